"""Exact accounting under any workload: no claim misses, no ledger is overdrawn, everyone finishes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from zlib import crc32

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.clock import VirtualClock
from engine.config import EngineConfig
from engine.errors import RequestRefused
from engine.events import AdmissionDecided, AnyEvent, RequestTransitioned, StepPlanned
from engine.executor.simulated import SimulatedExecutor
from engine.llm_engine import EngineRequest, LLMEngine
from engine.request import Cause
from engine.sampling_params import SamplingParams
from engine.scheduler.decision import ADMITTED, Guard, Overdraft
from engine.scheduler.plan import StepKind
from invariants import InvariantChecker
from tests.builders import engine_config

MAX_STEPS = 20_000


@dataclass(frozen=True)
class Job:
    """One request: `shared` tokens from the start of one of two documents, `own` tokens that nobody has."""

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
    """Tiny pools, pages of 1 to 64, chunking and mixing on and off, tight ratios, alignment, preemption."""
    page = draw(st.sampled_from([1, 2, 16, 64]))
    chunk = draw(st.one_of(st.none(), st.integers(max(page, 8), 200)))
    preempts = draw(st.booleans())
    policies = ["fcfs", "lof"] if preempts else ["fcfs", "lpm", "shortest-prefill-first", "dfs-weight", "hrrn", "lof"]
    policy = draw(st.sampled_from(policies))
    align = None if chunk is None else draw(st.sampled_from([None, None, page, 3 * page]))
    if align is not None and align > (chunk or 0):
        align = None
    radix = policy == "shortest-prefill-first" or draw(st.booleans())
    return engine_config(
        kv_accounting="exact",
        page_size=page,
        num_pages=max(3, draw(st.integers(60, 500)) // page),
        enable_radix=radix,
        chunked_prefill_size=chunk,
        truncation_align_size=align,
        max_prefill_tokens=max(page, align or 0, draw(st.sampled_from([32, 64, 300, 8192]))),
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


JOBS = st.lists(
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


class Watch:
    """The checker, and what exact accounting promises beside its laws."""

    def __init__(self, config: EngineConfig) -> None:
        self.checker = InvariantChecker()
        self.page = config.cache.page_size
        self.chunking = config.scheduler.chunked_prefill_size is not None
        self.seen: Counter[str] = Counter()

    def emit(self, event: AnyEvent) -> None:
        self.checker.emit(event)
        if isinstance(event, StepPlanned):
            self.seen.update(event.guards)
            assert not event.claim_failed
            opened = event.budget_open
            if opened is not None:
                assert opened.remaining_total <= opened.remaining_current
            if event.kind is StepKind.MIXED:
                assert event.decodes
        if isinstance(event, RequestTransitioned):
            assert event.cause is not Cause.KV_POOL_EXHAUSTED
        if not isinstance(event, AdmissionDecided):
            return
        total, current = event.remaining_total_after, event.remaining_current_after
        if event.reason not in ADMITTED:
            return
        assert current >= 0
        assert total >= 0
        assert current % self.page == 0 == total % self.page
        assert event.selected_extend > 0
        if self.chunking:
            assert event.rem_input_after >= 0
            assert (event.rem_chunk_after or 0) >= 0
        assert set(event.overdrafts) <= ({Overdraft.FIRST_UNCHUNKED} if not self.chunking else set())
        if event.is_chunked:
            assert event.extend_end % self.page == 0
        if event.is_continuation:
            assert event.remaining_total_after == event.remaining_total_before
            assert event.reserved_new_tokens == 0


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(config=configs(), work=JOBS)
def test_no_miss_no_overdraft_and_everyone_ends(config: EngineConfig, work: list[Job]) -> None:
    watch = Watch(config)
    engine = LLMEngine(config, executor=SimulatedExecutor(config), clock=VirtualClock(), sink=watch)
    ends: Counter[str] = Counter()
    accepted: set[str] = set()
    pending = sorted(enumerate(work), key=lambda item: item[1].arrives)
    step = 0
    while pending or engine.has_work:
        while pending and pending[0][1].arrives <= step:
            index, job = pending.pop(0)
            params = SamplingParams(max_new_tokens=job.max_new, ignore_eos=job.ignore_eos)
            prompt = job.prompt(index)
            try:
                engine.add_request(
                    EngineRequest(rid=f"r{index}", prompt_ids=prompt, params=params, priority=job.priority)
                )
            except RequestRefused:
                # The only prompts refused are those that the whole pool cannot hold.
                assert len(prompt) > config.cache.num_pages * config.cache.page_size
                continue
            accepted.add(f"r{index}")
        for index, job in enumerate(work):
            if job.aborted_after is not None and job.arrives + job.aborted_after == step:
                engine.abort_request(f"r{index}")
        for output in engine.step():
            if output.finish is not None:
                ends[output.rid] += 1
        watch.checker.audit(engine.snapshot())
        step += 1
        assert step < MAX_STEPS
    assert ends == dict.fromkeys(accepted, 1)
    assert watch.checker.total_violations == 0
    allowed = {Guard.MIXED_SAT_OUT, Guard.LAST_PUSHED_BACK}
    assert set(watch.seen) <= allowed
