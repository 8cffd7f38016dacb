"""Negative control: whatever the workload and the configuration, a healthy engine breaks no law.

This is also the sharpest test of the scheduler: a counterexample is a minimal workload with the law that broke.
"""

from __future__ import annotations

from dataclasses import dataclass
from zlib import crc32

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
from tests.builders import CoreRun, engine_config

MAX_STEPS = 20_000


@dataclass(frozen=True)
class Job:
    """One request: `shared` tokens from the start of one of a few documents, `own` tokens that nobody has."""

    arrives: int
    document: int
    shared: int
    own: int
    max_new: int
    ignore_eos: bool
    priority: int | None
    aborted_after: int | None

    def prompt(self, index: int) -> tuple[int, ...]:
        common = [(100 * self.document + 7 * place) % 500 for place in range(self.shared)]
        return (*common, *[crc32(f"{index}/{place}".encode()) % 500 for place in range(self.own)])


@st.composite
def configs(draw: st.DrawFn) -> EngineConfig:
    """Page sizes 1 to 64, chunking and mixing on and off, tight and roomy pools, every order, preemption."""
    page = draw(st.sampled_from([1, 2, 16, 64]))
    chunk = draw(st.one_of(st.none(), st.integers(max(page, 8), 200)))
    preempts = draw(st.booleans())
    policies = ["fcfs", "lof"] if preempts else ["fcfs", "lpm", "shortest-prefill-first", "dfs-weight", "hrrn", "lof"]
    policy = draw(st.sampled_from(policies))
    radix = draw(st.booleans()) or policy == "shortest-prefill-first"
    return engine_config(
        page_size=page,
        num_pages=max(4, draw(st.integers(120, 900)) // page),
        enable_radix=radix,
        chunked_prefill_size=chunk,
        max_prefill_tokens=draw(st.sampled_from([32, 64, 300, 8192])),
        enable_mixed_chunk=draw(st.booleans()),
        max_running_requests=draw(st.sampled_from([1, 2, 4, 16])),
        prefill_max_requests=draw(st.sampled_from([None, None, 1, 3])),
        schedule_policy=policy,
        schedule_conservativeness=draw(st.sampled_from([0.01, 0.3, 1.0])),
        clip_max_new_tokens=draw(st.sampled_from([1, 16, 4096])),
        enable_priority_scheduling=preempts,
        enable_priority_preemption=preempts,
        priority_preemption_threshold=1,
    )


jobs = st.lists(
    st.builds(
        Job,
        arrives=st.integers(0, 40),
        document=st.integers(1, 2),
        shared=st.integers(0, 150),
        own=st.integers(1, 150),
        max_new=st.integers(1, 80),
        ignore_eos=st.booleans(),
        priority=st.sampled_from([None, 0, 5, 9]),
        aborted_after=st.one_of(st.none(), st.none(), st.integers(0, 30)),
    ),
    min_size=1,
    max_size=14,
)
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
@given(config=configs(), work=jobs, fails=st.sets(st.integers(0, 60), max_size=2))
def test_no_law_breaks_in_the_scheduler(config: EngineConfig, work: list[Job], fails: set[int]) -> None:
    drive(config, work, fails)


@pytest.mark.slow
@settings(quick, max_examples=2_000)
@given(config=configs(), work=jobs, fails=st.sets(st.integers(0, 60), max_size=2))
def test_no_law_breaks_in_the_scheduler_at_length(config: EngineConfig, work: list[Job], fails: set[int]) -> None:
    drive(config, work, fails)


@settings(quick, max_examples=60)
@given(config=configs(), work=jobs)
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
