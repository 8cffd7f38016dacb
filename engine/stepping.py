"""Stepping. Owns: the order of things within a call of `LLMEngine.step`: one step at a time, or two that overlap.

serial       plan · commit · execute · apply
overlapped   plan N + 1 · commit · launch | collect N · apply N

With overlap the host plans and puts together a batch while the one before it is computed. At most one step lags: two
are in flight only within a call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec

from engine.executor.base import Executor, ForwardBatch, OverlappingExecutor, StepResult
from engine.executor.failure import report_failure
from engine.executor.forward_batch import from_plan
from engine.outputs import OutputDesk, TokenOutput
from engine.scheduler.flight import Flight
from engine.scheduler.plan import StepKind, StepPlan, StepTimes
from engine.scheduler.scheduler import Scheduler
from engine.token_store import TokenStore


class Steps(Protocol):
    """One way of making steps.

    was_idle    the last step had nothing to do, and nobody is left
    done        steps applied
    with_work   steps begun that compute something
    moves       these, and where steps overlap those brought in that did: what tells progress from spinning
    last_failure  the last executor failure, for a debugger; events and the log do not hold its text
    """

    was_idle: bool
    done: int
    with_work: int
    moves: int
    last_failure: BaseException | None

    def run(self) -> list[TokenOutput]:
        """Do the next step, or as much of it as can be done now."""
        ...


class _Begun(msgspec.Struct):
    """A step that was planned and committed. `has_failed`: its launch raised."""

    flight: Flight
    times: StepTimes
    batch: ForwardBatch | None = None
    has_failed: bool = False


class _StepBase:
    """What both ways share. `now_ns`: the engine's clock."""

    def __init__(
        self, scheduler: Scheduler, tokens: TokenStore, desk: OutputDesk, *, now_ns: Callable[[], int]
    ) -> None:
        self._scheduler = scheduler
        self._tokens = tokens
        self._desk = desk
        self._now_ns = now_ns
        self.was_idle = True
        self.done = 0
        self.with_work = 0
        self.moves = 0
        self.last_failure: BaseException | None = None

    def _begin(self) -> _Begun:
        """Prepare, plan, commit."""
        scheduler = self._scheduler
        started = self._now_ns()
        scheduler.prepare(started)
        plan = scheduler.plan(started)
        planned = self._now_ns()
        plan = scheduler.commit(plan)
        committed = self._now_ns()
        self._desk.remember_hits(plan)
        self.with_work += plan.kind is not StepKind.IDLE
        self.moves += plan.kind is not StepKind.IDLE
        times = StepTimes(started_ns=started, plan_from_ns=started, planned_ns=planned, committed_ns=committed)
        return _Begun(scheduler.state.flights[-1], times)

    def _batch(self, plan: StepPlan, before: Flight | None = None) -> ForwardBatch:
        """The batch of a plan. `before`: the step in flight whose tokens are not known yet."""
        return from_plan(
            plan,
            tokens=self._tokens,
            leases=self._scheduler.kv.leases,
            page_size=self._scheduler.kv.page_size,
            under_way={} if before is None else {rid: place for place, rid in enumerate(before.plan.sampling)},
        )

    def _finish(self, step: _Begun, result: StepResult | None, launched_ns: int) -> list[TokenOutput]:
        """Settle, apply, complete. `result` None: the executor raised."""
        scheduler, plan = self._scheduler, step.flight.plan
        times = msgspec.structs.replace(step.times, launched_ns=launched_ns, ready_ns=self._now_ns())
        outputs, outcome = self._desk.settle(step.flight, result, times)
        scheduler.apply(plan, outcome)
        self._desk.forget_ended(outputs)
        scheduler.complete(msgspec.structs.replace(times, applied_ns=self._now_ns()))
        self.was_idle = plan.kind is StepKind.IDLE and not scheduler.state.has_work
        self.done += 1
        return outputs

    def _failed(self, step: int, error: Exception) -> None:
        self.last_failure = error
        report_failure(step, error)


class SerialSteps(_StepBase):
    """One step after the other."""

    def __init__(
        self,
        scheduler: Scheduler,
        tokens: TokenStore,
        desk: OutputDesk,
        executor: Executor,
        *,
        now_ns: Callable[[], int],
    ) -> None:
        super().__init__(scheduler, tokens, desk, now_ns=now_ns)
        self._executor = executor

    def run(self) -> list[TokenOutput]:
        """One whole step."""
        step = self._begin()
        plan = step.flight.plan
        ends = self._desk.retraction_ends(plan)
        result, launched_ns = self._execute(plan)
        outputs = ends + self._finish(step, result, launched_ns)
        self._desk.forget_ended(ends)
        return outputs

    def _execute(self, plan: StepPlan) -> tuple[StepResult | None, int]:
        """Run the batch; None when the executor raised. Also the launch time."""
        if plan.kind is StepKind.IDLE:
            return StepResult(plan.step, ()), self._now_ns()
        batch = self._batch(plan)
        launched = self._now_ns()
        try:
            return self._executor.execute(batch), launched
        except Exception as error:  # whatever a model raises ends its step only
            self._failed(plan.step, error)
            return None, launched


class OverlappedSteps(_StepBase):
    """Each step is planned and launched while the one before it is computed, where that can be done.

    It waits for the step in flight first where the next batch hangs on its tokens (a grammar's mask, a penalty), where
    somebody would have to give way for memory that the step in flight may be about to free, and where it would compute
    for those alone whose end was asked for.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        tokens: TokenStore,
        desk: OutputDesk,
        executor: OverlappingExecutor,
        *,
        now_ns: Callable[[], int],
    ) -> None:
        super().__init__(scheduler, tokens, desk, now_ns=now_ns)
        self._executor = executor
        self._flying: _Begun | None = None

    def run(self) -> list[TokenOutput]:
        """Launch the next step, and bring in the one before it."""
        outputs: list[TokenOutput] = []
        before, self._flying = self._flying, None
        nothing_flew = before is None
        if before is not None and not self._can_go_ahead(before):
            outputs += self._bring_in(before)
            before = None
        after = None
        if self._scheduler.state.is_plannable or (nothing_flew and not self.was_idle):
            after = self._launch(before, outputs)
        if before is not None:
            outputs += self._bring_in(before)
        if after is not None and (after.batch is None or after.has_failed):
            outputs += self._bring_in(after)
            after = None
        self._flying = after
        return outputs

    def _can_go_ahead(self, before: _Begun) -> bool:
        """Whether the next step can be launched without the tokens of `before`."""
        batch = before.batch
        if batch is None:
            return True
        hangs = any(row.history is not None or row.grammar is not None for row in batch.sampling)
        scheduler = self._scheduler
        return (
            not hangs and self._executor.allows_next(batch) and scheduler.is_wanted_ahead() and scheduler.fits_ahead()
        )

    def _launch(self, before: _Begun | None, outputs: list[TokenOutput]) -> _Begun:
        """Begin a step and start its computation; ends that its plan brings are added to `outputs`."""
        step = self._begin()
        plan = step.flight.plan
        ends = self._desk.retraction_ends(plan)
        self._desk.forget_ended(ends)
        outputs += ends
        if plan.kind is not StepKind.IDLE:
            step.batch = self._batch(plan, None if before is None else before.flight)
            try:
                self._executor.launch(step.batch)
            except Exception as error:  # whatever a model raises ends its step only
                self._failed(plan.step, error)
                step.has_failed = True
        step.times = msgspec.structs.replace(step.times, launched_ns=self._now_ns())
        return step

    def _bring_in(self, step: _Begun) -> list[TokenOutput]:
        """Wait for a step's tokens and apply them."""
        plan = step.flight.plan
        result: StepResult | None = None
        # Who ended by it made room: there is reason to look at the queue again at once.
        self.moves += step.batch is not None
        if step.batch is None:
            result = StepResult(plan.step, ())
        elif not step.has_failed:
            try:
                result = self._executor.collect()
            except Exception as error:  # whatever a model raises ends its step only
                self._failed(plan.step, error)
        return self._finish(step, result, step.times.launched_ns)
