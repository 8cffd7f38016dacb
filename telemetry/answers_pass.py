"""Answers about passes. Owns: how kept steps become the rows of `/observe/passes`. The caller holds the lock."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from engine.config import Policy
from engine.events import AdmissionDecided
from engine.scheduler.decision import ADMITTED, LedgerView, Reason
from telemetry.observe import DecisionRow, Head, Ledgers, PassesAnswer, PassRow, QueueMove

if TYPE_CHECKING:
    from telemetry.read_model import ReadModel
    from telemetry.step_row import StepRow

#: Waiting requests that a pass did not reach, shown at most.
SHOWN_UNSEEN: Final = 12


def ledgers(view: LedgerView | None) -> Ledgers | None:
    if view is None:
        return None
    return Ledgers(
        rem_input=view.rem_input,
        rem_chunk=view.rem_chunk,
        remaining_total=view.remaining_total,
        remaining_current=view.remaining_current,
    )


def limits(model: ReadModel) -> Ledgers:
    """What each ledger may hold at most, by configuration."""
    scheduler, pool = model.config.scheduler, model.pages.num_pages * model.config.cache.page_size
    return Ledgers(
        rem_input=scheduler.max_prefill_tokens,
        rem_chunk=scheduler.chunked_prefill_size,
        remaining_total=pool,
        remaining_current=pool,
        rows=scheduler.max_running_requests,
    )


def passes(model: ReadModel, head: Head, n: int) -> PassesAnswer:
    """The last `n` steps, oldest first."""
    kept = list(model.steps)
    # One longer than the steps, of which there may be none yet.
    after_another = list(zip([None, *kept], kept, strict=False))[-n:]
    rows = tuple(_pass_row(model, row, last) for last, row in after_another)
    return PassesAnswer(**head.model_dump(), passes=rows)


def _behind_s(row: StepRow, last: StepRow | None) -> float:
    """Seconds of a step that is over in which the one before it was still computed."""
    if row.completed is None or last is None or last.completed is None:
        return 0.0
    return max(0, last.completed.times.ready_ns - row.completed.times.started_ns) / 1e9


def _pass_row(model: ReadModel, row: StepRow, last: StepRow | None) -> PassRow:
    plan, done, end = row.planned, row.completed, row.planned.pass_end
    key = order_key(model, plan.active_policy)
    return PassRow(
        step=plan.step,
        t_wall_s=model.wall_s(plan.t_ns),
        kind=plan.kind,
        policy=plan.active_policy,
        limits=limits(model),
        budget_open=ledgers(plan.budget_open),
        budget_close=ledgers(plan.budget_close),
        mixed_rows=plan.mixed_rows,
        prefill_tokens=sum(piece.extend_len for piece in plan.prefills),
        decode_rows=row.decode_rows,
        candidates=tuple(decision(model, event) for event in row.decisions),
        end=end.stop if end is not None else None,
        end_reason=end.stopped_by if end is not None else None,
        end_rid=end.rid if end is not None else None,
        full_by=row.full_by[0] if row.full_by is not None else None,
        full_since=row.full_by[1] if row.full_by is not None else None,
        not_considered=end.not_considered if end is not None else 0,
        num_waiting=plan.num_waiting,
        num_running=plan.num_running,
        evicted_pages=plan.evicted_pages,
        retracted=(*(victim.rid for victim in plan.retractions), *plan.preempted),
        guards=tuple(plan.guards),
        new_token_ratio=plan.new_token_ratio,
        order_key=key,
        moves=tuple(_moves(model, row, key)),
        waiting_before=row.waiting_before,
        step_s=(done.times.applied_ns - done.times.started_ns) / 1e9 if done is not None else None,
        behind_s=_behind_s(row, last),
    )


#: What each policy sorts by, where the records say it.
_KEYS: Final = {
    Policy.FCFS: "entry",
    Policy.LPM: "cached_tokens",
    Policy.SHORTEST_PREFILL_FIRST: "uncached_tokens",
    Policy.LOF: "max_new_tokens",
}


def order_key(model: ReadModel, policy: str | None) -> str:
    """The name of what the active policy of a pass sorted by; "" when no record has it."""
    if policy is None:
        return ""
    key = _KEYS.get(Policy(policy), "")
    return "priority" if model.config.scheduler.enable_priority_scheduling and key == "entry" else key


def _moves(model: ReadModel, row: StepRow, key: str) -> Iterator[QueueMove]:
    seen, after = set(), 0
    for event, before in zip(row.decisions, row.places, strict=True):
        if before is None or event.is_continuation or event.reason is Reason.PREEMPTED_FOR:
            continue
        seen.add(event.rid)
        yield QueueMove(rid=event.rid, before=before, after=after, key=_key(model, event, before, key))
        after += 1
    others = [(before, rid) for before, rid in enumerate(row.first_waiting) if rid not in seen]
    for before, rid in others[:SHOWN_UNSEEN]:
        yield QueueMove(rid=rid, before=before)


def _key(model: ReadModel, event: AdmissionDecided, before: int, key: str) -> float | None:
    if key == "entry":
        return before
    if key == "cached_tokens":
        return event.prefix_len
    if key == "uncached_tokens":
        return event.candidate_extend
    request = model.find(event.rid)
    if request is None:
        return None
    if key == "max_new_tokens":
        return request.max_new_tokens
    return request.priority if key == "priority" else None


def decision(model: ReadModel, event: AdmissionDecided) -> DecisionRow:
    return DecisionRow(
        rid=event.rid,
        step=event.step,
        t_wall_s=model.wall_s(event.t_ns),
        order=event.order,
        is_continuation=event.is_continuation,
        prefix_len=event.prefix_len,
        candidate_extend=event.candidate_extend,
        selected_extend=event.selected_extend,
        extend_end=event.extend_end,
        before=Ledgers(
            rem_input=event.rem_input_before,
            rem_chunk=event.rem_chunk_before,
            remaining_total=event.remaining_total_before,
            remaining_current=event.remaining_current_before,
        ),
        after=Ledgers(
            rem_input=event.rem_input_after,
            rem_chunk=event.rem_chunk_after,
            remaining_total=event.remaining_total_after,
            remaining_current=event.remaining_current_after,
        ),
        reserved_new_tokens=event.reserved_new_tokens,
        is_chunked=event.is_chunked,
        result=event.result,
        reason=event.reason,
        admitted=event.reason in ADMITTED,
        need=event.need,
        have=event.have,
        stopped_pass=event.stopped_pass,
        times_passed_over=event.times_passed_over,
        overdrafts=tuple(event.overdrafts),
    )
