"""Live explanations. Owns: the sentences that say what happened to one request, from the read model's own answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from telemetry.explain_words import amount, apart, clauses, code_words, counted_test, first_few, following, passes, span
from telemetry.observe import DecisionRow, QueueEntry, RequestDetail, Timeline, WaitSpan
from telemetry.policy_words import bound_words, compared, overtaken_words, rule_words
from telemetry.words import mark, t, tn

#: What each blocker means to somebody who waits.
_MEANING: Final = {
    "compute": mark("the step's prefill tokens were used up (rem_input)"),
    "chunk": mark("the step's prefill slice was used up (rem_chunk)"),
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

#: Blockers whose test counts requests; the others count tokens.
IN_REQUESTS: Final = frozenset({"rows", "prefill_max"})

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
_AHEAD_SHOWN: Final = 3
_ENDS_SHOWN: Final = 3
_GIVEN_SHOWN: Final = 3
#: Shorter waits are not told beside longer ones: every request waits for the end of the step that it came into.
_TELLING_S: Final = 0.001
#: The parts of TTFT.
_PARTS: Final = {
    "intake": mark("{time} before the queue"),
    "queue": mark("{time} in the queue"),
    "prepare": mark("{time} preparing its steps"),
    "chunk_forward": mark("{time} computing its prompt"),
    "commit": mark("{time} applying the result"),
    "between_chunks": mark("{time} between its chunks"),
    "emit": mark("{time} until the first byte was sent"),
}
#: What each overdraft is.
_OVERDRAFTS: Final = {
    "first_unchunked": mark("the first prompt of a pass is taken whole where chunking is off"),
    "input_by_chunk": mark("a piece is cut by the chunk, not by what is left of the input"),
    "chunk_page_rounding": mark("a piece counts as whole pages"),
    "kv_rounding": mark("K/V is charged in whole pages"),
    "continuation": mark("a prompt that was begun goes on before the others"),
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
    """A life in order of time, in the language in use; the present state last.

    ahead   who is before it in the queue, from the head
    slices  what the last pass computed instead
    """
    request, timeline = detail.request, detail.timeline
    arrived = {"rid": request.rid, "prompt": request.prompt_len, "outputs": request.max_new_tokens}
    lines = [
        t("Request {rid} arrived with a prompt of {prompt} tokens, asking for at most {outputs} new ones.", **arrived)
    ]
    lines += _waits(timeline)
    lines += [_decision(decision) for decision in detail.decisions if decision.admitted]
    if timeline.first_token_ns is not None:
        lines.append(_first_token(timeline))
    if request.retractions:
        lines.append(
            tn(
                request.retractions,
                "It was pushed back to the queue {n} time while running.",
                "It was pushed back to the queue {n} times while running.",
            )
        )
    if request.outputs > 1 and request.tbt_p50_s is not None and request.tbt_max_s is not None:
        told = {"tokens": request.outputs, "median": _span(request.tbt_p50_s), "worst": _span(request.tbt_max_s)}
        if request.finish is None:
            so_far = t(
                "{tokens} tokens so far; the gap between two was {median} in the median, {worst} at worst.", **told
            )
        else:
            so_far = t(
                "{tokens} tokens in all; the gap between two was {median} in the median, {worst} at worst.", **told
            )
        lines.append(so_far)
    if detail.queue is not None:
        lines += _now(detail.queue, timeline, ahead, slices)
    elif request.finish is not None and request.duration_s is not None:
        took, finish = _span(request.duration_s), request.finish
        lines.append(
            t("It ended after {time} with {tokens} tokens: {finish}.", time=took, tokens=request.outputs, finish=finish)
        )
    return tuple(lines)


def _waits(timeline: Timeline) -> list[str]:
    """One sentence per stretch of waiting, the longest eight, in order of time."""
    longest = sorted(_joined(timeline.waits), key=lambda one: one.start_ns - one.end_ns)[:8]
    longest = [one for one in longest if (one.end_ns - one.start_ns) / 1e9 >= _TELLING_S] or longest[:1]
    in_order = sorted(longest, key=lambda one: one.start_ns)
    return [_waited(stretch) for stretch in in_order if stretch.end_ns > stretch.start_ns]


def _waited(stretch: WaitSpan) -> str:
    told = {
        "time": span(stretch.end_ns - stretch.start_ns),
        "why": t(_MEANING[stretch.blocker]),
        "passes": passes(stretch.passes),
        "ends": _ends(stretch),
    }
    if stretch.passes and told["ends"]:
        return t("It waited {time}, over {passes}, because {why} ({ends}).", **told)
    if stretch.passes:
        return t("It waited {time}, over {passes}, because {why}.", **told)
    if told["ends"]:
        return t("It waited {time}, because {why} ({ends}).", **told)
    return t("It waited {time}, because {why}.", **told)


def _ends(stretch: WaitSpan) -> str:
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
    told = {
        "step": str(decision.step),
        "selected": str(decision.selected_extend),
        "candidate": str(decision.candidate_extend),
        "end": str(decision.extend_end),
        "prefix": str(decision.prefix_len),
        "reason": code_words(decision.reason),
    }
    if decision.selected_extend < decision.candidate_extend:
        said = t(
            "Step {step} computed {selected} of its prompt tokens of {candidate}, cut to fit, up to position {end}, "
            "with {prefix} before them already there ({reason}).",
            **told,
        )
    else:
        said = t(
            "Step {step} computed {selected} of its prompt tokens, up to position {end}, "
            "with {prefix} before them already there ({reason}).",
            **told,
        )
    why = [t(_OVERDRAFTS[name]) if name in _OVERDRAFTS else code_words(name) for name in decision.overdrafts]
    below = t("A ledger went below zero: {why}.", why=clauses(why)) if why else ""
    return following((said, below))


def _first_token(timeline: Timeline) -> str:
    until = timeline.ttft_ns
    if until is None and timeline.first_token_ns is not None:
        until = timeline.first_token_ns - timeline.accepted_ns
    parts = [
        # A newer engine may have parts that this one does not know.
        t(_PARTS[name], time=span(ns)) if name in _PARTS else t("{time} {part}", time=span(ns), part=name)
        for name, ns in timeline.parts_ns.items()
        if ns
    ]
    return t("Its first token came after {time}: {parts}.", time=span(until or 0), parts=apart(parts))


def _now(entry: QueueEntry, timeline: Timeline, ahead: tuple[str, ...], slices: tuple[SliceGiven, ...]) -> list[str]:
    """Where it waits, since when, for what, need and have, who is ahead, and what would have to change."""
    lines = [_waits_now(entry, timeline)]
    joined = _joined(timeline.waits)
    if joined and joined[-1].blocker == entry.blocker:
        lines.append(_held(joined[-1]))
    if entry.reason in _BUDGET_SPENT and slices:
        lines.append(_given(slices))
    if ahead:
        lines.append(t("Ahead of it: {names}.", names=first_few(ahead, _AHEAD_SHOWN)))
    lines += _overtaken(entry)
    lines.append(t(_REMEDY[entry.blocker]))
    return lines


def _waits_now(entry: QueueEntry, timeline: Timeline) -> str:
    why = [t(_MEANING[entry.blocker])]
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
            place=entry.position,
            time=span(_stay_ns(timeline)),
            why=clauses(why),
        )
    return t(
        "It is waiting now, at place {place}, for {time}: {why}.",
        place=entry.position,
        time=_span(entry.age_s),
        why=clauses(why),
    )


def _tested(need: float, have: float) -> str:
    told = {"need": amount(need), "have": amount(have), "short": amount(need - have)}
    if need > have:
        return t("it needs {need} and there are {have} tokens, {short} too few", **told)
    return t("it needs {need} and there are {have} tokens", **told)


def _held(stretch: WaitSpan) -> str:
    told = {
        "time": span(stretch.end_ns - stretch.start_ns),
        "passes": passes(stretch.passes),
        "ends": _ends(stretch),
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
        for one in slices[:_GIVEN_SHOWN]
    )
    if len(slices) > _GIVEN_SHOWN:
        return t("The last pass gave {shares} and {n} more.", shares=shares, n=len(slices) - _GIVEN_SHOWN)
    return t("The last pass gave {shares}.", shares=shares)


def _overtaken(entry: QueueEntry) -> list[str]:
    """How often later ones went first, by which rule, and what bounds it."""
    if not entry.times_passed_over:
        return []
    lines = [overtaken_words(entry.times_passed_over, entry.overtaken_by)]
    last = entry.overtaker
    if last is not None and last.policy:
        told = {"step": str(last.step), "rule": rule_words(last.policy, last.order_key), "rid": last.rid}
        keys = compared(last.order_key, last.own_key, last.key, last.rid)
        if keys:
            lines.append(t("Step {step} ordered by {rule}: {keys}.", keys=keys, **told))
        else:
            lines.append(t("Step {step} ordered by {rule}: {rid} went first.", **told))
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
