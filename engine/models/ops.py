"""Small operators. Owns: what a decoder computes between its matrix products and its attention, as one table that is
chosen when the model is built, and torch's form of it.

`engine/models/flashinfer_ops.py` has the other form. Both are asked in steps that either can do at once: a residual
that is added and normalised is one kernel of FlashInfer's, while torch adds within the matrix product where it can.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn.functional import silu

from engine.models.llama_config import LlamaConfig
from engine.models.norm import rms_norm
from engine.models.rope import PositionTables, rope_tables, rotate

#: What turning needs to know of a step's positions, looked up once per step.
Angles = tuple[torch.Tensor, torch.Tensor]


class Product(Protocol):
    """A linear layer."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [R, in] -> [R, out], in memory of its own."""
        ...

    def add_to(self, base: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """base + x Wᵀ + bias, where `base` [R, out] may be overwritten."""
        ...


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """Weights of the norms of a layer's heads: q, k [D] of each head alike, `stacked` [Hq + Hkv, D] of all of them."""

    q: torch.Tensor
    k: torch.Tensor
    stacked: torch.Tensor


class Ops(Protocol):
    """The small operators of one model, over rows of its type where its weights are.

    kernels   who computes, products included, in words
    """

    kernels: str

    def reserve_positions(self, count: int) -> None:
        """Make positions below `count` usable."""
        ...

    def angles(self, positions: torch.Tensor) -> Angles:
        """What `turned` needs of a step's positions [R] int64."""
        ...

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """x [R, H] scaled to a mean square of 1 in each row, times `weight` [H]."""
        ...

    def add_norm(
        self, hidden: torch.Tensor, product: Product, x: torch.Tensor, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The residual stream behind a layer and its norm: h = hidden + product(x), and rms_norm(h, weight).

        hidden [R, H] may be overwritten. Whether h is rounded before it is normalised is left to the form.
        """
        ...

    def turned(self, qkv: torch.Tensor, norms: HeadNorms | None, angles: Angles) -> tuple[torch.Tensor, torch.Tensor]:
        """Heads of q and k, normalised where there are `norms`, turned by their positions.

        qkv       [R, (Hq + 2 Hkv) D], whose q and k may be overwritten; its v is not
        returns   q [R, Hq, D] and k [R, Hkv, D], which may be parts of wider rows
        """
        ...

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up of gate_up [R, 2 ffn], gate first -> [R, ffn]."""
        ...


#: Makes the table for a model of these facts whose tensors are `like` this one in type and place.
MakeOps = Callable[[LlamaConfig, torch.Tensor], Ops]


class TorchOps:
    """By torch's operators, on any device and in any type."""

    kernels = "torch's kernels"

    def __init__(self, config: LlamaConfig, like: torch.Tensor) -> None:
        self._eps = config.rms_norm_eps
        self._heads, self._kv_heads, self._dim = config.num_heads, config.num_kv_heads, config.head_dim
        self._width = (self._heads + self._kv_heads) * self._dim

        def tables(count: int) -> tuple[torch.Tensor, torch.Tensor]:
            # Made on the CPU everywhere: angles that differ in the last bit between devices would be one more
            # difference.
            cos, sin = rope_tables(config, count, like.dtype)
            return cos.to(like.device), sin.to(like.device)

        self._tables = PositionTables(tables)

    def reserve_positions(self, count: int) -> None:
        self._tables.reserve(count)

    def angles(self, positions: torch.Tensor) -> Angles:
        """Rows of the cosines and of the signed sines, each [R, 1, D]."""
        cos, sin = self._tables.now
        return cos.index_select(0, positions), sin.index_select(0, positions)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, weight, self._eps)

    def add_norm(
        self, hidden: torch.Tensor, product: Product, x: torch.Tensor, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = product.add_to(hidden, x)
        return hidden, rms_norm(hidden, weight, self._eps)

    def turned(self, qkv: torch.Tensor, norms: HeadNorms | None, angles: Angles) -> tuple[torch.Tensor, torch.Tensor]:
        qk = qkv[:, : self._width].view(len(qkv), self._heads + self._kv_heads, self._dim)
        if norms is not None:
            qk = rms_norm(qk, norms.stacked, self._eps)
        qk = rotate(qk, *angles)
        return qk[:, : self._heads], qk[:, self._heads :]

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return silu(gate).mul_(up)
