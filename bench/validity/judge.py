"""Predictions beside measurements. Owns: what-if on the base journals, medians over repeats, errors, their table."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from telemetry.sim.commands import WhatifCommand
from telemetry.sim.progress import Meter
from telemetry.sim.report import duration
from telemetry.sim.trial import figures_of
from telemetry.sim.whatif import compare, recorded_run
from telemetry.sim.whatif_figures import is_compared

MEASURES: Final = {"ttft_p50": "TTFT p50", "ttft_p99": "TTFT p99", "tbt_p99": "TBT p99"}
Json = dict[str, Any]


def measured(journal: Path) -> dict[str, float]:
    """The three measures of a recorded run, in seconds."""
    happened, _ = recorded_run(journal)
    figures = figures_of([one for one in happened.values() if is_compared(one)])
    return {name: figures[name] or 0.0 for name in MEASURES}


def predicted(journal: Path, settings: Mapping[str, str]) -> Json:
    """What `admitscope whatif` says of `settings` from one journal: measures before and after, and its own error."""
    words = tuple(f"{name}={value}" for name, value in settings.items())
    result = compare(WhatifCommand(journal=journal, set=words), Meter())
    rows = {row.name: row for row in result.compared}
    return {
        "measures": {
            name: {
                "before": rows[name].before.value,
                "after": rows[name].after.value,
                "is_clear": rows[name].is_clear,
                "is_within_error": rows[name].is_within_error,
            }
            for name in MEASURES
        },
        "checks": {check.name: check.error for check in result.model_checks if check.name in MEASURES},
        "held_out_median": result.cost_before.median_error,
        "share_outside": result.cost_after.share_outside,
    }


def judged(base: Sequence[Mapping[str, float]], case: Sequence[Mapping[str, float]], guesses: Sequence[Json]) -> Json:
    """Of one case: measured and predicted change of each measure, as after / before - 1; medians over repeats."""
    found: Json = {}
    for name in MEASURES:
        changes = [after[name] / before[name] - 1 for before, after in zip(base, case, strict=True)]
        before, after = (statistics.median(one[name] for one in runs) for runs in (base, case))
        told = [guess["measures"][name] for guess in guesses]
        ratios = [one["after"] / one["before"] - 1 for one in told]
        change, guess = after / before - 1, statistics.median(ratios)
        agree = all(one > 0 for one in changes) or all(one < 0 for one in changes)
        found[name] = {
            "before_s": before,
            "after_s": after,
            "change": change,
            "change_least": min(changes),
            "change_most": max(changes),
            "repeats_agree": agree,
            "predicted": guess,
            "predicted_least": min(ratios),
            "predicted_most": max(ratios),
            "is_direction_right": (guess > 0) == (change > 0),
            # How far the predicted time is from the measured one, the machine's own speed taken out.
            "size_error": (1 + guess) / (1 + change) - 1,
            "called_no_finding": sum(bool(one["is_within_error"]) or not one["is_clear"] for one in told),
        }
    return found


_HEADS: Final = (
    "change",
    "measure",
    "before",
    "after",
    "measured",
    "of the repeats",
    "predicted",
    "of the base journals",
    "direction",
    "predicted / measured time",
)


def lines_of(result: Json) -> list[str]:
    """The section of the page: Markdown."""
    facts = (
        f"{result['machine']}; {result['requests']} requests at {result['rate']:.3g} a second, {result['threads']} "
        f"thread of the model, {result['repeats']} repeats of each configuration, interleaved; {result['date']}."
    )
    out = [facts, "", f"| {' | '.join(_HEADS)} |", "|---|---|---:|---:|---:|---:|---:|---:|---|---:|"]
    for case, judged_case in result["cases"].items():
        out += [f"| {case} | {' | '.join(_cells(name, one, result['repeats']))} |" for name, one in judged_case.items()]
    return [*out, "", *_summary(result), "", *_baseline(result)]


def _cells(name: str, one: Json, repeats: int) -> list[str]:
    return [
        MEASURES[name],
        duration(_four(one["before_s"])),
        duration(_four(one["after_s"])),
        f"{one['change']:+.0%}",
        f"{one['change_least']:+.0%} to {one['change_most']:+.0%}",
        f"{one['predicted']:+.0%}",
        f"{one['predicted_least']:+.0%} to {one['predicted_most']:+.0%}",
        _direction(one, repeats),
        f"{one['size_error']:+.0%}",
    ]


def _four(value: float) -> float:
    return float(f"{value:.4g}")


def is_finding(one: Json, repeats: int) -> bool:
    """Whether what-if called it a change: from most base journals clear, and larger than its own miss of that run."""
    return bool(2 * one["called_no_finding"] < repeats)


def _direction(one: Json, repeats: int) -> str:
    if not one["repeats_agree"]:
        return "none measured: repeats differ in sign"
    if not is_finding(one, repeats):
        return "called no finding"
    return "right" if one["is_direction_right"] else "**wrong**"


def _summary(result: Json) -> list[str]:
    rows = [one for case in result["cases"].values() for one in case.values()]
    measured_ones = [one for one in rows if one["repeats_agree"]]
    found = [one for one in measured_ones if is_finding(one, result["repeats"])]
    right = sum(one["is_direction_right"] for one in found)
    text = (
        f"Of {len(rows)} changes {len(measured_ones)} have a measured direction (their repeats agree in sign). What-if "
        f"called {len(measured_ones) - len(found)} of these no finding: not clear, or smaller than its own miss of the "
        f"base run. Direction: right in {right} of the {len(found)} others."
    )
    if not found:
        return [text]
    errors, every = ([abs(one["size_error"]) for one in part] for part in (found, rows))
    size = (
        f" Size, of these {len(found)}: the predicted time after the change is off by {statistics.median(errors):.0%} "
        f"in the median, {max(errors):.0%} at most, where the time before it is taken as measured (of all "
        f"{len(rows)}: {max(every):.0%} at most)."
    )
    return [text + size]


def _baseline(result: Json) -> list[str]:
    what = (
        "The base runs themselves: as recorded, how far the simulator is from that (simulated / recorded - 1), and the "
        "median error of its cost model on steps that it did not see. How much the recorded ones differ from each "
        "other is what this machine does to equal runs:"
    )
    out = [
        what,
        "",
        f"| base journal | {' | '.join(MEASURES.values())} | error on steps |",
        "|---|---:|---:|---:|---:|",
    ]
    for number, one in enumerate(result["baselines"], 1):
        cells = (f"{duration(_four(one['recorded'][name]))} ({one['checks'][name]:+.0%})" for name in MEASURES)
        out.append(f"| repeat {number} | {' | '.join(cells)} | {one['held_out_median']:.0%} |")
    return out
