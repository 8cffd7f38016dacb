"""The latency ring. Owns: latencies and rates of the last ten minutes, in slots of one second of the engine clock."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import Final

from telemetry.observe import LatencyPoint

SLOT_NS: Final = 1_000_000_000
SLOTS: Final = 600
#: Distinct gaps, and first tokens, that one slot keeps; what comes later in that second is counted but not ranked.
KEPT: Final = 4096


def quantile(counts: Counter[int], q: float) -> int | None:
    """The smallest value that at least `q` of the observations do not exceed; None when there are none."""
    total = counts.total()
    if not total:
        return None
    need, seen = q * total, 0
    for value in sorted(counts):
        seen += counts[value]
        if seen >= need:
            return value
    raise AssertionError("counts changed while they were read")


_Quantiles = tuple[float | None, float | None]


def _quantiles(counts: Counter[int]) -> _Quantiles:
    """(median, 99th percentile) in seconds."""
    return _seconds(quantile(counts, 0.5)), _seconds(quantile(counts, 0.99))


class Slot:
    """One second. `at` is its number since the clock's origin."""

    __slots__ = (
        "at",
        "gap_count",
        "gap_quantiles",
        "gaps",
        "prefill",
        "running",
        "steps",
        "tokens",
        "ttft",
        "ttft_count",
        "ttft_quantiles",
        "waiting",
    )

    def __init__(self, at: int, *, waiting: int, running: int) -> None:
        self.at = at
        self.ttft: Counter[int] = Counter()
        self.ttft_count = 0
        self.gaps: Counter[int] = Counter()
        self.gap_count = 0
        self.tokens = 0
        self.prefill = 0
        self.steps = 0
        self.waiting = waiting
        self.running = running
        self.ttft_quantiles: _Quantiles | None = None
        self.gap_quantiles: _Quantiles | None = None

    def close(self) -> None:
        """Nothing more will be observed: keep the quantiles, let the observations go."""
        self.ttft_quantiles, self.gap_quantiles = _quantiles(self.ttft), _quantiles(self.gaps)
        self.ttft, self.gaps = Counter(), Counter()

    def point(self, wall_s: float) -> LatencyPoint:
        """This slot as an answer."""
        ttft = self.ttft_quantiles or _quantiles(self.ttft)
        gap = self.gap_quantiles or _quantiles(self.gaps)
        return LatencyPoint(
            t_wall_s=wall_s,
            ttft_count=self.ttft_count,
            ttft_p50_s=ttft[0],
            ttft_p99_s=ttft[1],
            tbt_count=self.gap_count,
            tbt_p50_s=gap[0],
            tbt_p99_s=gap[1],
            tokens_per_s=self.tokens * 1e9 / SLOT_NS,
            prefill_tokens_per_s=self.prefill * 1e9 / SLOT_NS,
            waiting=self.waiting,
            running=self.running,
            steps=self.steps,
        )


class LatencyRing:
    """The last SLOTS seconds. Times never fall."""

    def __init__(self) -> None:
        self._slots: deque[Slot] = deque(maxlen=SLOTS)

    def at(self, t_ns: int) -> Slot:
        """The slot of `t_ns`, begun if need be; a time before the last slot counts there."""
        at = t_ns // SLOT_NS
        last = self._slots[-1] if self._slots else None
        if last is None or at > last.at:
            waiting = running = 0
            if last is not None:
                waiting, running = last.waiting, last.running
                last.close()
            last = Slot(at, waiting=waiting, running=running)
            self._slots.append(last)
        return last

    def add_ttft(self, t_ns: int, ttft_ns: int) -> None:
        slot = self.at(t_ns)
        slot.ttft_count += 1
        if len(slot.ttft) < KEPT:
            slot.ttft[ttft_ns] += 1

    def add_gaps(self, t_ns: int, gap_ns: int, count: int) -> None:
        slot = self.at(t_ns)
        slot.gap_count += count
        if len(slot.gaps) < KEPT or gap_ns in slot.gaps:
            slot.gaps[gap_ns] += count

    def rates(self, now_ns: int, window_s: int) -> tuple[float, float]:
        """(output, computed prompt) tokens per second over the `window_s` seconds up to `now_ns`."""
        since = now_ns // SLOT_NS - window_s
        recent = [slot for slot in self._slots if slot.at > since]
        return sum(slot.tokens for slot in recent) / window_s, sum(slot.prefill for slot in recent) / window_s

    def points(self, now_ns: int, wall_s: Callable[[int], float]) -> Iterable[LatencyPoint]:
        """All slots up to the one of `now_ns`, seconds in which nothing happened included."""
        if not self._slots:
            return
        last = max(now_ns // SLOT_NS, self._slots[-1].at)
        by_number = {slot.at: slot for slot in self._slots}
        waiting = running = 0
        for at in range(max(self._slots[0].at, last - SLOTS + 1), last + 1):
            slot = by_number.get(at) or Slot(at, waiting=waiting, running=running)
            waiting, running = slot.waiting, slot.running
            yield slot.point(wall_s((at + 1) * SLOT_NS))


def _seconds(ns: int | None) -> float | None:
    return None if ns is None else ns / 1e9
