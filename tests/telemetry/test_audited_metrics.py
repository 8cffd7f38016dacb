"""What /metrics shows, and every request's times, equal the invariant checker's own books after every step."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.config import EngineConfig
from engine.errors import RequestRefused
from engine.events import FanOut
from engine.executor.simulated import SimulatedExecutor
from engine.llm_engine import EngineRequest, LLMEngine
from engine.sampling_params import SamplingParams
from engine.server.engine_thread import EngineThread
from invariants import InvariantChecker, InvariantViolation
from telemetry.auditor import Auditor
from telemetry.metrics import MetricsSink
from telemetry.readings import LIVES, life_reading, readings_of
from telemetry.request_timeline import RequestTimeline
from tests.builders import engine_config
from tests.workloads import JOBS, MAX_STEPS, Job, configs


class TickingClock:
    """Every look at it comes a little later: no two instants of a run are the same by chance."""

    def __init__(self) -> None:
        self._now = self._looks = 0

    def now_ns(self) -> int:
        self._looks += 1
        self._now += 1 + self._looks * 7_919 % 1_013
        return self._now


class Rig:
    """An engine on a ticking clock with a checker and metrics; `step` audits what they say of each other."""

    def __init__(self, config: EngineConfig, *, expects_responses: bool = False) -> None:
        self.clock = TickingClock()
        self.checker = InvariantChecker()
        self.metrics = MetricsSink(clock=self.clock, expects_responses=expects_responses)
        self.ended: list[RequestTimeline] = []
        told = self.metrics.on_finished

        def on_finished(request: RequestTimeline) -> None:
            self.ended.append(request)
            told(request)

        self.metrics.on_finished = on_finished
        self.engine = LLMEngine(
            config,
            executor=SimulatedExecutor(config),
            clock=self.clock,
            sink=FanOut((self.checker, self.metrics)),
        )

    def add(self, rid: str, prompt: tuple[int, ...], max_new: int = 4, **more: Any) -> bool:
        params = SamplingParams(max_new_tokens=max_new, ignore_eos=more.pop("ignore_eos", False))
        accepted_ns = self.clock.now_ns()
        try:
            self.engine.add_request(
                EngineRequest(rid=rid, prompt_ids=prompt, params=params, accepted_ns=accepted_ns, **more)
            )
        except RequestRefused:
            return False
        return True

    def step(self) -> None:
        self.engine.step()
        assert self.checker.audit(self.engine.snapshot())
        self.audit()

    def audit(self) -> None:
        assert self.checker.audit_readings(readings_of(self.metrics, also=self.ended))
        for request in self.ended:
            assert life_reading(request).finished_ns is not None
        self.ended.clear()


# Too slow: an example is the life of a whole engine.
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(config=configs(), work=JOBS, responds=st.booleans())
def test_metrics_and_times_equal_the_second_books(config: EngineConfig, work: list[Job], responds: bool) -> None:
    rig = Rig(config, expects_responses=responds)
    todo = sorted(enumerate(work), key=lambda item: item[1].arrives)
    step = 0
    while todo or rig.engine.has_work:
        while todo and todo[0][1].arrives <= step:
            index, job = todo.pop(0)
            rig.add(f"r{index}", job.prompt(index), job.max_new, ignore_eos=job.ignore_eos, priority=job.priority)
            rig.audit()
        for index, job in enumerate(work):
            if job.aborted_after is not None and job.arrives + job.aborted_after == step:
                rig.engine.abort_request(f"r{index}")
                rig.audit()
        live = list(rig.metrics.timeline.live)
        if responds and live and step % 3 == 0:
            rig.metrics.front_end.on_first_byte(live[step % len(live)], rig.clock.now_ns())
        rig.step()
        step += 1
        assert step < MAX_STEPS
    assert rig.checker.total_violations == 0
    counts = rig.checker.checks_by_group
    assert not rig.engine.steps_done or (counts["meter"] and counts["time"])


def test_room_that_passes_without_a_candidate_leave_is_recounted() -> None:
    """Decode rows take the whole chunk: pass after pass looks at nobody, and each leaves a page less."""
    rig = Rig(engine_config(page_size=1, num_pages=64, chunked_prefill_size=1, enable_mixed_chunk=True))
    rig.add("runs", (5,), 12, ignore_eos=True)
    rig.step()
    rig.add("waits", (6, 7, 8))
    left = []
    for _ in range(6):
        rig.step()
        left.append(rig.metrics.snapshot()[rig.metrics.at["ledger_remaining_tokens", "kv_now"]])
    assert left == sorted(left, reverse=True)
    assert left[0] > left[-1]


def test_readings_are_not_compared_before_the_start_or_inside_a_step() -> None:
    rig = Rig(engine_config())
    fresh = InvariantChecker()
    assert not fresh.audit_readings(readings_of(rig.metrics))
    rig.add("a", tuple(range(40)))
    asked: list[bool] = []
    emit = rig.metrics.emit

    def within(event: Any) -> None:
        emit(event)
        if type(event).__name__ == "StepPlanned":
            asked.append(rig.checker.audit_readings(readings_of(rig.metrics)))

    rig.metrics.emit = within
    rig.step()
    assert asked == [False]


def test_each_audit_looks_at_the_next_live_requests() -> None:
    rig = Rig(engine_config(num_pages=4096, max_running_requests=4))
    for index in range(LIVES + 6):
        rig.add(f"r{index}", (index % 500, index // 500, 7))
    first, second = readings_of(rig.metrics), readings_of(rig.metrics, lives_from=LIVES)
    assert (len(first.lives), len(second.lives)) == (LIVES, 6)
    assert not {life.rid for life in first.lives} & {life.rid for life in second.lives}


@pytest.mark.parametrize("mode", ["record", "raise"])
def test_the_auditor_finds_metrics_that_drift(mode: Any, caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(engine_config())
    checker = InvariantChecker(on_violation=mode)
    rig.engine = LLMEngine(
        engine_config(),
        executor=SimulatedExecutor(engine_config()),
        clock=rig.clock,
        sink=FanOut((checker, rig.metrics)),
    )
    rig.checker = checker
    thread = EngineThread(rig.engine, max_queued_requests=4, max_running_requests=4, clock=rig.clock)
    auditor = Auditor(rig.engine, thread, checker, period_s=None, metrics=rig.metrics)
    rig.add("a", tuple(range(40)))
    rig.engine.step()
    auditor.audit()
    assert checker.total_violations == 0
    rig.metrics._books.cells[rig.metrics.at["requests_finished_total", "stop"]] += 1
    rig.engine.step()
    auditor.audit()
    assert checker.violations_by_id["INV-METER-02"] >= 1
    if mode == "raise":
        with pytest.raises(InvariantViolation, match="INV-METER-02"):
            rig.engine.step()
