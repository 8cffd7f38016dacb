"""Linear layers. Owns: the memory layout in which a weight matrix multiplies fastest on CPU.

Three layouts, chosen once at load (bench/executor_steps.py prints what they give):

- oneDNN's own blocked layout ("packed"): bfloat16, and the wide LM head in float32;
- [in, out] ("transposed"): other float32 matrices, up to twice as fast as [out, in] for few rows;
- [out, in] as stored, when this torch build offers no packing, and on a GPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import linear


class Linear:
    """y = x Wᵀ + bias. `wide` marks a matrix with many more outputs than inputs (the LM head)."""

    __slots__ = ("_bias", "_multiply_packed", "_packed", "_stored", "_transposed", "layout")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, wide: bool = False) -> None:
        """`weight` is [out, in], `bias` [out]; the weight is copied unless it is kept as stored."""
        self._bias = bias
        self._packed: Any = None
        self._stored: torch.Tensor | None = None
        self._transposed: torch.Tensor | None = None
        self._multiply_packed: Any = None
        wants_packing = weight.dtype is torch.bfloat16 or wide
        if wants_packing and (packed := _pack(weight)) is not None:
            self._packed, self.layout = packed, "packed"
            self._multiply_packed = torch.ops.mkldnn._linear_pointwise.default
        elif weight.dtype is torch.float32 and weight.device.type == "cpu":
            self._transposed, self.layout = weight.t().contiguous(), "transposed"
        else:
            self._stored, self.layout = weight, "stored"

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [R, in] -> [R, out]."""
        if self._transposed is not None:
            if self._bias is not None:
                return torch.addmm(self._bias, x, self._transposed)
            return torch.mm(x, self._transposed)
        if self._packed is not None:
            y: torch.Tensor = self._multiply_packed(x, self._packed, self._bias, "none", [], "")
            return y
        assert self._stored is not None
        return linear(x, self._stored, self._bias)

    def add_to(self, base: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """base + x Wᵀ + bias, where `base` [R, out] may be overwritten."""
        if self._transposed is not None:
            added = base.addmm_(x, self._transposed)
            return added if self._bias is None else added.add_(self._bias)
        return base.add_(self(x))


def _pack(weight: torch.Tensor) -> Any:
    """The weight in oneDNN's layout, or None when this build of torch cannot: packing is not a public interface."""
    if weight.device.type != "cpu":
        return None
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        probe = torch.zeros(1, weight.shape[1], dtype=weight.dtype)
        torch.ops.mkldnn._linear_pointwise.default(probe, packed, None, "none", [], "")
    except (AttributeError, NotImplementedError, RuntimeError, TypeError):  # each: this build lacks it
        return None
    return packed
