"""Faults of what the scheduler decides and publishes. Owns: one of its methods broken at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from engine.kvcache.kv_cache import KvCache
from engine.request import Cause
from engine.scheduler import apply, ledgers, planner
from engine.scheduler.decision import AdmissionDecision, Reason
from engine.scheduler.plan import StepKind, StepPlan
from tests.builders import CoreRun
from tests.sabotage.scenario import FAULTS, Fault

Break = Callable[[CoreRun, pytest.MonkeyPatch], None]


def breaks(law: str, name: str, **settings: object) -> Callable[[Break], Break]:
    """Register a function that breaks the engine."""

    def register(function: Break) -> Break:
        FAULTS.append(Fault(law, name, engine=function, settings=settings))
        return function

    return register


def planned(run: CoreRun, patch: pytest.MonkeyPatch, change: Callable[[StepPlan], StepPlan]) -> None:
    """Every plan goes through `change`."""
    original = run.scheduler.plan
    patch.setattr(run.scheduler, "plan", lambda now_ns: change(original(now_ns)))


def first_cut(plan: StepPlan, change: Callable[[AdmissionDecision], int]) -> StepPlan:
    """The plan with another length of its first cut, in its decision and in its row alike."""
    cut = next((one for one in plan.decisions if one.reason is Reason.ADMITTED_FIRST_CHUNK), None)
    if cut is None:
        return plan
    extend = change(cut)
    return replace(
        plan,
        decisions=tuple(replace(one, selected_extend=extend) if one is cut else one for one in plan.decisions),
        prefills=tuple(replace(row, extend_len=extend) if row.rid == cut.rid else row for row in plan.prefills),
    )


# -- pieces of prompts -----------------------------------------------------------------------------------------------


@breaks("INV-CHUNK-01", "a piece of length zero")
def zero_length(run: CoreRun, patch: pytest.MonkeyPatch) -> None:
    planned(run, patch, lambda plan: first_cut(plan, lambda _cut: 0))


@breaks("INV-CHUNK-02", "a continuation that starts over")
def starts_over(run: CoreRun, patch: pytest.MonkeyPatch) -> None:
    original = run.scheduler.prepare

    def broken(now_ns: int) -> None:
        request = run.scheduler.state.continuation
        if request is not None and request.computed_len >= 32:
            request.computed_len -= 16
        original(now_ns)

    patch.setattr(run.scheduler, "prepare", broken)


@breaks("INV-CHUNK-03", "a token from a middle piece")
def middle_token(run: CoreRun, patch: pytest.MonkeyPatch) -> None:
    def change(plan: StepPlan) -> StepPlan:
        middle = tuple(row.rid for row in plan.prefills if not row.is_last)
        return replace(plan, sampling=(*plan.sampling, *middle))

    planned(run, patch, change)


@breaks("INV-CHUNK-03", "a last piece without its token")
def missing_token(_run: CoreRun, patch: pytest.MonkeyPatch) -> None:
    original = apply._one_token

    def broken(state: Any, request: Any, *args: Any, is_first: bool) -> bool:
        if is_first:
            request.output_len -= 1
        return original(state, request, *args, is_first=is_first)

    patch.setattr(apply, "_one_token", broken)


@breaks("INV-CHUNK-04", "candidates before the continuation")
def continuation_last(_run: CoreRun, patch: pytest.MonkeyPatch) -> None:
    original = planner._Pass._candidates

    def broken(self: Any) -> Any:
        end = original(self)
        planner._Pass._continue(self)
        return end

    patch.setattr(planner._Pass, "_candidates", broken)
    real = planner._Pass._continue
    calls: list[int] = []

    def skip_first(self: Any) -> int | None:
        calls.append(1)
        return None if len(calls) % 2 else real(self)

    patch.setattr(planner._Pass, "_continue", skip_first)


@breaks("INV-CHUNK-05", "a first cut three tokens short")
def unaligned(run: CoreRun, patch: pytest.MonkeyPatch) -> None:
    planned(run, patch, lambda plan: first_cut(plan, lambda cut: cut.selected_extend - 3))


# -- ledgers ---------------------------------------------------------------------------------------------------------


@breaks("INV-BUDGET-01", "overdrafts that nobody names")
def silent_overdraft(run: CoreRun, patch: pytest.MonkeyPatch) -> None:
    def change(plan: StepPlan) -> StepPlan:
        return replace(plan, decisions=tuple(replace(one, overdrafts=()) for one in plan.decisions))

    planned(run, patch, change)


@breaks("INV-BUDGET-02", "decode rows charged twice")
def charged_twice(_run: CoreRun, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(planner, "ComputeLedger", lambda limit, spent: ledgers.ComputeLedger(limit, 2 * spent))


@breaks("INV-BUDGET-02", "decode rows not charged to the slice")
def not_charged(_run: CoreRun, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(planner, "ChunkLedger", lambda limit, spent: ledgers.ChunkLedger(limit, 0))


@breaks("INV-BUDGET-03", "an admission charged twice")
def double_charge(_run: CoreRun, patch: pytest.MonkeyPatch) -> None:
    original = ledgers.Budget.charge
    patch.setattr(ledgers.Budget, "charge", lambda self, cost: original(original(self, cost), cost))


@breaks("INV-BUDGET-03", "a pinned prefix that is not charged")
def pin_forgotten(_run: CoreRun, patch: pytest.MonkeyPatch) -> None:
    original = KvCache.path_cost
    patch.setattr(KvCache, "path_cost", lambda self, *args: replace(original(self, *args), pages=0))


@breaks("INV-BUDGET-03", "a refusal that is charged")
def refusal_charged(run: CoreRun, patch: pytest.MonkeyPatch) -> None:
    def charged(one: AdmissionDecision) -> AdmissionDecision:
        return one if one.is_admitted else replace(one, after=replace(one.after, rem_input=one.after.rem_input - 16))

    planned(run, patch, lambda plan: replace(plan, decisions=tuple(map(charged, plan.decisions))))


@breaks("INV-BUDGET-04", "a promise that skips the last running request")
def skips_growth(_run: CoreRun, patch: pytest.MonkeyPatch) -> None:
    original = planner.promised_growth
    patch.setattr(
        planner, "promised_growth", lambda accounting, running, ratio: original(accounting, list(running)[:-1], ratio)
    )


@breaks("INV-BUDGET-04", "a ratio that never decays")
def stuck_ratio(run: CoreRun, patch: pytest.MonkeyPatch) -> None:
    planned(run, patch, lambda plan: replace(plan, ratio_after=plan.ratio) if plan.decodes else plan)


# -- steps -----------------------------------------------------------------------------------------------------------


@breaks("INV-STEP-01", "a step published twice")
def published_twice(run: CoreRun, patch: pytest.MonkeyPatch) -> None:
    original = run.scheduler.complete

    def broken(times: Any) -> None:
        applied = run.scheduler._applied
        original(times)
        run.scheduler._applied = applied
        original(times)

    patch.setattr(run.scheduler, "complete", broken)


@breaks("INV-STEP-02", "a clock that goes back")
def clock_back(run: CoreRun, patch: pytest.MonkeyPatch) -> None:
    original = run.step

    def broken(**kwargs: Any) -> StepPlan:
        run.now_ns -= 5_000_000 if run.steps == 4 else 0
        return original(**kwargs)

    patch.setattr(run, "step", broken)


@breaks("INV-STEP-03", "a running request that loses its turn")
def loses_turn(run: CoreRun, patch: pytest.MonkeyPatch) -> None:
    def change(plan: StepPlan) -> StepPlan:
        if plan.kind is not StepKind.DECODE or len(plan.decodes) < 2:
            return plan
        return replace(plan, decodes=plan.decodes[1:], sampling=plan.sampling[1:])

    planned(run, patch, change)


@breaks("INV-STEP-04", "a waiting request that gets lost")
def lost_request(run: CoreRun, patch: pytest.MonkeyPatch) -> None:
    original = run.scheduler.prepare

    def broken(now_ns: int) -> None:
        waiting: Any = run.scheduler.state.waiting
        last = [request.rid for request in waiting][1:][-1:]
        if isinstance(waiting, list):
            del waiting[len(waiting) - len(last) :]
        else:
            waiting.remove(last)
        original(now_ns)

    patch.setattr(run.scheduler, "prepare", broken)


@breaks("INV-STEP-05", "a state that changes without an event")
def silent_transition(run: CoreRun, patch: pytest.MonkeyPatch) -> None:
    original = run.scheduler.publisher.transitioned

    def broken(self: Any, request: Any, source: Any, cause: Cause, **kwargs: Any) -> None:
        if cause is not Cause.FINAL_CHUNK:
            original.__func__(self, request, source, cause, **kwargs)

    patch.setattr(type(run.scheduler.publisher), "transitioned", broken)


@breaks("INV-PROG-01", "a full flag that stays latched")
def latched(run: CoreRun, patch: pytest.MonkeyPatch) -> None:
    original = run.scheduler._skip_reason
    patch.setattr(run.scheduler, "_skip_reason", lambda: "full_flag" if run.steps > 30 else original())
