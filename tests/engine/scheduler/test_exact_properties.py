"""Exact accounting under any workload: no claim misses, no ledger is overdrawn, everyone finishes."""

from __future__ import annotations

from collections import Counter

from hypothesis import HealthCheck, given, settings

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
from tests.workloads import JOBS, MAX_STEPS, Job, configs


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


# Too slow: an example is the life of a whole engine.
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(config=configs(accounting="exact"), work=JOBS)
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
