"""Stretches of waiting in live explanations. Owns: what each blocker means, what held a request how long, by share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from telemetry.explain_words import apart, clauses, code_words, is_telling, other, passes, percent_of, span
from telemetry.observe import WaitSpan
from telemetry.words import mark, t, tn

#: What each blocker means to somebody who waits.
MEANING: Final = {
    "compute": mark("the step's prefill tokens were used up (rem_input)"),
    "chunk": mark("the step's prefill slice was used up, or less than one page of it was left (rem_chunk)"),
    "kv_now": mark("there was no room in the K/V pool at that moment (remaining_current)"),
    "kv_total": mark(
        "its whole future did not fit the K/V pool beside what running requests are promised (remaining_total)"
    ),
    "rows": mark("as many requests ran as may run at once"),
    "chunk_slot": mark("it would have to be cut, and another prompt was already being computed in chunks"),
    "order": mark("the pass ended before it was looked at"),
    "cold_prefix": mark("another request was computing the prefix they share"),
    "engine_busy": mark("no pass had been made since it came"),
    "delay": mark("admissions were being delayed"),
    "prefill_max": mark("the batch held as many new prompts as it may"),
}

_ENDS_SHOWN: Final = 3
_SHARES_SHOWN: Final = 5
#: Shorter waits are not told beside longer ones: every request waits for the end of the step that it came into.
_TELLING_S: Final = 0.001


#: The same by reason, where the reason says more.
_BY_REASON: Final = {
    "chunk_exhausted": mark("the step's prefill slice was used up (rem_chunk)"),
    "chunk_below_page": mark("less than one page was left of the step's prefill slice (rem_chunk)"),
}


def meaning(blocker: str, reason: str | None) -> str:
    """What held it, in words; under `order` the reason is that of the one ahead."""
    return t(MEANING[blocker] if blocker == "order" else _BY_REASON.get(reason or "", MEANING[blocker]))


def waits_told(waits: Sequence[WaitSpan], *, goes_on: bool = False) -> list[str]:
    """One sentence per stretch of waiting, the longest eight, in order of time.

    goes_on  the last one is not over: it is told with the present state, and not here
    """
    over = joined(waits)[:-1] if goes_on else joined(waits)
    longest = sorted(over, key=lambda one: one.start_ns - one.end_ns)[:8]
    telling = [one for one in longest if (one.end_ns - one.start_ns) / 1e9 >= _TELLING_S]
    longest = telling if telling or goes_on else longest[:1]
    in_order = sorted(longest, key=lambda one: one.start_ns)
    return [_waited(stretch) for stretch in in_order if stretch.end_ns > stretch.start_ns]


def partition(held_ns: Mapping[str, int], order_ns: Mapping[str, int], now: str | None = None) -> str:
    """What held it, by share of its wait: what holds it at this moment, `now`, is often the least of it.

    "" where one cause had all of it and that is told anyway.
    """
    waited = sum(held_ns.values())
    ranked = sorted(held_ns.items(), key=lambda item: -item[1])
    telling = [(blocker, ns) for blocker, ns in ranked[:_SHARES_SHOWN] if is_telling(ns, waited)]
    if len(telling) < 2 and now in {None, *(blocker for blocker, _ in telling)}:
        return ""
    told = [
        t(
            "{blocker} {time} ({share})",
            blocker=_with_ends(blocker, order_ns),
            time=span(ns),
            share=percent_of(ns, waited),
        )
        for blocker, ns in telling
    ]
    shares = apart([*told, *other(waited - sum(ns for _, ns in telling), waited)])
    return t("By what held it, its wait of {time} was: {shares}.", time=span(waited), shares=shares) if shares else ""


def _with_ends(blocker: str, order_ns: Mapping[str, int]) -> str:
    """A blocker; `order` with what ended most of the passes, since that is the limit to lift; else the two largest."""
    if blocker != "order" or not order_ns:
        return code_words(blocker)
    total = sum(order_ns.values())
    (most, ns), *others = sorted(order_ns.items(), key=lambda item: -item[1])
    if 2 * ns > total or not others:
        return t("order, most of it behind {reason},", reason=code_words(most))
    return t(
        "order, {share} of it behind {reason} and {second_share} behind {second},",
        share=percent_of(ns, total),
        reason=code_words(most),
        second_share=percent_of(others[0][1], total),
        second=code_words(others[0][0]),
    )


def _in_words(stretch: WaitSpan) -> str:
    return meaning(stretch.blocker, stretch.reason)


def _waited(stretch: WaitSpan) -> str:
    told = {
        "time": span(stretch.end_ns - stretch.start_ns),
        "why": meaning(stretch.blocker, stretch.reason),
        "passes": passes(stretch.passes),
        "ends": ends_told(stretch),
    }
    if stretch.passes and told["ends"]:
        return t("It waited {time}, over {passes}, because {why} ({ends}).", **told)
    if stretch.passes:
        return t("It waited {time}, over {passes}, because {why}.", **told)
    if told["ends"]:
        return t("It waited {time}, because {why} ({ends}).", **told)
    return t("It waited {time}, because {why}.", **told)


def ends_told(stretch: WaitSpan) -> str:
    """What ended the passes of a stretch under `order`, most frequent first, and the steps that made none for it."""
    ended = sorted((one for one in stretch.ended_by if one.passes), key=lambda one: -one.passes)
    told = [
        t("{n} ended by {reason}", n=f"{one.passes:,}", reason=code_words(one.reason)) for one in ended[:_ENDS_SHOWN]
    ]
    if len(ended) > _ENDS_SHOWN:
        others = sum(one.passes for one in ended[_ENDS_SHOWN:])
        told.append(t("{n} by other reasons", n=f"{others:,}"))
    kept_out = sorted((one for one in stretch.ended_by if one.steps), key=lambda one: -one.steps)
    if kept_out:
        told.append(
            tn(
                sum(one.steps for one in kept_out),
                "no pass in {n} more step, still for {reason}",
                "no pass in {n} more steps, still for {reason}",
                reason=code_words(kept_out[0].reason),
            )
        )
    return clauses(told) if told else ""


def joined(waits: Sequence[WaitSpan]) -> list[WaitSpan]:
    """Neighbours that would be told in the same words as one: a blocker may go on under another reason."""
    out: list[WaitSpan] = []
    for stretch in waits:
        last = out[-1] if out else None
        is_on = last is not None and last.blocker == stretch.blocker != "order" and last.end_ns == stretch.start_ns
        if last is not None and is_on and _in_words(last) == _in_words(stretch):
            together = {"end_ns": stretch.end_ns, "passes": last.passes + stretch.passes}
            out[-1] = last.model_copy(update=together)
        else:
            out.append(stretch)
    return out
