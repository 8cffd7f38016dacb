"""Commit. Owns: the writes that a plan asks for. Does what the plan says and decides nothing.

`commit_plan` checks the room before its first write; if an allocation would miss (a fault hook, or a bug), nothing is
applied. Any failure after the first write is a bug, and the engine marks itself dead.
"""

from __future__ import annotations

from typing import Final

from engine.errors import LawBroken, StalePlan
from engine.events import StepPlanned
from engine.kvcache.kv_cache import KvLease
from engine.kvcache.radix_cache import Node
from engine.request import Cause, FinishReason, Request, RequestState
from engine.scheduler.apply import finish
from engine.scheduler.decision import Guard
from engine.scheduler.flight import Flight
from engine.scheduler.plan import PrefillRow, StepKind, StepPlan
from engine.scheduler.publisher import Publisher
from engine.scheduler.retraction import RETRACT_DECODE_STEPS, needed_pages
from engine.scheduler.state import SchedulerState

#: Places beyond its prompt that the page table of an admitted request starts with.
_SPARE_PAGES: Final = 8


def commit_plan(state: SchedulerState, plan: StepPlan, publisher: Publisher) -> StepPlan:
    """Apply `plan`; returns the plan in force: the same, or an idle one after an allocation miss.

    Raises StalePlan when the state moved since the plan was made.
    """
    if plan.state_version != state.version:
        raise StalePlan(f"step {plan.step}: planned on version {plan.state_version}, state is {state.version}")
    state.version += 1
    stopper = len(plan.decisions) - 1 if plan.pass_end is not None and plan.pass_end.stop in {"result", "slots"} else -1
    for index, decision in enumerate(plan.decisions):
        publisher.decided(decision, stopped_pass=index == stopper)
    missed = _would_miss(state, plan)
    if missed:
        plan = _missed_plan(state, plan)
    for rid, extend in plan.considered:
        state.requests[rid].last_candidate_extend = extend
    _touch_and_preempt(state, plan, publisher)
    if plan.prefills:
        _commit_prefill(state, plan, publisher)
    elif plan.decodes or plan.retractions:
        _commit_decode(state, plan, publisher)
    else:
        state.last_extend_tokens = 0
    state.full = plan.full_after
    state.ratio = plan.ratio_after
    state.sat_out_last = Guard.MIXED_SAT_OUT in plan.guards and plan.kind is StepKind.EXTEND
    state.delayed_passes = plan.delayed_passes
    # Who leaves gives memory back without anybody's doing: that nothing was done then says nothing about the queue.
    state.stuck = plan.kind is StepKind.IDLE and len(state.waiting) > 0 and not state.leaving
    for rid in plan.sampling:
        state.requests[rid].in_flight += 1
    for row in plan.prefills:
        if not row.is_last:
            state.requests[row.rid].in_flight += 1
    state.flights.append(Flight(plan))
    _publish_planned(state, plan, publisher, claim_failed=missed)
    return plan


def _touch_and_preempt(state: SchedulerState, plan: StepPlan, publisher: Publisher) -> None:
    """Stamp what the pass matched, release whom it preempted, lock the members' prefixes, and only then evict.

    A member may match a prefix that only its victim locked: evicting at once, as the reference does, would take it
    from under the plan.
    """
    kv = state.kv
    ends: dict[str, tuple[Node, int]] = {}
    if kv.enable_radix:
        for rid, pages in plan.touches:
            ends[rid] = kv.tree.touch(state.requests[rid].keys.first(pages))
    rows = {rid: _let_go(state, state.requests[rid]) for rid in plan.preempted}
    for row in plan.prefills:
        request = state.requests[row.rid]
        if request.state is not RequestState.WAITING:
            continue
        # Nothing but splits has changed the tree since its touch, and a split leaves a node's end where it is.
        node, pages = ends[row.rid] if kv.enable_radix else (kv.tree.root, 0)
        if pages * kv.page_size != row.prefix_len:
            raise LawBroken(f"member {row.rid}: planned on {row.prefix_len} cached tokens, {pages} pages match")
        table_pages = kv.pages_ceil(request.seq_len) + _SPARE_PAGES
        request.lease = kv.acquire_at(row.rid, node, pages, room=table_pages)
    running = len(state.running)
    for gone in range(1, len(rows) + 1) if state.accounting.evicts_spare else ():
        room = state.kv.pages_ceil(RETRACT_DECODE_STEPS * (running - gone))
        state.evicted_in_step += state.kv.evict_until_free(room)
    if rows:
        order = [request for request in state.running if request.rid in rows]
        state.running = [request for request in state.running if request.rid not in rows]
        for request in order:
            requeue(state, request, publisher, Cause.PREEMPT, row=rows[request.rid])


def _would_miss(state: SchedulerState, plan: StepPlan) -> bool:
    """Whether the test switch turns this step's allocation into a miss."""
    fault = state.kv.allocation_fault
    if fault is None or not (plan.prefills or plan.decodes):
        return False
    return fault("prefill" if plan.prefills else "decode")


def _missed_plan(state: SchedulerState, plan: StepPlan) -> StepPlan:
    """Nothing of `plan` happens: members keep their places at the queue's front, in their order."""
    return StepPlan(
        step=plan.step,
        now_ns=plan.now_ns,
        state_version=plan.state_version,
        kind=StepKind.IDLE,
        pass_end=plan.pass_end,
        order=plan.order,
        active_policy=plan.active_policy,
        budget_open=plan.budget_open,
        budget_close=plan.budget_open,
        mixed_rows=plan.mixed_rows,
        continuation_after=state.continuation.rid if state.continuation is not None else None,
        full_after=state.full,
        ratio=plan.ratio,
        ratio_after=plan.ratio,
        promised_tokens=plan.promised_tokens,
        delayed_passes=plan.delayed_passes,
        chunk_size=plan.chunk_size,
        predicted_step_ns=plan.predicted_step_ns,
        guards=(*plan.guards, Guard.ALLOC_MISS),
    )


def _commit_prefill(state: SchedulerState, plan: StepPlan, publisher: Publisher) -> None:
    """Evict, then claim. Every matched prefix is locked by now: a claim cannot evict another member's."""
    kv = state.kv
    members = [state.requests[row.rid] for row in plan.prefills]
    state.evicted_in_step += kv.evict_until_free(_pages_to_free(state, plan, members))
    ends = [row.extend_end for row in plan.prefills]
    claims = kv.extend_each(list(zip(map(_lease, members), ends, strict=True)))
    for row, request, _ in zip(plan.prefills, members, claims, strict=True):
        _admit(request, row, publisher)
    _leave_queue(state, members)
    state.continuation = state.requests[plan.continuation_after] if plan.continuation_after is not None else None
    extend_tokens = sum(row.extend_len for row in plan.prefills)
    if plan.mixed_tested and state.accounting.evicts_spare:
        state.evicted_in_step += kv.evict_until_free(needed_pages(state.running, kv.page_size))
    state.last_prefill = members
    if plan.decodes:
        _claim_decode(state, state.running)
        state.last_prefill = members + state.running
        extend_tokens += len(state.running)
        state.running = []
    state.last_extend_tokens = extend_tokens
    state.processed_tokens += extend_tokens


def _pages_to_free(state: SchedulerState, plan: StepPlan, members: list[Request]) -> int:
    """Pages to have free before the members claim: what they lack, or the reference's sum, a page more for each."""
    kv = state.kv
    if not state.accounting.evicts_spare:
        held = sum(request.lease.count for request in members if request.lease is not None)
        return sum(kv.pages_ceil(row.extend_end) for row in plan.prefills) - held
    tokens = sum(row.extend_len for row in plan.prefills)
    if kv.page_size > 1:
        tokens += len(members) * kv.page_size
    return kv.pages_ceil(tokens)


def _lease(request: Request) -> KvLease:
    assert request.lease is not None, f"request {request.rid} has no lease"
    return request.lease


def _admit(request: Request, row: PrefillRow, publisher: Publisher) -> None:
    source = request.state
    request.last_extend_end = row.extend_end
    if source is RequestState.WAITING:
        request.computed_len = row.prefix_len
        request.transition(RequestState.PREFILL, Cause.ADMIT)
        publisher.transitioned(request, source, Cause.ADMIT, row=_lease(request).row, cached_len=row.prefix_len)


def _leave_queue(state: SchedulerState, members: list[Request]) -> None:
    """Members leave the queue; whoever entered before the latest of them was passed over."""
    latest = max(request.entry_seq for request in members)
    leaving = [request for request in members if request is not state.continuation]
    for request in leaving:
        state.overtakes.settle(request)
    state.dequeue(leaving)
    state.overtakes.admitted(latest, state.waiting)


def _claim_decode(state: SchedulerState, rows: list[Request]) -> None:
    kv = state.kv
    pages = len(rows) if state.accounting.evicts_spare else needed_pages(rows, kv.page_size)
    state.evicted_in_step += kv.evict_until_free(pages)
    growing = [request for request in rows if request.computed_len % kv.page_size == 0]
    kv.extend_together([(_lease(request), request.computed_len + 1) for request in growing])


def _commit_decode(state: SchedulerState, plan: StepPlan, publisher: Publisher) -> None:
    kv = state.kv
    state.evicted_in_step += kv.evict_until_free(needed_pages(state.running, kv.page_size))
    for index, victim in enumerate(plan.retractions):
        request = state.requests[victim.rid]
        state.running.remove(request)
        if victim.aborted:
            finish(state, request, FinishReason.LENGTH, publisher, cause=Cause.KV_POOL_EXHAUSTED, keep=False)
            continue
        retract(state, request, publisher)
        left = len(plan.decodes) + len(plan.retractions) - index - 1
        if state.accounting.evicts_spare:
            state.evicted_in_step += kv.evict_until_free(kv.pages_ceil(RETRACT_DECODE_STEPS * left))
        state.evicted_in_step += kv.evict_until_free(needed_pages(state.running, kv.page_size))
    if plan.retractions:
        state.running = [state.requests[rid] for rid in plan.decodes]
    if plan.decodes:
        _claim_decode(state, state.running)
    state.last_extend_tokens = 0
    state.processed_tokens += state.sticky_extend_tokens


def retract(state: SchedulerState, request: Request, publisher: Publisher, cause: Cause = Cause.RETRACT) -> None:
    """Push a request back to the queue's tail: lease released, nothing inserted, outputs kept."""
    row = _let_go(state, request)
    requeue(state, request, publisher, cause, row=row)


def _let_go(state: SchedulerState, request: Request) -> int:
    """Release the lease of a request that goes back to the queue; returns its row."""
    lease = _lease(request)
    state.kv.release(lease, None)
    request.lease = None
    return lease.row


def requeue(
    state: SchedulerState, request: Request, publisher: Publisher, cause: Cause, *, row: int | None = None
) -> None:
    """Put a request whose lease is released at the queue's tail, as a new entry."""
    source = request.state
    request.computed_len = request.ahead_len = 0
    request.last_extend_end = 0
    request.last_candidate_extend = 0
    request.num_retractions += 1
    request.entry_seq = state.next_entry()
    request.processed_at_entry = state.processed_tokens
    request.transition(RequestState.WAITING, cause)
    state.enqueue(request, publisher.t_ns)
    publisher.transitioned(request, source, cause, row=row)


def _publish_planned(state: SchedulerState, plan: StepPlan, publisher: Publisher, *, claim_failed: bool) -> None:
    publisher.emit(
        StepPlanned(
            *publisher.head(),
            plan.kind,
            plan.active_policy,
            plan.prefills,
            plan.decodes,
            plan.sampling,
            plan.retractions,
            plan.preempted,
            plan.mixed_rows,
            plan.budget_open,
            plan.budget_close,
            plan.pass_end,
            plan.chunk_limit,
            state.continuation.rid if state.continuation is not None else None,
            state.full,
            state.ratio,
            len(state.waiting),
            len(state.live_running),
            state.waiting_tokens,
            plan.promised_tokens,
            state.evicted_in_step,
            state.kv.pool.counts,
            plan.guards,
            claim_failed,
            plan.chunk_size,
            plan.predicted_step_ns,
        )
    )
