"""Clocks. Owns: where time comes from. The core never reads one; `now_ns` is handed to it."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A monotonic source of integer nanoseconds."""

    def now_ns(self) -> int:
        """Nanoseconds since an arbitrary origin; never falls."""
        ...


class MonotonicClock:
    """The clock of a real process."""

    def now_ns(self) -> int:
        return time.monotonic_ns()


class VirtualClock:
    """The clock of simulations and tests: moves only when told to."""

    def __init__(self, start_ns: int = 0) -> None:
        self._now_ns = start_ns

    def now_ns(self) -> int:
        return self._now_ns

    def advance_ns(self, delta_ns: int) -> None:
        """Move forward by `delta_ns` (at least 0)."""
        if delta_ns < 0:
            raise ValueError(f"delta_ns is {delta_ns}; a clock moves forward only")
        self._now_ns += delta_ns
