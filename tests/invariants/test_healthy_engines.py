"""Negative control: whatever the workload and the configuration, a healthy engine breaks no law.

This is also the sharpest test of the scheduler: a counterexample is a minimal workload with the law that broke.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.clock import VirtualClock
from engine.config import EngineConfig
from engine.errors import RequestRefused
from engine.executor.simulated import SimulatedExecutor
from engine.llm_engine import EngineRequest, LLMEngine
from engine.sampling_params import SamplingParams
from invariants import InvariantChecker
from tests.builders import CoreRun
from tests.workloads import JOBS, MAX_STEPS, Job, configs

#: Too slow: an example is the life of a whole engine, audited after each step.
quick = settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def drive(config: EngineConfig, work: list[Job], fails: set[int]) -> None:
    """Run `work` on the real scheduler, an audit after each step, and find nothing wrong and nothing held."""
    checker = InvariantChecker()
    run = CoreRun(config, checker, end_token=True, after_step=checker.audit)
    todo = sorted(enumerate(work), key=lambda item: item[1].arrives)
    step = 0
    while todo or run.has_work:
        while todo and todo[0][1].arrives <= step:
            index, job = todo.pop(0)
            try:
                run.add(
                    f"r{index}",
                    job.prompt(index),
                    job.max_new,
                    ignore_eos=job.ignore_eos,
                    priority=job.priority,
                )
            except RequestRefused:
                continue
        for index, job in enumerate(work):
            if job.aborted_after is not None and job.arrives + job.aborted_after == step:
                run.abort(f"r{index}")
        run.step(fail=step in fails)
        step += 1
        assert step < MAX_STEPS
    assert checker.total_violations == 0
    free, private, protected, _ = run.scheduler.kv.pool.counts
    assert (private, protected) == (0, 0)
    assert free or config.cache.enable_radix


@quick
@given(config=configs(), work=JOBS, fails=st.sets(st.integers(0, 60), max_size=2))
def test_no_law_breaks_in_the_scheduler(config: EngineConfig, work: list[Job], fails: set[int]) -> None:
    drive(config, work, fails)


@pytest.mark.slow
@settings(quick, max_examples=2_000)
@given(config=configs(), work=JOBS, fails=st.sets(st.integers(0, 60), max_size=2))
def test_no_law_breaks_in_the_scheduler_at_length(config: EngineConfig, work: list[Job], fails: set[int]) -> None:
    drive(config, work, fails)


@settings(quick, max_examples=60)
@given(config=configs(), work=JOBS)
def test_no_law_breaks_in_the_engine(config: EngineConfig, work: list[Job]) -> None:
    checker = InvariantChecker()
    engine = LLMEngine(config, executor=SimulatedExecutor(config), clock=VirtualClock(), sink=checker)
    ends: dict[str, int] = {}
    step = 0
    accepted: set[str] = set()
    pending = sorted(enumerate(work), key=lambda item: item[1].arrives)
    while pending or engine.has_work:
        while pending and pending[0][1].arrives <= step:
            index, job = pending.pop(0)
            params = SamplingParams(max_new_tokens=job.max_new, ignore_eos=job.ignore_eos)
            try:
                engine.add_request(
                    EngineRequest(rid=f"r{index}", prompt_ids=job.prompt(index), params=params, priority=job.priority)
                )
            except RequestRefused:
                continue
            accepted.add(f"r{index}")
        for index, job in enumerate(work):
            if job.aborted_after is not None and job.arrives + job.aborted_after == step:
                engine.abort_request(f"r{index}")
        for output in engine.step():
            if output.finish is not None:
                ends[output.rid] = ends.get(output.rid, 0) + 1
        checker.audit(engine.snapshot())
        step += 1
        assert step < MAX_STEPS
    assert ends == dict.fromkeys(accepted, 1)
    assert checker.total_violations == 0
