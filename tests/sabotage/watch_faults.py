"""Faults about single requests, derived values and times. Owns: one lie, or one broken method, per law."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from engine.events import AdmissionDecided, RequestArrived, RequestTransitioned, StepCompleted, StepPlanned
from engine.request import Cause
from engine.scheduler import commit, planner
from engine.scheduler.decision import Reason
from engine.scheduler.plan import StepKind, StepPlan
from engine.scheduler.prefill_adder import PrefillAdder
from engine.scheduler.publisher import Publisher
from engine.scheduler.state import SchedulerState
from engine.scheduler.waiting_queue import Overtakes
from tests.builders import CoreRun
from tests.sabotage.engine_faults import breaks, planned
from tests.sabotage.event_faults import cause, lie

# -- progress and overtaking -----------------------------------------------------------------------------------------


@breaks("INV-REQ-01", "every third decode step computes nothing")
def idles(run: CoreRun, patch: pytest.MonkeyPatch) -> None:
    def change(plan: StepPlan) -> StepPlan:
        if plan.kind is not StepKind.DECODE or plan.step % 3 or plan.retractions:
            return plan
        return replace(plan, kind=StepKind.IDLE, decodes=(), sampling=())

    planned(run, patch, change)


@breaks("INV-REQ-01", "decodes that never ride along, behind prompts that never end")
def decodes_starve(run: CoreRun, patch: pytest.MonkeyPatch) -> None:
    def change(plan: StepPlan) -> StepPlan:
        if plan.kind is not StepKind.MIXED:
            return plan
        sampling = tuple(row.rid for row in plan.prefills if row.is_last)
        return replace(plan, kind=StepKind.EXTEND, decodes=(), sampling=sampling)

    planned(run, patch, change)


@breaks("INV-REQ-02", "an empty engine that refuses whoever comes")
def refuses_alone(run: CoreRun, patch: pytest.MonkeyPatch) -> None:
    original = run.scheduler._skip_reason

    def broken() -> str | None:
        skip = original()
        state = run.scheduler.state
        return "rows" if skip is None and not state.running and state.continuation is None else skip

    patch.setattr(run.scheduler, "_skip_reason", broken)


@breaks("INV-REQ-03", "a bound on overtaking that nobody looks at", max_overtakes=1)
def no_bound(_run: CoreRun, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SchedulerState, "candidates", lambda self, _now_ns: iter(list(self.waiting)))


@breaks("INV-REQ-03", "first come, last served", schedule_policy="fcfs")
def last_come(_run: CoreRun, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SchedulerState, "candidates", lambda self, _now_ns: iter(list(self.waiting)[::-1]))


@breaks("INV-REQ-03", "a bound on waiting that nobody looks at", starvation_limit_s=0.003)
def no_limit(_run: CoreRun, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SchedulerState, "candidates", lambda self, _now_ns: iter(list(self.waiting)))


@breaks("INV-REQ-04", "overtakes counted twice")
def overtakes_twice(_run: CoreRun, patch: pytest.MonkeyPatch) -> None:
    original = Overtakes.admitted

    def broken(self: Overtakes, latest: int, waiting: Any) -> None:
        original(self, latest, waiting)
        original(self, latest, waiting)

    patch.setattr(Overtakes, "admitted", broken)


lie("INV-REQ-04", "an overtake that was none", AdmissionDecided, lambda e: True, times_passed_over=7)

# -- victims and hits ------------------------------------------------------------------------------------------------


@breaks("INV-REQ-05", "a request pushed back twice in one step")
def retracted_twice(_run: CoreRun, patch: pytest.MonkeyPatch) -> None:
    original = commit.requeue

    def broken(state: Any, request: Any, publisher: Publisher, why: Cause, *, row: int | None = None) -> None:
        source = request.state
        original(state, request, publisher, why, row=row)
        publisher.transitioned(request, source, why, row=row)

    patch.setattr(commit, "requeue", broken)


@breaks("INV-REQ-05", "lost tokens that nobody counts")
def lost_tokens(run: CoreRun, patch: pytest.MonkeyPatch) -> None:
    planned(
        run,
        patch,
        lambda plan: replace(plan, retractions=tuple(replace(one, lost_tokens=0) for one in plan.retractions)),
    )


lie("INV-REQ-05", "a victim that the plan does not name", StepPlanned, lambda e: e.retractions, retractions=())
lie(
    "INV-REQ-05",
    "a way back that is not counted",
    RequestTransitioned,
    cause(Cause.RETRACT),
    num_retractions=lambda e: e.num_retractions - 1,
)


@breaks("INV-REQ-06", "a hit told again with the last piece")
def hit_twice(_run: CoreRun, patch: pytest.MonkeyPatch) -> None:
    original = Publisher.transitioned

    def broken(self: Publisher, request: Any, source: Any, why: Cause, **kwargs: Any) -> None:
        if why is Cause.FINAL_CHUNK:
            kwargs["cached_len"] = request.computed_len
        original(self, request, source, why, **kwargs)

    patch.setattr(Publisher, "transitioned", broken)


lie(
    "INV-REQ-06",
    "a hit of a page more than was left out",
    RequestTransitioned,
    lambda e: e.cause is Cause.ADMIT and e.cached_len,
    cached_len=lambda e: e.cached_len + 16,
)

# -- derived values --------------------------------------------------------------------------------------------------


@breaks("INV-FLAG-01", "a mixed step that calls itself extend")
def wrong_kind(run: CoreRun, patch: pytest.MonkeyPatch) -> None:
    def change(plan: StepPlan) -> StepPlan:
        return replace(plan, kind=StepKind.EXTEND) if plan.kind is StepKind.MIXED else plan

    planned(run, patch, change)


@breaks("INV-FLAG-02", "a full flag that an end does not clear")
def stale_flag(run: CoreRun, patch: pytest.MonkeyPatch) -> None:
    original = run.scheduler._merge_last_prefill

    def broken() -> None:
        full = run.scheduler.state.full
        original()
        run.scheduler.state.full = full

    patch.setattr(run.scheduler, "_merge_last_prefill", broken)


@breaks("INV-FLAG-02", "a full flag that never latches")
def no_latch(run: CoreRun, patch: pytest.MonkeyPatch) -> None:
    planned(run, patch, lambda plan: replace(plan, full_after=False))


@breaks("INV-FLAG-03", "a pass that counts the refused one as not considered")
def not_considered(run: CoreRun, patch: pytest.MonkeyPatch) -> None:
    def change(plan: StepPlan) -> StepPlan:
        end = plan.pass_end
        if end is None or end.stop not in {"result", "slots"}:
            return plan
        return replace(plan, pass_end=replace(end, not_considered=end.not_considered + 1))

    planned(run, patch, change)


@breaks("INV-FLAG-03", "the decision is made and its reason thrown away")
def reason_lost(run: CoreRun, patch: pytest.MonkeyPatch) -> None:
    def change(plan: StepPlan) -> StepPlan:
        end = plan.pass_end
        if end is None or end.stop != "result":
            return plan
        return replace(plan, pass_end=replace(end, stopped_by=Reason.PREFILL_MAX_REACHED))

    planned(run, patch, change)


lie("INV-FLAG-03", "a stop that no decision made", AdmissionDecided, lambda e: e.order == 0, stopped_pass=True)


@breaks("INV-FLAG-04", "a cap that leaves nothing", schedule_policy="shortest-prefill-first")
def cap_fills_the_slice(_run: CoreRun, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(planner, "continuation_cap", lambda waiting, *, rest, rem_chunk, page_size: rem_chunk)


@breaks("INV-FLAG-04", "a piece above its cap", schedule_policy="shortest-prefill-first")
def cap_ignored(_run: CoreRun, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(planner, "continuation_cap", lambda waiting, *, rest, rem_chunk, page_size: page_size)
    original = PrefillAdder.consider_continuation
    patch.setattr(
        PrefillAdder, "consider_continuation", lambda self, request, *, cap: original(self, request, cap=None)
    )


# -- times -----------------------------------------------------------------------------------------------------------


@breaks("INV-TIME-01", "a step that begins before the last one ended")
def overlapping(run: CoreRun, patch: pytest.MonkeyPatch) -> None:
    original = run.scheduler.complete
    patch.setattr(run.scheduler, "complete", lambda times: original(replace(times, started_ns=0)))


lie(
    "INV-TIME-01",
    "a forward pass that ends before it began",
    StepCompleted,
    lambda e: e.times.ready_ns,
    times=lambda e: replace(e.times, launched_ns=e.times.ready_ns + 1),
)
lie("INV-TIME-01", "a negative wait for the queue", RequestArrived, lambda e: True, accepted_ns=lambda e: e.t_ns + 1)
