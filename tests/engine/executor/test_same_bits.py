"""Answers with kernels in C: the same tokens whatever the chunks, the neighbours, the cache and the pressure."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from engine.clock import VirtualClock
from engine.config import EngineConfig
from engine.events import RecordingSink, StepPlanned
from engine.executor.factory import build_torch_executor
from engine.executor.torch_executor import TorchExecutor
from engine.llm_engine import EngineRequest, LLMEngine
from engine.sampling_params import SamplingParams
from engine.scheduler.plan import StepKind
from tests.engine.models.test_native_llama import SMALL, native
from tests.engine.native.libraries import EACH, Kernels, library

GREEDY = SamplingParams(max_new_tokens=80, temperature=0.0, min_new_tokens=80)
DRAWN = SamplingParams(max_new_tokens=80, temperature=1.0, top_p=0.95, seed=5, min_new_tokens=80)
#: Settings that must not change a token; the first is the one that others are held against.
SETTINGS: dict[str, dict[str, Any]] = {
    "roomy": {},
    "small chunks": {"scheduler": {"chunked_prefill_size": 16}},
    "odd chunks, small pages": {"scheduler": {"chunked_prefill_size": 20}, "cache": {"page_size": 4, "num_pages": 512}},
    "one at a time": {"scheduler": {"max_running_requests": 1}},
    "pressure": {"scheduler": {"schedule_conservativeness": 0.02}, "cache": {"num_pages": 26}},
    "pressure, nothing shared": {
        "scheduler": {"schedule_conservativeness": 0.02, "chunked_prefill_size": 32},
        "cache": {"num_pages": 32, "enable_radix": False},
    },
    "decodes and pieces apart": {"scheduler": {"enable_mixed_chunk": False, "chunked_prefill_size": 48}},
}


def config_of(name: str) -> EngineConfig:
    changes = SETTINGS[name]
    return EngineConfig.model_validate(
        {
            "scheduler": {"max_running_requests": 8, **changes.get("scheduler", {})},
            "cache": {"page_size": 16, "num_pages": 128, **changes.get("cache", {})},
        }
    )


def answers(executor: TorchExecutor, config: EngineConfig) -> tuple[dict[str, list[int]], list[StepPlanned]]:
    """What eight requests, two of which begin alike, get; and the plans."""
    sink = RecordingSink()
    engine = LLMEngine(config, executor=executor, clock=VirtualClock(), sink=sink)
    got: dict[str, list[int]] = {}
    shared = np.random.default_rng(9).integers(10, 300, 40).tolist()
    for index in range(8):
        own = np.random.default_rng(index).integers(10, 300, (5, 41, 33, 20)[index % 4]).tolist()
        rid = f"r{index}"
        got[rid] = []
        prompt = tuple([*shared, *own] if index % 2 else own)
        engine.add_request(EngineRequest(rid=rid, prompt_ids=prompt, params=(GREEDY, DRAWN)[index // 2 % 2]))
        for output in engine.step():
            got[output.rid].append(output.token_id or -1)
    while engine.has_work:
        for output in engine.step():
            got[output.rid].append(output.token_id or -1)
    return got, [event for event in sink.events if isinstance(event, StepPlanned)]


@EACH
@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_tokens_depend_on_nothing_but_their_request(kernels: Kernels, quantization: Any) -> None:
    found: dict[str, dict[str, list[int]]] = {}
    for name in SETTINGS:
        config = config_of(name)
        executor = native(
            SMALL,
            kernels=kernels,
            quantization=quantization,
            page_size=config.cache.page_size,
            num_pages=config.cache.num_pages or 0,
        )
        found[name], plans = answers(executor, config)
        if name in {"roomy", "one at a time"}:
            assert any(plan.kind is StepKind.MIXED for plan in plans) == (name == "roomy")
        assert any(plan.retractions for plan in plans) == name.startswith("pressure"), name
    assert len({tuple(tokens) for tokens in found["roomy"].values()}) == 8
    for name, got in found.items():
        assert got == found["roomy"], name


@pytest.mark.model
def test_so_do_those_of_a_real_model() -> None:
    library()  # skips where there are no such kernels
    found = []
    for name in ("roomy", "pressure, nothing shared"):
        config = config_of(name)
        executor = build_torch_executor(config)
        assert executor.info().attention_backend == "native"
        found.append(answers(executor, config)[0])
        executor.close()
    assert found[0] == found[1]
