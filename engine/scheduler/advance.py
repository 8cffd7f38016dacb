"""Advance. Owns: what follows from a plan alone, written ahead of its outcome where steps overlap.

Without overlap a step is applied before the next one is planned, and `apply` writes lengths and token values together.
With overlap step N + 1 is planned while N is in flight. Lengths then advance right after commit, so that the next plan
stands on them; what token values say (page keys, ends) is settled by `apply`, one step late:

    commit N + 1 · advance N + 1 · launch N + 1 · apply N · commit N + 2 · ...

* The tree gets pages of applied steps only (`Request.applied_len`), so a step that fails poisons nothing in it.
* Who reaches its last token by count alone is known to end, and leaves the running list at once: it has no memory
  promised beyond that token. It keeps its lease until the outcome ends it.
* Who is ended by a token (EOS, a stop string) may have a row in the step behind. That row is void: its token reaches
  nobody. The lease is given back all the same while the row may still be computed. That is safe: the executor does its
  batches in the order in which they were launched, and whoever gets the pages is in a batch launched later. Nor can the
  row write to a page that went to the tree: it writes behind the applied tokens, and the tree gets full pages of those.
"""

from __future__ import annotations

from engine.request import Cause, RequestState
from engine.scheduler.plan import StepPlan
from engine.scheduler.publisher import Publisher
from engine.scheduler.state import SchedulerState


def advance_plan(state: SchedulerState, plan: StepPlan, publisher: Publisher) -> None:
    """Move the members of a committed plan to where its outcome will find them."""
    for piece in plan.prefills:
        request = state.requests[piece.rid]
        request.computed_len = piece.extend_end
        request.ahead_len += piece.extend_len
        if piece.is_last:
            request.output_len += 1
            request.ahead_outputs += 1
        target, cause = (
            (RequestState.DECODE, Cause.FINAL_CHUNK) if piece.is_last else (RequestState.PREFILL, Cause.NEXT_CHUNK)
        )
        request.transition(target, cause)
        publisher.transitioned(request, RequestState.PREFILL, cause, row=None)
    for rid in plan.decodes:
        request = state.requests[rid]
        request.computed_len += 1
        request.ahead_len += 1
        request.output_len += 1
        request.ahead_outputs += 1
    _let_leave(state, plan)


def _let_leave(state: SchedulerState, plan: StepPlan) -> None:
    """Whose last token is in this step is not planned for again."""
    leaving = {}
    for rid in plan.sampling:
        request = state.requests[rid]
        if request.output_len >= request.max_new_tokens:
            leaving[rid] = request
    if leaving:
        state.leaving.update(leaving)
        state.running = [request for request in state.running if request.rid not in leaving]
        state.last_prefill = [request for request in state.last_prefill if request.rid not in leaving]
        state.shrank = True
