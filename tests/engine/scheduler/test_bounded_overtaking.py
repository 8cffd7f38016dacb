"""FR-14: a request that keeps losing to better matches is bounded by a wait or by a number of overtakes."""

from __future__ import annotations

import numpy as np
import pytest

from engine.clock import VirtualClock
from engine.config import CacheConfig, EngineConfig, ExecutorConfig, Policy, SchedulerConfig
from engine.events import AdmissionDecided, RecordingSink
from engine.executor.simulated import SimulatedExecutor
from engine.kvcache.page_keys import PageKeys
from engine.llm_engine import EngineRequest, LLMEngine
from engine.request import Request, RequestState
from engine.sampling_params import SamplingParams
from engine.scheduler.waiting_queue import Overtakes, PlainQueue

HOT = tuple(range(64))


def _play(rounds: int = 200, **limits: float | int) -> tuple[int | None, int]:
    """A hot request arrives every round, a cold one in round 5. Returns its admission round and times passed over."""
    config = EngineConfig(
        scheduler=SchedulerConfig.model_validate(
            {"schedule_policy": Policy.LPM, "max_running_requests": 2, "chunked_prefill_size": None} | limits
        ),
        cache=CacheConfig(page_size=16, num_pages=128),
        executor=ExecutorConfig(kind="simulated"),
    )
    clock, sink = VirtualClock(), RecordingSink()
    engine = LLMEngine(config, executor=SimulatedExecutor(config), clock=clock, sink=sink)
    for number in range(rounds):
        hot = EngineRequest(
            rid=f"hot{number}",
            prompt_ids=(*HOT, 100 + number % 50, number % 50),
            params=SamplingParams(max_new_tokens=3, ignore_eos=True),
        )
        engine.add_request(hot)
        if number == 5:
            cold = EngineRequest(rid="cold", prompt_ids=tuple(range(400, 430)), params=SamplingParams(max_new_tokens=3))
            engine.add_request(cold)
        engine.step()
        clock.advance_ns(100_000_000)
        for event in sink.events:
            if isinstance(event, AdmissionDecided) and event.rid == "cold" and event.selected_extend:
                return number, event.times_passed_over
        sink.events.clear()
    return None, 0


def test_fr_14_without_a_bound_the_cold_request_starves() -> None:
    assert _play()[0] is None


@pytest.mark.parametrize("bound", [1, 8, 32])
def test_fr_14_max_overtakes_bounds_how_often(bound: int) -> None:
    admitted, passed_over = _play(max_overtakes=bound)
    assert admitted is not None
    assert passed_over == bound


def test_fr_14_starvation_limit_bounds_how_long() -> None:
    admitted, _ = _play(starvation_limit_s=2.0)
    assert admitted is not None
    assert 25 <= admitted <= 32  # entered in round 5, 0.1 s a round; then as soon as a row is free


def test_overtakes_stand_still_while_a_request_runs_and_do_not_make_it_urgent_when_it_comes_back() -> None:
    """Otherwise a late entry could be due before an older one, and who is due would not be a head of the queue."""
    overtakes, queue = Overtakes(), PlainQueue(Policy.FCFS)
    request = Request(rid="r", prompt_len=5, max_new_tokens=3, keys=PageKeys(np.empty(0, dtype=np.int64)))
    request.entry_seq = 10
    overtakes.admitted(11, queue)
    overtakes.admitted(12, queue)
    overtakes.admitted(9, queue)
    assert (overtakes.count(request), overtakes.in_this_stay(request)) == (2, 2)
    overtakes.settle(request)
    request.state = RequestState.DECODE
    overtakes.admitted(20, queue)
    assert overtakes.count(request) == 2, "it runs: nobody passes it"
    request.state, request.entry_seq = RequestState.WAITING, 21
    overtakes.admitted(22, queue)
    assert (overtakes.count(request), overtakes.in_this_stay(request)) == (3, 1)
