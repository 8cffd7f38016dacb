"""Executor factory. Owns: turning an EngineConfig into a ready executor."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.executor.base import Executor, LendCore
from engine.executor.cpu_form import CpuFormChoice

if TYPE_CHECKING:
    from engine.attention.base import AttentionBackend
    from engine.attention.device import DeviceRuntime
    from engine.executor.torch_executor import TorchExecutor
    from engine.models.decoder import Decoder
    from engine.models.llama_config import LlamaConfig

#: Entries of an embedding from which on a model's weights are worth huge pages: they no longer fit into any cache.
_LARGE: Final = 8 * 1024 * 1024


def build_executor(config: EngineConfig) -> Executor:
    """The executor that `config.executor.kind` names.

    Raises ModelFormatError for a model that cannot be loaded, ConfigError for settings that contradict the model.
    """
    if config.executor.kind == "simulated":
        from engine.executor.simulated import SimulatedExecutor

        simulated = SimulatedExecutor(config)
        if config.executor.overlap:
            from engine.executor.background import BackgroundExecutor

            return BackgroundExecutor(simulated)
        return simulated
    return build_torch_executor(config)


def build_torch_executor(config: EngineConfig) -> TorchExecutor:
    """Load the model and allocate its K/V memory. `executor.threads` sets torch's threads for the whole process."""
    choice = CpuFormChoice(config.executor)  # before torch, whose import takes as long as the compiler

    import torch

    from engine.executor.huge_pages import ask_for_huge_pages, give_back_free_memory
    from engine.executor.torch_executor import TorchExecutor
    from engine.models.packaged import model_name, packaged_gguf_path

    if config.executor.threads is not None:
        torch.set_num_threads(config.executor.threads)
    path = packaged_gguf_path() if config.model.path is None else config.model.path
    if config.executor.device == "cuda":
        from engine.attention.device import CudaRuntime

        return build_gpu_executor(config, path, CudaRuntime())
    model, attention, lend_core = _on_cpu(config, path, choice)
    dtype = model.dtype
    context = _context(config, model.config)
    num_pages = pool_pages(config, model.config, itemsize=dtype.itemsize)
    try:
        executor = TorchExecutor(
            model,
            name=config.model.name or model_name(path),
            page_size=config.cache.page_size,
            num_pages=num_pages,
            attention=attention,
            max_context_tokens=context,
        )
    except RuntimeError as error:
        if "allocate memory" not in str(error):
            raise
        raise ConfigError(_too_big(config, num_pages, model.config.kv_bytes_per_token(dtype.itemsize))) from error
    executor.lend_core = lend_core
    if model.config.vocab_size * model.config.hidden_size >= _LARGE:
        give_back_free_memory()
        ask_for_huge_pages()
    return executor


def build_gpu_executor(
    config: EngineConfig, path: Path, runtime: DeviceRuntime, *, kernels: Any = None
) -> TorchExecutor:
    """The model on the device of `runtime`. `kernels`: see FlashInferBackend."""
    from engine.executor.gpu import GpuStart
    from engine.models.packaged import model_name

    start = GpuStart(config, runtime, kernels=kernels)
    model = start.load(path)
    is_sized = config.cache.num_pages is not None or config.executor.gpu_memory_share is None
    return start.build(
        model,
        name=config.model.name or model_name(path),
        context=_context(config, model.config),
        num_pages=pool_pages(config, model.config, itemsize=model.dtype.itemsize) if is_sized else None,
    )


def _context(config: EngineConfig, model: LlamaConfig) -> int:
    """Tokens of the longest request. Raises ConfigError where more are asked for than the model has."""
    wanted, limit = config.model.max_context_tokens, model.max_context_tokens
    if wanted is None:
        return limit
    if wanted > limit:
        raise ConfigError(f"model.max_context_tokens={wanted} is above the model's own limit, {limit}")
    return wanted


def pool_pages(config: EngineConfig, model: LlamaConfig, *, itemsize: int) -> int:
    """Pages of the K/V pool: `cache.num_pages`, or as many as `cache.memory_mib` holds."""
    if config.cache.num_pages is not None:
        return config.cache.num_pages
    page_bytes = model.kv_bytes_per_token(itemsize) * config.cache.page_size
    pages = config.cache.memory_mib * 1024 * 1024 // page_bytes
    if pages < 2:
        raise ConfigError(
            f"cache.memory_mib={config.cache.memory_mib} holds {pages} pages of cache.page_size="
            f"{config.cache.page_size} tokens ({page_bytes} bytes each); at least 2 are needed"
        )
    return pages


def _too_big(config: EngineConfig, num_pages: int, token_bytes: int) -> str:
    name = "memory_mib" if config.cache.num_pages is None else "num_pages"
    mib = num_pages * config.cache.page_size * token_bytes / 1024**2
    return f"cache.{name}={getattr(config.cache, name)} asks for {mib:,.0f} MiB of K/V memory: this machine refuses it"


def _on_cpu(
    config: EngineConfig, path: Path, choice: CpuFormChoice
) -> tuple[Decoder, AttentionBackend, LendCore | None]:
    """The model, its attention, and what leaves a processor to others."""
    from engine.attention.cpu import CpuBackend
    from engine.attention.native import NativeBackend
    from engine.attention.torch_reference import TorchReferenceBackend
    from engine.models.llama import LlamaModel
    from engine.models.loader import load_weights
    from engine.models.native_llama import NativeLlama, misfit

    form = choice.form()
    shape, weights = load_weights(path, form.dtype)
    if form.library is not None and (why := misfit(shape, form.quantization)) is not None:
        loaded = form.dtype
        form = choice.instead(form, why, bfloat16_fits=misfit(shape, "none") is None)
        if form.dtype is not loaded:
            shape, weights = load_weights(path, form.dtype)
    if form.library is not None:
        native = NativeLlama(shape, weights, form.library, quantization=form.quantization)
        return native, NativeBackend(form.library, windows=shape.windows), form.library.core_lender()
    attention: AttentionBackend
    if config.executor.attention_backend == "reference":
        attention = TorchReferenceBackend(windows=shape.windows)
    else:
        width = shape.num_kv_heads * shape.head_dim
        attention = CpuBackend(dtype=form.dtype, windows=shape.windows, kv_width=width)
    model = LlamaModel(shape, weights, quantization=form.quantization)
    if form.why:
        model.kernels += f": {form.why}"
    return model, attention, None
