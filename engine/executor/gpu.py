"""GPU executor. Owns: the start of a model on a GPU: weights, backend, warm-up, and the K/V pool in what is left.

An allocation that the device refuses is told with the figures of the device, as a ConfigError: it is settings and other
programs that can be changed, not this one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch

from engine.attention.base import AttentionBackend
from engine.attention.device import DeviceRuntime
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.executor.gpu_memory import (
    WARM_UP_TOKENS,
    LargestStep,
    WarmUp,
    fitting_pages,
    largest_step,
    out_of_memory,
)
from engine.executor.manual import ManualDriver
from engine.executor.numeric_type import numeric_type
from engine.executor.overlapped_torch import OverlappedTorchExecutor
from engine.executor.torch_executor import Gpu, TorchExecutor
from engine.models.llama import LlamaModel
from engine.models.llama_config import LlamaConfig
from engine.models.loader import load_model
from engine.models.ops import Ops, TorchOps
from engine.sampling_params import SamplingParams

#: Elements of a head that FlashInfer's FA2 kernels are compiled for.
HEAD_DIMS: Final = (64, 128, 256)
#: The least compute capability that computes in bfloat16, the one type that FlashInfer's kernels are asked for.
LEAST_CAPABILITY: Final = (8, 0)
#: Settings that FlashInfer's kernels are asked for by, and what does without them.
_WITHOUT_FLASHINFER: Final = {"attention_backend": "reference", "kernels": "torch"}
#: The dearest way to choose a token: a nucleus sought in the whole vocabulary, and log-probabilities.
_DEAR: Final = SamplingParams(max_new_tokens=2, temperature=1.0, top_p=0.9, min_p=0.001, logprobs=5)


class GpuStart:
    """Loads one model onto one device. `kernels`: see FlashInferBackend."""

    def __init__(self, config: EngineConfig, runtime: DeviceRuntime, *, kernels: Any = None) -> None:
        self._config = config
        self._runtime = runtime
        self._kernels = kernels

    def load(self, path: Path) -> LlamaModel:
        """The model, on the device.

        Raises ConfigError for a GPU that is too old for FlashInfer's kernels, and for a model that the small operators
        that were asked for do not fit.
        """
        asked = self._config.executor
        self._check_capability()
        with self._told("loading the weights"):
            return load_model(
                path,
                dtype=numeric_type(asked),
                device=self._runtime.device,
                make_ops=self._flashinfer_ops if asked.kernels == "flashinfer" else TorchOps,
            )

    def _check_capability(self) -> None:
        """Raise ConfigError for kernels that this GPU is too old for: they would fail when they are compiled."""
        for name, instead in _WITHOUT_FLASHINFER.items():
            if getattr(self._config.executor, name) == "flashinfer" and self._runtime.capability < LEAST_CAPABILITY:
                has, least = (".".join(map(str, one)) for one in (self._runtime.capability, LEAST_CAPABILITY))
                raise ConfigError(
                    f"executor.{name}=flashinfer: in bfloat16 it needs compute capability {least} or higher, this GPU "
                    f"has {has}: use executor.{name}={instead}"
                )

    def _flashinfer_ops(self, facts: LlamaConfig, like: torch.Tensor) -> Ops:
        from engine.models import flashinfer_ops

        setting = "executor.kernels=flashinfer"
        _check_heads(setting, facts, flashinfer_ops.HEAD_DIMS, "executor.kernels=torch")
        with _missing_told(setting):
            return flashinfer_ops.FlashInferOps(facts, like, kernels=self._kernels)

    def build(self, model: LlamaModel, *, name: str, context: int, num_pages: int | None) -> TorchExecutor:
        """An executor for requests of up to `context` tokens. `num_pages` None: as many pages as memory holds.

        Raises ConfigError for a model that the backend has no kernels for, and where memory does not do.
        """
        with self._told("making the attention's workspace"):
            attention = self._attention(model)
            model.reserve_positions(context)
        pages = self._pages(model, attention, name, context) if num_pages is None else num_pages
        with self._told(f"making the K/V pool of {pages:,} pages"):
            return self._executor(model, attention, name, context, pages)

    def _pages(self, model: LlamaModel, attention: AttentionBackend, name: str, context: int) -> int:
        config = self._config
        share = config.executor.gpu_memory_share
        assert share is not None, "without a share the pool's size comes from the settings"
        step = largest_step(config, context)
        with self._told(f"trying a step of {step.prompt_rows} prompt tokens and {step.decode_rows} decode rows"):
            warm_up = self._warm_up(model, attention, name, context, step)
        return fitting_pages(
            self._runtime.memory(),
            warm_up,
            share=share,
            page_bytes=model.config.kv_bytes_per_token(model.dtype.itemsize) * config.cache.page_size,
            spare_pages=int(config.executor.cuda_graph_rows > 0),
        )

    def _warm_up(
        self, model: LlamaModel, attention: AttentionBackend, name: str, context: int, step: LargestStep
    ) -> WarmUp:
        """Run `step` over a pool that just holds it, then small steps of each kind; the pool is gone afterwards."""
        pages = max(2, step.pages(context, self._config.cache.page_size))
        without_graphs = self._runtime.memory()
        executor = self._executor(model, attention, name, max(context, WARM_UP_TOKENS), pages)
        driver = ManualDriver(executor)
        prompts = [driver.add(f"prompt {i}", [0] * length) for i, length in enumerate(step.prompts(context))]
        decoding = [driver.add(f"decode {i}", [0], _DEAR) for i in range(step.decode_rows)]
        self._runtime.reset_peak()
        before = self._runtime.memory()
        driver.step([(sequence, sequence.missing_len) for sequence in (*prompts, *decoding)])
        # Whatever is compiled or made at a first use is so before the first request: each kind of batch comes to both
        # of the sets that take turns, with graphs for the decode rows, which leave the sets alone, and without.
        decodes = [(sequence, 1) for sequence in decoding]
        late = driver.add("late", [0] * WARM_UP_TOKENS)
        piece = (late, WARM_UP_TOKENS // 3)
        for work in (decodes, decodes, [piece], [piece], [piece, *decodes]):
            driver.step(work)
        working = self._runtime.memory().peak - before.allocated
        kv_bytes = executor.kv_cache.nbytes
        executor.close()
        # What left with this executor but its K/V: the graphs. Counted before they are given back.
        graphs = max(0, without_graphs.free - before.free - kv_bytes) if self._config.executor.cuda_graph_rows else 0
        return WarmUp(step, working, graphs)

    def _executor(
        self, model: LlamaModel, attention: AttentionBackend, name: str, context: int, pages: int
    ) -> TorchExecutor:
        kind = OverlappedTorchExecutor if self._config.executor.overlap else TorchExecutor
        return kind(
            model,
            name=name,
            page_size=self._config.cache.page_size,
            num_pages=pages,
            attention=attention,
            max_context_tokens=context,
            gpu=Gpu(self._runtime, graph_rows=self._config.executor.cuda_graph_rows),
        )

    def _attention(self, model: LlamaModel) -> AttentionBackend:
        facts, windows = model.config, model.config.windows
        if self._config.executor.attention_backend == "reference":
            from engine.attention.torch_reference import TorchReferenceBackend

            return TorchReferenceBackend(windows=windows)
        from engine.attention.flashinfer import FlashInferBackend, HeadShape, MixedKernel, PrefillKernel, UnfitKernel

        setting = "executor.attention_backend=flashinfer"
        _check_heads(setting, facts, HEAD_DIMS, "executor.attention_backend=reference")
        if self._config.executor.cuda_graph_rows and any(windows):
            raise ConfigError(
                f"executor.cuda_graph_rows={self._config.executor.cuda_graph_rows}: the model has layers with a "
                "sliding window, which no graph is captured for: use executor.cuda_graph_rows=0"
            )
        asked = self._config.executor
        try:
            with _missing_told(setting):
                return FlashInferBackend(
                    runtime=self._runtime,
                    heads=HeadShape(facts.num_heads, facts.num_kv_heads, facts.head_dim),
                    dtype=model.dtype,
                    windows=windows,
                    mixed=MixedKernel(asked.flashinfer_mixed),
                    prefill=PrefillKernel(asked.flashinfer_prefill),
                    kernels=self._kernels,
                )
        except UnfitKernel as error:
            name = "flashinfer_mixed" if isinstance(error.kernel, MixedKernel) else "flashinfer_prefill"
            raise ConfigError(f"executor.{name}={error.kernel}: {error.why}") from error

    @contextmanager
    def _told(self, doing: str) -> Iterator[None]:
        """Turn an allocation that fails while `doing` something into a ConfigError with the figures."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            raise ConfigError(out_of_memory(doing, self._runtime.memory())) from error


def _check_heads(setting: str, facts: LlamaConfig, have: tuple[int, ...], instead: str) -> None:
    """Raise ConfigError where the kernels of `setting` have no heads of the model's size."""
    if facts.head_dim not in have:
        raise ConfigError(
            f"{setting}: the model's head_dim is {facts.head_dim}; the kernels have {', '.join(map(str, have))}: use "
            f"{instead}"
        )


@contextmanager
def _missing_told(setting: str) -> Iterator[None]:
    """Turn an import that fails into a ConfigError that says how to install it."""
    try:
        yield
    except ImportError as error:
        raise ConfigError(
            f"{setting} cannot be imported ({error}): pip install --no-deps 'flashinfer-python>=0.7.2.post1,<0.8' "
            "apache-tvm-ffi nvidia-ml-py (docs/gpu.md)"
        ) from error
