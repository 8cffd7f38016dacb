"""Rotary position embedding. Owns: the cosine and sine tables, and turning q and k by them (rotate-half order)."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from engine.models.llama_config import LlamaConfig, RopeScaling


class PositionTables:
    """Tensors with a row for each position, made longer when they are too short. `make(count)` makes them.

    Those that were replaced are kept: a graph captured before reads them where they lie.
    """

    def __init__(self, make: Callable[[int], tuple[torch.Tensor, ...]]) -> None:
        self._make = make
        self._made = [make(0)]

    @property
    def now(self) -> tuple[torch.Tensor, ...]:
        return self._made[-1]

    def reserve(self, count: int) -> None:
        """Have rows for positions below `count`."""
        if count > len(self.now[0]):
            self._made.append(self._make(count))


def rope_tables(config: LlamaConfig, max_positions: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos, signed sin), each [max_positions, 1, D].

    The first half of the sine is negated, so that turning is `x * cos + swap_halves(x) * sin`.
    """
    cos, sin = _cos_sin(config, max_positions)
    cos, sin = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
    return cos[:, None, :].to(dtype), sin[:, None, :].to(dtype)


def cos_sin_cache(config: LlamaConfig, max_positions: int) -> torch.Tensor:
    """[max_positions, D] float32: the cosines of D / 2 angles, then their sines. FlashInfer's form of the tables."""
    return torch.cat(_cos_sin(config, max_positions), dim=-1)


def _cos_sin(config: LlamaConfig, max_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of every angle, each [max_positions, D / 2] float32."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    frequencies = 1.0 / (config.rope_theta**exponents)
    scaling = config.rope_scaling
    if scaling is not None:
        frequencies = _scaled(frequencies, scaling, config.rope_theta)
    angles = torch.arange(max_positions, dtype=torch.float32)[:, None] * frequencies[None, :]
    cos, sin = angles.cos(), angles.sin()
    if scaling is not None and scaling.magnitude != 1.0:
        cos, sin = cos * scaling.magnitude, sin * scaling.magnitude
    return cos, sin


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn x [R, heads, D] by the tables' rows cos, sin [R, 1, D]."""
    # Rolled by half its length the last axis has its halves swapped.
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


def _scaled(frequencies: torch.Tensor, scaling: RopeScaling, theta: float) -> torch.Tensor:
    """Frequencies stretched for contexts beyond the trained one. frequencies [D / 2] -> [D / 2]."""
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "factors":
        return frequencies / torch.tensor(scaling.factors)
    if scaling.kind == "yarn":
        keep = _yarn_keep(len(frequencies), scaling, theta)
    else:
        # llama3: wavelengths shorter than original / high stay, longer than original / low are stretched by `factor`,
        # those between move smoothly from one to the other.
        turns = scaling.original_context * frequencies / (2 * math.pi)
        keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        keep = keep.clamp(0.0, 1.0)
    return keep * frequencies + (1 - keep) * frequencies / scaling.factor


def _yarn_keep(count: int, scaling: RopeScaling, theta: float) -> torch.Tensor:
    """How much of each frequency yarn keeps, [count] in [0, 1]: 1 up to one dimension, 0 from another on."""

    def dimension(turns: float) -> float:
        """Where, as an index into the frequencies, a frequency turns this often within the original context."""
        return count * math.log(scaling.original_context / (turns * 2 * math.pi)) / math.log(theta)

    first, last = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * count - 1)
    if first == last:
        last += 0.001  # a step instead of a ramp, without dividing by nothing
    return 1 - ((torch.arange(count, dtype=torch.float32) - first) / (last - first)).clamp(0.0, 1.0)
