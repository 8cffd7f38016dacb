"""Timelines. Owns: what happened to each request and when, built from events alone, in exact integer nanoseconds.

Each request has one cursor that only moves forward. Every named instant (admitted, launched, ready, applied, first
byte) charges the stretch since the cursor to one part, so the parts of time to first token add up to it, and a
retraction adds to `queue` instead of clearing anything. While a request waits it has exactly one blocker; a stretch
under one blocker is closed only when the blocker changes, so a pass costs as much as it changes, however many wait.

Not thread-safe: one listener owns one `TimelineTracker` and feeds it every event in order.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any, Final, Protocol

from engine.events import (
    AdmissionDecided,
    AnyEvent,
    RequestArrived,
    RequestTransitioned,
    ResponseSent,
    StepCompleted,
    StepPlanned,
)
from engine.request import RequestState
from engine.scheduler.decision import Reason
from engine.scheduler.plan import OutcomeRow
from invariants.members import ADMIT, DECODE, FINISHED, IDLE_STEP, PREFILL, WAITING
from telemetry.blockers import CHUNK, KV_NOW, OF_REASON
from telemetry.queue_watch import QueueWatch
from telemetry.request_timeline import (
    BETWEEN,
    CHUNK_FORWARD,
    COMMIT,
    EMIT,
    FINISH_OF,
    INTAKE,
    KEPT,
    PREPARE,
    QUEUE,
    Chunk,
    RequestTimeline,
)
from telemetry.token_rows import change_of, has_row

#: Emptied responses may never be reported (a caller without a server): beyond this many, the oldest are let go.
KEPT_EMITTING: Final = 4096
_TRIM_AT: Final = 1 << 16


class TimelineListener(Protocol):
    """Who is told what a timeline shows, as soon as it is known."""

    def on_admitted(self, request: RequestTimeline) -> None:
        """First admission."""

    def on_first_token(self, request: RequestTimeline) -> None:
        """First token applied."""

    def on_ttft(self, request: RequestTimeline) -> None:
        """Time to first token is final: `ttft_ns` and all parts."""

    def on_gaps(self, gap_ns: int, count: int, *, queued: bool = False) -> None:
        """`count` requests each waited `gap_ns` between two tokens; `queued`: in the queue, for a part of it."""

    def on_finished(self, request: RequestTimeline) -> None:
        """The request ended; its tokens and chunks are complete. Its response may still be on the way."""


class TimelineTracker:
    """All timelines of one engine, and the queue with its blockers.

    expects_responses  a server reports first bytes (`on_first_byte` or ResponseSent). Without one, time to first token
                       ends when the token is applied and nothing is ever `emitting`.
    keep_detail        keep decisions and spans per request (the read model does; metrics do not need them)
    """

    def __init__(self, listener: TimelineListener, *, expects_responses: bool, keep_detail: bool = False) -> None:
        self._listener = listener
        self._expects_responses = expects_responses
        self._keep_detail = keep_detail
        self.live: dict[str, RequestTimeline] = {}
        self.emitting: dict[str, RequestTimeline] = {}
        self.queue = QueueWatch(keep_spans=keep_detail)
        self.prefilling = 0
        self.decoding = 0
        self._plans: dict[int, StepPlanned] = {}
        #: When the last step was ready.
        self._ready_ns = 0
        self._closing: list[RequestTimeline] = []
        self._decisions: list[AdmissionDecided] = []
        self._group: tuple[str, ...] = ()
        #: Of `_group`: those that have no run of tokens, because they ended, or were never heard of.
        self._runless: set[str] = set()
        self._times: array[int] = array("q")
        self._base = 0
        #: One of the requests of the gap that is being told.
        self.gap_rid = ""

    def apply(self, event: AnyEvent) -> None:
        """Take one event."""
        if (handle := HANDLERS.get(type(event))) is not None:
            handle(self, event)

    @property
    def is_closing(self) -> bool:
        """Whether a request has ended whose last token is yet to be told."""
        return bool(self._closing)

    def first_byte(self, rid: str, t_ns: int) -> None:
        """The server wrote the first byte of a response; earlier news than ResponseSent, which comes at the end."""
        request = self.live.get(rid) or self.emitting.get(rid)
        if request is not None:
            self._first_byte(request, t_ns)

    def settle_tokens(self, request: RequestTimeline) -> None:
        """Bring `request.token_ns` up to date."""
        for start, end in request.runs:
            request.token_ns.extend(self._times[start - self._base : end - self._base])
        request.runs.clear()
        if request.run_from is not None:
            end = self._base + len(self._times)
            request.token_ns.extend(self._times[request.run_from - self._base :])
            request.run_from = end

    def arrived(self, event: RequestArrived) -> None:
        """A new request, in the queue."""
        request = RequestTimeline(event, keep_detail=self._keep_detail)
        self.live[event.rid] = request
        request.mark(INTAKE, event.t_ns)
        request.phase = QUEUE
        self.queue.enter(request, event.t_ns)

    def transitioned(self, event: RequestTransitioned) -> None:
        """A request changed state."""
        request = self.live.get(event.rid)
        if request is None:
            return
        request.computed_len, request.output_len = event.computed_len, event.output_len
        request.num_retractions = event.num_retractions
        target = event.target
        if event.cause is ADMIT:
            self._admitted(request, event.t_ns)
        elif target is FINISHED:
            self._ended(request, event)
        elif target is WAITING and event.source is not None:
            self._back_to_queue(request, event.t_ns)
        if target is not request.state:
            self._set_state(request, target)

    def _set_state(self, request: RequestTimeline, state: RequestState) -> None:
        before, request.state = request.state, state
        self.prefilling += (state is PREFILL) - (before is PREFILL)
        self.decoding += (state is DECODE) - (before is DECODE)

    def _admitted(self, request: RequestTimeline, t_ns: int) -> None:
        if request.phase != QUEUE:
            return
        self.queue.leave(request, t_ns, is_admitted=True)
        if request.first_token_ns is None:
            request.mark(QUEUE, t_ns)
        request.phase = PREPARE
        self._set_state(request, PREFILL)
        if request.admitted_ns is None:
            request.admitted_ns = t_ns
            # Read from the decision, so once per request: refused examinations before it found hits too.
            request.cached_len = request.decided.prefix_len if request.decided is not None else 0
            self._listener.on_admitted(request)

    def _back_to_queue(self, request: RequestTimeline, t_ns: int) -> None:
        self.queue.close_refusal(request, t_ns)
        if request.first_token_ns is None:
            request.mark(request.phase, t_ns)
        request.retracted_ns.append(t_ns)
        request.phase = QUEUE
        self.queue.enter(request, t_ns)

    def _ended(self, request: RequestTimeline, event: RequestTransitioned) -> None:
        if request.phase == QUEUE:
            self.queue.leave(request, event.t_ns)
        self.queue.close_refusal(request, event.t_ns)
        if request.phase in {QUEUE, BETWEEN} and request.first_token_ns is None:
            # In any other phase a step is in flight, whose StepCompleted has the instants.
            request.mark(request.phase, event.t_ns)
        request.finish, request.end_cause, request.finished_ns = FINISH_OF[event.cause], event.cause, event.t_ns
        plan = self._plans.get(event.step)
        if plan is not None and has_row(plan, event.rid):
            # The token that ended it is reported by the StepCompleted that follows.
            self._closing.append(request)
        else:
            self._close(request)

    def decided(self, event: AdmissionDecided) -> None:
        """A pass examined a request."""
        self._decisions.append(event)
        request = self.live.get(event.rid)
        if request is None:
            return
        request.decided = event
        request.matched_len = event.prefix_len
        if self._keep_detail:
            request.decisions_left_out += len(request.decisions) == KEPT
            request.decisions.append(event)

    def planned(self, event: StepPlanned) -> None:
        """A step was committed."""
        self._flush_closing()
        decisions, self._decisions = self._decisions, []
        if event.kind is not IDLE_STEP:
            self._plans[event.step] = event
        admitted, latest = set(), 0
        for row in event.prefills:
            admitted.add(row.rid)
            request = self.live.get(row.rid)
            if request is None:
                continue
            latest = max(latest, request.enqueued_as)
            if request.phase == BETWEEN:
                self.queue.close_refusal(request, event.t_ns)
                if request.first_token_ns is None:
                    request.mark(BETWEEN, event.t_ns)
                request.phase = PREPARE
            else:
                self._admitted(request, event.t_ns)
            request.chunks.append(
                Chunk(
                    step=event.step,
                    prefix_len=row.prefix_len,
                    extend_len=row.extend_len,
                    is_last=row.is_last,
                    now=event.t_ns,
                    decodes=len(event.decodes),
                )
            )
        if event.prefills:
            self.queue.passed(latest)
        if event.pass_end is not None:
            if decisions:
                self._refused_continuations(decisions, admitted, event.t_ns)
            self.queue.apply_pass(event, decisions, admitted)

    def _refused_continuations(self, decisions: list[AdmissionDecided], admitted: set[str], t_ns: int) -> None:
        for decision in decisions:
            if decision.is_continuation and decision.rid not in admitted:
                request = self.live.get(decision.rid)
                if request is not None and request.phase == BETWEEN and request.first_token_ns is None:
                    # A guard parks it for want of pages, or because decode rows left nothing of the chunk ledger.
                    no_slice = decision.reason is Reason.PARKED_BY_GUARD and (decision.have or 0) <= 0
                    blocker = CHUNK if no_slice else OF_REASON.get(decision.reason, KV_NOW)
                    self.queue.refuse_continuation(request, blocker, decision.reason, t_ns)

    def completed(self, event: StepCompleted) -> None:
        """A step is over."""
        plan = self._plans.pop(event.step, None)
        times = event.times
        launched, ready = times.launched_ns or event.t_ns, times.ready_ns or event.t_ns
        applied = times.applied_ns or event.t_ns
        if plan is not None and plan.t_ns < self._ready_ns:
            launched = max(launched, self._ready_ns)  # launched behind another step, it began when that was ready
        self._ready_ns = ready
        for row in plan.prefills if plan is not None else ():
            request = self.live.get(row.rid)
            chunk = None if request is None or request.phase == QUEUE else request.chunk_of(event.step)
            if request is None or chunk is None:
                continue
            chunk.launched_ns, chunk.ready_ns = launched, ready
            chunk.applied_ns = None if event.failed else applied
            if request.first_token_ns is None:
                request.mark(PREPARE, launched)
                request.mark(CHUNK_FORWARD, ready)
                request.mark(COMMIT, applied)
            request.phase = EMIT if row.is_last else BETWEEN if chunk is request.chunks[-1] else PREPARE
        if event.rows and not event.failed:
            self._tokens(event.rows, applied)
        self._flush_closing()

    def _tokens(self, rows: tuple[OutcomeRow, ...], t_ns: int) -> None:
        """Every request in `rows` got one token at `t_ns`. Those that also got one in the step before share one gap."""
        times, listener = self._times, self._listener
        change = change_of(self._group, rows)
        rids, came = change.rids, change.came
        again = self._runless.difference(change.gone) if self._runless else None
        if again:
            # An id of the step before that is another request now, or was not known then.
            came = tuple([rid for rid in rids if rid in again or rid in came])
        elif not came and not change.gone and rids is self._group:
            self.gap_rid = rids[0]
            listener.on_gaps(t_ns - times[-1], len(rids))
            times.append(t_ns)
            return
        index = self._base + len(times)
        for rid in change.gone:
            if (request := self.live.get(rid)) is not None:
                self._close_run(request, index)
        self._runless = set()
        for rid in came:
            request = self.live.get(rid)
            if request is None:
                self._runless.add(rid)
                continue
            if request.last_token_ns is not None:
                # Only a request that came back from the queue has a piece of prompt admitted between two tokens.
                queued = bool(request.chunks) and request.chunks[-1].admitted_ns >= request.last_token_ns
                self.gap_rid = rid
                listener.on_gaps(t_ns - request.last_token_ns, 1, queued=queued)
            request.run_from = index
            if request.first_token_ns is None:
                self._first_token(request, t_ns)
        shared = len(rids) - len(came)
        if shared:
            self.gap_rid = next(rid for rid in reversed(rids) if rid not in came)
            listener.on_gaps(t_ns - times[-1], shared)
        times.append(t_ns)
        self._group = rids
        if len(times) >= _TRIM_AT:
            self._trim()

    def _close_run(self, request: RequestTimeline, index: int) -> None:
        """`request` got no token at `index`: its run of tokens ended before, and may have been looked at since."""
        if request.run_from is not None:
            if request.run_from < index:
                request.runs.append((request.run_from, index))
            request.last_token_ns = self._times[index - 1 - self._base]
            request.run_from = None

    def _trim(self) -> None:
        """Forget shared token times after handing them to whom they belong; amortised O(1) per token."""
        for request in self.live.values():
            self.settle_tokens(request)
            if len(request.token_ns):
                request.last_token_ns = request.token_ns[-1]
        last = self._times[-1]
        self._base += len(self._times) - 1
        self._times = array("q", (last,))

    def _first_token(self, request: RequestTimeline, t_ns: int) -> None:
        request.mark(COMMIT, t_ns)
        request.first_token_ns = t_ns
        self._listener.on_first_token(request)
        if request.first_byte_ns is not None:
            self._first_byte(request, request.first_byte_ns)
        elif not self._expects_responses:
            request.ttft_ns = t_ns - request.accepted_ns
            self._listener.on_ttft(request)

    def _first_byte(self, request: RequestTimeline, t_ns: int) -> None:
        request.first_byte_ns = t_ns
        if request.first_token_ns is None or request.ttft_ns is not None:
            return
        # A response that is not streamed has its first byte after its last token: its TTFT ends with the token.
        streamed = request.finished_ns is None or t_ns < request.finished_ns or request.output_len <= 1
        if streamed:
            request.mark(EMIT, t_ns)
        request.ttft_ns = request.cursor_ns - request.accepted_ns
        self._listener.on_ttft(request)

    def _flush_closing(self) -> None:
        closing, self._closing = self._closing, []
        for request in closing:
            self._close(request)

    def _close(self, request: RequestTimeline) -> None:
        self.settle_tokens(request)
        if request.run_from is not None:
            request.run_from = None
            self._runless.add(request.rid)
        if len(request.token_ns):
            request.last_token_ns = request.token_ns[-1]
            # Its state changed before its last token was handed out: the end of a life is not before its last token.
            request.finished_ns = max(request.finished_ns or 0, request.last_token_ns)
        request.output_len = max(request.output_len, len(request.token_ns))
        del self.live[request.rid]
        if self._expects_responses and not request.response_done:
            self.emitting[request.rid] = request
            if len(self.emitting) > KEPT_EMITTING:
                del self.emitting[next(iter(self.emitting))]
        self._listener.on_finished(request)

    def responded(self, event: ResponseSent) -> None:
        """The HTTP layer is done with a response."""
        request = self.live.get(event.rid) or self.emitting.pop(event.rid, None)
        if request is None:
            return
        request.response_done = True
        request.last_byte_ns = event.last_byte_ns
        if event.first_byte_ns is not None:
            self._first_byte(request, event.first_byte_ns)


HANDLERS: Final[dict[type, Callable[[TimelineTracker, Any], None]]] = {
    AdmissionDecided: TimelineTracker.decided,
    StepPlanned: TimelineTracker.planned,
    StepCompleted: TimelineTracker.completed,
    RequestTransitioned: TimelineTracker.transitioned,
    RequestArrived: TimelineTracker.arrived,
    ResponseSent: TimelineTracker.responded,
}
