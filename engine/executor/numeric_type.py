"""Numeric types. Owns: what `executor.dtype=auto` means on the machine at hand."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import torch

from engine.config import ExecutorConfig
from engine.models.linear import packs
from engine.models.loader import DTYPES

_CPU_FACTS: Final = Path("/proc/cpuinfo")


def numeric_type(config: ExecutorConfig) -> torch.dtype:
    """The type of weights, activations and K/V.

    `auto` is bfloat16 on a GPU, and on a CPU whose matrix units multiply it (AMX), where that is several times as fast
    and a row keeps its bits in any company. Elsewhere, and below int8 weights, it is float32.
    """
    if config.dtype != "auto":
        return DTYPES[config.dtype]
    if config.device == "cuda":
        return torch.bfloat16
    return torch.bfloat16 if config.quantization in {"auto", "none"} and multiplies_bfloat16() else torch.float32


def multiplies_bfloat16() -> bool:
    """Whether this processor has matrix units for bfloat16 that this build of torch uses. False where nobody says."""
    try:
        flags = _CPU_FACTS.read_text(encoding="ascii", errors="replace")
    except OSError:  # not Linux
        return False
    # Not a public interface: it asks the kernel for the units too, which a sandbox may refuse.
    permitted = getattr(torch.cpu, "_is_amx_tile_supported", None)
    return "amx_bf16" in flags and permitted is not None and bool(permitted()) and packs(torch.bfloat16)
