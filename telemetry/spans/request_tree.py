"""The span tree of one request. Owns: cutting a finished timeline into spans, with the numbers of each decision.

Every child lies within the root; `engine.queue`, `engine.prefill.chunk` and `engine.between_chunks` follow each other
without a gap up to the first token, so what is seen in a trace viewer is where the time to first token went.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from itertools import pairwise
from typing import Final

from engine.events import AdmissionDecided
from engine.request import Cause, FinishReason
from telemetry.observe import BLOCKERS
from telemetry.request_timeline import Chunk, RequestTimeline
from telemetry.spans.draft import (
    Attributes,
    DraftEvent,
    SpanDraft,
    derived_id,
    request_span_id,
    step_ids,
)
from telemetry.spans.stays import Stay, TraceFacts
from telemetry.stalls import STALL_CAUSES

#: Events of one kind on one span; more are counted in an attribute.
MAX_EVENTS: Final = 32
MAX_LATE_TOKENS: Final = 8
_MS: Final = 1e6

#: (start, end, queued) of a gap -> index into STALL_CAUSES.
CauseOf = Callable[[int, int, bool], int]


class RequestTree:
    """Builds the spans of requests of one engine.

    model        as served
    cause_of     why a token was late
    gap_ns       a gap above it makes a token late
    with_held    each stretch under one blocker is a span of its own, within the queue or between two chunks
    """

    def __init__(self, *, engine_id: str, model: str, cause_of: CauseOf, gap_ns: int, with_held: bool = False) -> None:
        self._engine_id = engine_id
        self._model = model
        self._cause_of = cause_of
        self._gap_ns = gap_ns
        self._with_held = with_held

    def build(
        self, request: RequestTimeline, facts: TraceFacts, *, kept_because: str, kept_steps: Collection[int]
    ) -> list[SpanDraft]:
        """All spans of one finished request, root first.

        kept_steps  steps whose span is kept: only those are linked to
        """
        builder = _Builder(request, facts, request_span_id(facts.trace_id, request.rid))
        end = _end_of(request)
        spans = [self._root(builder, end, kept_because)]
        spans.append(
            builder.child("engine.intake", request.accepted_ns, request.enqueued_ns, prompt_tokens=request.prompt_len)
        )
        for index, stay in enumerate(facts.stays):
            spans.extend(_queue(builder, stay, index, end))
        decided = {event.step: event for event in request.decisions if event.selected_extend > 0}
        for index, chunk in enumerate(request.chunks):
            links = (step_ids(self._engine_id, chunk.step),) if chunk.step in kept_steps else ()
            spans.append(_chunk(builder, chunk, index, decided.get(chunk.step), links))
        spans.extend(_between(builder))
        if self._with_held:
            spans.extend(_held(builder, spans))
        spans.extend(self._decodes(builder, end))
        if request.first_byte_ns is not None and request.last_byte_ns is not None:
            if request.first_token_ns is not None and request.first_byte_ns > request.first_token_ns:
                # Of a whole answer it lasts as long as decoding and a little longer: else that rest would be nobody's.
                spans.append(builder.child("engine.emit", request.first_token_ns, request.first_byte_ns))
            spans.append(builder.child("engine.stream", request.first_byte_ns, request.last_byte_ns))
        return [_within(span, spans[0]) for span in spans]

    def _root(self, builder: _Builder, end: int, kept_because: str) -> SpanDraft:
        request, facts = builder.request, builder.facts
        operation = "chat" if request.rid.startswith("chatcmpl-") else "text_completion"
        attributes: Attributes = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "admitscope",
            "gen_ai.request.model": self._model,
            "gen_ai.request.max_tokens": request.max_new_tokens,
            "gen_ai.response.id": request.rid,
            "gen_ai.response.model": self._model,
            "gen_ai.response.finish_reasons": (str(request.finish or ""),),
            "gen_ai.usage.input_tokens": request.prompt_len,
            "gen_ai.usage.output_tokens": request.output_len,
            "gen_ai.usage.cache_read.input_tokens": request.cached_len or 0,
            "admitscope.engine_id": self._engine_id,
            "admitscope.chunks": len(request.chunks),
            "admitscope.retractions": request.num_retractions,
            "admitscope.kept_because": kept_because,
        }
        if request.ttft_ns is not None:
            attributes["admitscope.ttft_ms"] = request.ttft_ns / _MS
        if request.queue_ns is not None:
            attributes["admitscope.queue_ms"] = request.queue_ns / _MS
        if request.priority is not None:
            attributes["admitscope.priority"] = request.priority
        if request.end_cause is not None:
            attributes["admitscope.end_cause"] = request.end_cause.value
        events = tuple(
            DraftEvent("engine.invariant.violation", t_ns, {"id": law, "expected": expected, "observed": found})
            for t_ns, law, expected, found in facts.violations[:MAX_EVENTS]
        )
        error = None
        if request.finish is None:
            error = "shutdown"
        elif request.finish in {FinishReason.ERROR, FinishReason.ABORT, FinishReason.REFUSED}:
            error = str(request.end_cause or request.finish)
        return SpanDraft(
            name=f"{operation} {self._model}",
            trace_id=facts.trace_id,
            span_id=builder.root_id,
            parent_id=facts.parent_span_id,
            start_ns=request.accepted_ns,
            end_ns=end,
            attributes=attributes,
            events=events,
            is_server=True,
            error=error,
        )

    def _decodes(self, builder: _Builder, end: int) -> list[SpanDraft]:
        """One span for each stretch of decoding: from the last piece of the prompt to the push-back or the end."""
        request = builder.request
        starts = [chunk.applied_ns for chunk in request.chunks if chunk.is_last and chunk.applied_ns is not None]
        leaves = [stay.enter_ns for stay in builder.facts.stays[1:]]
        last = request.finished_ns or request.last_token_ns or end
        spans = []
        for index, start in enumerate(starts):
            until = min([t_ns for t_ns in leaves if t_ns >= start], default=last)
            if until <= start:
                continue  # its first token was its last
            tokens = [t_ns for t_ns in request.token_ns if start <= t_ns <= until]
            spans.append(self._decode(builder, index, start, until, tokens))
        return spans

    def _decode(self, builder: _Builder, index: int, start: int, until: int, tokens: list[int]) -> SpanDraft:
        gaps = [(later - earlier, earlier, later) for earlier, later in pairwise(tokens)]
        attributes: Attributes = {"index": index, "tokens": len(tokens)}
        late = [gap for gap in gaps if gap[0] > self._gap_ns]
        attributes["late_tokens"] = len(late)
        if gaps:
            worst, earlier, later = max(gaps)
            attributes["worst_gap_ms"] = worst / _MS
            attributes["worst_gap_cause"] = STALL_CAUSES[self._cause_of(earlier, later, False)]
        events = tuple(
            DraftEvent(
                "engine.late_token",
                later,
                {"gap_ms": gap / _MS, "cause": STALL_CAUSES[self._cause_of(earlier, later, False)]},
            )
            for gap, earlier, later in late[:MAX_LATE_TOKENS]
        )
        return builder.span("engine.decode", index, start, until, attributes, events)


class _Builder:
    """Makes children of one root."""

    def __init__(self, request: RequestTimeline, facts: TraceFacts, root_id: int) -> None:
        self.request = request
        self.facts = facts
        self.root_id = root_id

    def child(self, name: str, start_ns: int, end_ns: int, **attributes: str | bool | int | float) -> SpanDraft:
        return self.span(name, 0, start_ns, end_ns, dict(attributes))

    def span(
        self,
        name: str,
        index: int,
        start_ns: int,
        end_ns: int,
        attributes: Attributes,
        events: tuple[DraftEvent, ...] = (),
    ) -> SpanDraft:
        return SpanDraft(
            name=name,
            trace_id=self.facts.trace_id,
            span_id=derived_id(self.facts.trace_id, self.root_id, name, index),
            parent_id=self.root_id,
            start_ns=start_ns,
            end_ns=max(start_ns, end_ns),
            attributes=attributes,
            events=events,
        )


def _end_of(request: RequestTimeline) -> int:
    """When its root span ends: the last thing that is known of it."""
    seen = (request.finished_ns, request.last_byte_ns, request.last_token_ns, request.cursor_ns)
    return max(t_ns for t_ns in seen if t_ns is not None)


def _queue(builder: _Builder, stay: Stay, index: int, end: int) -> list[SpanDraft]:
    """The stay as `engine.queue`; after a push-back it lies in an `engine.retracted`."""
    request = builder.request
    until = stay.leave_ns if stay.leave_ns is not None else end
    blocked = _blocked(request, stay.enter_ns, until)
    attributes: Attributes = {"index": index, **_in_ms(blocked)}
    # A timeline keeps the latest stretches only.
    unexplained = until - stay.enter_ns - sum(blocked.values())
    if unexplained > 0:
        attributes["blocked_by.not_kept_ms"] = unexplained / _MS
    events: list[DraftEvent] = []
    examined = passed_over = 0
    reason = None
    for event in request.decisions:
        if not stay.enter_ns <= event.t_ns <= until:
            continue
        examined += 1
        passed_over = max(passed_over, event.times_passed_over)
        if event.selected_extend <= 0 and event.reason is not reason:
            reason = event.reason
            if len(events) < MAX_EVENTS:
                events.append(DraftEvent("engine.admission.refused", event.t_ns, _refusal(event)))
    attributes["times_examined"] = examined
    attributes["times_passed_over"] = passed_over
    span = builder.span("engine.queue", index, stay.enter_ns, until, attributes, tuple(events))
    if stay.cause is Cause.ARRIVE:
        return [span]
    lost: Attributes = {} if stay.tokens_lost is None else {"tokens_lost": stay.tokens_lost}
    around = builder.span("engine.retracted", index, stay.enter_ns, until, {"cause": stay.cause.value, **lost})
    return [around, span._replace(parent_id=around.span_id)]


def _chunk(
    builder: _Builder,
    chunk: Chunk,
    index: int,
    decided: AdmissionDecided | None,
    links: tuple[tuple[int, int], ...],
) -> SpanDraft:
    attributes: Attributes = {
        "index": index,
        "step": chunk.step,
        "prefix_len": chunk.prefix_len,
        "selected_extend": chunk.extend_len,
        "is_last": chunk.is_last,
        "decode_rows": chunk.decode_rows,
        "pages_claimed": builder.facts.claimed.get(chunk.step, 0),
    }
    events: tuple[DraftEvent, ...] = ()
    if decided is not None:
        attributes |= {
            "candidate_extend": decided.candidate_extend,
            "is_chunked": decided.is_chunked,
            "reason": decided.reason.value,
            **_ledgers(decided),
        }
        events = tuple(
            DraftEvent("engine.overdraft", decided.t_ns, {"kind": kind.value}) for kind in decided.overdrafts
        )
    if chunk.launched_ns is not None and chunk.ready_ns is not None:
        attributes["forward_ms"] = (chunk.ready_ns - chunk.launched_ns) / _MS
    reached = (chunk.applied_ns, chunk.ready_ns, chunk.launched_ns, chunk.admitted_ns)
    end = next(t_ns for t_ns in reached if t_ns is not None)
    span = builder.span("engine.prefill.chunk", index, chunk.admitted_ns, end, attributes, events)
    failed = chunk.ready_ns is not None and chunk.applied_ns is None
    return span._replace(links=links, error="step_failed" if failed else None)


def _between(builder: _Builder) -> list[SpanDraft]:
    """From one piece's end to the next piece's admission, unless the request was back in the queue in between."""
    request = builder.request
    spans = []
    for index, (before, after) in enumerate(pairwise(request.chunks)):
        if before.applied_ns is None or before.is_last or after.admitted_ns < before.applied_ns:
            continue  # where steps overlap the next piece may be planned before this one has come back
        if any(before.applied_ns <= stay.enter_ns <= after.admitted_ns for stay in builder.facts.stays[1:]):
            continue
        blocked = _blocked(request, before.applied_ns, after.admitted_ns)
        attributes: Attributes = {"after_chunk": index, **_in_ms(blocked)}
        spans.append(builder.span("engine.between_chunks", index, before.applied_ns, after.admitted_ns, attributes))
    return spans


def _blocked(request: RequestTimeline, start_ns: int, end_ns: int) -> dict[str, int]:
    """Nanoseconds under each blocker within [start_ns, end_ns)."""
    blocked: dict[str, int] = {}
    for held in request.held:
        overlap = min(held.end_ns, end_ns) - max(held.start_ns, start_ns)
        if overlap > 0:
            name = BLOCKERS[held.blocker]
            blocked[name] = blocked.get(name, 0) + overlap
    return blocked


def _held(builder: _Builder, spans: list[SpanDraft]) -> list[SpanDraft]:
    """One span for each stretch under one blocker, within the stay or the pause that it is a part of."""
    held: list[SpanDraft] = []
    for around in spans:
        if around.name not in {"engine.queue", "engine.between_chunks"}:
            continue
        for each in builder.request.held:
            start, end = max(each.start_ns, around.start_ns), min(each.end_ns, around.end_ns)
            if end > start:
                attributes: Attributes = {"blocker": BLOCKERS[each.blocker], "passes": each.passes}
                if each.reason is not None:
                    attributes["reason"] = each.reason.value
                if each.who is not None:
                    attributes["who"] = each.who
                span = builder.span("engine.held", len(held), start, end, attributes)
                held.append(span._replace(parent_id=around.span_id))
    return held


def _in_ms(blocked: dict[str, int]) -> Attributes:
    return {f"blocked_by.{name}_ms": spent / _MS for name, spent in blocked.items()}


def _refusal(event: AdmissionDecided) -> Attributes:
    attributes: Attributes = {
        "reason": event.reason.value,
        "step": event.step,
        "candidate_extend": event.candidate_extend,
        "prefix_len": event.prefix_len,
        **_ledgers(event),
    }
    if event.need is not None:
        attributes["need"] = event.need
    if event.have is not None:
        attributes["have"] = event.have
    return attributes


def _ledgers(event: AdmissionDecided) -> Attributes:
    """Ledgers of a decision, in tokens. A ledger that is off has no attribute."""
    values = {
        "compute.before": event.rem_input_before,
        "compute.after": event.rem_input_after,
        "chunk.before": event.rem_chunk_before,
        "chunk.after": event.rem_chunk_after,
        "kv_total.before": event.remaining_total_before,
        "kv_total.after": event.remaining_total_after,
        "kv_now.before": event.remaining_current_before,
        "kv_now.after": event.remaining_current_after,
    }
    return {name: value for name, value in values.items() if value is not None}


def _within(span: SpanDraft, root: SpanDraft) -> SpanDraft:
    """`span` cut to its root's time: a clock that jumped back must not make a child outlive its parent."""
    if span.start_ns >= root.start_ns and span.end_ns <= root.end_ns:
        return span
    start = min(max(span.start_ns, root.start_ns), root.end_ns)
    return span._replace(start_ns=start, end_ns=min(max(span.end_ns, start), root.end_ns))
