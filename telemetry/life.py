"""Life of one request. Owns: finding, in one pass over a journal's records, everything that concerns one request.

Of the other requests only the states are kept, to say who was ahead, who overtook and who stopped a pass.
"""

from __future__ import annotations

from collections import deque
from typing import Literal

from engine.request import Cause, RequestState
from engine.scheduler.decision import Reason
from telemetry.life_facts import ChunkFact, EndFact, GapFact, Life, ResponseFact, RetractionFact, Wait
from telemetry.life_wait import Stoppers, Tally, Waiting, refusals, wait_fact
from telemetry.schema import Record
from telemetry.schema_events import (
    AbortRequestedRecord,
    AdmissionDecidedRecord,
    EngineStartedRecord,
    RequestArrivedRecord,
    RequestTransitionedRecord,
    ResponseSentRecord,
    StepCompletedRecord,
    StepPlannedRecord,
)
from telemetry.schema_journal import CheckpointRecord, RefusalsFoldedRecord
from telemetry.schema_parts import LedgerPart, PassEndPart

_LIVE = (RequestState.PREFILL, RequestState.DECODE)


class LifeBuilder:
    """Feed it every record in order, then ask for `life`."""

    def __init__(self, rid: str) -> None:
        self.rid = rid
        self._started: EngineStartedRecord | None = None
        self._states: dict[str, RequestState] = {}
        self._places: dict[str, int] = {}
        self._next_place = 0
        self._step = 0
        self._t_ns = 0
        self._ready_ns = 0
        #: The last two plans: where steps overlap, an outcome follows the plan of the next step.
        self._plans: deque[StepPlannedRecord] = deque(maxlen=2)
        #: The last written refusal of each waiting request; a folded one repeats its numbers.
        self._refused: dict[str, AdmissionDecidedRecord] = {}
        self._full_by: tuple[str, Reason, Tally] | None = None
        self._stoppers = Stoppers()
        self._times_used = 0
        self._begin(None)

    def _begin(self, arrived: RequestArrivedRecord | None) -> None:
        self._arrived = arrived
        self._wait: Waiting | None = None
        self._waits: list[Wait] = []
        self._chunks: list[ChunkFact] = []
        self._parked: dict[Reason, Tally] = {}
        self._retractions: list[RetractionFact] = []
        self._abort_asked_ns: int | None = None
        self._cached_len: int | None = None
        self._first_token: tuple[int, int] | None = None
        self._last_token_ns: int | None = None
        self._output_len = 0
        self._worst: GapFact | None = None
        self._retracted_since_token = False
        self._end: EndFact | None = None
        self._response: ResponseFact | None = None

    # -- records ---------------------------------------------------------------------------------------------------

    def feed(self, record: Record) -> None:
        """Take one record."""
        match record:
            case AdmissionDecidedRecord():
                self._decided(record)
            case StepPlannedRecord():
                self._planned(record)
            case StepCompletedRecord():
                self._completed(record)
            case RequestTransitionedRecord():
                self._transitioned(record)
            case RequestArrivedRecord() if record.rid == self.rid:
                self._begin(record)
                self._times_used += 1
            case RefusalsFoldedRecord() if record.rid == self.rid:
                self._folded(record)
            case AbortRequestedRecord() if record.rid == self.rid:
                # Turned away from the queue, nobody asked: its end says so.
                self._abort_asked_ns = record.t_ns if record.cause is Cause.ABORT else None
            case ResponseSentRecord() if record.rid == self.rid:
                self._response = ResponseFact(
                    first_byte_ns=record.first_byte_ns,
                    last_byte_ns=record.last_byte_ns,
                    bytes_sent=record.bytes_sent,
                    disconnected=record.disconnected,
                )
            case CheckpointRecord():
                if self._wait is not None:
                    self._wait.settle()
            case EngineStartedRecord():
                self._started = record

    def _decided(self, record: AdmissionDecidedRecord) -> None:
        if not record.is_admitted:
            self._refused[record.rid] = record
            self._stoppers.refused(record.rid)
        if record.rid != self.rid:
            return
        if record.is_admitted:
            self._chunks.append(_chunk(record))
        elif self._wait is not None:
            self._wait.refused(record.reason, 1, record.step, record.step, (record.need, record.have))
        else:
            began = Tally(0, record.step, record.step, first_ns=record.t_ns)
            tally = self._parked.setdefault(record.reason, began)
            tally.add(1, record.step, record.step)
            tally.need, tally.have = record.need, record.have

    def _folded(self, record: RefusalsFoldedRecord) -> None:
        if self._wait is not None:
            self._wait.folded(record)
        else:
            tally = self._parked.setdefault(record.reason, Tally(0, record.first_step, record.last_step))
            tally.add(record.count, record.first_step, record.last_step)

    def _planned(self, record: StepPlannedRecord) -> None:
        self._step, self._t_ns = record.step, record.t_ns
        self._plans.append(record)
        end = record.pass_end
        wait = self._wait
        stopper = self._stoppers.planned(end, self._ended_at(end)) if end is not None else None
        if record.claim_failed and wait is not None and self._chunks and self._chunks[-1].step == record.step:
            # Admitted, and still waiting: the pages were not there, so the whole pass was put back.
            wait.refused(Reason.PARKED_BY_GUARD, 1, record.step, record.step, (None, None))
        # A request that was pushed back in this very step came after its pass.
        if wait is not None and end is not None and record.step > wait.from_step:
            others = tuple(row for row in record.prefills if row.rid != self.rid)
            wait.passed(record.step, end, self._full_by, others, t_ns=record.t_ns, is_stopper=stopper == self.rid)
            if any(self._places.get(row.rid, -1) > wait.place for row in others):
                wait.overtaken(record.active_policy, record.t_ns)
            wait.later.clear()
        self._watch_full_flag(record)
        if self._chunks and self._chunks[-1].step == record.step:
            if record.claim_failed:
                self._chunks.pop()
            else:
                self._chunks[-1] = self._chunks[-1].model_copy(
                    update={"other_prompts": len(record.prefills) - 1, "decode_rows": len(record.decodes)}
                )
        for retraction in record.retractions:
            if retraction.rid == self.rid and not retraction.aborted:
                self._retractions.append(
                    RetractionFact(
                        step=record.step,
                        at_ns=record.t_ns,
                        cause=retraction.cause,
                        output_len=retraction.output_len,
                        lost_tokens=retraction.lost_tokens,
                    )
                )

    def _ended_at(self, end: PassEndPart) -> str | None:
        """At whom it ended; a step without a pass, at the first of those that wait."""
        if end.rid is not None or end.stop != "skipped":
            return end.rid
        waiting = (rid for rid, state in self._states.items() if state is RequestState.WAITING)
        return min(waiting, key=self._places.__getitem__, default=None)

    def _watch_full_flag(self, record: StepPlannedRecord) -> None:
        """Who marked the batch full: the request whose refusal ended the pass that set the flag."""
        end = record.pass_end
        if not record.batch_is_full:
            self._full_by = None
        elif end is not None and end.rid is not None and _may_mark(end):
            tally = Tally(1, record.step, record.step)
            refused = self._refused.get(end.rid)
            if refused is not None and refused.reason is end.stopped_by:
                tally.need, tally.have = refused.need, refused.have
            self._full_by = (end.rid, end.stopped_by, tally)

    def _completed(self, record: StepCompletedRecord) -> None:
        self._step, self._t_ns = record.step, record.t_ns
        # The latest piece; where steps overlap, the one before it.
        for place in range(len(self._chunks) - 1, max(len(self._chunks) - 3, -1), -1):
            if self._chunks[place].step == record.step:
                took = record.times.applied_ns - record.times.started_ns
                done = {"step_ns": took, "done_ns": record.t_ns, "failed": record.failed}
                done["behind_ns"] = max(0, self._ready_ns - record.times.started_ns)
                self._chunks[place] = self._chunks[place].model_copy(update=done)
                break
        self._ready_ns = record.times.ready_ns
        if all(row.rid != self.rid for row in record.rows):
            return
        self._output_len += 1
        if self._first_token is None:
            self._first_token = (record.t_ns, record.step)
        elif self._last_token_ns is not None:
            self._gap(record, record.t_ns - self._last_token_ns)
        self._last_token_ns = record.t_ns
        self._retracted_since_token = False

    def _gap(self, record: StepCompletedRecord, ns: int) -> None:
        if self._worst is not None and ns <= self._worst.ns:
            return
        plan = next((plan for plan in self._plans if plan.step == record.step), None)
        self._worst = GapFact(
            ns=ns,
            step=record.step,
            kind=record.kind,
            prefill_tokens=sum(piece.extend_len for piece in plan.prefills) if plan is not None else 0,
            was_retracted=self._retracted_since_token,
        )

    # -- states ----------------------------------------------------------------------------------------------------

    def _transitioned(self, record: RequestTransitionedRecord) -> None:
        rid, target = record.rid, record.target
        self._refused.pop(rid, None)
        self._stoppers.left(rid)
        if rid == self.rid:
            self._own(record)
        elif record.cause is Cause.ADMIT and self._wait is not None:
            if self._places.get(rid, 0) < self._wait.place:
                self._wait.ahead_admitted += 1
            else:
                self._wait.later.append(rid)
        if target is RequestState.FINISHED:
            self._states.pop(rid, None)
            self._places.pop(rid, None)
            return
        self._states[rid] = target
        if target is RequestState.WAITING:
            self._places[rid] = self._next_place
            self._next_place += 1

    def _own(self, record: RequestTransitionedRecord) -> None:
        if record.target is RequestState.WAITING:
            self._retracted_since_token = record.cause is not Cause.ARRIVE
            others = [state for rid, state in self._states.items() if rid != self.rid]
            self._wait = Waiting(
                rid=self.rid,
                from_ns=record.t_ns,
                from_step=record.step,
                after=record.cause,
                ahead=sum(state is RequestState.WAITING for state in others),
                running=sum(state in _LIVE for state in others),
                place=self._next_place,
            )
        elif record.cause is Cause.ADMIT:
            if self._wait is not None:
                self._wait.passes += 1
                self._close_wait(record.t_ns, record.step, "admitted")
            if self._cached_len is None:
                self._cached_len = min(record.cached_len, record.prompt_len)
        if record.target is RequestState.FINISHED:
            if self._wait is not None:
                self._close_wait(record.t_ns, record.step, "ended")
            self._end = EndFact(
                step=record.step,
                at_ns=record.t_ns,
                cause=record.cause,
                detail=record.detail,
                output_len=record.output_len,
            )

    def _close_wait(self, to_ns: int, to_step: int, end: Literal["admitted", "ended"]) -> None:
        wait = self._wait
        assert wait is not None
        wait.settle()
        self._waits.append(wait_fact(wait, to_ns, to_step, end))
        self._wait = None

    def _ended(self) -> EndFact | None:
        """The end, which is not before the last token: its state changed before that token was handed out."""
        end, last = self._end, self._last_token_ns
        if end is None or last is None or end.at_ns >= last:
            return end
        return end.model_copy(update={"at_ns": last})

    # -- the answer ------------------------------------------------------------------------------------------------

    def life(self) -> Life | None:
        """What was found so far; None when no request of this id arrived."""
        arrived = self._arrived
        if arrived is None:
            return None
        waits = list(self._waits)
        if self._wait is not None:
            self._wait.settle()
            waits.append(wait_fact(self._wait, max(self._t_ns, self._wait.from_ns), self._step, "waiting"))
        started = self._started
        accepted = min(arrived.accepted_ns or arrived.t_ns, arrived.t_ns)
        return Life(
            rid=self.rid,
            state=RequestState.FINISHED if self._end else self._states.get(self.rid, RequestState.WAITING),
            times_used=self._times_used,
            accepted_ns=accepted,
            arrived_ns=arrived.t_ns,
            arrived_wall_ns=started.wall_ns - started.t_ns + accepted if started is not None else 0,
            prompt_len=arrived.prompt_len,
            prompt_pages=len(arrived.page_keys) // 8,
            max_new_tokens=arrived.max_new_tokens,
            requested_new_tokens=arrived.requested_new_tokens,
            cached_len=self._cached_len,
            waits=tuple(waits),
            chunks=tuple(self._chunks),
            parked=tuple(refusals(reason, tally) for reason, tally in self._parked.items()),
            retractions=tuple(self._retractions),
            abort_asked_ns=self._abort_asked_ns,
            first_token_ns=self._first_token[0] if self._first_token else None,
            first_token_step=self._first_token[1] if self._first_token else None,
            last_token_ns=self._last_token_ns,
            output_len=self._output_len,
            worst_gap=self._worst,
            end=self._ended(),
            response=self._response,
            record_ends_ns=self._t_ns,
            record_ends_step=self._step,
        )


def _may_mark(end: PassEndPart) -> bool:
    """Whether this end may be what marked the batch full: that of a pass, or of a step without a free row for one."""
    return end.stopped_by is Reason.ROWS_EXHAUSTED if end.stop == "skipped" else True


def _chunk(record: AdmissionDecidedRecord) -> ChunkFact:
    return ChunkFact(
        step=record.step,
        at_ns=record.t_ns,
        reason=record.reason,
        prefix_len=record.prefix_len,
        extend_len=record.selected_extend,
        extend_end=record.extend_end,
        seq_len=record.prefix_len + record.candidate_extend,
        before=LedgerPart(
            rem_input=record.rem_input_before,
            rem_chunk=record.rem_chunk_before,
            remaining_total=record.remaining_total_before,
            remaining_current=record.remaining_current_before,
        ),
        after=LedgerPart(
            rem_input=record.rem_input_after,
            rem_chunk=record.rem_chunk_after,
            remaining_total=record.remaining_total_after,
            remaining_current=record.remaining_current_after,
        ),
        reserved_new_tokens=record.reserved_new_tokens,
        need=record.need,
        have=record.have,
        overdrafts=record.overdrafts,
    )
