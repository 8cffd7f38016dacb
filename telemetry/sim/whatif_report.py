"""A comparison in words and tables. Owns: what `admitscope whatif` prints."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from telemetry.sim.report import change, cost_lines, duration
from telemetry.sim.whatif_result import Choice, Compared, DecisionDifference, Interval, ModelCheck, WhatifResult
from telemetry.sim.whatif_words import signed


def show_comparison(result: WhatifResult, console: Console) -> None:
    """Everything but the pairs."""
    say = console.print
    say(result.sentence, highlight=False, markup=False, soft_wrap=True)
    say(population(result), highlight=False, soft_wrap=True)
    say()
    say(figures_table(result.compared, result.resamples))
    for line in within_error_lines(result.compared):
        say(line, highlight=False)
    if result.faster is not None and result.slower is not None:
        say(f"first token: earlier for {result.faster:.0%} of requests, later for {result.slower:.0%}", highlight=False)
    say()
    say(_fairness(result))
    say()
    say(_reasons(result))
    say()
    for line in difference_lines(result.first_difference):
        say(line, highlight=False, markup=False)
    say()
    if result.model_checks:
        say(checks_table(result.model_checks))
    if result.model_error is not None:
        say(f"single requests: median error of the time to first token {result.model_error:.1%}", highlight=False)
    for line in cost_lines(result.cost_before.model_copy(update={"note": ""})):
        say(line, highlight=False, markup=False)
    for line in _cost_notes(result):
        say(line, highlight=False, markup=False)
    if result.violations:
        say(f"{result.violations} laws of the engine broke: this is a fault of the engine", highlight=False)
    for note in result.notes:
        say(note, highlight=False, markup=False)
    say(f"took {result.wall_s:.1f} s", highlight=False)


def population(result: WhatifResult) -> str:
    """Which requests the tables of times are of."""
    said = f"{result.requests:,} requests compared in pairs, {result.left_out:,} left out"
    if not result.left_out:
        return said
    unfinished = f"; of {result.unfinished:,} the record has no end" if result.unfinished else ""
    return (
        f"{said}{unfinished}. All times here are of those that ended by themselves in the record and in both runs; the "
        "page and the metrics count every first token"
    )


def within_error_lines(compared: tuple[Compared, ...]) -> list[str]:
    """What a star in the table means, where there is one."""
    is_there = any(one.is_within_error for one in compared)
    return ["* a smaller change than the simulator's error below: no finding, at most its direction"] * is_there


def _cost_notes(result: WhatifResult) -> list[str]:
    """What is to be said of the cost model in each run; once when it is the same of both."""
    before, after = result.cost_before.note, result.cost_after.note
    if before == after:
        return [before] if before else []
    return [f"{run}: {note}" for run, note in (("before", before), ("after", after)) if note]


def amount(value: float | None, unit: str) -> str:
    """A number with its unit."""
    if value is None:
        return "–"
    if unit == "s":
        return duration(value)
    return f"{value:.1%}" if unit == "share" else f"{value:,.4g}" + (" 1/s" if unit == "1/s" else "")


def figures_table(compared: tuple[Compared, ...], resamples: int) -> Table:
    """Each measure before and after, with the interval of the difference."""
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for name in ("before", "after", "difference", f"95 % of {resamples} draws"):
        table.add_column(name, justify="right")
    for one in compared:
        table.add_row(
            one.name.replace("_", " ") + (" *" if one.is_within_error else ""),
            amount(one.before.value, one.unit),
            amount(one.after.value, one.unit),
            _signed(one.difference.value, one.unit),
            _spread(one.difference, one),
        )
    return table


def _signed(value: float | None, unit: str) -> str:
    if value is None:
        return "–"
    if unit == "s":
        return signed(value)
    text = amount(abs(value), unit)
    sign = "+" if value > 0 else "-"
    return sign + text if any(digit in "123456789" for digit in text) else text


def _spread(spread: Interval, one: Compared) -> str:
    if spread.low is None or spread.high is None:
        return ""
    clear = "" if one.is_clear else "  (not clear)"
    return f"{_signed(spread.low, one.unit)} to {_signed(spread.high, one.unit)}{clear}"


def _fairness(result: WhatifResult) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("prompt tokens", "requests", "TTFT p50 before", "after", "TTFT p99 before", "after"):
        table.add_column(name, justify="right")
    for one in result.fairness:
        times = (one.ttft_p50_before, one.ttft_p50_after, one.ttft_p99_before, one.ttft_p99_after)
        table.add_row(f"{one.prompt_from:,} to {one.prompt_to:,}", f"{one.requests:,}", *map(duration, times))
    return table


def _reasons(result: WhatifResult) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("decisions")
    for name in ("before", "after"):
        table.add_column(name, justify="right")
    for reason in dict.fromkeys([*result.reasons_before, *result.reasons_after]):
        table.add_row(reason, f"{result.reasons_before.get(reason, 0):,}", f"{result.reasons_after.get(reason, 0):,}")
    return table


def difference_lines(first: DecisionDifference | None) -> list[str]:
    """Where the two runs part, and how."""
    if first is None:
        return ["the two runs decide the same throughout"]
    head = f"they part in step {first.step:,}, {first.time_before:.3f} s after the start"
    if first.what == "decision":
        return [f"{head}, over {first.rid}", f"  before: {_choice(first.before)}", f"  after:  {_choice(first.after)}"]
    if first.what == "kind":
        return [f"{head}: {first.kind_before or 'over'} before, {first.kind_after or 'over'} after"]
    words = {"decode": "decodes", "retraction": "is pushed back"}
    return [f"{head}: {first.rid} {words[first.what]} in only one of them"]


def _choice(choice: Choice) -> str:
    if choice.reason is None:
        return "not looked at"
    test = "" if choice.need is None else f"; needs {choice.need:,.0f}, there is {choice.have or 0:,.0f}"
    return f"{choice.reason}, {choice.selected_extend:,} tokens after {choice.prefix_len:,}{test}"


def checks_table(checks: tuple[ModelCheck, ...]) -> Table:
    """The recorded run beside its simulation."""
    table = Table(box=None, pad_edge=False)
    table.add_column("the simulator")
    for name in ("recorded", "simulated", "error"):
        table.add_column(name, justify="right")
    for one in checks:
        error = "–" if one.error is None else change(one.error, 1)
        table.add_row(one.name.replace("_", " "), duration(one.recorded), duration(one.simulated), error)
    return table
