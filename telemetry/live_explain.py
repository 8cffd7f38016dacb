"""Live explanations. Owns: the sentences that say what happened to one request, from the read model's own answer."""

from __future__ import annotations

from typing import Final

from telemetry.explain_words import apart, clauses, code_words, following, span
from telemetry.live_explain_now import AHEAD_SHOWN, GIVEN_SHOWN, SliceGiven, now_told
from telemetry.live_explain_wait import partition, waits_told
from telemetry.observe import DecisionRow, RequestDetail, Timeline
from telemetry.words import mark, t, tn

#: Blockers whose test counts requests; the others count tokens.
IN_REQUESTS: Final = frozenset({"rows", "prefill_max"})

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


def sentences(
    detail: RequestDetail, ahead: tuple[str, ...] = (), slices: tuple[SliceGiven, ...] = ()
) -> tuple[str, ...]:
    """A life in order of time, in the language in use; the present state last.

    ahead   who is before it in the queue, from the head
    slices  what the last pass computed instead
    """
    request, timeline = detail.request, detail.timeline
    arrived = {"rid": request.rid, "prompt": f"{request.prompt_len:,}", "outputs": f"{request.max_new_tokens:,}"}
    lines = [
        t("Request {rid} arrived with a prompt of {prompt} tokens, asking for at most {outputs} new ones.", **arrived)
    ]
    # The stretch that is not over is told with the present state.
    lines += waits_told(timeline.waits, goes_on=detail.queue is not None)
    if detail.queue is None and (shares := partition(timeline.blockers_ns, timeline.order_ns)):
        lines.append(shares)
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
        told = {"tokens": f"{request.outputs:,}", "median": _span(request.tbt_p50_s), "worst": _span(request.tbt_max_s)}
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
        lines += now_told(detail.queue, timeline, ahead, slices)
    elif request.finish is not None and request.duration_s is not None:
        told = {"time": _span(request.duration_s), "tokens": f"{request.outputs:,}", "finish": request.finish}
        lines.append(t("It ended after {time} with {tokens} tokens: {finish}.", **told))
    return tuple(lines)


def ids_named(detail: RequestDetail, ahead: tuple[str, ...], slices: tuple[SliceGiven, ...]) -> tuple[str, ...]:
    """The ids that `sentences` of the same may name, its own first."""
    entry = detail.queue
    last = entry.overtaker.rid if entry is not None and entry.overtaker is not None else None
    stopped = entry.who_stopped if entry is not None else None
    found = (detail.request.rid, *ahead[:AHEAD_SHOWN], *(one.rid for one in slices[:GIVEN_SHOWN]), stopped, last)
    return tuple(dict.fromkeys(rid for rid in found if rid is not None))


def _decision(decision: DecisionRow) -> str:
    told = {
        "step": str(decision.step),
        "selected": f"{decision.selected_extend:,}",
        "candidate": f"{decision.candidate_extend:,}",
        "end": f"{decision.extend_end:,}",
        "prefix": f"{decision.prefix_len:,}",
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


def _span(seconds: float) -> str:
    return span(round(seconds * 1e9))
