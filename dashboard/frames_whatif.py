"""Numbers of the view "What if". Owns: a comparison -> frames for charts, tables, and one sentence.

Pure. "before" is the recorded configuration, "after" the changed one; both are simulated.
"""

from __future__ import annotations

from typing import Any, Final

import pandas as pd

from dashboard import formats as f
from dashboard.tables import Table
from dashboard.words import mark, t
from telemetry.sim.parts import MOST_STEP_ERROR, CostUsed
from telemetry.sim.whatif_result import Choice, Compared, DecisionDifference, Setting, WhatifResult

MEASURES: Final = {"tbt": "TBT", "ttft": "TTFT", "e2e": mark("until the last token")}

_NAMES: Final = {
    "ttft_p50": "TTFT p50",
    "ttft_p90": "TTFT p90",
    "ttft_p99": "TTFT p99",
    "tbt_p50": "TBT p50",
    "tbt_p99": "TBT p99",
    "e2e_p50": mark("until the last token p50"),
    "e2e_p99": mark("until the last token p99"),
    "cache_hit_rate": mark("prompt tokens from the cache"),
    "output_tokens_per_s": mark("output tokens a second"),
    "retractions": mark("retractions"),
    "steps": mark("steps"),
    "duration": mark("duration of the run"),
}
_TOLD: Final = ("tbt_p99", "ttft_p50", "ttft_p99")
_SETTINGS: Final = {
    "scheduler.chunked_prefill_size": mark("a chunk of {after} instead of {before} tokens"),
    "scheduler.max_prefill_tokens": mark("an input budget of {after} instead of {before} tokens"),
    "scheduler.max_running_requests": mark("{after} instead of {before} rows"),
    "scheduler.schedule_policy": mark("policy {after} instead of {before}"),
    "scheduler.kv_accounting": mark("{after} instead of {before} accounting"),
    "cache.page_size": mark("pages of {after} instead of {before} tokens"),
    "cache.num_pages": mark("a pool of {after} instead of {before} pages"),
}
#: What a simulated step may exceed of those that the cost model was fitted on.
_SHAPES: Final = {
    "prefill_tokens": mark("prompt tokens in a step"),
    "prefill_context": mark("positions that prompt tokens attend to"),
    "prefill_rows": mark("prompts in a step"),
    "decode_rows": mark("decode rows"),
    "decode_context": mark("K/V tokens that decode rows read"),
}
_OTHER: Final = mark("{name} {after} instead of {before}")


def sentence(result: WhatifResult) -> str:
    """The answer: what would change from what to what in the simulator, and how far that is to be believed."""
    what = t(" and ").join(_setting(each) for each in result.settings)
    by_name = {one.name: one for one in result.compared}
    parts = [_part(by_name[name]) for name in _TOLD if name in by_name and by_name[name].before.value is not None]
    if not parts:
        return t("No request ended by itself in both runs: there is nothing to compare.")
    told = head(t("{what}: {parts}.", what=what, parts="; ".join(parts)))
    return told if result.cost_before.does_fit else f"{_misfit(result)} {told}"


def _misfit(result: WhatifResult) -> str:
    """It comes first, since it is true of each number behind it."""
    return t(
        "No finding: the cost model does not fit. It misses a step by {off} in the median; at most {most} is believed.",
        off=f.share(result.cost_before.median_error or 0.0, 1.0),
        most=f.share(MOST_STEP_ERROR, 1.0),
    )


def head(text: str) -> str:
    """With a capital letter."""
    return text[:1].upper() + text[1:]


def _setting(setting: Setting) -> str:
    values = {"before": _value(setting.before), "after": _value(setting.after)}
    return t(_SETTINGS.get(setting.name, _OTHER), name=setting.name.partition(".")[2], **values)


def _value(text: str) -> str:
    if text == "None":
        return t("no limit")
    return f.count(int(text)) if text.isdigit() else text


def _part(one: Compared) -> str:
    values = {
        "name": t(_NAMES[one.name]),
        "before": amount(one.before.value, one.unit),
        "after": amount(one.after.value, one.unit),
        "low": signed(one.difference.low, one.unit),
        "high": signed(one.difference.high, one.unit),
    }
    if one.is_within_error and one.model_error is not None:
        off = f"{100 * abs(one.model_error):.0f}\u00a0%"
        if one.is_clear:
            return t(
                "{name} from {before} to {after} ({low} to {high}; the simulator is off by {off} here, more than this "
                "change: take the direction, not the number)",
                **values,
                off=off,
            )
        return t(
            "{name} from {before} to {after} ({low} to {high}; the simulator is off by {off} here, more than this "
            "change: no finding)",
            **values,
            off=off,
        )
    if one.is_clear:
        return t("{name} from {before} to {after} ({low} to {high})", **values)
    return t("{name} from {before} to {after}, no clear difference ({low} to {high})", **values)


def amount(value: float | None, unit: str) -> str:
    """A number with its unit."""
    if value is None:
        return f.NOTHING
    if unit == "s":
        return f.duration(value)
    if unit == "share":
        return f"{100 * value:.1f}\u00a0%"
    return f"{f.rate(value)}\u00a0tok/s" if unit == "1/s" else f.count(value)


def signed(value: float | None, unit: str) -> str:
    """A difference, with its sign."""
    if value is None or value == 0:
        return amount(value, unit)
    return ("+" if value > 0 else "\u2212") + amount(abs(value), unit)


def compared_table(result: WhatifResult) -> Table:
    """Every measure before and after, with the interval of the difference."""
    rows = [
        {
            "id": one.name,
            "cells": [
                t(_NAMES.get(one.name, one.name)),
                [amount(one.before.value, one.unit), one.before.value],
                [amount(one.after.value, one.unit), one.after.value],
                [signed(one.difference.value, one.unit), one.difference.value],
                _interval(one),
                _error(one),
            ],
        }
        for one in result.compared
    ]
    heads = ("", *_runs(), t("Difference"), t("95 % interval"), t("Simulator's error"))
    kinds = ("text", "num", "num", "num", "num", "num")
    return Table(columns=_columns(heads, kinds), rows=rows)


def _runs() -> tuple[str, str]:
    """The two runs, as heads of columns."""
    return head(t("before")), head(t("after"))


def _error(one: Compared) -> str:
    if one.model_error is None:
        return f.NOTHING
    error = signed(one.model_error, "share")
    return t("{error}: more than the change", error=error) if one.is_within_error else error


def cost_notes(result: WhatifResult) -> list[str]:
    """Which simulated steps exceed what the cost model was fitted on, told for each run that has some."""
    if not result.cost_before.is_measured:
        return [t("Its times are computed, not fitted to measurements: compare configurations, do not believe times.")]
    sides = zip(_runs(), (result.cost_before, result.cost_after), strict=True)
    return [_outside(run, cost) for run, cost in sides if cost.steps_outside]


def _outside(run: str, cost: CostUsed) -> str:
    return t(
        "{run}: {outside} of {steps} steps ({share} of the time) are beyond what the cost model was fitted on; most of "
        "them by {what}: up to {asked}, fitted up to {fitted}.",
        run=run,
        outside=f.count(cost.steps_outside),
        steps=f.count(cost.steps),
        share=f"{100 * cost.share_outside:.0f}\u00a0%",
        what=t(_SHAPES.get(cost.most_outside or "", cost.most_outside or "")),
        asked=f.count(cost.most_asked),
        fitted=f.count(cost.most_fitted),
    )


def _interval(one: Compared) -> str:
    if one.difference.low is None or one.difference.high is None:
        return f.NOTHING
    told = t("{low} to {high}", low=signed(one.difference.low, one.unit), high=signed(one.difference.high, one.unit))
    return told if one.is_clear else t("{interval}: not clear", interval=told)


def _columns(heads: tuple[str, ...], kinds: tuple[str, ...]) -> tuple[dict[str, str], ...]:
    return tuple({"label": head, "kind": kind, "unit": "", "help": ""} for head, kind in zip(heads, kinds, strict=True))


def curve_frame(result: WhatifResult, measure: str) -> pd.DataFrame:
    """Columns percent, seconds, run, of one measure."""
    curve = next((one for one in result.curves if one.name == measure), None)
    rows = [] if curve is None else [*_points(curve.before, "before"), *_points(curve.after, "after")]
    return pd.DataFrame(rows, columns=["percent", "seconds", "run"])


def _points(values: tuple[float, ...], run: str) -> list[tuple[int, float, str]]:
    # A log axis has no 0; times of 0 are those of a request that waited for nothing.
    return [(percent, max(value, 1e-6), run) for percent, value in enumerate(values)]


def pair_frame(result: WhatifResult, measure: str) -> pd.DataFrame:
    """Columns rid, prompt, before, after, change: one row for each compared request (of `tbt`: its longest gap)."""
    rows = []
    for pair in result.pairs:
        before, after = getattr(pair, f"{measure}_before"), getattr(pair, f"{measure}_after")
        if before is not None and after is not None:
            change = "earlier" if after < 0.99 * before else "later" if after > 1.01 * before else "same"
            rows.append((pair.rid, pair.prompt_len, max(before, 1e-6), max(after, 1e-6), change))
    return pd.DataFrame(rows, columns=["rid", "prompt", "before", "after", "change"])


def fairness_frame(result: WhatifResult) -> pd.DataFrame:
    """Columns group, place, requests, seconds, run: TTFT p50 of each tenth of the requests by length of prompt."""
    rows = []
    for one in result.fairness:
        group = f"{f.count(one.prompt_from)}–{f.count(one.prompt_to)}"
        for run, value in (("before", one.ttft_p50_before), ("after", one.ttft_p50_after)):
            if value is not None:
                rows.append((group, one.decile, one.requests, max(value, 1e-6), run))
    return pd.DataFrame(rows, columns=["group", "place", "requests", "seconds", "run"])


def reasons_table(result: WhatifResult) -> Table:
    """Decisions by reason, in both runs."""
    reasons = dict.fromkeys([*result.reasons_before, *result.reasons_after])
    rows = [
        {
            "id": reason,
            "cells": [f.words(reason), *(_counted(side.get(reason, 0)) for side in _reasons(result))],
        }
        for reason in reasons
    ]
    return Table(columns=_columns((t("Decision"), *_runs()), ("text", "num", "num")), rows=rows)


def _reasons(result: WhatifResult) -> tuple[dict[str, int], dict[str, int]]:
    return result.reasons_before, result.reasons_after


def _counted(value: int) -> list[Any]:
    return [f.count(value), value]


def differences_table(result: WhatifResult) -> Table:
    """The first steps in which the two runs do different things. The id of a row is its step."""
    rows = [
        {
            "id": str(one.step),
            "cells": [
                [f.count(one.step), one.step],
                f.duration(one.time_before),
                [f.short_rid(one.rid), one.rid],
                _did(one, one.before, one.kind_before),
                _did(one, one.after, one.kind_after),
            ],
        }
        for one in result.differences
    ]
    heads = (t("Step"), t("Begins at"), t("Request"), *_runs())
    return Table(
        columns=_columns(heads, ("num", "num", "mono", "text", "text")),
        rows=rows,
        empty=(t("The same decisions"), t("Both runs decide the same in every step.")),
    )


def _did(one: DecisionDifference, choice: Choice, kind: str) -> str:
    if one.what != "decision":
        words = {"decode": t("other decode rows"), "retraction": t("other retractions"), "kind": t("another step")}
        return f"{words[one.what]} ({kind or t('run over')})"
    if choice.reason is None:
        return t("not looked at")
    return t("{reason}, {tokens} tok", reason=f.words(choice.reason), tokens=f.count(choice.selected_extend))


def checks_table(result: WhatifResult) -> Table:
    """The recorded run beside its own simulation."""
    rows = [
        {
            "id": one.name,
            "cells": [
                t(_NAMES.get(one.name, one.name)),
                f.duration(one.recorded),
                f.duration(one.simulated),
                f.NOTHING if one.error is None else signed(one.error, "share"),
            ],
        }
        for one in result.model_checks
    ]
    heads = ("", t("Recorded"), t("Simulated"), t("Error"))
    return Table(columns=_columns(heads, ("text", "num", "num", "num")), rows=rows)
