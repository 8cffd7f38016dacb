"""The start on a GPU, on a CPU: settings that cannot be, pages from a warm-up, and memory that does not do."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.attention import flashinfer
from engine.attention.device import CudaRuntime, DeviceMemory
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.executor import gpu
from engine.executor.background import BackgroundExecutor
from engine.executor.factory import build_executor, build_gpu_executor
from engine.executor.gpu_memory import LargestStep, WarmUp, fitting_pages, largest_step, out_of_memory
from engine.executor.manual import ManualDriver
from engine.executor.overlapped_torch import OverlappedTorchExecutor
from engine.models import flashinfer_ops
from tests.engine.attention.late_device import GIB, LateDevice
from tests.engine.attention.shaped_flashinfer import ShapedFlashInfer
from tests.engine.models.gguf_files import tiny_weights, write_gguf

MIB = 1024**2
ON_GPU = {"device": "cuda", "attention_backend": "flashinfer", "dtype": "bfloat16"}
#: 2 layers, K and V, 2 heads of 16, bfloat16.
PAGE_BYTES = 2 * 2 * 2 * 16 * 16 * 2
SMALL_STEP = {"chunked_prefill_size": 64, "max_running_requests": 5}


@pytest.fixture(autouse=True)
def _tiny_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashinfer, "WORKSPACE_BYTES", 1024)
    monkeypatch.setattr(gpu, "HEAD_DIMS", (16,))
    monkeypatch.setattr(flashinfer_ops, "HEAD_DIMS", (16,))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "Tiny-1M-Q8_0.gguf", tiny_weights())


def config(**sections: Any) -> EngineConfig:
    executor = ON_GPU | sections.pop("executor", {})
    return EngineConfig.model_validate({"executor": executor, "scheduler": SMALL_STEP} | sections)


def memory(*, free: int, allocated: int = 0, peak: int = 0, total: int = 8 * GIB) -> DeviceMemory:
    return DeviceMemory(total=total, free=free, allocated=allocated, peak=peak)


REFUSED = {
    "executor.attention_backend=flashinfer needs executor.device=cuda": {"attention_backend": "flashinfer"},
    "executor.attention_backend=cpu contradicts executor.device=cuda: use flashinfer": {"device": "cuda"},
    "executor.dtype=float32 .* take bfloat16; use it, or executor.attention_backend=reference": ON_GPU
    | {"dtype": "float32"},
    "executor.quantization=int8 contradicts executor.device=cuda: .*; use none": ON_GPU | {"quantization": "int8"},
    "executor.cuda_graph_rows=4 needs executor.attention_backend=flashinfer, not cpu": {"cuda_graph_rows": 4},
    "not reference": ON_GPU | {"attention_backend": "reference", "cuda_graph_rows": 4},
    "executor.kernels=flashinfer needs executor.device=cuda.*use native or torch": {"kernels": "flashinfer"},
    "executor.dtype=float32 is not for executor.kernels=flashinfer.* use executor.kernels=torch": ON_GPU
    | {"attention_backend": "reference", "dtype": "float32", "kernels": "flashinfer"},
    "less than or equal to 1": ON_GPU | {"gpu_memory_share": 1.5},
}


@pytest.mark.parametrize("message", REFUSED)
def test_settings_that_contradict_each_other_are_refused_by_name(message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig.model_validate({"executor": REFUSED[message]})


def test_steps_overlap_on_a_gpu_and_with_made_up_tokens_only(path: Path) -> None:
    with pytest.raises(ValueError, match=r"executor\.overlap=True contradicts executor\.device=cpu"):
        EngineConfig.model_validate({"executor": {"overlap": True}})
    device = LateDevice(late=False)
    asked = config(cache={"num_pages": 8}, executor={"overlap": True})
    assert isinstance(
        build_gpu_executor(asked, path, device, kernels=ShapedFlashInfer(device)), OverlappedTorchExecutor
    )
    simulated = EngineConfig.model_validate({"executor": {"kind": "simulated", "overlap": True}})
    made = build_executor(simulated)
    assert isinstance(made, BackgroundExecutor)
    made.close()


def test_the_reference_compares_on_a_gpu_in_any_type() -> None:
    for dtype in ("float32", "bfloat16"):
        config(executor={"attention_backend": "reference", "dtype": dtype})


@pytest.mark.skipif(torch.cuda.is_available(), reason="no GPU-less torch here")
def test_without_cuda_the_start_says_what_is_missing_before_it_loads_a_model(tmp_path: Path) -> None:
    wanted = config(model={"path": tmp_path / "absent"})
    with pytest.raises(ConfigError, match=r"executor.device=cuda: torch .*, or use executor.device=cpu") as told:
        build_executor(wanted)
    assert torch.__version__ in str(told.value)


@pytest.mark.parametrize(("cuda", "words"), [(None, "built without CUDA: install"), ("13.0", "finds no GPU: look at")])
def test_a_torch_without_cuda_and_a_machine_without_a_gpu_are_told_apart(
    monkeypatch: pytest.MonkeyPatch, cuda: str | None, words: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    with pytest.raises(ConfigError, match=words):
        CudaRuntime()


@pytest.mark.parametrize("graph_rows", [0, 4])
def test_pages_fill_what_the_warm_up_leaves(path: Path, graph_rows: int) -> None:
    device = LateDevice(
        late=False,
        memory_plan=[
            memory(total=600 * MIB, free=500 * MIB),
            memory(total=600 * MIB, free=470 * MIB, allocated=30 * MIB),
            memory(total=600 * MIB, free=470 * MIB, allocated=30 * MIB, peak=130 * MIB),
            memory(total=600 * MIB, free=490 * MIB),
        ],
    )
    executor = build_gpu_executor(
        config(executor={"gpu_memory_share": 0.5, "cuda_graph_rows": graph_rows}), path, device,
        kernels=ShapedFlashInfer(device),
    )  # fmt: skip
    # Half of 600 is 300; 110 are taken, a step takes 100. With graphs: what the warm-up's executor held, less its K/V,
    # and the spare page.
    pool = LargestStep(64, 5).pages(128, 16) + bool(graph_rows)
    left = 90 * MIB - (30 * MIB - pool * PAGE_BYTES if graph_rows else 0)
    assert executor.info().num_pages == left // PAGE_BYTES - bool(graph_rows)
    assert device.peaks_reset == 1
    driver = ManualDriver(executor)
    sequence = driver.add("r", [5, 6, 7])
    driver.generate([sequence], 4)
    assert len(sequence.outputs) == 4


def test_the_warm_up_uses_every_wrapper_of_both_sets_before_the_first_request(path: Path) -> None:
    device = LateDevice(late=False)
    module = ShapedFlashInfer(device)
    build_gpu_executor(config(cache={"num_pages": 40}), path, device, kernels=module)
    assert module.calls == [], "a pool of a given size needs no warm-up"
    executor = build_gpu_executor(config(), path, device, kernels=module)
    made = [call.name for call in module.calls if call.name.endswith("__init__")]
    assert len(made) == 4
    assert len(set(made)) == 2
    driver = ManualDriver(executor)
    driver.generate([driver.add("r", [5, 6, 7]), driver.add("s", [5])], 4)
    assert [call.name for call in module.calls if call.name.endswith("__init__")] == made


def test_given_pages_and_given_memory_need_no_warm_up(path: Path) -> None:
    device = LateDevice(late=False)
    module = ShapedFlashInfer(device)
    assert build_gpu_executor(config(cache={"num_pages": 7}), path, device, kernels=module).info().num_pages == 7
    sized = config(executor={"gpu_memory_share": None}, cache={"memory_mib": 1})
    assert build_gpu_executor(sized, path, device, kernels=module).info().num_pages == MIB // PAGE_BYTES
    assert device.peaks_reset == 0


def test_too_little_memory_names_every_figure(path: Path) -> None:
    device = LateDevice(late=False, memory_plan=[memory(free=GIB, total=8 * GIB)])
    with pytest.raises(ConfigError) as told:
        build_gpu_executor(config(executor={"gpu_memory_share": 0.1}), path, device, kernels=ShapedFlashInfer(device))
    words = str(told.value)
    for part in (
        "executor.gpu_memory_share=0.1 of 8,192 MiB is 819 MiB", "take 7,168 MiB", "64 prompt tokens and 5 decode rows",
        "leaves -6,349 MiB", "2 pages of 0.0 MiB", "scheduler.chunked_prefill_size",
    ):  # fmt: skip
        assert part in words


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("engine.executor.gpu.load_model", "loading the weights"),
        ("engine.attention.flashinfer.FlashInferBackend.__init__", "making the attention's workspace"),
        ("engine.executor.manual.ManualDriver.step", "trying a step of 64 prompt tokens and 5 decode rows"),
        ("engine.executor.gpu.GpuStart._executor", "making the K/V pool of 12 pages"),
    ],
)
def test_memory_that_the_device_refuses_is_told_with_its_figures(
    monkeypatch: pytest.MonkeyPatch, path: Path, place: str, words: str
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(place, refuse)
    device = LateDevice(late=False, memory_plan=[memory(free=100 * MIB, allocated=5 * GIB, peak=6 * GIB)])
    pages = {"num_pages": 12} if "pool" in words else {}
    with pytest.raises(ConfigError) as told:
        build_gpu_executor(config(cache=pages), path, device, kernels=ShapedFlashInfer(device))
    assert f"executor.device=cuda: out of memory while {words}." in str(told.value)
    for part in (
        "8,192 MiB",
        "100 MiB free",
        "5,120 MiB in tensors",
        "at most 6,144 MiB",
        "2,972 MiB in other programs",
    ):
        assert part in str(told.value)


def test_other_faults_of_the_start_stay_what_they_are(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise RuntimeError("an illegal memory access")

    monkeypatch.setattr("engine.executor.manual.ManualDriver.step", fail)
    device = LateDevice(late=False)
    with pytest.raises(RuntimeError, match="illegal"):
        build_gpu_executor(config(), path, device, kernels=ShapedFlashInfer(device))


def test_a_head_that_no_kernel_has_names_what_there_is(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    monkeypatch.setattr(gpu, "HEAD_DIMS", (64, 128, 256))
    device = LateDevice(late=False)
    with pytest.raises(ConfigError, match=r"head_dim is 16; the kernels have 64, 128, 256: use .*=reference"):
        build_gpu_executor(config(), path, device, kernels=ShapedFlashInfer(device))


def test_without_flashinfer_the_start_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(ConfigError, match=r"cannot be imported .*: pip install --no-deps 'flashinfer-python>=0.7.2"):
        build_gpu_executor(config(), path, LateDevice(late=False))


@pytest.mark.parametrize(("attention", "graph_rows"), [("flashinfer", 0), ("flashinfer", 4), ("reference", 0)])
def test_small_operators_are_torchs_unless_flashinfers_are_asked_for(
    path: Path, attention: str, graph_rows: int
) -> None:
    device = LateDevice(late=False)
    answers = {}
    for kernels, words in (
        ("auto", "torch's kernels"),
        ("torch", "torch's kernels"),
        ("flashinfer", "torch's products, FlashInfer's norms, RoPE and activation"),
    ):
        module = ShapedFlashInfer(device)
        asked = {"kernels": kernels, "attention_backend": attention, "cuda_graph_rows": graph_rows}
        wanted = config(executor=asked, cache={"num_pages": 9})
        executor = build_gpu_executor(wanted, path, device, kernels=module)
        assert executor.info().kernels == words
        driver = ManualDriver(executor)
        driver.generate([sequence := driver.add("r", [5, 6, 7])], 3)
        answers[kernels] = sequence.outputs
        assert bool(module.named("silu_and_mul")) == (kernels == "flashinfer")
    assert answers["auto"] == answers["torch"]


def test_a_head_that_no_small_kernel_has_names_what_there_is(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    monkeypatch.setattr(flashinfer_ops, "HEAD_DIMS", (64, 128, 256))
    wanted = config(executor={"kernels": "flashinfer", "attention_backend": "reference"})
    device = LateDevice(late=False)
    with pytest.raises(ConfigError, match=r"kernels=flashinfer: .* head_dim is 16; .* 64, 128, 256: use .*=torch"):
        build_gpu_executor(wanted, path, device, kernels=ShapedFlashInfer(device))


def test_without_flashinfer_small_operators_say_how_to_install_it(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    wanted = config(executor={"kernels": "flashinfer", "attention_backend": "reference"})
    with pytest.raises(ConfigError, match=r"executor.kernels=flashinfer cannot be imported .*: pip install --no-deps"):
        build_gpu_executor(wanted, path, LateDevice(late=False))


def test_the_reference_runs_there_too(path: Path) -> None:
    wanted = config(executor={"attention_backend": "reference"}, cache={"num_pages": 9})
    executor = build_gpu_executor(wanted, path, LateDevice(late=False))
    assert executor.info().attention_backend == "reference"
    driver = ManualDriver(executor)
    driver.generate([driver.add("r", [5, 6, 7])], 3)


def test_the_largest_step_follows_the_scheduler() -> None:
    def step(**scheduler: Any) -> LargestStep:
        return largest_step(EngineConfig.model_validate({"scheduler": scheduler}), 5000)

    assert step(chunked_prefill_size=512, max_running_requests=9) == LargestStep(512, 9)
    assert step(chunked_prefill_size=None, max_prefill_tokens=8192) == LargestStep(8192, 256)
    assert step(chunked_prefill_size=None, max_prefill_tokens=1024) == LargestStep(5000, 256)


@given(rows=st.integers(1, 900), decodes=st.integers(1, 20), context=st.integers(2, 300), page=st.integers(1, 40))
def test_a_step_is_made_of_prompts_that_fit_the_context(rows: int, decodes: int, context: int, page: int) -> None:
    step = LargestStep(rows, decodes)
    prompts = step.prompts(context)
    assert sum(prompts) == rows
    assert max(prompts) <= context
    assert 0 not in prompts
    assert step.pages(context, page) * page >= rows + decodes


@given(
    total=st.integers(1, 200 * GIB), free=st.floats(0, 1), share=st.floats(0.01, 1), working=st.integers(0, GIB),
    page_bytes=st.integers(1, 10 * MIB), spare=st.integers(0, 1),
)  # fmt: skip
def test_what_fits_never_passes_the_share(
    total: int, free: float, share: float, working: int, page_bytes: int, spare: int
) -> None:
    now = memory(total=total, free=int(total * free))
    warm_up = WarmUp(LargestStep(1, 1), working=working, graphs=0)
    try:
        pages = fitting_pages(now, warm_up, share=share, page_bytes=page_bytes, spare_pages=spare)
    except ConfigError:
        return
    taken = total - now.free
    assert pages >= 2
    assert taken + working + (pages + spare) * page_bytes <= total * share
    assert taken + working + (pages + spare + 1) * page_bytes > int(total * share) - 1


def test_words_for_what_is_left_over() -> None:
    words = out_of_memory("loading the weights", memory(free=0, allocated=8 * GIB, peak=8 * GIB))
    assert "0.0 MiB free, 8,192 MiB in tensors of this program (at most 8,192 MiB), 0.0 MiB in other programs" in words
