"""Words of a search. Owns: what its best is called, and the recommendation in a sentence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from telemetry.sim.objectives import LONGEST_GAP, MEASURES, THROUGHPUT, Figures, is_better
from telemetry.sim.parts import digits
from telemetry.sim.report import change, duration
from telemetry.sim.tune_result import Verdict
from telemetry.sim.whatif_result import Compared
from telemetry.sim.whatif_words import signed

if TYPE_CHECKING:
    from telemetry.sim.search import Search, Tried

#: Worse by less than this share of the baseline is not told as a price.
_PRICE: Final = 0.03
#: A smaller share of the gain is not told as luck.
_TOLD_LUCK: Final = 0.01
_PRICED: Final = ("ttft_p50", "ttft_p99", "tbt_p99", LONGEST_GAP, "e2e_p50", THROUGHPUT)


def told(measure: str) -> str:
    """The name of a measure in a comparison."""
    return "output_tokens_per_s" if measure == THROUGHPUT else measure


def amount(measure: str, value: float | None) -> str:
    """A figure with its unit."""
    if measure == THROUGHPUT:
        return "–" if value is None else f"{value:,.4g} tokens/s"
    return duration(value)


def short(settings: Mapping[str, str]) -> str:
    """Settings as `--set` takes them, without their sections."""
    return ", ".join(f"{name.partition('.')[2]}={value}" for name, value in settings.items()) or "as it is"


def command_of(settings: Mapping[str, str]) -> str:
    """As flags of `serve`."""
    words = []
    for name, value in settings.items():
        flag = "--" + name.replace("_", "-")
        is_switch = value in {"true", "false"}
        words.append((flag if value == "true" else _off(flag)) if is_switch else f"{flag} {value}")
    return " ".join(("admitscope serve", *words))


def _off(flag: str) -> str:
    return f"--no-{flag.removeprefix('--')}"


def verdict_of(objective: str, row: Compared | None) -> Verdict:
    """What the difference in the objective amounts to."""
    if row is None:
        return "none"
    if row.is_within_error:
        return "direction" if row.is_clear else "unclear"
    return "gain" if row.is_clear or objective == THROUGHPUT else "unclear"


def sentence_of(
    objective: str,
    verdict: Verdict,
    best: Tried,
    search: Search,
    compared: Sequence[Compared],
    *,
    luck: float | None,
    is_recorded: bool,
    misfit: str = "",
) -> str:
    """The recommendation, its gain, how sure that is, and what it costs.

    misfit  why no time of this search is to be believed; then there is no recommendation
    """
    what = MEASURES[objective]
    rows = {one.name: one for one in compared}
    row = rows.get(told(objective))
    if verdict == "unfit":
        return (
            f"No recommendation: {misfit}. Keep the present configuration; record a run on a machine that does less "
            "beside it, or name a cost model with --cost."
        )
    if row is None or verdict == "none":
        return (
            f"Keep the present configuration: of {len(search.tried)} that were tried, none "
            f"{'with these limits ' if search.limits else ''}has a better {what} than its {_of(search, objective)}."
        )
    if verdict == "unclear":
        why = (
            f"by less than the simulator's error of {abs(row.model_error or 0):.0%}"
            if row.is_within_error
            else "but the interval of the difference has 0 in it"
        )
        return (
            f"Keep the present configuration: the best of {len(search.tried)} ({short(best.settings)}) takes {what} "
            f"from {_change(objective, row)}, {why}{_interval(objective, row)}: no clear gain."
        )
    parts = [
        f"Set {_settings(best, search)}: {what} goes from {_change(objective, row)}{_interval(objective, row)}.",
        _price(objective, best.figures, search.base.figures, rows),
        _sureness(objective, verdict, row, luck=luck, is_recorded=is_recorded),
    ]
    return " ".join(part for part in parts if part)


def stopped(search: Search) -> str:
    """What a search that was interrupted had tried."""
    count = len(search.tried)
    if not count:
        return "stopped while the baseline was simulated: nothing was tried"
    best, what = search.best(), MEASURES[search.objective]
    base = _of(search, search.objective)
    if best is search.base:
        return f"stopped after {count} configurations; none of them has a better {what} than the baseline's {base}"
    found = amount(search.objective, digits(best.figures.get(search.objective)))
    return (
        f"stopped after {count} configurations; the best of them so far is {short(best.settings)}, with a {what} of "
        f"{found} (the baseline: {base}). It was not compared, so it is no recommendation"
    )


def _of(search: Search, objective: str) -> str:
    return amount(objective, digits(search.base.figures.get(objective)))


def _settings(best: Tried, search: Search) -> str:
    base = {dimension.name: dimension.values[dimension.base] for dimension in search.space.dimensions}
    return " and ".join(f"{name.partition('.')[2]}={value} (now {base[name]})" for name, value in best.settings.items())


def _change(measure: str, row: Compared) -> str:
    before, after = row.before.value, row.after.value
    share = f" ({change(after / before - 1)})" if before and after is not None else ""
    return f"{amount(measure, before)} to {amount(measure, after)}{share}"


def _interval(objective: str, row: Compared) -> str:
    low, high = row.difference.low, row.difference.high
    if objective == THROUGHPUT:
        return ", of the whole run, for which no interval can be drawn"
    if low is None or high is None:
        return ""
    return f", a difference of {signed(low)} to {signed(high)} in 95 % of draws of the requests"


def _price(objective: str, best: Figures, base: Figures, rows: Mapping[str, Compared]) -> str:
    """What gets worse; a star where by less than the simulator's error, as in the table."""
    found = []
    for measure in _PRICED:
        before, after = base.get(measure), best.get(measure)
        if measure == objective or not before or after is None:
            continue
        if is_better(measure, before, after) and abs(after - before) > _PRICE * before:
            both = f"{amount(measure, digits(before))} to {amount(measure, digits(after))}"
            row = rows.get(told(measure))
            star = "*" if row is not None and row.is_within_error else ""
            found.append(f"{MEASURES[measure]} from {both} ({change(after / before - 1)}{star})")
    return f"The price: {', '.join(found)}." if found else ""


def _sureness(objective: str, verdict: Verdict, row: Compared, *, luck: float | None, is_recorded: bool) -> str:
    words = []
    before, after = row.before.value or 0.0, row.after.value or 0.0
    if luck and luck > _TOLD_LUCK * abs(after - before):
        words.append(f"{amount(objective, luck)} of it is expected luck of having chosen the best on these requests")
    if verdict == "direction" and row.model_error is not None:
        words.append(
            f"the simulator is off by {abs(row.model_error):.0%} on this measure of the recorded run, more than this "
            "change: take the direction, not the number"
        )
    elif row.model_error is not None:
        words.append(
            f"the simulator is off by {abs(row.model_error):.0%} on this measure of the recorded run, less than this "
            "change"
        )
    elif not is_recorded:
        words.append("nothing recorded is the same as this workload, so the simulator's error is not known")
    text = "; ".join(words)
    return f"{text[0].upper()}{text[1:]}." if text else ""
