"""The present state in live explanations. Owns: where a request waits now, for what, and what would change it."""

from __future__ import annotations

from typing import Final, NamedTuple

from engine.scheduler.decision import Reason
from telemetry.explain_words import (
    amount,
    apart,
    clauses,
    code_words,
    counted_test,
    first_few,
    need_have,
    passes,
    span,
)
from telemetry.live_explain_wait import ends_told, joined, meaning, partition
from telemetry.observe import QueueEntry, Timeline, WaitSpan
from telemetry.policy_words import bound_words, overtaken_words, overtaker_words
from telemetry.words import mark, t

#: What would have to change for a request that this blocker holds, for those who ask what to do.
_REMEDY: Final = {
    "compute": mark("The next step has a new budget of max_prefill_tokens; prompts before it take theirs first."),
    "chunk": mark("The next step has a new slice of chunked_prefill_size; decode rows and earlier prompts go first."),
    "kv_now": mark("Pages come free when a running request ends, or a cached prefix that nobody holds is evicted."),
    "kv_total": mark(
        "It is admitted once a running request ends or has less left to generate; a lower max_tokens, "
        "clip_max_new_tokens or schedule_conservativeness, or a larger pool, would admit it sooner."
    ),
    "rows": mark("It is admitted once a running request ends, or with a larger max_running_requests."),
    "chunk_slot": mark(
        "It is admitted after the last piece of the other prompt, or with a larger chunked_prefill_size."
    ),
    "order": mark("It is looked at once the passes get past those before it."),
    "cold_prefix": mark("One step later the prefix is cached and it computes that much less."),
    "engine_busy": mark("It is looked at as soon as the step in progress is over."),
    "delay": mark("It is looked at once the delay ends, which is configured."),
    "prefill_max": mark("The next step takes as many prompts again, or more with a larger prefill_max_requests."),
}
AHEAD_SHOWN: Final = 3
GIVEN_SHOWN: Final = 3
#: Refusals behind which others got the step's prefill budget: who, is the question.
_BUDGET_SPENT: Final = frozenset({"chunk_exhausted", "chunk_below_page", "chunk_slot_taken", "compute_exhausted"})


class SliceGiven(NamedTuple):
    """What one prompt got of the last pass: tokens, of those that it lacked."""

    rid: str
    tokens: int
    lacked: int


def now_told(
    entry: QueueEntry, timeline: Timeline, ahead: tuple[str, ...], slices: tuple[SliceGiven, ...]
) -> list[str]:
    """Where it waits, since when, for what, need and have, who is ahead, and what would have to change."""
    lines = [_waits_now(entry, timeline), _stopper(entry)]
    stretches = joined(timeline.waits)
    if stretches and stretches[-1].blocker == entry.blocker:
        lines.append(_held(stretches[-1]))
    lines.append(partition(entry.held_ns, entry.order_ns, entry.blocker))
    if entry.reason in _BUDGET_SPENT and slices:
        lines.append(_given(slices))
    if ahead:
        lines.append(t("Ahead of it: {names}.", names=first_few(ahead, AHEAD_SHOWN)))
    lines += _overtaken(entry)
    lines.append(t(_REMEDY[entry.blocker]))
    return [line for line in lines if line]


def _waits_now(entry: QueueEntry, timeline: Timeline) -> str:
    why = [meaning(entry.blocker, entry.reason)]
    if entry.blocker == "order" and entry.reason is not None:
        reason = code_words(entry.reason)
        if entry.who_stopped:
            why.append(t("the last pass ended at {rid} with {reason}", rid=entry.who_stopped, reason=reason))
        else:
            why.append(t("the last pass ended at the queue with {reason}", reason=reason))
    if entry.need is not None and entry.have is not None:
        why.append(counted_test(entry.reason, entry.need, entry.have) or _tested(entry.need, entry.have))
    if entry.state == "retracted":
        # The age of one that was pushed back counts from its arrival: it also ran meanwhile.
        return t(
            "It is waiting now, at place {place}, for {time} since it was pushed back: {why}.",
            place=f"{entry.position:,}",
            time=span(_stay_ns(timeline)),
            why=clauses(why),
        )
    return t(
        "It is waiting now, at place {place}, for {time}: {why}.",
        place=f"{entry.position:,}",
        time=span(round(entry.age_s * 1e9)),
        why=clauses(why),
    )


def _stopper(entry: QueueEntry) -> str:
    """What the one that it waits behind lacks: its own need and have; "" where the pass compared nothing there."""
    stopper = entry.stopper
    if entry.blocker != "order" or stopper is None or stopper.step is None:
        return ""
    test = need_have(Reason(stopper.reason), stopper.need, stopper.have)
    if not test:
        return ""
    why = meaning(stopper.blocker, stopper.reason)
    return t("Step {step} refused {rid} because {why}: {test}.", step=stopper.step, rid=stopper.rid, why=why, test=test)


def _tested(need: float, have: float) -> str:
    told = {"need": amount(need), "have": amount(have), "short": amount(need - have)}
    if need > have:
        return t("it needs {need} and there are {have} tokens, {short} too few", **told)
    return t("it needs {need} and there are {have} tokens", **told)


def _held(stretch: WaitSpan) -> str:
    told = {
        "time": span(stretch.end_ns - stretch.start_ns),
        "passes": passes(stretch.passes),
        "ends": ends_told(stretch),
    }
    if stretch.passes and told["ends"]:
        return t("That has held it for {time}, over {passes}: {ends}.", **told)
    if stretch.passes:
        return t("That has held it for {time}, over {passes}.", **told)
    if told["ends"]:
        return t("That has held it for {time}: {ends}.", **told)
    return t("That has held it for {time}.", **told)


def _given(slices: tuple[SliceGiven, ...]) -> str:
    """Who got the last pass's prefill budget."""
    shares = apart(
        t(
            "{rid} {tokens} of the {lacked} tokens it lacked",
            rid=one.rid,
            tokens=f"{one.tokens:,}",
            lacked=f"{one.lacked:,}",
        )
        for one in slices[:GIVEN_SHOWN]
    )
    if len(slices) > GIVEN_SHOWN:
        return t("The last pass gave {shares} and {n} more.", shares=shares, n=len(slices) - GIVEN_SHOWN)
    return t("The last pass gave {shares}.", shares=shares)


def _overtaken(entry: QueueEntry) -> list[str]:
    """How often later ones went first, by which rule, and what bounds it."""
    if not entry.times_passed_over:
        return []
    lines = [overtaken_words(entry.times_passed_over, entry.overtaken_by)]
    last = entry.overtaker
    if last is not None and last.policy:
        lines.append(overtaker_words(last))
    lines.append(bound_words(last.policy if last is not None else ""))
    return lines


def _stay_ns(timeline: Timeline) -> int:
    """How long the present stay in the queue is: its last stretches, one on the other's heels."""
    start_ns = end_ns = timeline.waits[-1].end_ns if timeline.waits else 0
    for stretch in reversed(timeline.waits):
        if stretch.end_ns != start_ns:
            break
        start_ns = stretch.start_ns
    return end_ns - start_ns
