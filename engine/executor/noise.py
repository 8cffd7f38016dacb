"""Noise. Owns: Gumbel noise from an integer hash of (seed, position, token id): no generator, no state.

The same integer arithmetic on every device, and the same noise for a token whatever its batch, its slot or a retraction
in between.
"""

from __future__ import annotations

from typing import Final

import torch

MASK64: Final = (1 << 64) - 1
#: Odd constants of a 64-bit finaliser (splitmix64), as signed integers because torch has no unsigned arithmetic.
GOLDEN: Final = 0x9E3779B97F4A7C15
_MIX_1: Final = 0xBF58476D1CE4E5B9
_MIX_2: Final = 0x94D049BB133111EB


def token_keys(count: int) -> torch.Tensor:
    """Well-mixed 64-bit keys of the integers below `count`, [count] int64."""
    return mix(torch.arange(count, dtype=torch.int64) * signed(GOLDEN))


def row_key(seed: int, position: int) -> int:
    """A signed 64-bit key of (seed, position), integers of any size of which the lowest 64 bits count."""
    return signed(mix_int(mix_int(seed & MASK64) ^ (position & MASK64)))


def gumbel(keys: torch.Tensor, row_keys: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise, [S, n] float64. keys [n] or [S, n] int64, row_keys [S, 1] int64."""
    bits = mix(keys ^ row_keys)
    # 53 random bits to the middle of their cell in (0, 1): neither logarithm meets 0.
    uniform = (_shift_right(bits, 11).double() + 0.5) * 2.0**-53
    return uniform.log_().neg_().log_().neg_()


def mix(x: torch.Tensor) -> torch.Tensor:
    """The 64-bit finaliser on int64 elements (multiplication wraps around)."""
    x = (x ^ _shift_right(x, 30)) * signed(_MIX_1)
    x = (x ^ _shift_right(x, 27)) * signed(_MIX_2)
    return x ^ _shift_right(x, 31)


def mix_int(x: int) -> int:
    """The same finaliser on one Python integer of 64 bits, after a step of the golden ratio."""
    x = (x + GOLDEN) & MASK64
    x = ((x ^ (x >> 30)) * _MIX_1) & MASK64
    x = ((x ^ (x >> 27)) * _MIX_2) & MASK64
    return x ^ (x >> 31)


def signed(x: int) -> int:
    """The signed 64-bit integer with the same bits."""
    return x - (1 << 64) if x >= 1 << 63 else x


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift: torch's own copies the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
