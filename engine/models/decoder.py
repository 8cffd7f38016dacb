"""Decoder seam. Owns: what an executor asks of a model, and the caches it hands it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from engine.attention.base import AttentionBackend
    from engine.models.llama_config import LlamaConfig
    from engine.models.quantized import Quantization


@dataclass(slots=True)
class LayerCache:
    """K and V of one layer, twice: by page for attention, by slot for writing. All are views of one allocation.

    k, v              [num_pages, page_size, Hkv, D]
    k_slots, v_slots  [num_pages * page_size, Hkv, D]
    """

    k: torch.Tensor
    v: torch.Tensor
    k_slots: torch.Tensor
    v_slots: torch.Tensor


class Decoder(Protocol):
    """A Llama-family model over one flattened batch; knows no request and no page.

    kernels   what computes, in words
    """

    config: LlamaConfig
    dtype: torch.dtype
    device: torch.device
    quantization: Quantization
    kernels: str

    def reserve_positions(self, count: int) -> None:
        """Make positions below `count` usable. Left to the executor: its pool may hold far less than the context."""
        ...

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        out_slots: torch.Tensor,
        *,
        caches: list[LayerCache],
        attention: AttentionBackend,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write K/V of every row, return logits of `rows`.

        token_ids, positions, out_slots   [R] int64
        attention                         prepared for this batch
        rows                              [S] int64 rows whose logits are wanted; None: all
        returns                           [S, vocab] in a float type
        """
        ...
