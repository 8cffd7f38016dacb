"""The studies. Owns: what each runs, and how its figures are told as a table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from bench.studies import charts
from bench.studies.runs import COST_WORDS, TRACES, Figures, Run
from telemetry.sim.report import duration

LIMIT: Final = 1_000
#: Shares of the recorded speed: at the first the simulated engine keeps up except in bursts, at the second it does not.
_EASY, _BUSY = 0.25, 0.4


@dataclass(frozen=True, slots=True)
class Column:
    """A column: its head, the figure of a run it shows, and how."""

    head: str
    field: str
    words: Callable[[Any], str] = duration


@dataclass(frozen=True, slots=True)
class Study:
    """One study: its runs, the first `limit` requests of the trace, its columns and its plots."""

    name: str
    title: str
    runs: tuple[Run, ...]
    columns: tuple[Column, ...]
    plots: Callable[[Sequence[Figures]], dict[str, Any]]
    limit: int = LIMIT
    told: Callable[[Sequence[Figures]], list[str]] = lambda _: []


def share(value: float | None) -> str:
    """Of a whole."""
    return "–" if value is None else f"{value:.1%}"


def count(value: float | None) -> str:
    """A number of things."""
    return "–" if value is None else f"{value:,.0f}"


def plain(value: float | None) -> str:
    """Two places."""
    return "–" if value is None else f"{value:.2f}"


def times(value: float | None) -> str:
    """A factor."""
    return "–" if value is None else f"{value:,.3g} x"


def per_s(value: float | None) -> str:
    """Tokens a second."""
    return "–" if value is None else f"{value:,.4g} 1/s"


def table(figures: Sequence[Figures], columns: Sequence[Column]) -> list[str]:
    """Markdown, a row for each run."""
    heads = ["load", "run", *(column.head for column in columns)]
    out = [f"| {' | '.join(heads)} |", f"|---|---|{'---:|' * len(columns)}"]
    for one in figures:
        cells = [one["group"], one["name"], *(column.words(one.get(column.field)) for column in columns)]
        out.append(f"| {' | '.join(cells)} |")
    return out


def lines_of(study: Study, result: dict[str, Any]) -> list[str]:
    """The section of a study's page: Markdown."""
    figures = result["runs"]
    of_all = "all" if result["limit"] is None else f"the first {result['limit']:,}"
    broken = sum(one["violations"] for one in figures)
    trace = TRACES[study.runs[0].trace]
    head = (
        f"{of_all[0].upper()}{of_all[1:]} requests of the {trace} trace in each of {len(figures)} runs; {broken} laws "
        f"broke. {COST_WORDS}"
    )
    pictures = [f"![{study.title}]({study.name}-{plot}.svg)" for plot in result["plots"]]
    return [head, "", *table(figures, study.columns), "", *study.told(figures), *pictures]


_TIMES: Final = (
    Column("TTFT p50", "ttft_p50"),
    Column("TTFT p99", "ttft_p99"),
    Column("TBT p99", "tbt_p99"),
)
_POLICIES: Final = ("fcfs", "lpm", "dfs-weight", "shortest-prefill-first", "hrrn")


def _load(rate_scale: float) -> str:
    return f"{rate_scale:g} x recorded"


POLICIES: Final = Study(
    "policies",
    "policies on the Mooncake conversation trace",
    tuple(
        Run(name=policy, settings={"schedule_policy": policy}, rate_scale=load, group=_load(load))
        for load in (_EASY, _BUSY)
        for policy in _POLICIES
    ),
    (
        Column("hit rate", "hit_rate", share),
        *_TIMES,
        Column("longest wait", "longest_wait"),
        Column("TTFT p50 of the shortest tenth", "shortest_p50"),
        Column("of the longest", "longest_p50"),
        Column("TTFT p99 of the shortest tenth", "shortest_p99"),
        Column("of the longest", "longest_p99"),
        Column("slowdown p50", "slowdown_p50", times),
        Column("p99", "slowdown_p99", times),
        Column("Jain", "jain", plain),
    ),
    charts.policies,
)

_CHUNKS: Final = (128, 256, 512, 1_024, 2_048, 4_096, 8_192, 16_384)


def _cost_lines(figures: Sequence[Figures]) -> list[str]:
    """Where the curve has its minimum, for three weights."""
    parts = []
    for weight in charts.WEIGHTS:
        costs = charts.cost_curve(figures, weight)
        best = min(costs, key=costs.__getitem__)
        parts.append(f"{best:,} where TTFT p99 weighs {weight:.0%} (cost {costs[best]:.2f})")
    text = (
        "Cost of a chunk: TTFT p99 over the least TTFT p99 of all chunks, and the same of TBT p99, weighted. The least "
        f"is at {', '.join(parts)}."
    )
    return [text, ""]


CHUNKS: Final = Study(
    "chunk-size",
    "chunk size: time to first token against time between tokens",
    tuple(
        Run(
            name=f"{chunk:,}",
            settings={"chunked_prefill_size": str(chunk), "max_prefill_tokens": "16384"},
            rate_scale=_EASY,
            group=_load(_EASY),
        )
        for chunk in _CHUNKS
    ),
    (
        *_TIMES,
        Column("longest gap of a request p99", "longest_gap_p99"),
        Column("end-to-end p50", "e2e_p50"),
        Column("throughput", "throughput", per_s),
    ),
    charts.chunks,
    limit=300,
    told=_cost_lines,
)

_POOL: Final = 16_384
ACCOUNTING: Final = Study(
    "accounting",
    "reference and exact accounting",
    tuple(
        Run(
            name=accounting,
            settings={
                "kv_accounting": accounting,
                "page_size": str(page),
                "num_pages": str(_POOL // page),
                "schedule_conservativeness": conservativeness,
            },
            rate_scale=6.0,
            ask_for=1_024,
            group=f"pages of {page}, conservativeness {conservativeness}",
            trace="azure-conv",
        )
        for page in (16, 128)
        for conservativeness in ("1.0", "0.1")
        for accounting in ("reference", "exact")
    ),
    (
        *_TIMES,
        Column("end-to-end p50", "e2e_p50"),
        Column("throughput", "throughput", per_s),
        Column("pushed back", "retractions", count),
        Column("decisions", "decisions", count),
    ),
    charts.accounting,
    limit=600,
)

MIXED: Final = Study(
    "mixed",
    "mixed steps on and off",
    tuple(
        Run(
            name="mixed" if mixed == "true" else "not mixed",
            settings={"enable_mixed_chunk": mixed, "chunked_prefill_size": chunk},
            rate_scale=load,
            group=f"{_load(load)}, chunk {int(chunk):,}",
        )
        for load in (0.15, _EASY)
        for chunk in ("1024", "4096")
        for mixed in ("true", "false")
    ),
    (
        *_TIMES,
        Column("TBT p50", "tbt_p50"),
        Column("longest gap of a request p99", "longest_gap_p99"),
        Column("end-to-end p50", "e2e_p50"),
        Column("throughput", "throughput", per_s),
    ),
    charts.mixed,
    limit=500,
)

_ORDERS: Final = {
    "full order": {"schedule_policy": "lpm"},
    "fallback at 128": {"schedule_policy": "lpm", "lpm_fallback_threshold": "128"},
    "fcfs": {"schedule_policy": "fcfs"},
}
FALLBACK: Final = Study(
    "lpm-fallback",
    "lpm with the fallback at 128 waiting requests, and without",
    tuple(
        Run(name=name, settings=settings, rate_scale=load, group=_load(load))
        for load in (_BUSY, 1.0)
        for name, settings in _ORDERS.items()
    ),
    (
        Column("hit rate", "hit_rate", share),
        *_TIMES,
        Column("longest wait", "longest_wait"),
        Column("until all were answered", "duration_s"),
        Column("throughput", "throughput", per_s),
    ),
    charts.fallback,
)

STUDIES: Final = {study.name: study for study in (POLICIES, CHUNKS, ACCOUNTING, MIXED, FALLBACK)}
