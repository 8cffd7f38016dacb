"""Staging. Owns: how a step's integer arrays reach the device: packed into one pinned buffer, in one copy.

The buffer may be filled again only when the device is past the copies that read it. With one buffer the host would wait
for that in every step; two, used by turns, let it be a step ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from engine.attention.device import DeviceRuntime

#: Sets of staging and kernels used by turns.
SETS: Final = 2
#: Entries of a first buffer: enough for most steps.
FIRST_CAPACITY: Final = 4096

Item = TypeVar("Item")


class Rotation(Generic[Item]):
    """`sets` things that take turns."""

    def __init__(self, make: Callable[[], Item], sets: int) -> None:
        self._items = [make() for _ in range(sets)]
        self._turns = 0

    def next(self) -> Item:
        """The one that was used longest ago."""
        self._turns += 1
        return self._items[self._turns % len(self._items)]


class Staging:
    """One pinned buffer, its twin on the device, and the event of its last copy.

    Views on the device stay where they are as long as no more than `capacity` entries are packed.
    """

    def __init__(self, runtime: DeviceRuntime, dtype: torch.dtype, *, capacity: int = FIRST_CAPACITY) -> None:
        self._runtime = runtime
        self._dtype = dtype
        self._sent = runtime.event()
        self._reserve(capacity)
        self._bounds: list[tuple[int, int]] = []

    def pack(self, arrays: Sequence[NDArray[Any]]) -> list[torch.Tensor]:
        """Views of the pinned buffer that hold `arrays`, one behind the other. Waits while a copy may still read it.

        The views are good until the next `pack`; `sent` has to be called after the last copy that reads them.
        """
        self.wait()
        ends = np.cumsum([len(array) for array in arrays]).tolist()
        self._bounds = list(zip([0, *ends[:-1]], ends, strict=True))
        if ends[-1] > len(self._host):
            self._reserve(2 * ends[-1])
        for (first, end), array in zip(self._bounds, arrays, strict=True):
            self._array[first:end] = array
        return [self._host[first:end] for first, end in self._bounds]

    def upload(self) -> list[torch.Tensor]:
        """Start one copy of all that was packed; its views on the device, in the same order."""
        count = self._bounds[-1][1]
        self._runtime.copy(self._device[:count], self._host[:count])
        return [self._device[first:end] for first, end in self._bounds]

    def sent(self) -> None:
        """All copies from the buffer were started: it may be filled again once the device is past this place."""
        self._sent.record()

    def wait(self) -> None:
        """Hold the host until the device is past the last `sent`."""
        self._sent.wait()

    def _reserve(self, count: int) -> None:
        self._host = self._runtime.pinned(count, self._dtype)
        self._array = self._host.numpy()
        self._device = torch.empty(count, dtype=self._dtype, device=self._runtime.device)
