"""FlashInferOps. Owns: a decoder's small operators by FlashInfer's kernels, on NVIDIA GPUs.

A step of few rows is bound by starting kernels one by one: here a layer starts four of them beside its products, its
K/V writes and its attention, two more with head norms, where torch's form starts nine or more. Sums, turned heads and
activations are rounded once, at their end; torch's form rounds in between, so the two differ in last bits.

Every call writes either into memory that it makes or over what the caller is done with, so a captured graph finds all
of it where it was.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from engine.models.llama_config import LlamaConfig
from engine.models.ops import Angles, HeadNorms, Product
from engine.models.rope import PositionTables, cos_sin_cache

#: Elements of a head that its RoPE in place is compiled for; others take a way through its quantising kernels.
HEAD_DIMS: Final = (64, 128, 256)


class FlashInferOps:
    """For models in float16 or bfloat16 with heads of one of `HEAD_DIMS`, norm weights in the model's type.

    kernels   the module to use; None: flashinfer, imported now
    """

    def __init__(self, config: LlamaConfig, like: torch.Tensor, *, kernels: Any = None) -> None:
        """Raises ImportError where the module is to be imported and cannot be."""
        if kernels is None:
            # Here and not above: importing takes seconds and writes to the home directory, with or without a GPU.
            import flashinfer

            kernels = flashinfer
        self.kernels = "torch's products, FlashInfer's norms, RoPE and activation"
        self._module = kernels
        self._eps = config.rms_norm_eps
        self._dim = config.head_dim
        self._q_end = config.num_heads * config.head_dim
        self._k_end = self._q_end + config.num_kv_heads * config.head_dim
        # Made on the CPU, as torch's form does.
        self._tables = PositionTables(lambda count: (cos_sin_cache(config, count).to(like.device),))

    def reserve_positions(self, count: int) -> None:
        self._tables.reserve(count)

    def angles(self, positions: torch.Tensor) -> Angles:
        """The positions themselves, and the table that the kernel looks them up in."""
        return positions, self._tables.now[0]

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = self._module.rmsnorm(x, weight, self._eps)
        return normed

    def add_norm(
        self, hidden: torch.Tensor, product: Product, x: torch.Tensor, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The sum is written over `hidden`, and its norm over the product."""
        added = product(x)
        self._module.fused_add_rmsnorm(added, hidden, weight, self._eps)
        return hidden, added

    def turned(self, qkv: torch.Tensor, norms: HeadNorms | None, angles: Angles) -> tuple[torch.Tensor, torch.Tensor]:
        positions, table = angles
        q, k = qkv[:, : self._q_end], qkv[:, self._q_end : self._k_end]
        if norms is not None:
            # Into new memory: nothing says that the norm may be written over what it reads.
            q, k = self._normed_heads(q, norms.q), self._normed_heads(k, norms.k)
        self._module.apply_rope_with_cos_sin_cache_inplace(positions, q, k, self._dim, table, is_neox=True)
        return self._heads(q), self._heads(k)

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        # A row is taken to lie behind the one before it: nothing there asks for the steps between them.
        gated: torch.Tensor = self._module.silu_and_mul(gate_up.contiguous())
        return gated

    def _normed_heads(self, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Each head of rows [R, heads * D] normalised, times weight [D]."""
        return self.rms_norm(self._heads(rows), weight).view(rows.shape)

    def _heads(self, rows: torch.Tensor) -> torch.Tensor:
        """rows [R, heads * D] seen as [R, heads, D]."""
        return rows.view(len(rows), -1, self._dim)
