"""Publisher. Owns: the sequence number, and the head (step, time) that every event of the core carries."""

from __future__ import annotations

from engine.events import (
    AbortRequested,
    AdmissionDecided,
    AnyEvent,
    EventSink,
    LockChanged,
    PagesMoved,
    RequestTransitioned,
)
from engine.request import Cause, Request, RequestState
from engine.scheduler.decision import AdmissionDecision


class Publisher:
    """Stamps events and hands them to the one sink. Also the cache's `KvEvents`."""

    __slots__ = ("_sink", "claims_apart", "seq", "step", "t_ns")

    def __init__(self, sink: EventSink) -> None:
        self._sink = sink
        #: One event for each row of a claim, as the first version of the record had it: for replays of such.
        self.claims_apart = False
        self.seq = 0
        self.step = 0
        self.t_ns = 0

    def head(self) -> tuple[int, int, int]:
        """(seq, step, t_ns) of the next event; takes the sequence number."""
        seq = self.seq
        self.seq = seq + 1
        return seq, self.step, self.t_ns

    def emit(self, event: AnyEvent) -> None:
        self._sink.emit(event)

    def pages_moved(self, pages: bytes, source: str, target: str, owner: str, cause: str, owners: bytes = b"") -> None:
        seq = self.seq
        moved = PagesMoved(seq, self.step, self.t_ns, pages, source, target, owner, cause, owners)
        if owners and self.claims_apart:
            for row, part in moved.parts():
                self.pages_moved(part, source, target, row, cause)
            return
        self.seq = seq + 1
        self._sink.emit(moved)

    def lock_changed(self, node: int, rid: str, delta: int, count: int) -> None:
        seq = self.seq
        self.seq = seq + 1
        self._sink.emit(LockChanged(seq, self.step, self.t_ns, node, rid, delta, count))

    def abort_requested(self, rid: str, detail: str, cause: Cause) -> None:
        self._sink.emit(AbortRequested(*self.head(), rid, detail, cause))

    def transitioned(
        self,
        request: Request,
        source: RequestState | None,
        cause: Cause,
        *,
        row: int | None,
        cached_len: int = 0,
        detail: str = "",
    ) -> None:
        """`row` is the row taken by an admission or given back by an end or retraction."""
        self._sink.emit(
            RequestTransitioned(
                *self.head(),
                request.rid,
                source,
                request.state,
                cause,
                request.prompt_len,
                request.output_len,
                request.computed_len,
                row,
                request.num_retractions,
                cached_len,
                detail,
            )
        )

    def decided(self, decision: AdmissionDecision, *, stopped_pass: bool) -> None:
        before, after = decision.before, decision.after
        self._sink.emit(
            AdmissionDecided(
                *self.head(),
                decision.rid,
                decision.order,
                decision.is_continuation,
                decision.prefix_len,
                decision.candidate_extend,
                decision.selected_extend,
                decision.extend_end,
                before.rem_input,
                after.rem_input,
                before.rem_chunk,
                after.rem_chunk,
                before.remaining_total,
                after.remaining_total,
                before.remaining_current,
                after.remaining_current,
                decision.reserved_new_tokens,
                decision.is_chunked,
                decision.result,
                decision.reason,
                decision.need,
                decision.have,
                stopped_pass,
                decision.times_passed_over,
                decision.overdrafts,
            )
        )
