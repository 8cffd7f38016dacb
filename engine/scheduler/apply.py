"""Apply. Owns: what an outcome writes, and the one way in which a request ends.

Any failure after the first write is a bug, and the engine marks itself dead.
"""

from __future__ import annotations

from collections.abc import Iterable

from engine.errors import LawBroken
from engine.request import Cause, FinishReason, Request, RequestState
from engine.scheduler.plan import OutcomeRow, StepOutcome, StepPlan
from engine.scheduler.publisher import Publisher
from engine.scheduler.state import SchedulerState

_FINISH_CAUSES = {
    FinishReason.STOP: Cause.STOP,
    FinishReason.LENGTH: Cause.LENGTH,
    FinishReason.ABORT: Cause.ABORT,
    FinishReason.ERROR: Cause.ERROR,
}


def apply_outcome(state: SchedulerState, outcome: StepOutcome, publisher: Publisher) -> None:
    """Write what a step brought. Raises LawBroken when the outcome is not that of the plan in flight."""
    plan = state.in_flight
    if plan is None or plan.step != outcome.step:
        raise LawBroken(f"outcome of step {outcome.step}: in flight is {plan.step if plan else None}")
    rows = tuple(row.rid for row in outcome.rows)
    if not outcome.failed and rows != plan.sampling:
        raise LawBroken(f"step {outcome.step}: rows {rows} are not the sampled {plan.sampling}")
    state.version += 1
    state.in_flight = None
    if outcome.failed:
        _fail(state, plan, publisher)
        return
    by_rid = {row.rid: row for row in outcome.rows}
    ended: set[str] = set()
    for piece in plan.prefills:
        request = state.requests[piece.rid]
        request.computed_len = piece.extend_end
        request.in_flight -= 1
        if not piece.is_last:
            request.transition(RequestState.PREFILL, Cause.NEXT_CHUNK)
            state.chunk_to_insert = True
            publisher.transitioned(request, RequestState.PREFILL, Cause.NEXT_CHUNK, row=None)
            if request.abort_requested:
                finish(state, request, FinishReason.ABORT, publisher, cause=Cause.ABORT, keep=True)
                ended.add(request.rid)
        elif _one_token(state, request, by_rid[piece.rid], publisher, is_first=True):
            ended.add(piece.rid)
    for rid in plan.decodes:
        request = state.requests[rid]
        request.computed_len += 1
        request.in_flight -= 1
        if _one_token(state, request, by_rid[rid], publisher, is_first=False):
            ended.add(rid)
    drop_ended(state, ended)


def _one_token(
    state: SchedulerState, request: Request, row: OutcomeRow, publisher: Publisher, *, is_first: bool
) -> bool:
    """One output token; returns whether the request ended."""
    page_size = state.kv.page_size
    request.output_len += 1
    if row.new_page_key is not None:
        request.keys.append(row.new_page_key)
    if row.head32_key is not None:
        request.head32_key = row.head32_key
    reason = FinishReason.ABORT if request.abort_requested else row.finish
    if reason is not None:
        finish(state, request, reason, publisher, cause=_FINISH_CAUSES[reason], keep=True, detail=row.detail)
        return True
    if is_first:
        assert request.lease is not None, f"request {request.rid} has no lease"
        request.transition(RequestState.DECODE, Cause.FINAL_CHUNK)
        publisher.transitioned(request, RequestState.PREFILL, Cause.FINAL_CHUNK, row=None)
        state.kv.insert(
            request.lease,
            request.keys.first(request.computed_len // page_size),
            split_at=request.prompt_len // page_size,
        )
    return False


def _fail(state: SchedulerState, plan: StepPlan, publisher: Publisher) -> None:
    """The executor raised: what it wrote cannot be trusted, so every member ends with an error, nothing is kept."""
    rids = dict.fromkeys([*(row.rid for row in plan.prefills), *plan.decodes])
    for rid in rids:
        request = state.requests[rid]
        request.in_flight = 0
        finish(state, request, FinishReason.ERROR, publisher, cause=Cause.ERROR, keep=False, detail="executor_failed")
    drop_ended(state, rids)


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
    if lease is not None:
        row = lease.row
        keys = request.keys.first(request.computed_len // state.kv.page_size) if keep else None
        state.kv.release(lease, keys, split_at=request.prompt_len // state.kv.page_size)
        request.lease = None
    request.finish_reason = reason
    request.transition(RequestState.FINISHED, cause)
    del state.requests[request.rid]
    publisher.transitioned(request, source, cause, row=row, detail=detail)


def drop_ended(state: SchedulerState, ended: Iterable[str]) -> None:
    """Take ended requests out of the lists; a shrunk list clears the full flag at the next step."""
    gone = set(ended)
    if not gone:
        return
    state.running = [request for request in state.running if request.rid not in gone]
    state.last_prefill = [request for request in state.last_prefill if request.rid not in gone]
    if state.continuation is not None and state.continuation.rid in gone:
        state.continuation = None
        state.chunk_to_insert = False
    state.shrank = True
