"""Words. Owns: the answer of a comparison in one sentence."""

from __future__ import annotations

from typing import Final

from telemetry.sim.report import duration
from telemetry.sim.whatif_result import Compared, Setting

_NAMES: Final = {
    "scheduler.chunked_prefill_size": "a chunk",
    "scheduler.schedule_policy": "policy",
    "scheduler.max_prefill_tokens": "an input budget",
    "scheduler.kv_accounting": "accounting",
    "cache.page_size": "a page size",
    "cache.num_pages": "a pool of pages",
}
#: The measures of the sentence: what is felt between tokens, then at the start.
TOLD: Final = (("tbt_p99", "TBT p99"), ("ttft_p50", "TTFT p50"), ("ttft_p99", "TTFT p99"))


def sentence_of(settings: tuple[Setting, ...], compared: tuple[Compared, ...], *, misfit: str = "") -> str:
    """What the change would do, with intervals of the differences; what is no finding says so beside its number.

    misfit  why no time is to be believed; it comes first, since it is true of each number behind it
    """
    by_name = {one.name: one for one in compared}
    parts = [part for name, word in TOLD if name in by_name and (part := _part(word, by_name[name]))]
    what = " and ".join(map(_setting, settings))
    what = what[0].upper() + what[1:]
    if not parts:
        return f"{what}: no request can be compared."
    doubt = f"No finding: {misfit}. " if misfit else ""
    told = f"{what} would take {', '.join(parts)}."
    return f"{doubt}{told} Intervals are of requests under the simulator, without its error."


def _setting(setting: Setting) -> str:
    name = _NAMES.get(setting.name)
    if name is None:
        return f"{setting.name}={setting.after} instead of {setting.before}"
    return f"{name} of {_number(setting.after)} instead of {_number(setting.before)}"


def _number(text: str) -> str:
    return f"{int(text):,}" if text.isdigit() else "no limit" if text == "None" else text


def _part(word: str, one: Compared) -> str:
    before, after, spread = one.before.value, one.after.value, one.difference
    if before is None or after is None:
        return ""
    told = f"{word} from {duration(before)} to {duration(after)}"
    if spread.low is None or spread.high is None:
        return told
    return f"{told} (difference {signed(spread.low)} to {signed(spread.high)}{_worth(one)})"


def _worth(one: Compared) -> str:
    """How far the difference is to be believed; empty for one that is clear, and larger than the simulator's error."""
    if not one.is_within_error or one.model_error is None:
        return "" if one.is_clear else ", so no clear difference"
    take = "take the direction, not the number" if one.is_clear else "no finding"
    return f"; {take}: the simulator is off by {abs(one.model_error):.0%} here, more than this change"


def signed(seconds: float) -> str:
    """A difference with its sign and unit."""
    return "0 s" if round(seconds * 1e6) == 0 else ("+" if seconds > 0 else "-") + duration(abs(seconds))
