"""Overlapped steps of a real, tiny model: on a thread, and on a device whose copies are late; the same answers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from engine.attention import flashinfer
from engine.attention.flashinfer import FlashInferBackend, HeadShape
from engine.clock import VirtualClock
from engine.config import EngineConfig
from engine.events import RecordingSink, StepCompleted, StepPlanned
from engine.executor.background import BackgroundExecutor
from engine.executor.base import Executor, ForwardBatch, StepResult
from engine.executor.manual import ManualDriver
from engine.executor.overlapped_torch import OverlappedTorchExecutor
from engine.executor.torch_executor import Gpu
from engine.llm_engine import EngineRequest, LLMEngine
from engine.models.llama import LlamaModel
from engine.sampling_params import GrammarSpec, SamplingParams
from invariants import InvariantChecker
from tests.engine.attention.late_device import LateDevice
from tests.engine.attention.shaped_flashinfer import ShapedFlashInfer
from tests.engine.executor.tiny import CONFIG, tiny_executor, tiny_weights

Answers = dict[str, tuple[list[int], str]]


@pytest.fixture(autouse=True)
def _small_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashinfer, "WORKSPACE_BYTES", 1024)


def device_executor(*, graph_rows: int = 0, returns: int = 2, **device: bool) -> OverlappedTorchExecutor:
    runtime = LateDevice(late=False, **device)
    heads = HeadShape(CONFIG.num_heads, CONFIG.num_kv_heads, CONFIG.head_dim)
    backend = FlashInferBackend(runtime=runtime, heads=heads, dtype=torch.float32, kernels=ShapedFlashInfer(runtime))
    executor = OverlappedTorchExecutor(
        LlamaModel(CONFIG, tiny_weights()),
        name="tiny",
        page_size=4,
        num_pages=64,
        attention=backend,
        secret=b"fixed for tests",
        gpu=Gpu(runtime, graph_rows=graph_rows),
        returns=returns,
    )
    executor.kv_cache[:, :, :64] = float("nan")
    return executor


def prompt(length: int, seed: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(0, CONFIG.vocab_size, length).tolist())


class OddGrammar:
    """Odd tokens only, six of them."""

    def __init__(self) -> None:
        self._taken = 0

    def allowed(self) -> np.ndarray:
        bits = np.arange(-(-CONFIG.vocab_size // 32) * 32) % 2 == 1
        return np.packbits(bits, bitorder="little").view(np.int32)

    def push(self, token_id: int) -> bool:
        self._taken += 1
        return token_id % 2 == 1

    @property
    def is_complete(self) -> bool:
        return self._taken >= 6


#: By kind: what a request asks for.
KINDS: dict[str, dict[str, Any]] = {
    "one": {"max_new_tokens": 1},
    "two": {"max_new_tokens": 2},
    "long": {"max_new_tokens": 24},
    "to its end": {"max_new_tokens": 24, "ignore_eos": False},
    "not too early": {"max_new_tokens": 24, "min_new_tokens": 5, "ignore_eos": False},
    "stopped": {"max_new_tokens": 24, "stop_token_ids": tuple(range(0, CONFIG.vocab_size, 7))},
    "at once": {"max_new_tokens": 24, "stop_token_ids": tuple(range(CONFIG.vocab_size))},
    "penalty": {"max_new_tokens": 8, "repetition_penalty": 1.3},
    "grammar": {"max_new_tokens": 12, "grammar": GrammarSpec("regex", "odd")},
    "seeded": {"max_new_tokens": 10, "temperature": 0.9, "seed": 7},
    "logprobs": {"max_new_tokens": 6, "logprobs": 2},
}
GREEDY = ("one", "two", "long", "to its end", "stopped", "at once", "long", "two", "long", "stopped")


def answers(executor: Executor, kinds: tuple[str, ...], *, overlap: bool, **scheduler: Any) -> tuple[Answers, int]:
    """What requests of these kinds are answered, and how many steps were planned before the outcome of the last."""
    settings = {"max_running_requests": 4, "chunked_prefill_size": 16, "schedule_conservativeness": 0.05}
    config = EngineConfig.model_validate(
        {
            "scheduler": settings | scheduler,
            "cache": {"page_size": 4, "num_pages": 64},
            "executor": {"kind": "simulated", "overlap": overlap},
        }
    )
    sink, checker = RecordingSink(), InvariantChecker()

    class Both:
        def emit(self, event: Any) -> None:
            sink.emit(event)
            checker.emit(event)

    engine = LLMEngine(
        config, executor=executor, clock=VirtualClock(), sink=Both(), grammars=lambda _spec: OddGrammar()
    )
    said: dict[str, list[int]] = {}
    ends: dict[str, str] = {}
    waiting = [(f"{kind}-{place}", kind) for place, kind in enumerate(kinds)]
    turn = 0
    while waiting or engine.has_work:
        if waiting and turn % 2 == 0:
            rid, kind = waiting.pop(0)
            seed = len(said) % 4
            params = SamplingParams(**({"temperature": 0.0, "ignore_eos": True} | KINDS[kind]))
            said[rid] = []
            engine.add_request(EngineRequest(rid=rid, prompt_ids=prompt(9 + 11 * seed, seed), params=params))
        turn += 1
        for output in engine.step():
            if output.token_id is not None:
                said[output.rid].append(output.token_id)
            if output.finish is not None:
                ends[output.rid] = output.finish.value
        assert checker.audit(engine.snapshot())
        assert engine.last_failure is None, engine.last_failure
    engine.close()
    ahead = last = 0
    for event in sink.events:
        if isinstance(event, StepCompleted):
            last = event.step
        ahead += isinstance(event, StepPlanned) and event.step > last + 1
    return {rid: (tokens, ends[rid]) for rid, tokens in said.items()}, ahead


SCHEDULERS = [
    {},
    {"enable_mixed_chunk": True},
    {"chunked_prefill_size": None},
    {"clip_max_new_tokens": 2, "max_running_requests": 8, "schedule_policy": "lpm"},
    {"kv_accounting": "exact"},
]


@pytest.mark.parametrize("scheduler", SCHEDULERS, ids=lambda s: "-".join(s) or "plain")
@pytest.mark.parametrize("kinds", [GREEDY, tuple(KINDS)], ids=["greedy", "all"])
def test_a_model_on_a_thread_answers_the_same(kinds: tuple[str, ...], scheduler: dict[str, Any]) -> None:
    want, none = answers(tiny_executor(page_size=4, num_pages=64), kinds, overlap=False, **scheduler)
    behind = BackgroundExecutor(tiny_executor(page_size=4, num_pages=64))
    found, ahead = answers(behind, kinds, overlap=True, **scheduler)
    assert found == want
    assert (none, ahead > 5) == (0, True)


@pytest.mark.parametrize("graph_rows", [0, 3])
@pytest.mark.parametrize("kinds", [GREEDY, tuple(KINDS)], ids=["greedy", "all"])
def test_a_device_whose_copies_are_late_answers_the_same(kinds: tuple[str, ...], graph_rows: int) -> None:
    want, _ = answers(tiny_executor(page_size=4, num_pages=64), kinds, overlap=False)
    found, ahead = answers(device_executor(graph_rows=graph_rows, late_fetches=True), kinds, overlap=True)
    assert found == want
    assert ahead > 5


def test_one_return_buffer_instead_of_two_is_seen() -> None:
    want, _ = answers(tiny_executor(page_size=4, num_pages=64), GREEDY, overlap=False)
    found, _ = answers(device_executor(returns=1), GREEDY, overlap=True)
    assert found != want


def test_tokens_that_nobody_waits_for_are_seen() -> None:
    want, _ = answers(tiny_executor(page_size=4, num_pages=64), GREEDY, overlap=False)
    found, _ = answers(device_executor(late_fetches=True, deaf=True), GREEDY, overlap=True)
    assert found != want


class Slow:
    """An executor whose results come late, and never in step with the host."""

    def __init__(self, inner: Executor) -> None:
        self._inner = inner
        self._count = 0

    def info(self) -> Any:
        return self._inner.info()

    def execute(self, batch: ForwardBatch) -> StepResult:
        result = self._inner.execute(batch)
        self._count += 1
        for _ in range(20_000 * (self._count % 3)):
            pass
        return result

    def close(self) -> None:
        self._inner.close()


def test_results_that_come_late_are_those_of_their_steps() -> None:
    want, _ = answers(tiny_executor(page_size=4, num_pages=64), GREEDY, overlap=False)
    found, _ = answers(BackgroundExecutor(Slow(tiny_executor(page_size=4, num_pages=64))), GREEDY, overlap=True)
    assert found == want


def batch_of(step: int, *, carried: tuple[tuple[int, int], ...] = ()) -> ForwardBatch:
    driver = ManualDriver(tiny_executor(page_size=4, num_pages=64))
    made = driver.batch([(driver.add("r", prompt(5, 1)), 5)])
    return replace(made, step=step, carried=carried)


def test_a_batch_that_failed_on_the_thread_is_told_when_it_is_collected() -> None:
    seen: list[int] = []

    class FailsOnce(Slow):
        def execute(self, batch: ForwardBatch) -> StepResult:
            seen.append(int(batch.token_ids[4]))
            if len(seen) == 1:
                raise RuntimeError("ordered")
            return super().execute(batch)

    executor = BackgroundExecutor(FailsOnce(tiny_executor(page_size=4, num_pages=64)))
    executor.launch(batch_of(1))
    executor.launch(batch_of(2, carried=((4, 0),)))
    with pytest.raises(RuntimeError, match="ordered"):
        executor.collect()
    first = executor.collect()
    executor.launch(batch_of(3, carried=((4, 0),)))
    assert executor.collect().step == 3
    assert seen[1:] == [0, first.tokens[0].token_id], "no token to take over, then the one before"
    executor.close()
