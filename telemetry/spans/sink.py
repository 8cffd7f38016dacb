"""SpanSink. Owns: turning the event stream into finished spans, for those requests and steps that are worth it.

Feed it from a worker thread (`BufferedSink`). It follows every request with a timeline of its own and builds nothing
until a request ends; a caller that never reports the end of its response is closed after 4,096 others.
"""

from __future__ import annotations

import struct
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from typing import Final, Protocol

from engine.config import EngineConfig
from engine.events import (
    AnyEvent,
    EngineStarted,
    PagesMoved,
    RequestArrived,
    RequestTransitioned,
    ResponseSent,
    StepCompleted,
    StepPlanned,
)
from engine.request import Cause, RequestState
from engine.scheduler.plan import StepKind
from invariants.span_laws import SpanReading
from telemetry.phases import Handler, Phases, handlers_of
from telemetry.request_timeline import RequestTimeline
from telemetry.spans.draft import SpanDraft, request_span_id, request_trace_id
from telemetry.spans.keep import KeepRule, TokenBucket
from telemetry.spans.ledger import NOT_CHOSEN, REFUSED, SpanLedger
from telemetry.spans.request_tree import RequestTree
from telemetry.spans.stays import TraceFacts
from telemetry.spans.step_tree import StepKeeper, step_spans
from telemetry.stalls import StepLog
from telemetry.timeline import TimelineTracker

_ENDED_KEPT: Final = 4_096
_STEPS_KEPT: Final = 8_192
_PAGE_BYTES: Final = 4
_NOTES_KEPT: Final = 1_000


class SpanOutput(Protocol):
    """Where finished spans go. Neither call may block."""

    def start(self, engine: EngineStarted) -> None:
        """A new engine: its clock and its name."""

    def send(self, spans: list[SpanDraft]) -> None:
        """All spans of one request or one step."""

    def refuse(self, spans: int) -> None:
        """`spans` spans were worth keeping, and the rate did not allow them."""

    def close(self) -> None:
        """Send what waits and stop."""


class ViolationNote(Protocol):
    """What is read of a broken law."""

    @property
    def id(self) -> str: ...
    @property
    def expected(self) -> str: ...
    @property
    def found(self) -> str: ...
    @property
    def step(self) -> int: ...
    @property
    def rid(self) -> str | None: ...
    @property
    def evidence(self) -> tuple[int, ...]: ...


def _pages_of(row: int, claims: list[PagesMoved]) -> int:
    """Pages that these claims gave to one row."""
    pages, label = 0, f"r:{row}"
    for claim in claims:
        if claim.owners:
            pages += struct.unpack(f"<{len(claim.owners) // _PAGE_BYTES}i", claim.owners).count(row)
        elif claim.owner == label:
            pages += len(claim.pages) // _PAGE_BYTES
    return pages


class SpanSink:
    """Builds spans of one engine's events.

    expects_responses  a server reports each response's end; a request's tree is built then
    max_traces_per_s   of requests; steps have a bucket of the same size
    with_held          each stretch under one blocker is a span too
    """

    def __init__(
        self,
        output: SpanOutput,
        *,
        expects_responses: bool,
        sample_ratio: float = 0.01,
        max_traces_per_s: float = 50.0,
        ttft_ns: int = 1_000_000_000,
        gap_ns: int = 250_000_000,
        with_held: bool = False,
    ) -> None:
        self._output = output
        self._expects_responses = expects_responses
        self._gap_ns = gap_ns
        self._with_held = with_held
        self._rule = KeepRule(sample_ratio=sample_ratio, ttft_ns=ttft_ns, gap_ns=gap_ns)
        self._rate = max_traces_per_s
        self._notes: deque[ViolationNote] = deque(maxlen=_NOTES_KEPT)
        self._closed = False
        self._shared: TimelineTracker | None = None
        #: Made when one was wanted, for whoever asked.
        self._reading: SpanReading | None = None
        self._begin("", "", None)

    def _begin(self, engine_id: str, model: str, chunk_size: int | None) -> None:
        self._engine_id = engine_id
        self._log = StepLog(chunk_size)
        self._tree = RequestTree(
            engine_id=engine_id,
            model=model,
            cause_of=lambda start, end, queued: self._log.cause(start, end, queued=queued),
            gap_ns=self._gap_ns,
            with_held=self._with_held,
        )
        self._timeline = self._shared or TimelineTracker(
            self, expects_responses=self._expects_responses, keep_detail=True
        )
        self._ledger = SpanLedger()
        self._facts: dict[str, TraceFacts] = {}
        self._ended: OrderedDict[str, RequestTimeline] = OrderedDict()
        self._row_of: dict[str, int] = {}
        #: Claims of the commit that is not planned yet.
        self._claims: list[PagesMoved] = []
        self._plans: dict[int, StepPlanned] = {}
        self._keeper = StepKeeper()
        self._kept_steps: OrderedDict[int, None] = OrderedDict()
        self._buckets = (TokenBucket(self._rate), TokenBucket(self._rate))
        self._broken: dict[int, list[tuple[str, str, str]]] = {}
        #: Of the event at hand.
        self.now_ns = self.now_seq = 0
        self._handlers = handlers_of(self._timeline, self.phases())

    def phases(self) -> Phases:
        """What this does around its timeline: an end builds the trace at once, so facts come first."""
        before: dict[type, Handler] = {
            EngineStarted: self._started,
            RequestArrived: self._arrived,
            RequestTransitioned: self._transitioned,
            StepPlanned: self._planned,
            PagesMoved: self._moved,
        }
        return Phases(before, {StepCompleted: self._completed, ResponseSent: self._responded})

    def share(self, tracker: TimelineTracker) -> None:
        """From now on somebody else feeds `tracker`, this and others: with `now_ns` and `now_seq` set before what
        `phases` says, and `note` called after it. Before the first event."""
        self._shared = self._timeline = tracker
        self._handlers = handlers_of(tracker, self.phases())

    def note_violation(self, violation: ViolationNote) -> None:
        """A law broke. May be called from the thread that judges: it only appends."""
        self._notes.append(violation)

    # -- events ----------------------------------------------------------------------------------------------------

    def emit(self, event: AnyEvent) -> None:
        """Take one event."""
        self.feed(iter((event,)))

    def feed(self, events: Iterator[AnyEvent]) -> None:
        """Take several. Raises what one of them raises; those after it are still in `events`."""
        for event in events:
            self.now_ns, self.now_seq = event.t_ns, event.seq
            for handle in self._handlers.get(type(event), ()):
                handle(event)
            self.note(event)

    def note(self, event: AnyEvent) -> None:
        """`event` was taken."""
        ledger = self._ledger
        if event.seq == ledger.next_seq:
            ledger.next_seq += 1
        else:
            ledger.hear(event.seq)
        if ledger.wanted and not self._timeline.is_closing:
            self._reading = self.reading()

    def miss(self) -> None:
        """Something failed at the present event: what is open or closed from here on may be this side's fault."""
        self._ledger.miss()

    def is_run(self, events: Sequence[AnyEvent]) -> bool:
        """Whether these follow what was heard, without a gap, and nobody asks for a reading: then `note_run` after the
        last of them says as much as `note` after each."""
        due = self._ledger.next_seq
        return not self._ledger.wanted and events[0].seq == due and events[-1].seq == due + len(events) - 1

    def note_run(self, events: Sequence[AnyEvent]) -> None:
        """All of `events` were taken."""
        self._ledger.next_seq = events[-1].seq + 1

    def flush(self) -> None:
        """No event waits: whoever wants a reading need not wait for the next one."""
        if self._ledger.wanted:
            self._reading = self.reading()

    # -- what the checker compares ---------------------------------------------------------------------------------

    def ask(self) -> SpanReading | None:
        """The reading that was asked for last, once, and ask for the next. Any thread, but always the same.

        None: it is not there yet, or events were lost and there is nothing to compare.
        """
        reading, self._reading = self._reading, None
        self._ledger.wanted = True
        return reading

    def reading(self) -> SpanReading | None:
        """A reading now; None in the middle of an end. On the thread that feeds this sink."""
        if self._timeline.is_closing:
            return None
        return self._ledger.reading(self._facts, self._ended)

    def _started(self, event: EngineStarted) -> None:
        scheduler = EngineConfig.model_validate_json(event.config).scheduler
        self._begin(event.engine_id, event.model, scheduler.chunked_prefill_size)
        self._output.start(event)

    def _arrived(self, event: RequestArrived) -> None:
        trace_id = request_trace_id(event.trace_id, self._engine_id, event.rid, event.accepted_ns)
        parent = int(event.parent_span_id, 16) if event.parent_span_id else None
        facts = TraceFacts(trace_id, parent, caller_sampled=event.trace_sampled)
        facts.enter(event.t_ns, Cause.ARRIVE)
        previous = self._ended.pop(event.rid, None)  # an id used again before its response was reported
        if previous is not None:
            self._finish(previous)
        self._facts[event.rid] = facts

    def _transitioned(self, event: RequestTransitioned) -> None:
        facts = self._facts.get(event.rid)
        if facts is None:
            return
        if event.source is RequestState.WAITING:
            facts.leave(event.t_ns)
        elif event.target is RequestState.WAITING and event.source is not None:
            facts.enter(event.t_ns, event.cause)
        if event.target in {RequestState.WAITING, RequestState.FINISHED}:
            self._row_of.pop(event.rid, None)
        elif event.row is not None:
            self._row_of[event.rid] = event.row

    def _moved(self, event: PagesMoved) -> None:
        if event.cause == "claim":
            self._claims.append(event)

    def _planned(self, event: StepPlanned) -> None:
        claims, self._claims = self._claims, []
        for row in event.prefills:
            facts = self._facts.get(row.rid)
            if facts is not None:
                facts.claimed[event.step] = _pages_of(self._row_of.get(row.rid, -1), claims)
        for victim in event.retractions:
            facts = self._facts.get(victim.rid)
            if facts is not None:
                facts.stays[-1].tokens_lost = victim.lost_tokens
        if event.kind is not StepKind.IDLE:
            self._plans[event.step] = event

    def _responded(self, event: ResponseSent) -> None:
        if event.rid in self._ended:
            self._finish(self._ended.pop(event.rid))

    def _completed(self, event: StepCompleted) -> None:
        plan = self._plans.pop(event.step, None)
        if plan is None:
            return
        self._log.add(plan, event)
        self._take_notes()
        broken = self._broken.pop(event.step, [])
        why = self._keeper.why(plan, event, violated=bool(broken))
        if why is None:
            return
        spans = step_spans(
            plan,
            event,
            engine_id=self._engine_id,
            kept_because=why,
            violations=broken,
            span_of=self._span_of,
        )
        if not self._buckets[1].take(event.t_ns):
            self._output.refuse(len(spans))
            return
        self._kept_steps[event.step] = None
        if len(self._kept_steps) > _STEPS_KEPT:
            self._kept_steps.popitem(last=False)
        self._output.send(spans)

    def _span_of(self, rid: str) -> tuple[int, int] | None:
        facts = self._facts.get(rid)
        return None if facts is None else (facts.trace_id, request_span_id(facts.trace_id, rid))

    def _take_notes(self) -> None:
        # Whoever judges may be some events ahead: of a request at fault, nothing may be known here yet.
        while self._notes and max(self._notes[0].evidence, default=0) <= self.now_seq:
            note = self._notes.popleft()
            self._broken.setdefault(note.step, []).append((note.id, note.expected, note.found))
            facts = self._facts.get(note.rid) if note.rid is not None else None
            if facts is not None:
                facts.violations.append((self.now_ns, note.id, note.expected, note.found))
        while len(self._broken) > _NOTES_KEPT:
            del self._broken[next(iter(self._broken))]

    # -- what the timeline tells -----------------------------------------------------------------------------------

    def on_admitted(self, request: RequestTimeline) -> None:
        """Nothing to do: the end tells all."""

    def on_first_token(self, request: RequestTimeline) -> None:
        """Nothing to do."""

    def on_ttft(self, request: RequestTimeline) -> None:
        """Nothing to do."""

    def on_gaps(self, gap_ns: int, count: int, *, queued: bool = False) -> None:
        """Nothing to do."""

    def on_finished(self, request: RequestTimeline) -> None:
        """Keep it until its response has ended, or build its tree at once."""
        if self._expects_responses and not request.response_done:
            self._ended[request.rid] = request
            if len(self._ended) > _ENDED_KEPT:
                self._finish(self._ended.popitem(last=False)[1])
        else:
            self._finish(request)

    # -- ends ------------------------------------------------------------------------------------------------------

    def _finish(self, request: RequestTimeline) -> None:
        facts = self._facts.pop(request.rid, None)
        self._row_of.pop(request.rid, None)
        if facts is None:
            return
        self._ledger.close(request.rid)
        self._take_notes()
        why = self._rule.why(request, facts)
        if why is None:
            self._ledger.decide(NOT_CHOSEN)
            return
        spans = self._tree.build(request, facts, kept_because=why, kept_steps=self._kept_steps)
        if self._buckets[0].take(self.now_ns):
            self._ledger.keep(request.rid, request.enqueued_ns, spans)
            self._output.send(spans)
        else:
            self._ledger.decide(REFUSED)
            self._output.refuse(len(spans))

    def close(self) -> None:
        """Close every open trace with `error.type` shutdown, then the output."""
        if self._closed:
            return
        self._closed = True
        for request in [*self._ended.values(), *self._timeline.live.values()]:
            self._timeline.settle_tokens(request)
            self._finish(request)
        self._ended.clear()
        self._output.close()
