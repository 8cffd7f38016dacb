"""What a comparison of servers says. Owns: the cases, the aims, the ratios and both tables of `bench/cpu_peers.py`."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rich.table import Table

OURS: Final = "admitscope"


@dataclass(frozen=True, slots=True)
class Case:
    """A workload, and its arrivals: `rate` requests a second, None: all at once. `figures` are what is compared."""

    name: str
    workload: str
    figures: tuple[str, ...]
    rate: float | None = None


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure of `bench/serve.py`: title with unit, factor from its unit, format, and whether more is better."""

    title: str
    scale: float
    spec: str
    more_is_better: bool


FIGURES: Final = {
    "output_tok_s": Figure("output tok/s", 1.0, ".1f", more_is_better=True),
    "ttft_p50_s": Figure("TTFT p50 ms", 1000.0, ".0f", more_is_better=False),
    "tbt_p50_s": Figure("TBT p50 ms", 1000.0, ".1f", more_is_better=False),
    "tbt_p99_s": Figure("TBT p99 ms", 1000.0, ".1f", more_is_better=False),
}
#: Arrivals of the second W4, requests a second.
RATE: Final = 1.9
CASES: Final = (
    Case("W1", "W1", ("output_tok_s",)),
    Case("W2", "W2", ("output_tok_s",)),
    Case("W3", "W3", ("ttft_p50_s", "tbt_p50_s")),
    Case("W4", "W4", ("output_tok_s", "tbt_p99_s")),
    Case("W4 at a rate", "W4", ("ttft_p50_s", "tbt_p50_s"), rate=RATE),
    Case("W5", "W5", ("output_tok_s",)),
)


@dataclass(frozen=True, slots=True)
class Aim:
    """Ours divided by the peer's: at least `factor` where more is better, else at most. `peer` None: the better one."""

    case: str
    figure: str
    peer: str | None
    factor: float
    note: str = ""


AIMS: Final = (
    Aim("W1", "output_tok_s", "vLLM", 2.0, "int8 or bfloat16"),
    Aim("W1", "output_tok_s", "vLLM", 1.1, "float32"),
    Aim("W2", "output_tok_s", "vLLM", 2.0, "int8 or bfloat16"),
    Aim("W2", "output_tok_s", "vLLM", 1.1, "float32"),
    Aim("W3", "ttft_p50_s", "vLLM", 0.55),
    Aim("W3", "tbt_p50_s", "llama.cpp", 1.0),
    Aim("W4", "output_tok_s", "vLLM", 1.8),
    Aim("W4", "tbt_p99_s", "llama.cpp", 0.3),
    Aim("W4 at a rate", "ttft_p50_s", None, 0.8),
    Aim("W4 at a rate", "tbt_p50_s", None, 0.8),
    Aim("W5", "output_tok_s", "llama.cpp", 1.6),
)


@dataclass(slots=True)
class Subject:
    """One server or library that is compared.

    settings   what it ran with, in words
    missing    why it has no figures at all, and what to do; None where it has
    lines      case -> its repetitions, lines of `bench/serve.py`
    gaps       case -> why this case alone has no figures
    """

    name: str
    settings: str
    missing: str | None
    lines: dict[str, list[dict[str, Any]]]
    gaps: dict[str, str]

    @classmethod
    def named(cls, name: str, settings: str, missing: str | None = None) -> Subject:
        """One without figures yet."""
        return cls(name=name, settings=settings, missing=missing, lines={}, gaps={})

    def median(self, case: str, figure: str) -> float | None:
        """Over the repetitions that measured it; None where none did."""
        known = [line[figure] for line in self.lines.get(case, ()) if line[figure] is not None]
        return statistics.median(known) if known else None


def ratio(ours: float | None, theirs: float | None) -> float | None:
    """Ours divided by theirs; None where either is unknown or theirs is 0."""
    return None if ours is None or not theirs else ours / theirs


def best(subjects: Sequence[Subject], case: str, figure: str) -> float | None:
    """The better figure among `subjects`."""
    known = [value for subject in subjects if (value := subject.median(case, figure)) is not None]
    if not known:
        return None
    return max(known) if FIGURES[figure].more_is_better else min(known)


def verdicts(ours: Subject, peers: Mapping[str, Subject], cases: Sequence[Case]) -> list[dict[str, Any]]:
    """Each aim of `cases`: the ratio, and `met`, `missed`, or what is not measured."""
    names = {case.name for case in cases}
    found = []
    for aim in AIMS:
        if aim.case not in names:
            continue
        servers = [peers[name] for name in ("vLLM", "llama.cpp") if name in peers]
        chosen = servers if aim.peer is None else [peer for peer in servers if peer.name == aim.peer]
        got = ratio(ours.median(aim.case, aim.figure), best(chosen, aim.case, aim.figure))
        is_more = FIGURES[aim.figure].more_is_better
        verdict = "not measured"
        if got is not None:
            verdict = "met" if (got >= aim.factor if is_more else got <= aim.factor) else "missed"
        against = aim.peer or "the better of vLLM, llama.cpp"
        head: dict[str, Any] = {"case": aim.case, "figure": aim.figure, "peer": against, "note": aim.note}
        found.append(head | {"aim": aim.factor, "at_least": is_more, "ratio": got, "verdict": verdict})
    return found


def figures_table(subjects: Sequence[Subject], cases: Sequence[Case]) -> Table:
    """Medians of each subject; below each of a peer, how ours compares."""
    table = Table(title="figures (in brackets: ours / theirs)", title_justify="left")
    table.add_column("")
    columns = [(case, figure) for case in cases for figure in case.figures]
    for case, figure in columns:
        rate = "" if case.rate is None else f" {case.rate:g}/s"
        table.add_column(f"{case.workload}{rate}\n{FIGURES[figure].title}", justify="right", no_wrap=True)
    ours = subjects[0]
    for subject in subjects:
        if subject.missing is not None:
            continue
        cells = []
        for case, figure in columns:
            value, shape = subject.median(case.name, figure), FIGURES[figure]
            text = "-" if value is None else format(value * shape.scale, shape.spec)
            compared = None if subject is ours else ratio(ours.median(case.name, figure), value)
            cells.append(text if compared is None else f"{text} ({compared:.2f})")
        table.add_row(subject.name, *cells)
    return table


def aims_table(found: Sequence[Mapping[str, Any]]) -> Table:
    """What is aimed at, and what came out."""
    table = Table(title="aims", title_justify="left")
    for title in ("workload", "figure", "against", "ours / theirs", "aim", "", "with"):
        table.add_column(title, no_wrap=True)
    for row in found:
        got = "-" if row["ratio"] is None else f"{row['ratio']:.2f}"
        sign = "at least" if row["at_least"] else "at most"
        title = FIGURES[row["figure"]].title.removesuffix(" ms")
        table.add_row(
            row["case"], title, row["peer"], got, f"{sign} {row['aim']:g}", row["verdict"], row["note"] or "any mode"
        )
    return table
