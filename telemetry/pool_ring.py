"""The pool ring. Owns: pages by state and what is promised, over the last ten minutes, in slots of one second."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Final

from engine.events import StepCompleted, StepPlanned
from telemetry.observe_kv import PoolPoint

SLOT_NS: Final = 1_000_000_000
SLOTS: Final = 600


class _Slot:
    """One second. `at` is its number since the clock's origin; the numbers are those of its last step."""

    __slots__ = ("at", "evicted", "pages", "promised", "tightest")

    def __init__(self, at: int) -> None:
        self.at = at
        self.pages = (0, 0, 0, 0)
        self.promised = 0.0
        self.evicted = 0
        self.tightest: float | None = None


class PoolRing:
    """The last SLOTS seconds in which steps were made. Times never fall."""

    def __init__(self) -> None:
        self._slots: deque[_Slot] = deque(maxlen=SLOTS)

    def planned(self, event: StepPlanned, page_size: int) -> None:
        """A plan: what is promised, against what could be had before this step took its pages."""
        slot = self._at(event.t_ns)
        slot.pages, slot.promised = event.pages, event.promised_tokens
        slot.evicted += event.evicted_pages
        left = (event.pages[0] + event.pages[3]) * page_size - event.promised_tokens
        slot.tightest = left if slot.tightest is None else min(slot.tightest, left)

    def completed(self, event: StepCompleted, t_ns: int) -> None:
        """A step was applied: who ended gave pages back."""
        slot = self._at(t_ns)
        slot.pages = event.pages
        if not event.num_running:
            slot.promised = 0.0

    def points(self, page_size: int, wall_s: Callable[[int], float]) -> Iterator[PoolPoint]:
        """The slots, oldest first."""
        for slot in self._slots:
            free, private, protected, evictable = slot.pages
            yield PoolPoint(
                t_wall_s=wall_s((slot.at + 1) * SLOT_NS),
                free=free,
                private=private,
                protected=protected,
                evictable=evictable,
                had_tokens=(free + evictable) * page_size,
                promised_tokens=slot.promised,
                tightest_tokens=slot.tightest,
                evicted_pages=slot.evicted,
            )

    def _at(self, t_ns: int) -> _Slot:
        at = t_ns // SLOT_NS
        last = self._slots[-1] if self._slots else None
        if last is None or at > last.at:
            slot = _Slot(at)
            if last is not None:
                slot.pages, slot.promised = last.pages, last.promised
            self._slots.append(slot)
            return slot
        return last
