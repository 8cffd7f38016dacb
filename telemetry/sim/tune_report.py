"""A search in words, tables and a picture. Owns: what `admitscope tune` prints and draws."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from telemetry.sim.objectives import FRONT, LONGEST_GAP, MEASURES, THROUGHPUT
from telemetry.sim.report import cost_lines
from telemetry.sim.svg import HEIGHT, WIDTH, Row, data, write
from telemetry.sim.tune_result import Candidate, TuneResult
from telemetry.sim.tune_words import amount, short
from telemetry.sim.whatif_report import checks_table, figures_table, within_error_lines

MOST_ROWS: Final = 12


def show_tuned(result: TuneResult, console: Console) -> None:
    """The recommendation, what it changes, the front, and what the numbers are worth."""

    def say(text: object = "") -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=isinstance(text, str))

    say(result.sentence)
    if result.command:
        say(f"  {result.command}")
    how = {
        "trials": "as many as asked for",
        "time": "then time was over",
        "space": "every configuration there is",
    }[result.ended_by]
    undone = f" ({result.tried_to_undo} of them to undo changes)" if result.tried_to_undo else ""
    tried = f"{result.tried} of {result.space:,} configurations tried{undone}"
    say(f"{result.workload}: {result.requests:,} requests, {tried}, {how}")
    for limit in result.limits:
        say(f"limit: {limit}")
    say()
    if result.compared:
        say(f"after: {short(result.best)}")
        say(figures_table(result.compared, result.resamples))
        for line in within_error_lines(result.compared):
            say(line)
        say()
    say("what nothing tried betters in TTFT p99, TBT p99 and throughput together:")
    say(_front(result))
    say("> recommended; = the baseline; - cannot be recommended: --json says why. The longest gap of a request")
    say("is its p99 over requests; percentiles of TBT are of all gaps, so that rare stalls are not in them")
    if result.model_checks:
        say()
        say(checks_table(result.model_checks))
    for line in (*cost_lines(result.cost), *result.notes):
        say(line)
    if result.violations:
        say(f"{result.violations} laws of the engine broke: this is a fault of the engine")
    if result.plot:
        say(f"plot: {result.plot}")
    say(f"took {result.wall_s:.1f} s")


def _front(result: TuneResult) -> Table:
    measures = list(dict.fromkeys((result.objective, *FRONT, LONGEST_GAP)))
    table = Table(box=None, pad_edge=False)
    table.add_column("", min_width=1)
    table.add_column("", overflow="fold")
    heads = {**MEASURES, LONGEST_GAP: "longest gap", THROUGHPUT: "tokens/s"}
    for measure in measures:
        table.add_column(heads[measure], justify="right", no_wrap=True, min_width=len(heads[measure]))
    for one in rows_of(result):
        values = (amount(measure, getattr(one, measure)).removesuffix(" tokens/s") for measure in measures)
        what = short(one.settings).replace(", ", "\n") if one.trial else "the baseline"
        table.add_row(mark(one, result), what, *values)
    return table


def rows_of(result: TuneResult) -> list[Candidate]:
    """Baseline, recommendation and the front, in the order of the answer; at most MOST_ROWS of the front.

    Of configurations with the same figures, the one that changes least: the other changes did nothing here.
    """
    named = [one for one in result.candidates if mark(one, result) in {">", "="}]
    simplest = {_figures(one): one for one in named}
    for one in sorted(result.candidates, key=lambda one: (len(one.settings), one.trial)):
        if one.is_on_front:
            simplest.setdefault(_figures(one), one)
    front = [one for one in result.candidates if simplest.get(_figures(one)) is one and one not in named]
    wanted = {one.trial for one in (*front[:MOST_ROWS], *named)}
    return [one for one in result.candidates if one.trial in wanted]


def _figures(one: Candidate) -> tuple[float | None, ...]:
    return tuple(getattr(one, measure) for measure in FRONT)


def mark(one: Candidate, result: TuneResult) -> str:
    """What a row is."""
    if one.trial == 0:
        return "="
    if result.recommended and one.settings == result.recommended:
        return ">"
    return "-" if one.why_not else ""


def draw(result: TuneResult, file: Path) -> Path:
    """Everything that was tried, TTFT p99 against TBT p99, the front joined. Raises UsageError."""
    return write(file, chart_of(result))


def chart_of(result: TuneResult) -> Any:
    """Time to first token across, time between tokens up; both better near the origin."""
    import altair as alt

    names = {">": "recommended", "=": "baseline", "-": "not recommendable", "": "tried"}
    rows: list[Row] = []
    for one in result.candidates:
        if one.ttft_p99 and one.tbt_p99:
            what = names[mark(one, result)]
            what = "front" if what == "tried" and one.is_on_front else what
            rows.append({"ttft": one.ttft_p99, "tbt": one.tbt_p99, "throughput": one.throughput, "what": what})
    order = ["recommended", "baseline", "front", "tried", "not recommendable"]
    shown = [name for name in order if any(row["what"] == name for row in rows)]
    colours = dict(zip(order, ("#d55e00", "#0072b2", "#009e73", "#56b4e9", "#808080"), strict=True))
    shapes = dict(zip(order, ("diamond", "square", "circle", "circle", "cross"), strict=True))
    return (
        alt.Chart(data(rows), title=f"{result.workload}: {len(rows)} configurations", width=WIDTH, height=HEIGHT)
        .mark_point(filled=True, size=70, opacity=0.8)
        .encode(
            x=alt.X("ttft:Q", title="TTFT p99 (s)", scale=alt.Scale(type="log", nice=False, padding=12)),
            y=alt.Y("tbt:Q", title="TBT p99 (s)", scale=alt.Scale(type="log", nice=False, padding=12)),
            color=alt.Color(
                "what:N", title=None, sort=shown, scale=alt.Scale(domain=shown, range=[colours[n] for n in shown])
            ),
            shape=alt.Shape(
                "what:N", title=None, sort=shown, scale=alt.Scale(domain=shown, range=[shapes[n] for n in shown])
            ),
        )
    )
