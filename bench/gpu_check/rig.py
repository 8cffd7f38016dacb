"""Rig. Owns: what the sections work with: a device, FlashInfer, a clock, and the sizes of what they try.

Sections know the device by its seam only, so tests run them on a CPU double, at small sizes.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol

import numpy as np
import torch

from engine.attention.device import DeviceRuntime
from engine.attention.flashinfer import FlashInferBackend, HeadShape, MixedKernel
from engine.models.flashinfer_ops import FlashInferOps
from engine.models.ops import MakeOps, TorchOps

#: Launches before those that are timed.
WARM_UPS: Final = 3
#: Names of the two tables of small operators.
TORCH, FLASHINFER = "torch's operators", "FlashInfer's operators"


class Stopwatch(Protocol):
    """Times work on the device."""

    def seconds(self, work: Callable[[], object]) -> float:
        """How long the device takes for what `work` starts."""
        ...

    def spin(self, seconds: float) -> None:
        """Keep the device busy for about this long: what is started after it waits."""
        ...


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large the sections' problems are.

    heads            (K/V heads, head_dim, group) that attention is checked at
    layers, hidden   of the model of random weights for the checks of graphs
    """

    heads: tuple[tuple[int, int, int], ...] = ((3, 64, 3), (8, 128, 4), (4, 128, 7), (8, 128, 5))
    pages: tuple[int, ...] = (1, 16)
    shrink: int = 1
    layers: int = 4
    race_steps: int = 2000
    replays: int = 1000
    graph_rows: int = 32
    launches: int = 20
    prompts: int = 64
    answer_tokens: int = 32
    copy_bytes: int = 8 * 1024**3
    matmul: int = 8192
    dtype: torch.dtype = torch.bfloat16


@dataclass(slots=True)
class Rig:
    """kernels: the flashinfer module. rng: of everything that is drawn."""

    runtime: DeviceRuntime
    kernels: Any
    stopwatch: Stopwatch
    sizes: Sizes
    rng: np.random.Generator

    @property
    def device(self) -> torch.device:
        return self.runtime.device

    def backend(self, heads: HeadShape, **settings: Any) -> FlashInferBackend:
        """A backend of our own, by default as the engine has it."""
        return FlashInferBackend(
            runtime=settings.pop("runtime", self.runtime),
            heads=heads,
            dtype=self.sizes.dtype,
            mixed=settings.pop("mixed", MixedKernel.RAGGED),
            kernels=self.kernels,
            **settings,
        )

    def ops(self) -> dict[str, MakeOps]:
        """What makes each table of small operators, by its name."""
        return {TORCH: TorchOps, FLASHINFER: partial(FlashInferOps, kernels=self.kernels)}

    def median_s(self, work: Callable[[], object]) -> float:
        """Median time of `work` on the device, after some that are not timed."""
        for _ in range(WARM_UPS):
            work()
        return statistics.median(self.stopwatch.seconds(work) for _ in range(self.sizes.launches))
