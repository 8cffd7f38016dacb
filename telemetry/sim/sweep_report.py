"""A sweep in words, a table and a picture. Owns: what `admitscope sweep` prints and draws."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from telemetry.sim.report import cost_lines, duration
from telemetry.sim.svg import HEIGHT, WIDTH, Row, data, write
from telemetry.sim.sweep import Point, SweepResult, plainly

_HEADS = {"rate_scale": "times as fast", "rate": "requests/s", "concurrency": "clients"}
#: Lines of the picture, above; throughput has an axis of its own below.
_TIMES = {"ttft_p50": "TTFT p50", "ttft_p99": "TTFT p99", "tbt_p99": "TBT p99"}


def show_sweep(result: SweepResult, console: Console) -> None:
    """The sentence, the table, and what the numbers are worth."""

    def say(text: object = "") -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=isinstance(text, str))

    say(result.sentence)
    changed = ", ".join(f"{name}={value}" for name, value in result.settings.items()) or "none"
    requests = f"{result.requests:,} request{'' if result.requests == 1 else 's'} at each load"
    say(f"{result.workload}: {requests}, policy {result.policy}, set: {changed}")
    say()
    say(_table(result, is_wide=console.width >= _WIDE))
    if result.limits:
        say("! exceeds a limit")
    say("waiting: the queue on average over time; a wide terminal shows more, --json all")
    outside = [plainly(point.load) for point in result.points if point.share_outside > 0.05]
    if outside and result.cost.is_measured:
        say(f"more than 5 % of the time in steps larger than any fitted one at: {', '.join(outside)}")
    for line in (*cost_lines(result.cost), *result.notes):
        say(line)
    refused = max(point.refused for point in result.points)
    if refused:
        say(f"{refused} requests could never fit the pool and were refused; cache.num_pages sets it")
    if result.violations:
        say(f"{result.violations} laws of the engine broke: this is a fault of the engine")
    if result.plot:
        say(f"plot: {result.plot}")
    say(f"took {result.wall_s:.1f} s")


def _table(result: SweepResult, *, is_wide: bool) -> Table:
    table = Table(box=None, pad_edge=False)
    for head, _ in _COLUMNS if is_wide else _COLUMNS[:_NARROW]:
        table.add_column(head or _HEADS[result.by], justify="right", no_wrap=True)
    for point in result.points:
        cells = [cell(point) for _, cell in _COLUMNS]
        table.add_row(*(cells if is_wide else cells[:_NARROW]))
    return table


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:,.4g}"


#: Head and cell. The first of them fit into eighty characters.
_COLUMNS: Final[tuple[tuple[str, Callable[[Point], str]], ...]] = (
    ("", lambda point: f"{'! ' if point.exceeded else ''}{plainly(point.load)}"),
    ("served/s", lambda point: _number(point.served_per_s)),
    ("tokens/s", lambda point: _number(point.throughput)),
    ("TTFT p50", lambda point: duration(point.ttft_p50)),
    ("TTFT p99", lambda point: duration(point.ttft_p99)),
    ("TBT p99", lambda point: duration(point.tbt_p99)),
    ("waiting", lambda point: f"{point.waiting_mean:,.1f}"),
    ("after last arrival", lambda point: duration(point.after_last_s)),
    ("longest gap", lambda point: duration(point.longest_gap_p99)),
    ("TBT p50", lambda point: duration(point.tbt_p50)),
    ("most waiting", lambda point: _number(point.waiting_most)),
    ("cache", lambda point: "–" if point.cache_hit_rate is None else f"{point.cache_hit_rate:.1%}"),
    ("retracted", lambda point: _number(point.retractions)),
)
_NARROW: Final = 7
_WIDE: Final = 140


def draw_sweep(result: SweepResult, file: Path) -> Path:
    """Times and throughput over the load, one above the other. Raises UsageError when it cannot be written."""
    return write(file, sweep_chart(result))


def sweep_chart(result: SweepResult) -> Any:
    """Both over the same load, on a logarithmic axis."""
    import altair as alt

    times: list[Row] = [
        {"load": point.load, "seconds": getattr(point, name), "what": words}
        for point in result.points
        for name, words in _TIMES.items()
        if getattr(point, name)
    ]
    work: list[Row] = [{"load": point.load, "throughput": point.throughput} for point in result.points]
    x = alt.X("load:Q", title=_HEADS[result.by], scale=alt.Scale(type="log", nice=False, padding=12))
    above = (
        alt.Chart(data(times), title=f"{result.workload}, {result.policy}", width=WIDTH, height=HEIGHT)
        .mark_line(point=True)
        .encode(
            x=x,
            y=alt.Y("seconds:Q", title="seconds", scale=alt.Scale(type="log")),
            color=alt.Color("what:N", title=None, sort=list(_TIMES.values())),
        )
    )
    below = (
        alt.Chart(data(work), width=WIDTH, height=HEIGHT // 2)
        .mark_line(point=True)
        .encode(x=x, y=alt.Y("throughput:Q", title="output tokens/s"))
    )
    return alt.vconcat(above, below)
