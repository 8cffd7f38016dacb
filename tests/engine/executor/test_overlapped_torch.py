"""Overlapped steps of a real, tiny model: on a thread, and on a device whose copies are late; the same answers."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch

from engine.attention import flashinfer
from engine.attention.flashinfer import FlashInferBackend, HeadShape
from engine.executor.background import BackgroundExecutor
from engine.executor.base import Executor, ForwardBatch, StepResult
from engine.executor.manual import ManualDriver
from engine.executor.overlapped_torch import OverlappedTorchExecutor
from engine.executor.torch_executor import Gpu
from engine.llm_engine import EngineRequest
from engine.models.llama import LlamaModel
from engine.sampling_params import GrammarSpec, SamplingParams
from tests.engine.attention.late_device import LateDevice
from tests.engine.attention.shaped_flashinfer import ShapedFlashInfer
from tests.engine.executor.overlapped_runs import prompt, run
from tests.engine.executor.tiny import CONFIG, tiny_executor, tiny_weights

Answers = dict[str, tuple[list[int], str, list[int]]]


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
    "warm": {"max_new_tokens": 24, "temperature": 1.4},
    "top k": {"max_new_tokens": 20, "temperature": 1.0, "top_k": 9, "seed": 3},
    "top p": {"max_new_tokens": 20, "temperature": 1.2, "top_p": 0.9, "ignore_eos": False},
    "min p": {"max_new_tokens": 16, "temperature": 1.0, "min_p": 0.05, "seed": 5, "logprobs": 0},
    "all filters": {"max_new_tokens": 16, "temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.01, "logprobs": 3},
    "logprobs": {"max_new_tokens": 6, "logprobs": 2},
}
GREEDY = ("one", "two", "long", "to its end", "stopped", "at once", "long", "two", "long", "stopped")
DRAWN = ("warm", "top k", "long", "top p", "seeded", "min p", "all filters", "not too early", "logprobs", "stopped")


def answers(executor: Executor, kinds: tuple[str, ...], *, overlap: bool, **scheduler: Any) -> tuple[Answers, int]:
    """What requests of these kinds are answered, and how many steps were planned before the outcome of the last."""
    requests = [
        EngineRequest(
            rid=f"{kind}-{place}",
            prompt_ids=prompt(9 + 11 * (place % 4), place % 4),
            params=SamplingParams(**({"temperature": 0.0, "ignore_eos": True} | KINDS[kind])),
        )
        for place, kind in enumerate(kinds)
    ]
    said = run(executor, requests, overlap=overlap, **scheduler)
    # Log-probabilities themselves hang, in their last bits, on who else is in a matrix product.
    told = {rid: [-1 if one is None else len(one.top) for one in found] for rid, found in said.logprobs.items()}
    return {rid: (tokens, said.ends[rid], told[rid]) for rid, tokens in said.tokens.items()}, said.ahead


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
@pytest.mark.parametrize("kinds", [GREEDY, DRAWN, tuple(KINDS)], ids=["greedy", "drawn", "all"])
def test_a_device_whose_copies_are_late_answers_the_same(kinds: tuple[str, ...], graph_rows: int) -> None:
    want, _ = answers(tiny_executor(page_size=4, num_pages=64), kinds, overlap=False)
    found, ahead = answers(device_executor(graph_rows=graph_rows, late_fetches=True), kinds, overlap=True)
    assert found == want
    assert ahead > 5


def test_drawn_rows_run_ahead_as_greedy_ones_do() -> None:
    """As many plans before the outcome of the last, whether the same requests are drawn or not."""
    kinds = ("long",) * 6
    _, greedy = answers(device_executor(), kinds, overlap=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(KINDS, "long", {"max_new_tokens": 24, "temperature": 1.0, "top_p": 0.9, "logprobs": 1})
        _, drawn = answers(device_executor(), kinds, overlap=True)
    assert drawn == greedy


@pytest.mark.parametrize("kinds", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_one_return_buffer_instead_of_two_is_seen(kinds: tuple[str, ...]) -> None:
    """The tokens of one batch are those of the next: wrong ones, or more or fewer than it has rows."""
    want, _ = answers(tiny_executor(page_size=4, num_pages=64), kinds, overlap=False)
    with suppress(AssertionError):
        found, _ = answers(device_executor(returns=1), kinds, overlap=True)
        if found == want:
            pytest.fail("nothing was wrong with one buffer")


@pytest.mark.parametrize("kinds", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_tokens_that_nobody_waits_for_are_seen(kinds: tuple[str, ...]) -> None:
    want, _ = answers(tiny_executor(page_size=4, num_pages=64), kinds, overlap=False)
    found, _ = answers(device_executor(late_fetches=True, deaf=True), kinds, overlap=True)
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
