"""Page ownership as sets: faults that balance every sum are reported in the round they happen (field report FR-22)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from engine.clock import VirtualClock
from engine.executor.simulated import SimulatedExecutor
from engine.kvcache.page_pool import PageState
from engine.llm_engine import EngineRequest, LLMEngine
from engine.sampling_params import SamplingParams
from invariants import InvariantChecker, Violation
from invariants.audit import unaccounted
from tests.builders import engine_config


def live_engine(checker: InvariantChecker) -> LLMEngine:
    """Two requests in decode, each with private pages and a shared prefix in the tree."""
    config = engine_config(num_pages=64)
    engine = LLMEngine(config, executor=SimulatedExecutor(config), clock=VirtualClock(), sink=checker)
    for rid, own in (("a", 200), ("b", 300)):
        prompt = (*range(100, 140), *range(own, own + 30))
        engine.add_request(
            EngineRequest(rid=rid, prompt_ids=prompt, params=SamplingParams(max_new_tokens=40, ignore_eos=True))
        )
    for _ in range(4):
        engine.step()
        checker.audit(engine.snapshot())
    return engine


def share_and_lose(engine: LLMEngine) -> tuple[int, ...]:
    """Request b points at a page of request a, and a free page vanishes: the sums still balance."""
    kv = engine.scheduler.kv
    a, b = kv.leases["a"], kv.leases["b"]
    stolen = int(a.pages[-1])
    b._pages[b.count - 1] = stolen
    kv.pool._free_top -= 1
    return (stolen, int(kv.pool._free[kv.pool._free_top]))


def use_free_page(engine: LLMEngine) -> tuple[int, ...]:
    """Request a points at a page of the free list."""
    kv = engine.scheduler.kv
    lease = kv.leases["a"]
    free = int(kv.pool._free[0])
    lease._pages[lease.count - 1] = free
    return (free,)


def drop_lock(engine: LLMEngine) -> tuple[int, ...]:
    """The node that request a stands on loses a lock."""
    node = engine.scheduler.kv.leases["a"].node
    node.lock_count -= 1
    return (node.node_id,)


def limbo(engine: LLMEngine) -> tuple[int, ...]:
    """A page leaves the free list and arrives nowhere; its state is changed so that the counters agree."""
    pool = engine.scheduler.kv.pool
    pool._free_top -= 1
    page = int(pool._free[pool._free_top])
    pool._states[page] = PageState.PRIVATE
    pool._counts[PageState.FREE] -= 1
    pool._counts[PageState.PRIVATE] += 1
    return (page,)


@pytest.mark.parametrize("fault", [share_and_lose, use_free_page, drop_lock, limbo])
def test_fr_22_each_fault_is_reported_in_its_round(fault: Callable[[LLMEngine], tuple[int, ...]]) -> None:
    told: list[Violation] = []
    checker = InvariantChecker(on_violation="record", listener=told.append)
    engine = live_engine(checker)
    assert not told
    named = fault(engine)
    snapshot = engine.snapshot()
    assert sum(snapshot.kv.counts) == snapshot.kv.num_pages, "the sums must balance, or the test shows nothing"
    checker.audit(snapshot)
    assert told
    assert {violation.step for violation in told} == {engine.steps_done}
    words = " ".join(f"{violation.expected} {violation.found}" for violation in told)
    for number in named:
        assert str(number) in words
    assert checker.violations_by_id["INV-LOCK-03" if fault is drop_lock else "INV-PAGE-02"] > 0


def test_fr_22_two_owners_are_both_named() -> None:
    told: list[Violation] = []
    checker = InvariantChecker(on_violation="record", listener=told.append)
    engine = live_engine(checker)
    stolen, _ = share_and_lose(engine)
    checker.audit(engine.snapshot())
    double = next(v for v in told if f"page {stolen} in exactly one place" in v.expected)
    assert "request a" in double.found
    assert "request b" in double.found


@pytest.mark.parametrize(("fault", "lost"), [(share_and_lose, 2), (use_free_page, 1), (drop_lock, 0), (limbo, 1)])
def test_pages_found_nowhere_are_counted(fault: Callable[[LLMEngine], tuple[int, ...]], lost: int) -> None:
    """Stealing a page for a page table leaves the page that was there before without an owner."""
    engine = live_engine(InvariantChecker(on_violation="record"))
    assert unaccounted(engine.snapshot().kv) == 0
    fault(engine)
    assert unaccounted(engine.snapshot().kv) == lost


def test_fr_22_a_thousand_healthy_rounds_report_nothing() -> None:
    """Chunking, mixing, retraction, cancels and failures, the checker on after each round."""
    checker = InvariantChecker()
    config = engine_config(
        num_pages=40, chunked_prefill_size=64, max_running_requests=6, schedule_policy="lpm",
        schedule_conservativeness=0.1, clip_max_new_tokens=8,
    )  # fmt: skip
    engine = LLMEngine(config, executor=SimulatedExecutor(config), clock=VirtualClock(), sink=checker)
    rng = np.random.default_rng(22)
    retractions = 0
    for round_ in range(1_000):
        if engine.num_waiting < 4 and rng.random() < 0.3:
            common = tuple(range(int(rng.integers(0, 90))))
            own = tuple(int(token) for token in rng.integers(100, 400, size=int(rng.integers(1, 120))))
            params = SamplingParams(max_new_tokens=int(rng.integers(1, 120)), ignore_eos=bool(rng.random() < 0.5))
            engine.add_request(EngineRequest(rid=f"r{round_}", prompt_ids=common + own, params=params))
        live = engine.snapshot().requests
        if live and rng.random() < 0.05:
            engine.abort_request(live[int(rng.integers(len(live)))].rid)
        engine.step()
        snapshot = engine.snapshot()
        checker.audit(snapshot)
        retractions += sum(view.num_retractions for view in snapshot.waiting)
    assert checker.total_violations == 0
    assert checker.internal_errors == 0
    assert retractions
