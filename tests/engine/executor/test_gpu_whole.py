"""A GPU as somebody with one sets it up, whole: overlap, each mixed kernel, FlashInfer's small operators and graphs at
once, on a device that computes nothing before the host waits for it. The answers are a CPU's without any of them."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from engine.attention import flashinfer
from engine.attention.cpu import CpuBackend
from engine.attention.flashinfer import FlashInferBackend, HeadShape, MixedKernel, PrefillKernel
from engine.attention.metadata import PagedMetadata
from engine.config import EngineConfig
from engine.events import AdmissionDecided, RecordingSink
from engine.executor import gpu
from engine.executor.base import ForwardBatch, StepResult
from engine.executor.factory import build_gpu_executor
from engine.executor.torch_executor import Gpu, TorchExecutor
from engine.llm_engine import EngineRequest
from engine.models import flashinfer_ops
from engine.models.flashinfer_ops import FlashInferOps
from engine.models.llama import LlamaModel
from engine.models.llama_config import LlamaConfig
from engine.models.weights import LlamaWeights
from engine.sampling_params import SamplingParams
from tests.engine.attention.late_device import LateDevice
from tests.engine.attention.shaped_flashinfer import ShapedFlashInfer
from tests.engine.executor.late_operators import LateOperators, LateStream
from tests.engine.executor.overlapped_runs import PAGE_SIZE, LateLaunches, Said, prompt, run
from tests.engine.executor.tiny import CONFIG, tiny_weights
from tests.engine.models.gguf_files import tiny_weights as gguf_weights
from tests.engine.models.gguf_files import write_gguf

#: Models by name, each with the rows of its graphs; none is captured for windows.
MODELS = {
    "plain": (CONFIG, 3),
    "head norms": (replace(CONFIG, qk_norm=True), 4),
    "windows and head norms": (replace(CONFIG, qk_norm=True, windows=(7, 0)), 0),
}
#: What the requests ask for, greedy and drawn in turn.
ASKED: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "top_p": 0.9, "seed": 1},
    {"temperature": 0.0, "logprobs": 1},
    {"temperature": 0.7, "top_k": 20},
    {"temperature": 1.3, "min_p": 0.02, "min_new_tokens": 8, "ignore_eos": False},
    {"temperature": 0.0, "repetition_penalty": 1.3},
    {"temperature": 0.9, "top_p": 0.8, "top_k": 40, "seed": 7},
]
#: Every second prompt begins as the first one does, so that its pages are found.
REQUESTS = [
    EngineRequest(
        rid=f"r{place}",
        prompt_ids=(*prompt(21, 0)[: 21 if place % 2 == 0 else 0], *prompt(3 + 9 * (place % 3), place)),
        params=SamplingParams(**({"max_new_tokens": 20, "ignore_eos": True} | asked)),
    )
    for place, asked in enumerate(ASKED)
]
#: Too few for all.
PAGES = 30
#: Nothing is kept back for those who run.
CROWDED: dict[str, Any] = {
    "num_pages": PAGES,
    "schedule_conservativeness": 0.02,
    "clip_max_new_tokens": 2,
    "enable_mixed_chunk": True,
    "schedule_policy": "lpm",
}
MIXED_WRAPPERS = {
    MixedKernel.RAGGED: "BatchPrefillWithPagedKVCacheWrapper",
    MixedKernel.SPLIT: "BatchDecodeWithPagedKVCacheWrapper",
    MixedKernel.HOLISTIC: "BatchAttention",
    MixedKernel.POD: "BatchPODWithPagedKVCacheWrapper",
}


def weights(config: LlamaConfig) -> LlamaWeights:
    made = tiny_weights(config)
    if config.qk_norm:
        generator = torch.Generator().manual_seed(5)
        for layer in made.layers:
            layer.q_norm, layer.k_norm = 1 + torch.randn(2, config.head_dim, generator=generator) * 0.3
    return made


def _settings(num_pages: int) -> dict[str, Any]:
    return {"name": "tiny", "page_size": PAGE_SIZE, "num_pages": num_pages, "secret": b"fixed for tests"}


class HostPlans(FlashInferBackend):
    """Plans are the host's part: what they do to memory of the host is done at once."""

    def prepare(self, metadata: PagedMetadata) -> None:
        with _disable_current_modes():
            super().prepare(metadata)

    def prepare_captured(self, metadata: PagedMetadata) -> None:
        with _disable_current_modes():
            super().prepare_captured(metadata)


class WholeGpu(LateLaunches):
    """All of it on a late device. deaf, returns: faults that have to be seen."""

    def __init__(self, name: str, mixed: MixedKernel, *, deaf: bool = False, returns: int = 2) -> None:
        config, graph_rows = MODELS[name]
        self.stream = LateStream(late=False, late_fetches=True)
        self.module = ShapedFlashInfer(self.stream, operator_types=(torch.float32,))
        backend = HostPlans(
            runtime=self.stream,
            heads=HeadShape(config.num_heads, config.num_kv_heads, config.head_dim),
            dtype=torch.float32,
            windows=config.windows,
            mixed=mixed,
            prefill=PrefillKernel.FA3,
            kernels=self.module,
        )
        super().__init__(
            LlamaModel(config, weights(config), make_ops=partial(FlashInferOps, kernels=self.module)),
            attention=backend,
            gpu=Gpu(self.stream, graph_rows=graph_rows),
            returns=returns,
            **_settings(PAGES),
        )
        self.kv_cache[:, :, :PAGES] = float("nan")
        # Not before: capturing runs the model's operators, which nothing holds back yet.
        self.stream._late, self.stream._deaf = True, deaf
        self._operators = LateOperators(self.stream)


@pytest.fixture(autouse=True)
def _small_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashinfer, "WORKSPACE_BYTES", 1024)


@cache
def on_cpu(name: str) -> Said:
    """What the model says on a CPU, one step after the other, with room for all."""
    config, _ = MODELS[name]
    attention = CpuBackend(dtype=torch.float32, windows=config.windows)
    executor = TorchExecutor(LlamaModel(config, weights(config)), attention=attention, **_settings(64))
    return run(executor, REQUESTS, overlap=False)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("mixed", MixedKernel)
def test_all_settings_at_once_answer_as_a_cpu_without_any(name: str, mixed: MixedKernel) -> None:
    executor, heard = WholeGpu(name, mixed), RecordingSink()
    found = run(executor, REQUESTS, overlap=True, sinks=lambda _: [heard], **CROWDED)
    want = on_cpu(name)
    assert (found.tokens, found.ends) == (want.tokens, want.ends)
    assert found.ahead > 5
    assert any(plan.retractions for plan in found.plans), "the pool must be too small"
    assert any(plan.mixed_rows for plan in found.plans)
    decided = [event for event in heard.events if isinstance(event, AdmissionDecided)]
    assert any(event.prefix_len for event in decided if event.rid in {"r2", "r4"}), "prompts begin alike"
    assert ("replay" in executor.stream.log) == bool(MODELS[name][1])
    for function in (f"{MIXED_WRAPPERS[mixed]}.run", "fused_add_rmsnorm", "apply_rope_with_cos_sin_cache_inplace"):
        assert executor.module.named(function)


@pytest.mark.parametrize("turn", [3, 6, 9, 14])
@pytest.mark.parametrize("mixed", MixedKernel)
def test_who_is_given_up_in_flight_leaves_the_others_their_answers(mixed: MixedKernel, turn: int) -> None:
    """r0 is greedy and r1 drawn; their pages are others' soon."""
    aborts = {turn: "r0", turn + 2: "r1"}
    found = run(WholeGpu("head norms", mixed), REQUESTS, overlap=True, aborts=aborts, **CROWDED)
    want = on_cpu("head norms")
    for rid, tokens in found.tokens.items():
        assert tokens == want.tokens[rid][: len(tokens) if found.ends[rid] == "abort" else None]
    assert found.ends["r1"] == "abort"


class FailsOnce(WholeGpu):
    """Its ninth batch fails with all its kernels started, or when its tokens are asked for."""

    def __init__(self, mixed: MixedKernel, *, at_launch: bool) -> None:
        super().__init__("head norms", mixed)
        self._at_launch = at_launch
        self._left = 9

    def launch(self, batch: ForwardBatch) -> None:
        self._left -= self._at_launch
        if not self._left and self._at_launch:
            with self._operators:
                self.forward(batch, rows=[row.row for row in batch.sampling])
            raise RuntimeError("ordered")
        super().launch(batch)

    def collect(self) -> StepResult:
        result = super().collect()
        self._left -= not self._at_launch
        if not self._left and not self._at_launch:
            raise RuntimeError("ordered")
        return result


@pytest.mark.parametrize("at_launch", [True, False], ids=["launch", "collect"])
@pytest.mark.parametrize("mixed", MixedKernel)
def test_a_step_that_fails_on_the_device_costs_its_members_alone(mixed: MixedKernel, at_launch: bool) -> None:
    found = run(FailsOnce(mixed, at_launch=at_launch), REQUESTS, overlap=True, may_fail=True, **CROWDED)
    want = on_cpu("head norms")
    failed = {rid for rid, end in found.ends.items() if end == "error"}
    assert failed
    assert failed < set(found.ends) == set(want.ends)
    for rid, tokens in found.tokens.items():
        assert tokens == want.tokens[rid][: len(tokens) if rid in failed else None]


@pytest.mark.parametrize("fault", [{"returns": 1}, {"deaf": True}], ids=["one buffer", "no wait"])
@pytest.mark.parametrize("mixed", MixedKernel)
def test_sabotage_of_the_waits_is_seen(mixed: MixedKernel, fault: dict[str, Any]) -> None:
    with suppress(AssertionError, IndexError):
        found = run(WholeGpu("plain", mixed, **fault), REQUESTS, overlap=True, **CROWDED)
        if found.tokens == on_cpu("plain").tokens:
            pytest.fail("nothing was wrong")


@pytest.mark.parametrize("mixed", MixedKernel)
def test_the_start_takes_all_settings_at_once_and_makes_what_a_run_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mixed: MixedKernel
) -> None:
    monkeypatch.setattr(gpu, "HEAD_DIMS", (16,))
    monkeypatch.setattr(flashinfer_ops, "HEAD_DIMS", (16,))
    asked = {
        "device": "cuda", "attention_backend": "flashinfer", "kernels": "flashinfer", "flashinfer_mixed": mixed.value,
        "flashinfer_prefill": "fa3", "overlap": True, "cuda_graph_rows": 3, "quantization": "none",
    }  # fmt: skip
    scheduler = {"chunked_prefill_size": 16, "max_running_requests": 4}
    cache = {"page_size": PAGE_SIZE}
    config = EngineConfig.model_validate({"executor": asked, "scheduler": scheduler, "cache": cache})
    device = LateDevice(late=False, late_fetches=True)
    module = ShapedFlashInfer(device)
    path = write_gguf(tmp_path / "Tiny-1M-Q8_0.gguf", gguf_weights())
    executor = build_gpu_executor(config, path, device, kernels=module)
    made = [call.name for call in module.calls if call.name.endswith("__init__")]
    words = executor.info().vocab_size
    requests = [
        EngineRequest(rid=one.rid, prompt_ids=tuple(token % words for token in one.prompt_ids), params=one.params)
        for one in REQUESTS
    ]
    found = run(executor, requests, overlap=True, num_pages=executor.info().num_pages)
    assert set(found.ends) == {request.rid for request in REQUESTS}
    assert found.ahead > 5
    assert [call.name for call in module.calls if call.name.endswith("__init__")] == made, "made while requests wait"
    assert "replay" in device.log
