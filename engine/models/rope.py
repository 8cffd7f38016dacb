"""Rotary position embedding. Owns: the cosine and sine tables, and turning q and k by them (rotate-half order)."""

from __future__ import annotations

import math

import torch

from engine.models.llama_config import LlamaConfig, RopeScaling


def rope_tables(config: LlamaConfig, max_positions: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos, signed sin), each [max_positions, 1, D].

    The first half of the sine is negated, so that turning is `x * cos + swap_halves(x) * sin`.
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    frequencies = 1.0 / (config.rope_theta**exponents)
    if config.rope_scaling is not None:
        frequencies = _scaled(frequencies, config.rope_scaling)
    angles = torch.arange(max_positions, dtype=torch.float32)[:, None] * frequencies[None, :]
    cos, sin = angles.cos(), angles.sin()
    cos, sin = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
    return cos[:, None, :].to(dtype), sin[:, None, :].to(dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn x [R, heads, D] by the tables' rows cos, sin [R, 1, D]."""
    low, high = x.chunk(2, dim=-1)
    return torch.addcmul(x * cos, torch.cat((high, low), dim=-1), sin)


def _scaled(frequencies: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Frequencies stretched for contexts beyond the trained one."""
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    # llama3: wavelengths shorter than original / high stay, longer than original / low are stretched by `factor`,
    # those between move smoothly from one to the other.
    turns = scaling.original_context * frequencies / (2 * math.pi)
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = keep.clamp(0.0, 1.0)
    return keep * frequencies + (1 - keep) * frequencies / scaling.factor
