"""Quantized linear layers. Owns: int8 weights, and the int8 form that activations take on their way through them.

Weights have one scale per output channel. Activations have one scale per row, made anew for each batch, so that a row
never depends on its company; the products are summed in int32, which is exact in any order. So these layers give a
row the same bits alone and in a batch, which floating-point layers do not.

- `int8` keeps about 16 bits of an activation, as two int8 rows, a coarse one and what it left: x ≈ s (hi + lo / 254).
  Both go through the weights at once, which are read only once: what is dear about few rows.
- `int8-fast` keeps the coarse row alone.

One number per row would be too little for the outliers of a decoder's activations: with a few channels a hundred times
the rest, the rest is rounded to nothing (LLM.int8(), arXiv:2208.07339, splits such channels off; a second row needs no
choice of channels). bench/accuracy.py prints what each mode costs.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final, Literal

import torch

from engine.errors import ConfigError

Quantization = Literal["none", "int8", "int8-fast"]

_MOST: Final = 127
#: `lo` is the rest of a rounding, at most half a step, stretched to the whole range of int8.
_STRETCH: Final = 2 * _MOST
#: Zero among unsigned bytes.
_MIDDLE: Final = 128


class QuantizedLinear:
    """y = x Wᵀ + bias with int8 weights. Same calls as `Linear`."""

    __slots__ = ("_bias", "_multiply", "_packed", "_scales", "_two_rows", "_zeros", "layout")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, two_rows: bool) -> None:
        """`weight` [out, in] and `bias` [out] are float; `two_rows`: see `int8`.

        Raises ConfigError when this build of torch has no int8 layers, or this processor none that are exact.
        """
        scales = (weight.float().abs().amax(1) / _MOST).clamp_min_(torch.finfo(torch.float32).tiny)
        quantized = (weight.float() / scales[:, None]).round_().to(torch.int8)
        self._scales = scales
        self._zeros = torch.zeros(len(scales), dtype=torch.int64)
        self._bias = None if bias is None else bias.float()
        self._two_rows = two_rows
        self._packed, self._multiply = _pack(quantized)
        self.layout = "int8, two rows" if two_rows else "int8"

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [R, in] -> [R, out], in the type of `x`."""
        y = self._product(x.float())
        if self._bias is not None:
            y += self._bias
        return y.to(x.dtype)

    def add_to(self, base: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """base + x Wᵀ + bias, where `base` [R, out] may be overwritten."""
        return base.add_(self(x))

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        rows = len(x)
        scale = x.abs().amax(1, keepdim=True).div_(_MOST).clamp_min_(torch.finfo(torch.float32).tiny)
        steps = x / scale
        if not self._two_rows:
            return self._int8(steps.round_().to(torch.int8)).mul_(scale)
        coarse = steps.round()
        both = torch.empty(2 * rows, x.shape[1], dtype=torch.int8)
        both[:rows] = coarse
        both[rows:] = steps.sub_(coarse).mul_(_STRETCH).round_()
        y = self._int8(both)
        return y[:rows].add_(y[rows:], alpha=1 / _STRETCH).mul_(scale)

    def _int8(self, x: torch.Tensor) -> torch.Tensor:
        """[R, in] int8 -> [R, out] float32: exact sums, times the weights' scales."""
        return _multiplied(self._multiply, x, self._packed, self._scales, self._zeros)


def _pack(weight: torch.Tensor) -> tuple[Any, Any]:
    """[out, in] int8 in oneDNN's layout, and what multiplies by it: neither is a public interface of torch."""
    try:
        multiply = torch.ops.onednn.qlinear_pointwise.default
        packed = torch.ops.onednn.qlinear_prepack(weight, None)
        is_exact = _sums_are_exact()
    except (AttributeError, NotImplementedError, RuntimeError, TypeError) as error:  # each: this build lacks it
        raise ConfigError(
            "executor.quantization=int8 needs the int8 layers of oneDNN, which this build of torch lacks "
            f"({type(error).__name__}): use executor.quantization=none"
        ) from error
    if not is_exact:
        raise ConfigError(
            "executor.quantization=int8 needs a processor that sums int8 products exactly (AVX512, AVX-VNNI); on this "
            "one oneDNN's layers lose what overflows 16 bits: use executor.quantization=none"
        )
    return packed, multiply


def _multiplied(multiply: Any, x: torch.Tensor, packed: Any, scales: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
    """[R, in] int8 -> [R, out] float32. Overwrites `x`.

    As unsigned bytes, of which 128 is zero: what VNNI multiplies by signed ones. For signed activations oneDNN has no
    kernel on some processors without matrix units (AMD's Zen 5), and does them one by one, hundreds of times as slowly.
    """
    unsigned = x.view(torch.uint8).bitwise_xor_(_MIDDLE)
    y: torch.Tensor = multiply(
        unsigned, 1.0, _MIDDLE, packed, scales, zeros, None, 1.0, 0, torch.float32, "none", [], ""
    )
    return y


@cache
def _sums_are_exact() -> bool:
    """Whether the largest products add up: before VNNI, two are summed in 16 bits, and what overflows is lost."""
    for rows, inner, out in ((1, 129, 16), (5, 2048, 512)):
        x, weight = (
            torch.full((rows, inner), _MOST, dtype=torch.int8),
            torch.full((out, inner), _MOST, dtype=torch.int8),
        )
        ones, zeros = torch.ones(out), torch.zeros(out, dtype=torch.int64)
        packed, multiply = torch.ops.onednn.qlinear_prepack(weight, None), torch.ops.onednn.qlinear_pointwise.default
        for sign in (1, -1):
            y = _multiplied(multiply, x * sign, packed, ones, zeros)
            if not bool((y == sign * inner * _MOST**2).all()):
                return False
    return True
