"""TorchExecutor. Owns: the K/V memory and one model; computes one flattened batch at a time on CPU.

Page ids come from the scheduler; this file never chooses one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from engine.attention.base import AttentionBackend
from engine.executor.base import ExecutorInfo, ForwardBatch, StepResult
from engine.executor.sampler import Sampler
from engine.models.llama import LayerCache, LlamaModel


class BatchError(ValueError):
    """A batch names rows, tokens or positions that do not exist; the message says which and the limit."""


class TorchExecutor:
    """Runs `model` over `num_pages` pages of `page_size` tokens.

    max_context_tokens   longest sequence this executor accepts; None: the model's own limit
    secret               see Sampler
    """

    def __init__(
        self,
        model: LlamaModel,
        *,
        name: str,
        page_size: int,
        num_pages: int,
        attention: AttentionBackend,
        max_context_tokens: int | None = None,
        secret: bytes | None = None,
    ) -> None:
        config = model.config
        context = config.max_context_tokens if max_context_tokens is None else max_context_tokens
        self._model = model
        self._attention = attention
        self._info = ExecutorInfo(
            model=name,
            vocab_size=config.vocab_size,
            max_context_tokens=context,
            page_size=page_size,
            num_pages=num_pages,
            attention_backend=attention.name,
            device="cpu",
            dtype=_type_words(model),
            eos_token_ids=config.eos_token_ids,
        )
        model.reserve_positions(min(context, num_pages * page_size))
        self._sampler = Sampler(vocab_size=config.vocab_size, eos_token_ids=config.eos_token_ids, secret=secret)
        # Zeros, not garbage: a backend that multiplies a masked slot by 0 must not meet NaN.
        self.kv_cache = torch.zeros(
            (config.num_layers, 2, num_pages, page_size, config.num_kv_heads, config.head_dim), dtype=model.dtype
        )
        self._layer_caches = [
            LayerCache(k=k, v=v, k_slots=k.flatten(0, 1), v_slots=v.flatten(0, 1)) for k, v in self.kv_cache
        ]

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
            self._attention.prepare(meta)
            return self._model.forward(
                _tensor(batch.token_ids),
                _tensor(meta.positions.astype(np.int64)),
                _tensor(meta.out_slots),
                caches=self._layer_caches,
                attention=self._attention,
                rows=torch.tensor(rows, dtype=torch.int64),
            )

    def close(self) -> None:
        """Give the K/V memory back. The executor takes no more steps."""
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


def _type_words(model: LlamaModel) -> str:
    """`float32`, or `float32, weights int8`."""
    name = str(model.dtype).removeprefix("torch.")
    return name if model.quantization == "none" else f"{name}, weights {model.quantization}"


def _tensor(array: NDArray[Any]) -> torch.Tensor:
    """A view of `array`, or of a copy when it is read-only: torch knows no read-only memory."""
    return torch.from_numpy(array if array.flags.writeable else array.copy())
