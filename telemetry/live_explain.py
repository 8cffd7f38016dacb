"""Live explanations. Owns: the sentences that say what happened to one request, from the read model's own answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from telemetry.explain_words import amount, code_words, counted_test, span, times
from telemetry.observe import DecisionRow, QueueEntry, RequestDetail, Timeline, WaitSpan
from telemetry.policy_words import bound_words, compared, overtaken_words, rule_words

#: What each blocker means to somebody who waits.
_MEANING: Final = {
    "compute": "the step's prefill tokens were used up (rem_input)",
    "chunk": "the step's prefill slice was used up (rem_chunk)",
    "kv_now": "there was no room in the K/V pool at that moment (remaining_current)",
    "kv_total": "its whole future did not fit the K/V pool beside what running requests are promised (remaining_total)",
    "rows": "as many requests ran as may run at once",
    "chunk_slot": "it would have to be cut, and another prompt was already being computed in chunks",
    "order": "the pass ended before it was looked at",
    "cold_prefix": "another request was computing the prefix they share",
    "engine_busy": "no pass had been made since it came",
    "delay": "admissions were being delayed",
    "prefill_max": "the batch held as many new prompts as it may",
}

#: Blockers whose test counts requests; the others count tokens.
IN_REQUESTS: Final = frozenset({"rows", "prefill_max"})

#: What would have to change for a request that this blocker holds, for those who ask what to do.
_REMEDY: Final = {
    "compute": "The next step has a new budget of max_prefill_tokens; prompts before it take theirs first.",
    "chunk": "The next step has a new slice of chunked_prefill_size; decode rows and earlier prompts go first.",
    "kv_now": "Pages come free when a running request ends, or a cached prefix that nobody holds is evicted.",
    "kv_total": (
        "It is admitted once a running request ends or has less left to generate; a lower max_tokens, "
        "clip_max_new_tokens or schedule_conservativeness, or a larger pool, would admit it sooner."
    ),
    "rows": "It is admitted once a running request ends, or with a larger max_running_requests.",
    "chunk_slot": "It is admitted after the last piece of the other prompt, or with a larger chunked_prefill_size.",
    "order": "It is looked at once the passes get past those before it.",
    "cold_prefix": "One step later the prefix is cached and it computes that much less.",
    "engine_busy": "It is looked at as soon as the step in progress is over.",
    "delay": "It is looked at once the delay ends, which is configured.",
    "prefill_max": "The next step takes as many prompts again, or more with a larger prefill_max_requests.",
}
_AHEAD_SHOWN: Final = 3
_ENDS_SHOWN: Final = 3
#: Shorter waits are not told beside longer ones: every request waits for the end of the step that it came into.
_TELLING_S: Final = 0.001
#: The parts of TTFT in words.
_PARTS: Final = {
    "intake": "before the queue",
    "queue": "in the queue",
    "prepare": "preparing its steps",
    "chunk_forward": "computing its prompt",
    "commit": "applying the result",
    "between_chunks": "between its chunks",
    "emit": "until the first byte was sent",
}
#: What each overdraft is.
_OVERDRAFTS: Final = {
    "first_unchunked": "the first prompt of a pass is taken whole where chunking is off",
    "input_by_chunk": "a piece is cut by the chunk, not by what is left of the input",
    "chunk_page_rounding": "a piece counts as whole pages",
    "kv_rounding": "K/V is charged in whole pages",
    "continuation": "a prompt that was begun goes on before the others",
}
#: Refusals behind which others got the step's prefill budget: who, is the question.
_BUDGET_SPENT: Final = frozenset({"chunk_exhausted", "chunk_below_page", "chunk_slot_taken", "compute_exhausted"})


class SliceGiven(NamedTuple):
    """What one prompt got of the last pass: tokens, of those that it lacked."""

    rid: str
    tokens: int
    lacked: int


def sentences(
    detail: RequestDetail, ahead: tuple[str, ...] = (), slices: tuple[SliceGiven, ...] = ()
) -> tuple[str, ...]:
    """A life in order of time; the present state last.

    ahead   who is before it in the queue, from the head
    slices  what the last pass computed instead
    """
    request, timeline = detail.request, detail.timeline
    size = f"a prompt of {request.prompt_len} tokens, asking for at most {request.max_new_tokens} new ones"
    lines = [f"Request {request.rid} arrived with {size}."]
    lines += _waits(timeline)
    lines += [_decision(decision) for decision in detail.decisions if decision.admitted]
    if timeline.first_token_ns is not None:
        lines.append(_first_token(timeline))
    if request.retractions:
        lines.append(f"It was pushed back to the queue {times(request.retractions, 'time')} while running.")
    if request.outputs > 1 and request.tbt_p50_s is not None and request.tbt_max_s is not None:
        so_far = "so far" if request.finish is None else "in all"
        lines.append(
            f"{request.outputs} tokens {so_far}; the gap between two was {_span(request.tbt_p50_s)} in the median, "
            f"{_span(request.tbt_max_s)} at worst."
        )
    if detail.queue is not None:
        lines += _now(detail.queue, timeline, ahead, slices)
    elif request.finish is not None and request.duration_s is not None:
        lines.append(f"It ended after {_span(request.duration_s)} with {request.outputs} tokens: {request.finish}.")
    return tuple(lines)


def _waits(timeline: Timeline) -> list[str]:
    """One sentence per stretch of waiting, the longest eight, in order of time."""
    longest = sorted(_joined(timeline.waits), key=lambda one: one.start_ns - one.end_ns)[:8]
    longest = [one for one in longest if (one.end_ns - one.start_ns) / 1e9 >= _TELLING_S] or longest[:1]
    lines = []
    for stretch in sorted(longest, key=lambda one: one.start_ns):
        took = (stretch.end_ns - stretch.start_ns) / 1e9
        if took <= 0:
            continue
        ends = _ends(stretch)
        behind = f" ({ends})" if ends else ""
        why = _MEANING[stretch.blocker] + behind
        over = f", over {times(stretch.passes, 'pass', 'passes')}" if stretch.passes else ""
        lines.append(f"It waited {_span(took)}{over}, because {why}.")
    return lines


def _ends(stretch: WaitSpan) -> str:
    """What ended the passes of a stretch under `order`, most frequent first, and the steps that made none for it."""
    ended = sorted((one for one in stretch.ended_by if one.passes), key=lambda one: -one.passes)
    told = [f"{one.passes:,} ended by {code_words(one.reason)}" for one in ended[:_ENDS_SHOWN]]
    if len(ended) > _ENDS_SHOWN:
        told.append(f"{sum(one.passes for one in ended[_ENDS_SHOWN:]):,} by other reasons")
    kept_out = sorted((one for one in stretch.ended_by if one.steps), key=lambda one: -one.steps)
    if kept_out:
        steps = times(sum(one.steps for one in kept_out), "more step")
        told.append(f"no pass in {steps}, still for {code_words(kept_out[0].reason)}")
    return "; ".join(told)


def _joined(waits: Sequence[WaitSpan]) -> list[WaitSpan]:
    """Neighbours that would be told in the same words as one: a blocker may go on under another reason."""
    out: list[WaitSpan] = []
    for stretch in waits:
        last = out[-1] if out else None
        if last is not None and last.blocker == stretch.blocker != "order" and last.end_ns == stretch.start_ns:
            together = {"end_ns": stretch.end_ns, "passes": last.passes + stretch.passes}
            out[-1] = last.model_copy(update=together)
        else:
            out.append(stretch)
    return out


def _decision(decision: DecisionRow) -> str:
    cut = ""
    if decision.selected_extend < decision.candidate_extend:
        cut = f" of {decision.candidate_extend}, cut to fit"
    why = "; ".join(_OVERDRAFTS.get(name, code_words(name)) for name in decision.overdrafts)
    overdrafts = f" A ledger went below zero: {why}." if why else ""
    return (
        f"Step {decision.step} computed {decision.selected_extend} of its prompt tokens{cut}, up to position "
        f"{decision.extend_end}, with {decision.prefix_len} before them already there "
        f"({code_words(decision.reason)}).{overdrafts}"
    )


def _first_token(timeline: Timeline) -> str:
    until = timeline.ttft_ns
    if until is None and timeline.first_token_ns is not None:
        until = timeline.first_token_ns - timeline.accepted_ns
    parts = ", ".join(f"{_span(ns / 1e9)} {_PARTS.get(name, name)}" for name, ns in timeline.parts_ns.items() if ns)
    return f"Its first token came after {_span((until or 0) / 1e9)}: {parts}."


def _now(entry: QueueEntry, timeline: Timeline, ahead: tuple[str, ...], slices: tuple[SliceGiven, ...]) -> list[str]:
    """Where it waits, since when, for what, need and have, who is ahead, and what would have to change."""
    # The age of one that was pushed back counts from its arrival: it also ran meanwhile.
    back = entry.state == "retracted"
    since = _span(_stay_ns(timeline) / 1e9) + " since it was pushed back" if back else _span(entry.age_s)
    line = f"It is waiting now, at place {entry.position}, for {since}: {_MEANING[entry.blocker]}"
    if entry.blocker == "order" and entry.reason is not None:
        line += f"; the last pass ended at {entry.who_stopped or 'the queue'} with {code_words(entry.reason)}"
    if entry.need is not None and entry.have is not None:
        counted = counted_test(entry.reason, entry.need, entry.have)
        line += f"; {counted or f'it needs {amount(entry.need)} and there are {amount(entry.have)} tokens'}"
        if not counted and entry.need > entry.have:
            line += f", {amount(entry.need - entry.have)} too few"
    lines = [line + "."]
    joined = _joined(timeline.waits)
    if joined and joined[-1].blocker == entry.blocker:
        stretch = joined[-1]
        held = _span((stretch.end_ns - stretch.start_ns) / 1e9)
        over = f", over {times(stretch.passes, 'pass', 'passes')}" if stretch.passes else ""
        ends = _ends(stretch)
        lines.append(f"That has held it for {held}{over}{f': {ends}' if ends else ''}.")
    if entry.reason in _BUDGET_SPENT and slices:
        given = ", ".join(f"{one.rid} {one.tokens:,} of the {one.lacked:,} tokens it lacked" for one in slices[:3])
        more = f" and {len(slices) - 3} more" if len(slices) > 3 else ""
        lines.append(f"The last pass gave {given}{more}.")
    if ahead:
        more = f" and {len(ahead) - _AHEAD_SHOWN} more" if len(ahead) > _AHEAD_SHOWN else ""
        lines.append(f"Ahead of it: {', '.join(ahead[:_AHEAD_SHOWN])}{more}.")
    lines += _overtaken(entry)
    lines.append(_REMEDY[entry.blocker])
    return lines


def _overtaken(entry: QueueEntry) -> list[str]:
    """How often later ones went first, by which rule, and what bounds it."""
    if not entry.times_passed_over:
        return []
    lines = [f"Passed over in {overtaken_words(entry.times_passed_over, entry.overtaken_by)}."]
    last = entry.overtaker
    if last is not None and last.policy:
        keys = compared(last.order_key, last.own_key, last.key, last.rid)
        by = f": {keys}" if keys else f": {last.rid} went first"
        lines.append(f"Step {last.step} ordered by {rule_words(last.policy, last.order_key)}{by}.")
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


def _span(seconds: float) -> str:
    return span(round(seconds * 1e9))
