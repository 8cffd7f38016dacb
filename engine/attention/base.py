"""Attention seam. Owns: the two-method protocol that every attention backend implements."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from engine.attention.metadata import PagedMetadata

if TYPE_CHECKING:
    import torch


class AttentionBackend(Protocol):
    """`prepare` once per step, `run` once per layer."""

    name: str

    def prepare(self, metadata: PagedMetadata) -> None:
        """Turn the host arrays into whatever `run` needs; no work per layer may remain that could be done here."""
        ...

    def run(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, layer: int) -> torch.Tensor:
        """Attention of every row. q [R, Hq, D]; caches [num_pages, page_size, Hkv, D]; returns [R, Hq, D].

        Grouped-query: head h of q reads K/V head h // (Hq // Hkv). Scale is D ** -0.5.
        """
        ...


class CapturableAttention(AttentionBackend, Protocol):
    """A backend whose `run` can be captured for batches of decode rows."""

    def reserve_captured(self, size: int, *, max_indices: int) -> None:
        """Make what a captured batch of `size` rows and at most `max_indices` page ids needs, once and for all."""
        ...

    def prepare_captured(self, metadata: PagedMetadata) -> None:
        """As `prepare`, into the buffers of its size: what was captured reads them when it is replayed."""
        ...
