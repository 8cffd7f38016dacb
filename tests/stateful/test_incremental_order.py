"""The incremental order equals matching and sorting the whole queue: same decisions, same evictions, same events."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.clock import VirtualClock
from engine.config import CacheConfig, EngineConfig, ExecutorConfig, Policy, SchedulerConfig
from engine.events import EngineStarted, RecordingSink
from engine.executor.simulated import SimulatedExecutor
from engine.llm_engine import EngineRequest, LLMEngine
from engine.sampling_params import SamplingParams
from tests.stateful.effort import effort


def _engine(
    *, incremental: bool, policy: Policy, page_size: int, pool_tokens: int, fallback: int | None, chained: bool
) -> LLMEngine:
    config = EngineConfig(
        scheduler=SchedulerConfig(
            schedule_policy=policy,
            chunked_prefill_size=max(64, page_size),
            max_prefill_tokens=128,
            max_running_requests=6,
            incremental_order=incremental,
            lpm_fallback_threshold=fallback,
        ),
        cache=CacheConfig(page_size=page_size, num_pages=pool_tokens // page_size),
        executor=ExecutorConfig(kind="simulated"),
    )
    secret = b"" if chained or page_size > 1 else None  # None at page size 1: the ids themselves are the keys
    executor = SimulatedExecutor(config)
    return LLMEngine(config, executor=executor, clock=VirtualClock(), sink=RecordingSink(), key_secret=secret)


def _prompt(chance: random.Random) -> tuple[int, ...]:
    """Prompts that share heads of all lengths: whole prefixes, the first 32 tokens only, page-crossing stems."""
    stem = chance.randrange(4)
    shared = chance.choice([0, 8, 16, 31, 32, 33, 48, 64, 90])
    tail = chance.randrange(1, 40)
    branch = chance.randrange(3)
    return (
        tuple(stem * 100 + place % 50 for place in range(shared))
        + tuple(400 + branch for _ in range(chance.choice([0, 5, 16])))
        + tuple(chance.randrange(512) for _ in range(tail))
    )


def _play(seed: int, **shape: Any) -> tuple[list[Any], list[Any]]:
    """The same inputs into an incremental and a brute-force engine; their events and orders."""
    engines = [_engine(incremental=incremental, **shape) for incremental in (True, False)]
    orders: list[list[Any]] = [[], []]
    for engine in engines:
        engine.scheduler.state.record_order = True
    chance = random.Random(seed)
    number = 0
    for _ in range(160):
        for _ in range(chance.choice([0, 0, 1, 2, 5])):
            request = EngineRequest(
                rid=f"r{number}",
                prompt_ids=_prompt(chance),
                params=SamplingParams(max_new_tokens=chance.randrange(1, 60), ignore_eos=chance.random() < 0.5),
            )
            number += 1
            for engine in engines:
                engine.add_request(request)
        if chance.random() < 0.15 and number:
            victim = f"r{chance.randrange(number)}"
            for engine in engines:
                engine.abort_request(victim)
        for engine, seen in zip(engines, orders, strict=True):
            engine.step()
            seen.append(engine.scheduler.state.ordering)
            seen.append([request.rid for request in engine.scheduler.state.waiting])
    streams = []
    for engine in engines:
        sink = engine.scheduler.publisher._sink
        assert isinstance(sink, RecordingSink)
        streams.append([e for e in sink.events if not isinstance(e, EngineStarted)])
    for position, (left, right) in enumerate(zip(orders[0], orders[1], strict=True)):
        assert left == right, f"order {position}"
    return streams[0], streams[1]


@pytest.mark.parametrize("policy", [Policy.LPM, Policy.SHORTEST_PREFILL_FIRST, Policy.DFS_WEIGHT])
@effort(30)
@given(
    seed=st.integers(0, 2**32),
    page_size=st.sampled_from([1, 4, 16]),
    pool_tokens=st.sampled_from([256, 400, 1024]),
    fallback=st.sampled_from([None, None, 6]),
    chained=st.booleans(),
)
def test_equal_to_brute_force(policy: Policy, seed: int, **shape: Any) -> None:
    left, right = _play(seed, policy=policy, **shape)
    for index, (ours, theirs) in enumerate(zip(left, right, strict=False)):
        assert ours == theirs, f"event {index}"
    assert len(left) == len(right)
    assert msgspec.json.encode(left) == msgspec.json.encode(right)
