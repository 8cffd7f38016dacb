"""Attention kernels that are chosen by settings, on a CPU: refused where they do not fit, their memory counted before
pages are, made before the first request, and answers that stay what they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.attention import flashinfer
from engine.attention.device import DeviceMemory
from engine.attention.flashinfer import FlashInferBackend, HeadShape, MixedKernel, PrefillKernel
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.executor import gpu
from engine.executor.factory import build_gpu_executor
from engine.executor.manual import ManualDriver
from engine.executor.torch_executor import Gpu, TorchExecutor
from engine.models.llama import LlamaModel
from engine.sampling_params import SamplingParams
from tests.engine.attention.late_device import MIB, LateDevice
from tests.engine.attention.shaped_flashinfer import ShapedFlashInfer
from tests.engine.executor.tiny import CONFIG, tiny_executor, tiny_weights
from tests.engine.models.gguf_files import tiny_weights as gguf_weights
from tests.engine.models.gguf_files import write_gguf

#: What the double's BatchAttention brings, for the 392 MiB of the real one.
BROUGHT_MIB = 4
EVERY_CHOICE = pytest.mark.parametrize(
    ("mixed", "prefill"), [(mixed, prefill) for mixed in MixedKernel for prefill in PrefillKernel]
)


@pytest.fixture(autouse=True)
def _tiny_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashinfer, "WORKSPACE_BYTES", 1024)
    monkeypatch.setattr(gpu, "HEAD_DIMS", (16,))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "Tiny-1M-Q8_0.gguf", gguf_weights())


def config(mixed: str = "ragged", prefill: str = "fa2", **sections: Any) -> EngineConfig:
    executor = {
        "device": "cuda",
        "attention_backend": "flashinfer",
        "dtype": "bfloat16",
        "flashinfer_mixed": mixed,
        "flashinfer_prefill": prefill,
    }
    executor |= sections.pop("executor", {})
    scheduler = {"chunked_prefill_size": 64, "max_running_requests": 5}
    return EngineConfig.model_validate({"executor": executor, "scheduler": scheduler} | sections)


@pytest.mark.parametrize(("name", "value"), [("flashinfer_mixed", "pod"), ("flashinfer_prefill", "fa3")])
def test_a_choice_among_flashinfers_kernels_is_for_its_backend(name: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"executor.{name}={value} needs executor.attention_backend=flashinfer"):
        EngineConfig.model_validate({"executor": {name: value}})


@pytest.mark.parametrize(
    ("capability", "mixed", "prefill", "words"),
    [
        ((8, 9), "ragged", "fa3", r"executor.flashinfer_prefill=fa3: .* 9\.0 \(Hopper\), this GPU has 8\.9: use fa2"),
        ((8, 9), "pod", "fa2", r"executor.flashinfer_mixed=pod: .* 8\.0 and 9\.0, this GPU has 8\.9: use split"),
    ],
)
def test_a_gpu_that_has_no_such_kernels_is_told_at_the_start(
    path: Path, capability: tuple[int, int], mixed: str, prefill: str, words: str
) -> None:
    device = LateDevice(late=False, capability=capability)
    with pytest.raises(ConfigError, match=words):
        build_gpu_executor(config(mixed, prefill), path, device, kernels=ShapedFlashInfer(device))
    hopper = LateDevice(late=False)
    build_gpu_executor(config(mixed, prefill), path, hopper, kernels=ShapedFlashInfer(hopper)).close()


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({}, r"executor.attention_backend=flashinfer: .* 8\.0 or higher, this GPU has 7\.5: .*_backend=reference"),
        ({"attention_backend": "reference", "kernels": "flashinfer"}, r"executor.kernels=flashinfer: .* use .*=torch"),
    ],
)
def test_a_gpu_without_bfloat16_is_told_before_the_weights_are_read(
    tmp_path: Path, path: Path, asked: dict[str, str], words: str
) -> None:
    old = LateDevice(late=False, capability=(7, 5))
    with pytest.raises(ConfigError, match=words):
        build_gpu_executor(config(executor=asked), tmp_path / "absent", old, kernels=ShapedFlashInfer(old))
    torchs = config(executor={"attention_backend": "reference"}, cache={"num_pages": 9})
    build_gpu_executor(torchs, path, old).close()


def test_heads_that_batch_attention_has_no_memory_for_are_told_at_the_start(path: Path) -> None:
    device = LateDevice(late=False)
    module = ShapedFlashInfer(device, holistic_heads=1)
    with pytest.raises(ConfigError, match=r"executor.flashinfer_mixed=holistic: .* 2 K/V heads of 16: Buffer overflow"):
        build_gpu_executor(config("holistic", cache={"num_pages": 9}), path, device, kernels=module)


class Filling(LateDevice):
    """A device whose memory BatchAttention takes a part of."""

    def __init__(self) -> None:
        super().__init__(late=False)
        self.module = ShapedFlashInfer(self)

    def memory(self) -> DeviceMemory:
        taken = (5 + BROUGHT_MIB * len(self.module.named("BatchAttention.__init__"))) * MIB
        return DeviceMemory(total=20 * MIB, free=20 * MIB - taken, allocated=taken, peak=taken + 3 * MIB)


def test_the_memory_that_batch_attention_brings_is_not_given_to_pages(path: Path) -> None:
    pages, page_bytes = {}, 2 * 2 * 2 * 16 * 16 * 2
    for mixed in ("ragged", "holistic"):
        device = Filling()
        wanted = config(mixed, executor={"gpu_memory_share": 1.0})
        executor = build_gpu_executor(wanted, path, device, kernels=device.module)
        pages[mixed] = executor.info().num_pages
    assert pages["ragged"] == (20 - 5 - 3) * MIB // page_bytes
    assert pages["ragged"] - pages["holistic"] == BROUGHT_MIB * MIB // page_bytes


@EVERY_CHOICE
@pytest.mark.parametrize("graph_rows", [0, 2, 8])
def test_the_warm_up_makes_whatever_a_batch_will_need(
    path: Path, mixed: MixedKernel, prefill: PrefillKernel, graph_rows: int
) -> None:
    device = LateDevice(late=False)
    module = ShapedFlashInfer(device)
    wanted = config(mixed, prefill, executor={"cuda_graph_rows": graph_rows})
    executor = build_gpu_executor(wanted, path, device, kernels=module)
    made = [call.name for call in module.calls if call.name.endswith("__init__")]
    driver = ManualDriver(executor)
    for turn in range(4):
        decoding = [driver.add(f"decode {turn} {i}", [5, 6]) for i in range(3)]
        pieces = [driver.add(f"piece {turn} {i}", [5, 6, 7]) for i in range(3)]
        driver.step([(pieces[0], 3), *((s, 1) for s in decoding)])
        driver.step([(pieces[1], 3)])
        driver.step([(s, 1) for s in decoding])
        if turn == 1:
            # Where graphs take the decode rows, each round takes both sets in the same order: now in the other one.
            driver.step([(pieces[2], 3)])
    assert [call.name for call in module.calls if call.name.endswith("__init__")] == made


def conversation(executor: TorchExecutor) -> list[list[int]]:
    """Prompts that come in pieces while earlier ones decode; then all decode."""
    driver = ManualDriver(executor)
    running: list[Any] = []
    for seed, length in enumerate([33, 7, 60, 1, 18]):
        prompt = torch.randint(0, CONFIG.vocab_size, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
        late = driver.add(f"r{seed}", prompt, SamplingParams(max_new_tokens=64, temperature=0.0))
        while late.missing_len > 1 or not late.outputs:
            driver.step([(late, min(20, late.missing_len)), *((s, 1) for s in running)])
        running.append(late)
    driver.generate(running, 12)
    return [sequence.outputs for sequence in running]


@EVERY_CHOICE
@pytest.mark.parametrize("graph_rows", [0, 3])
def test_a_conversation_is_the_same_as_on_the_cpu(mixed: MixedKernel, prefill: PrefillKernel, graph_rows: int) -> None:
    device = LateDevice(late=False)
    module = ShapedFlashInfer(device)
    backend = FlashInferBackend(
        runtime=device,
        heads=HeadShape(CONFIG.num_heads, CONFIG.num_kv_heads, CONFIG.head_dim),
        dtype=torch.float32,
        mixed=mixed,
        prefill=prefill,
        kernels=module,
    )
    executor = TorchExecutor(
        LlamaModel(CONFIG, tiny_weights()),
        name="tiny",
        page_size=16,
        num_pages=64,
        attention=backend,
        secret=b"fixed for tests",
        gpu=Gpu(device, graph_rows=graph_rows),
    )
    assert conversation(executor) == conversation(tiny_executor())
    used = {
        MixedKernel.RAGGED: "BatchPrefillWithPagedKVCacheWrapper",
        MixedKernel.SPLIT: "BatchDecodeWithPagedKVCacheWrapper",
        MixedKernel.HOLISTIC: "BatchAttention",
        MixedKernel.POD: "BatchPODWithPagedKVCacheWrapper",
    }[mixed]
    assert module.named(f"{used}.run")
