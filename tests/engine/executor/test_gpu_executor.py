"""TorchExecutor as on a GPU, on a CPU: staged copies, FlashInfer's shape and captured graphs change no number."""

from __future__ import annotations

import dataclasses
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.attention import flashinfer
from engine.attention.flashinfer import FlashInferBackend, HeadShape
from engine.clock import VirtualClock
from engine.config import EngineConfig
from engine.events import RecordingSink, StepPlanned
from engine.executor.manual import ManualDriver
from engine.executor.torch_executor import Gpu, TorchExecutor
from engine.llm_engine import EngineRequest, LLMEngine
from engine.models.flashinfer_ops import FlashInferOps
from engine.models.llama import LlamaModel
from engine.models.ops import TorchOps
from engine.sampling_params import SamplingParams
from tests.engine.attention.late_device import LateDevice
from tests.engine.attention.shaped_flashinfer import ShapedFlashInfer
from tests.engine.executor.tiny import CONFIG, tiny_executor, tiny_weights

#: Small operators by torch and by FlashInfer.
SMALL = pytest.mark.parametrize("small", [False, True], ids=["torch", "flashinfer"])
SEEDED = SamplingParams(max_new_tokens=64, temperature=0.9, top_p=0.95, seed=1234, ignore_eos=True)


@pytest.fixture(autouse=True)
def _small_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashinfer, "WORKSPACE_BYTES", 1024)


def gpu_executor(
    *, graph_rows: int = 0, num_pages: int = 64, page_size: int = 16, small: bool = False
) -> tuple[TorchExecutor, LateDevice, ShapedFlashInfer]:
    """An executor on a device that works at once: what is not sent to it through the seam is not there later.

    small   FlashInfer's small operators too, in float32, which its kernels do not have: bits are held against a CPU's
    """
    device = LateDevice(late=False)
    module = ShapedFlashInfer(device, operator_types=(torch.float32,))
    backend = FlashInferBackend(
        runtime=device,
        heads=HeadShape(CONFIG.num_heads, CONFIG.num_kv_heads, CONFIG.head_dim),
        dtype=torch.float32,
        kernels=module,
    )
    executor = TorchExecutor(
        LlamaModel(CONFIG, tiny_weights(), make_ops=partial(FlashInferOps, kernels=module) if small else TorchOps),
        name="tiny",
        page_size=page_size,
        num_pages=num_pages,
        attention=backend,
        secret=b"fixed for tests",
        gpu=Gpu(device, graph_rows=graph_rows),
    )
    executor.kv_cache[:, :, :num_pages] = float("nan")
    return executor, device, module


def prompt(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, CONFIG.vocab_size, length).tolist()


def conversation(executor: TorchExecutor, lens: list[int], params: SamplingParams, *, cut: int) -> list[list[int]]:
    """Prompts that come one after the other, in pieces of `cut`, while the earlier ones decode; then all decode."""
    driver = ManualDriver(executor)
    running = []
    for seed, length in enumerate(lens):
        late = driver.add(f"r{seed}", prompt(length, seed), params)
        while late.missing_len > 1 or not late.outputs:
            driver.step([(late, min(cut, late.missing_len)), *((s, 1) for s in running)])
        running.append(late)
    driver.generate(running, 12)
    return [sequence.outputs for sequence in running]


@pytest.mark.parametrize("params", [SamplingParams(max_new_tokens=64, temperature=0.0), SEEDED], ids=["greedy", "seed"])
@pytest.mark.parametrize("graph_rows", [0, 1, 3, 8])
@pytest.mark.parametrize("cut", [20, 100])
@SMALL
def test_a_conversation_is_the_same_as_on_the_cpu(
    params: SamplingParams, graph_rows: int, cut: int, small: bool
) -> None:
    lens = [33, 7, 60, 1, 18]
    want = conversation(tiny_executor(), lens, params, cut=cut)
    executor, device, _ = gpu_executor(graph_rows=graph_rows, small=small)
    assert conversation(executor, lens, params, cut=cut) == want
    assert ("replay" in device.log) == bool(graph_rows)


@given(lens=st.lists(st.integers(2, 50), min_size=1, max_size=7), graph_rows=st.integers(1, 8), small=st.booleans())
@settings(max_examples=15)
def test_graphs_answer_as_the_eager_pass_does(lens: list[int], graph_rows: int, small: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flashinfer, "WORKSPACE_BYTES", 1024)
        eager, graphed = (gpu_executor(graph_rows=rows, small=small)[0] for rows in (0, graph_rows))
    logits = []
    for executor in (eager, graphed):
        driver = ManualDriver(executor)
        sequences = [driver.add(f"r{i}", prompt(length, i)) for i, length in enumerate(lens)]
        driver.step([(s, s.missing_len - 1) for s in sequences])
        rows = list(range(len(lens)))[::-1]
        logits.append(executor.forward(driver.batch([(s, 1) for s in sequences]), rows=rows))
    assert torch.allclose(logits[0], logits[1], atol=1e-5)


@SMALL
def test_padded_rows_touch_no_page_of_the_pool(small: bool) -> None:
    executor, device, _ = gpu_executor(graph_rows=8, small=small)
    driver = ManualDriver(executor)
    sequences = [driver.add(f"r{i}", prompt(20, i)) for i in range(5)]
    driver.step([(s, s.missing_len) for s in sequences])
    before = executor.kv_cache.clone()
    batch = driver.batch([(s, 1) for s in sequences])
    executor.forward(batch, rows=[0])
    assert device.log[-1] == "replay"
    written = set(batch.metadata.out_slots.tolist())
    was, now = (cache[:, :, :64].flatten(2, 3).nan_to_num() for cache in (before, executor.kv_cache))
    changed = (was != now).any(dim=-1).any(dim=-1).any(dim=0).any(dim=0)
    assert set(changed.nonzero().flatten().tolist()) == written


@pytest.mark.parametrize("sampled", [[], [4], [2, 0, 4]])
def test_a_graph_answers_for_the_rows_that_are_asked(sampled: list[int]) -> None:
    executor, device, _ = gpu_executor(graph_rows=8)
    driver = ManualDriver(executor)
    sequences = [driver.add(f"r{i}", prompt(9, i)) for i in range(5)]
    driver.step([(s, s.missing_len) for s in sequences])
    batch = driver.batch([(s, 1) for s in sequences])
    every = executor.forward(batch, rows=list(range(5)))
    some = executor.forward(batch, rows=sampled)
    assert device.log[-1] == "replay"
    assert torch.equal(some, every[sampled])


def test_prompts_and_batches_that_are_too_large_go_without_a_graph() -> None:
    executor, device, _ = gpu_executor(graph_rows=2)
    driver = ManualDriver(executor)
    sequences = [driver.add(f"r{i}", prompt(9, i)) for i in range(3)]
    driver.step([(s, s.missing_len) for s in sequences])
    driver.step([(s, 1) for s in sequences])
    assert "replay" not in device.log
    driver.step([(s, 1) for s in sequences[:2]])
    assert device.log.count("replay") == 1


def test_graphs_are_captured_from_the_largest_to_the_smallest_and_never_again() -> None:
    executor, device, module = gpu_executor(graph_rows=8)
    made = module.named("BatchDecodeWithPagedKVCacheWrapper.__init__")
    sizes = [len(given_["paged_kv_last_page_len_buffer"]) for given_ in made]
    assert sizes == [8, 4, 2, 1]
    driver = ManualDriver(executor)
    driver.generate([driver.add(f"r{i}", prompt(9, i)) for i in range(3)], 9)
    assert device.log.count("capture") == 4
    assert device.log.count("replay") == 8


def test_the_spare_page_is_not_offered() -> None:
    executor, _, _ = gpu_executor(graph_rows=4, num_pages=10)
    assert executor.info().num_pages == 10
    assert executor.kv_cache.shape[2] == 11
    assert gpu_executor(num_pages=10)[0].kv_cache.shape[2] == 10


def test_a_step_sends_its_rows_in_one_copy_and_its_plan_in_another() -> None:
    executor, device, module = gpu_executor()
    driver = ManualDriver(executor)
    sequence = driver.add("r", prompt(20, 0))
    device.log.clear()
    driver.step([(sequence, 20)])
    ours = [line for line in device.log if line.startswith("copy")]
    # tokens, positions and slots of 20 rows, and the one that is sampled; beside them what the plan itself copies.
    assert "copy 61" in ours
    assert executor.info().attention_backend == "flashinfer"
    assert len(module.named("BatchPrefillWithPagedKVCacheWrapper.plan")) == 1


def test_sabotage_a_graph_that_reads_other_memory_than_it_was_captured_with_is_seen() -> None:
    """Rows packed elsewhere than at the capture: the replay computes the old ones."""
    executor, _, _ = gpu_executor(graph_rows=2)
    driver = ManualDriver(executor)
    sequences = [driver.add(f"r{i}", prompt(9, i)) for i in range(2)]
    driver.step([(s, s.missing_len) for s in sequences])
    batch = driver.batch([(s, 1) for s in sequences])
    right = executor.forward(batch, rows=[0, 1])
    graphs = executor._graphs
    assert graphs is not None
    captured = graphs._captured[2]
    captured.staging._reserve(8)
    other = dataclasses.replace(batch, token_ids=(batch.token_ids + 1) % CONFIG.vocab_size)
    assert torch.equal(executor.forward(other, rows=[0, 1]), right)


def whole_run(executor: TorchExecutor) -> tuple[dict[str, list[int]], list[StepPlanned]]:
    """A whole engine with a pool that is too small: answers, and every plan."""
    scheduler = {"chunked_prefill_size": 16, "max_running_requests": 8, "schedule_conservativeness": 0.02}
    config = EngineConfig.model_validate({"scheduler": scheduler, "cache": {"page_size": 4, "num_pages": 44}})
    sink = RecordingSink()
    engine = LLMEngine(config, executor=executor, clock=VirtualClock(), sink=sink)
    answers: dict[str, list[int]] = {f"r{i}": [] for i in range(5)}
    waiting = list(answers)
    while waiting or engine.has_work:
        if waiting and engine.steps_done % 2 == 0:
            rid = waiting.pop(0)
            params = SamplingParams(max_new_tokens=40, temperature=0.0, min_new_tokens=40)
            engine.add_request(EngineRequest(rid=rid, prompt_ids=tuple(prompt(37, int(rid[1:]))), params=params))
        for output in engine.step():
            if output.token_id is not None:
                answers[output.rid].append(output.token_id)
    return answers, [event for event in sink.events if isinstance(event, StepPlanned)]


@pytest.mark.parametrize("graph_rows", [0, 3])
@SMALL
def test_a_whole_engine_decides_and_answers_as_on_the_cpu(graph_rows: int, small: bool) -> None:
    answers, plans = whole_run(tiny_executor(page_size=4, num_pages=44))
    executor, device, _ = gpu_executor(graph_rows=graph_rows, num_pages=44, page_size=4, small=small)
    assert whole_run(executor) == (answers, plans)
    assert any(plan.retractions for plan in plans), "the pool must be too small"
    assert ("replay" in device.log) == bool(graph_rows)
