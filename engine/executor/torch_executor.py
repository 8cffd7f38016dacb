"""TorchExecutor. Owns: the K/V memory and one model; computes one flattened batch at a time, on a CPU or a GPU.

Page ids come from the scheduler; this file never chooses one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from engine.attention.base import AttentionBackend, CapturableAttention
from engine.attention.device import DeviceRuntime
from engine.attention.staging import SETS, Rotation, Staging
from engine.executor.base import ExecutorInfo, ForwardBatch, LendCore, StepResult
from engine.executor.decode_graphs import DecodeGraphs
from engine.executor.sampler import Sampler
from engine.models.decoder import Decoder, LayerCache


class BatchError(ValueError):
    """A batch names rows, tokens or positions that do not exist; the message says which and the limit."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """Where and how a model on a GPU is run. Batches of up to `graph_rows` decode rows are replayed as graphs."""

    runtime: DeviceRuntime
    graph_rows: int = 0


class TorchExecutor:
    """Runs `model` over `num_pages` pages of `page_size` tokens.

    attention            CapturableAttention, if there are to be graphs
    max_context_tokens   longest sequence this executor accepts; None: the model's own limit
    secret               see Sampler
    gpu                  the device that the model was moved to; None: the CPU
    """

    def __init__(
        self,
        model: Decoder,
        *,
        name: str,
        page_size: int,
        num_pages: int,
        attention: AttentionBackend,
        max_context_tokens: int | None = None,
        secret: bytes | None = None,
        gpu: Gpu | None = None,
    ) -> None:
        config = model.config
        context = config.max_context_tokens if max_context_tokens is None else max_context_tokens
        #: Others may have the same: K/V are the executor's.
        self.model = model
        #: See LendingExecutor. Set by whoever knows what the model's kernels are.
        self.lend_core: LendCore | None = None
        self._attention = attention
        self._info = ExecutorInfo(
            model=name,
            vocab_size=config.vocab_size,
            max_context_tokens=context,
            page_size=page_size,
            num_pages=num_pages,
            attention_backend=attention.name,
            device=model.device.type,
            dtype=_type_words(model),
            eos_token_ids=config.eos_token_ids,
            kernels=model.kernels,
        )
        model.reserve_positions(min(context, num_pages * page_size))
        self._sampler = Sampler(
            vocab_size=config.vocab_size, eos_token_ids=config.eos_token_ids, secret=secret, device=model.device
        )
        graph_rows = 0 if gpu is None else gpu.graph_rows
        # Zeros, not garbage: a backend that multiplies a masked slot by 0 must not meet NaN.
        self.kv_cache = torch.zeros(
            # The page beyond the pool, which padded rows of graphs write to.
            (config.num_layers, 2, num_pages + bool(graph_rows), page_size, config.num_kv_heads, config.head_dim),
            dtype=model.dtype,
            device=model.device,
        )
        self._layer_caches = [
            LayerCache(k=k, v=v, k_slots=k.flatten(0, 1), v_slots=v.flatten(0, 1)) for k, v in self.kv_cache
        ]
        self._runtime = None if gpu is None else gpu.runtime
        self._stagings: Rotation[Staging] | None = None
        self._graphs: DecodeGraphs | None = None
        if gpu is not None:
            runtime = gpu.runtime
            self._stagings = Rotation(lambda: Staging(runtime, torch.int64), SETS)
        if gpu is not None and graph_rows:
            with torch.inference_mode():
                self._graphs = DecodeGraphs(
                    model,
                    cast("CapturableAttention", attention),
                    gpu.runtime,
                    caches=self._layer_caches,
                    largest=graph_rows,
                    page_size=page_size,
                    spare_page=num_pages,
                    max_pages=-(-min(context, num_pages * page_size) // page_size),
                )

    def info(self) -> ExecutorInfo:
        """Capacity and facts of the model."""
        return self._info

    def execute(self, batch: ForwardBatch) -> StepResult:
        """Write K/V of every row, run the model, sample `batch.sampling`.

        Raises MetadataError or BatchError before anything is written, NonFiniteLogits after.
        """
        logits = self.forward(batch, rows=[row.row for row in batch.sampling])
        with torch.inference_mode():
            tokens = self._sampler.sample(logits, batch.sampling)
        return StepResult(step=batch.step, tokens=tokens)

    def forward(self, batch: ForwardBatch, *, rows: list[int]) -> torch.Tensor:
        """Logits [S, vocab] of the flattened query `rows`; K/V of every row are written."""
        self._check(batch, rows)
        meta = batch.metadata
        with torch.inference_mode():
            if self._graphs is not None and (logits := self._graphs.forward(batch, rows, self._take_over)) is not None:
                return logits
            self._attention.prepare(meta)
            token_ids, positions, out_slots, wanted = self._to_device(
                batch.token_ids, meta.positions.astype(np.int64), meta.out_slots, np.array(rows, dtype=np.int64)
            )
            self._take_over(batch, token_ids)
            return self.model.forward(
                token_ids,
                positions,
                out_slots,
                caches=self._layer_caches,
                attention=self._attention,
                rows=wanted,
            )

    def _to_device(self, *arrays: NDArray[np.int64]) -> list[torch.Tensor]:
        """Views on a CPU; on a GPU one copy of all of them, which later work waits for by itself."""
        if self._stagings is None:
            return [_tensor(array) for array in arrays]
        staging = self._stagings.next()
        staging.pack(arrays)
        views = staging.upload()
        staging.sent()
        return views

    def _take_over(self, batch: ForwardBatch, token_ids: torch.Tensor) -> None:  # noqa: ARG002 - for who overlaps
        """Fill in what `batch.carried` names, in `token_ids` [R] where the model is. Here nothing is carried."""
        assert not batch.carried, "this executor has every token of a batch before it starts"

    def close(self) -> None:
        """Give the K/V memory back. The executor takes no more steps."""
        self._graphs = None
        self._layer_caches = []
        self.kv_cache = torch.empty(0)

    def _check(self, batch: ForwardBatch, rows: list[int]) -> None:
        """Refuse a batch whose numbers point outside: cheaper than finding out from wrong tokens."""
        meta, info = batch.metadata, self._info
        if meta.page_size != info.page_size:
            raise BatchError(f"metadata.page_size is {meta.page_size}; this executor has pages of {info.page_size}")
        meta.validate(info.num_pages)
        if len(batch.token_ids) != meta.num_rows:
            raise BatchError(f"token_ids has {len(batch.token_ids)} entries; metadata has {meta.num_rows} rows")
        if not meta.num_rows:
            raise BatchError("the batch has no rows")
        low, high = int(batch.token_ids.min()), int(batch.token_ids.max())
        if low < 0 or high >= info.vocab_size:
            raise BatchError(f"token_ids spans {low} to {high}; the vocabulary has ids 0 to {info.vocab_size - 1}")
        if (longest := int(meta.positions.max())) >= info.max_context_tokens:
            raise BatchError(f"position {longest} is beyond the context of {info.max_context_tokens} tokens")
        if rows and not 0 <= min(rows) <= max(rows) < meta.num_rows:
            raise BatchError(f"sampling rows span {min(rows)} to {max(rows)}; the batch has {meta.num_rows} rows")


def _type_words(model: Decoder) -> str:
    """`float32`, or `float32, weights int8`."""
    name = str(model.dtype).removeprefix("torch.")
    return name if model.quantization == "none" else f"{name}, weights {model.quantization}"


def _tensor(array: NDArray[Any]) -> torch.Tensor:
    """A view of `array`, or of a copy when it is read-only: torch knows no read-only memory."""
    return torch.from_numpy(array if array.flags.writeable else array.copy())
