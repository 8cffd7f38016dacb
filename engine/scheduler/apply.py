"""Apply. Owns: what an outcome writes, and the one way in which a request ends.

Without overlap lengths advance here, row by row; with overlap they did right after commit (`advance.py`).
Any failure after the first write is a bug, and the engine marks itself dead.
"""

from __future__ import annotations

from collections.abc import Iterable

from engine.errors import LawBroken
from engine.request import Cause, FinishReason, Request, RequestState
from engine.scheduler.flight import Flight
from engine.scheduler.plan import OutcomeRow, StepOutcome, StepPlan
from engine.scheduler.publisher import Publisher
from engine.scheduler.state import SchedulerState

_FINISH_CAUSES = {
    FinishReason.STOP: Cause.STOP,
    FinishReason.LENGTH: Cause.LENGTH,
    FinishReason.ABORT: Cause.ABORT,
    FinishReason.ERROR: Cause.ERROR,
}


def apply_outcome(state: SchedulerState, plan: StepPlan, outcome: StepOutcome, publisher: Publisher) -> Flight:
    """Write what a step brought. Raises LawBroken when plan and outcome are not those of the oldest step in flight."""
    flight = state.flights[0] if state.flights else None
    if flight is None or not flight.plan.step == plan.step == outcome.step:
        raise LawBroken(f"outcome of step {outcome.step}: in flight is {flight.plan.step if flight else None}")
    rows = tuple(row.rid for row in outcome.rows)
    wanted = flight.wanted(plan.sampling)
    if not outcome.failed and rows != wanted:
        raise LawBroken(f"step {outcome.step}: rows {rows} are not the sampled {wanted}")
    state.version += 1
    state.flights.popleft()
    if outcome.failed:
        _fail(state, flight, publisher)
        return flight
    by_rid = {row.rid: row for row in outcome.rows}
    ended: set[str] = set()
    for piece in plan.prefills:
        if piece.rid in flight.void:
            continue
        request = state.requests[piece.rid]
        _arrive(state, request, piece.extend_len, piece.extend_end)
        if not piece.is_last:
            if not state.overlaps:
                request.transition(RequestState.PREFILL, Cause.NEXT_CHUNK)
                publisher.transitioned(request, RequestState.PREFILL, Cause.NEXT_CHUNK, row=None)
            # With overlap the next piece, planned meanwhile, may have been the last.
            state.chunk_to_insert |= not state.overlaps or state.continuation is request
            if request.abort_requested:
                finish(state, request, FinishReason.ABORT, publisher, cause=Cause.ABORT, keep=True)
                ended.add(request.rid)
        elif _one_token(state, request, by_rid[piece.rid], publisher, is_first=True):
            ended.add(piece.rid)
    overlaps = state.overlaps
    for rid in flight.wanted(plan.decodes):
        request = state.requests[rid]
        if overlaps:
            _arrive(state, request, 1, request.computed_len)
        else:  # what `_arrive` does, without a call for each row
            request.computed_len += 1
            request.in_flight -= 1
        if _one_token(state, request, by_rid[rid], publisher, is_first=False):
            ended.add(rid)
    drop_ended(state, ended)
    return flight


def _arrive(state: SchedulerState, request: Request, tokens: int, computed_len: int) -> None:
    """K/V of `tokens` more tokens exists, `computed_len` in all."""
    request.in_flight -= 1
    if not state.overlaps:
        request.computed_len = computed_len
    elif request.lease is not None:  # else it was pushed back meanwhile, and has no K/V
        request.ahead_len -= tokens


def _one_token(
    state: SchedulerState, request: Request, row: OutcomeRow, publisher: Publisher, *, is_first: bool
) -> bool:
    """One output token; returns whether the request ended."""
    page_size = state.kv.page_size
    if state.overlaps:
        request.ahead_outputs -= 1
    else:
        request.output_len += 1
    if row.new_page_key is not None:
        request.keys.append(row.new_page_key)
    if row.head32_key is not None:
        request.head32_key = row.head32_key
    reason = FinishReason.ABORT if request.abort_requested else row.finish
    if reason is not None:
        finish(state, request, reason, publisher, cause=_FINISH_CAUSES[reason], keep=True, detail=row.detail)
        return True
    if not is_first:
        return False
    if not state.overlaps:
        request.transition(RequestState.DECODE, Cause.FINAL_CHUNK)
        publisher.transitioned(request, RequestState.PREFILL, Cause.FINAL_CHUNK, row=None)
    elif request.lease is None:  # pushed back meanwhile
        return False
    assert request.lease is not None, f"request {request.rid} has no lease"
    state.kv.insert(
        request.lease,
        request.keys.first(request.applied_len // page_size),
        split_at=request.prompt_len // page_size,
    )
    return False


def _fail(state: SchedulerState, flight: Flight, publisher: Publisher) -> None:
    """The executor raised: what it wrote cannot be trusted, so every member ends with an error, nothing is kept."""
    rids = dict.fromkeys([*(row.rid for row in flight.plan.prefills), *flight.plan.decodes])
    for rid in flight.wanted(tuple(rids)):
        request = state.requests[rid]
        request.in_flight -= 1
        finish(state, request, FinishReason.ERROR, publisher, cause=Cause.ERROR, keep=False, detail="executor_failed")
    drop_ended(state, [rid for rid in rids if rid not in flight.void])


def finish(
    state: SchedulerState,
    request: Request,
    reason: FinishReason,
    publisher: Publisher,
    *,
    cause: Cause,
    keep: bool,
    detail: str = "",
) -> None:
    """End a request. `keep`: its computed whole pages go to the tree."""
    source, lease = request.state, request.lease
    row = None
    if source is RequestState.WAITING:
        state.dequeue([request])
    if request.in_flight:
        # It is a member of the step behind, whose row for it is computed for nobody now.
        for flight in state.flights:
            flight.void.add(request.rid)
    if state.overlaps:
        request.computed_len, request.output_len = request.applied_len, request.output_len - request.ahead_outputs
        request.ahead_len = request.ahead_outputs = 0
    if lease is not None:
        row = lease.row
        keys = request.keys.first(request.computed_len // state.kv.page_size) if keep else None
        state.kv.release(lease, keys, split_at=request.prompt_len // state.kv.page_size)
        request.lease = None
    request.finish_reason = reason
    request.transition(RequestState.FINISHED, cause, is_late=state.overlaps)
    del state.requests[request.rid]
    publisher.transitioned(request, source, cause, row=row, detail=detail)


def drop_ended(state: SchedulerState, ended: Iterable[str]) -> None:
    """Take ended requests out of the lists; a shrunk list clears the full flag at the next step."""
    gone = set(ended)
    if not gone:
        return
    state.running = [request for request in state.running if request.rid not in gone]
    state.last_prefill = [request for request in state.last_prefill if request.rid not in gone]
    for rid in gone & state.leaving.keys():
        del state.leaving[rid]
    if state.continuation is not None and state.continuation.rid in gone:
        state.continuation = None
        state.chunk_to_insert = False
    state.shrank = True
