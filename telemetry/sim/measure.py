"""Measure. Owns: what each request of a run had to wait, and what the run decided, from its events alone.

Made of the same events for a recorded run and a simulated one, so that the two compare. Times to first token count
from when a client sent its request until the token was applied; network and text are not in them.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from engine.events import AdmissionDecided, AnyEvent, RequestArrived, RequestTransitioned, StepCompleted, StepPlanned
from engine.request import Cause, RequestState
from engine.scheduler.plan import StepKind

#: Bins of durations grow by one percent: 1 µs to 100,000 s.
_LEAST_NS: Final = 1_000
_GROWTH: Final = math.log(1.01)
BINS: Final = 2_600
_LEAST: Final = float(np.nextafter(0.0, 1.0))
#: Middle of each bin, in seconds.
BIN_S: Final[NDArray[np.float64]] = _LEAST_NS / 1e9 * np.exp((np.arange(BINS) + 0.5) * _GROWTH)
_SERVED: Final = frozenset({Cause.STOP, Cause.LENGTH, Cause.KV_POOL_EXHAUSTED})


def bin_of(ns: int) -> int:
    """The bin of a duration; what it stands for is within half a percent."""
    return 0 if ns <= _LEAST_NS else min(int(math.log(ns / _LEAST_NS) / _GROWTH), BINS - 1)


class Served:
    """One request that ended. Times in nanoseconds; `gaps` holds the bins of the times between its tokens.

    ttft_ns   None: it ended before its first token
    is_whole  it ended by itself, not by a client that left or a failure; of a simulated recording, in the record too
    """

    __slots__ = (
        "cached_len",
        "e2e_ns",
        "gaps",
        "is_whole",
        "output_len",
        "prompt_len",
        "retractions",
        "rid",
        "ttft_ns",
    )

    def __init__(self, live: _Live, now_ns: int, cause: Cause) -> None:
        self.rid = live.rid
        self.prompt_len = live.prompt_len
        self.output_len = live.output_len
        self.cached_len = live.cached_len
        self.retractions = live.retractions
        self.ttft_ns = None if live.first_ns is None else live.first_ns - live.sent_ns
        self.e2e_ns = now_ns - live.sent_ns
        self.gaps = live.gaps
        self.is_whole = cause in _SERVED


class _Live:
    __slots__ = (
        "cached_len",
        "first_ns",
        "gaps",
        "last_ns",
        "output_len",
        "prompt_len",
        "retractions",
        "rid",
        "sent_ns",
    )

    def __init__(self, event: RequestArrived) -> None:
        self.rid = event.rid
        self.prompt_len = event.prompt_len
        self.sent_ns = min(event.accepted_ns or event.t_ns, event.t_ns)
        self.output_len = 0
        self.first_ns: int | None = None
        self.last_ns = 0
        self.cached_len: int | None = None
        self.retractions = 0
        self.gaps: array[int] = array("H")


class Measure:
    """Hears one run. `done` gets each request as it ends; nothing of it is kept here.

    reasons     decisions by reason; of a journal without those that it only counts
    end_ns      time of the last event
    """

    def __init__(self, done: Callable[[Served], None]) -> None:
        self._done = done
        self._live: dict[str, _Live] = {}
        self._over: list[tuple[_Live, Cause]] = []
        self.reasons: Counter[str] = Counter()
        self.steps_by_kind: Counter[str] = Counter()
        self.tokens_computed = 0
        self.retractions = 0
        self.guards: Counter[str] = Counter()
        self.start_ns: int | None = None
        self.end_ns = 0
        # Most events are about pages: one look finds out that they are not for here.
        self._hears: dict[type[AnyEvent], Callable[[Any], None]] = {
            AdmissionDecided: self._decided,
            StepCompleted: self._completed,
            RequestTransitioned: self._transitioned,
            StepPlanned: self._planned,
            RequestArrived: self._arrived,
        }

    def emit(self, event: AnyEvent) -> None:
        hear = self._hears.get(type(event))
        if hear is not None:
            hear(event)

    def _decided(self, event: AdmissionDecided) -> None:
        self.reasons[event.reason] += 1

    def _arrived(self, event: RequestArrived) -> None:
        live = _Live(event)
        self._live[event.rid] = live
        self.start_ns = live.sent_ns if self.start_ns is None else self.start_ns

    def _planned(self, event: StepPlanned) -> None:
        if event.kind is StepKind.IDLE:
            return
        self.steps_by_kind[event.kind] += 1
        self.tokens_computed += sum(row.extend_len for row in event.prefills)
        self.retractions += len(event.retractions)
        for guard in event.guards:
            self.guards[guard] += 1

    def _completed(self, event: StepCompleted) -> None:
        now = event.t_ns
        bins: dict[int, int] = {}
        for row in event.rows:
            live = self._live.get(row.rid)
            if live is None:
                continue
            live.output_len += 1
            last = live.last_ns
            live.last_ns = now
            if last:
                found = bins.get(last)
                if found is None:
                    found = bins[last] = bin_of(now - last)
                live.gaps.append(found)
            else:
                live.first_ns = now
        if event.kind is not StepKind.IDLE:
            self.end_ns = now
        for live, cause in self._over:
            if self._live.get(live.rid) is live:
                del self._live[live.rid]
            self._done(Served(live, max(now if live.last_ns == now else live.last_ns, live.sent_ns), cause))
        self._over.clear()

    def _transitioned(self, event: RequestTransitioned) -> None:
        live = self._live.get(event.rid)
        if live is None:
            return
        live.retractions = event.num_retractions
        if event.cause is Cause.ADMIT and live.cached_len is None:
            live.cached_len = min(event.cached_len, event.prompt_len)
        if event.target is RequestState.FINISHED:
            self._over.append((live, event.cause))


class Histogram:
    """Durations by bin: quantiles within half a percent, in fixed memory."""

    def __init__(self) -> None:
        self.counts = np.zeros(BINS, dtype=np.int64)
        self.sum_ns = 0
        self.most_ns = 0

    def add(self, ns: int) -> None:
        self.counts[bin_of(ns)] += 1
        self.sum_ns += ns
        self.most_ns = max(self.most_ns, ns)

    def add_bins(self, bins: array[int]) -> None:
        """Durations of which only the bins are known."""
        if len(bins):
            found = np.frombuffer(bins, dtype=np.uint16)
            self.counts += np.bincount(found, minlength=BINS)

    def quantile_s(self, share: float) -> float | None:
        """None when there is nothing in it."""
        found = quantile_of(self.counts, share)
        return min(found, self.most_ns / 1e9) if found is not None and self.most_ns else found


def quantile_of(counts: NDArray[np.int64] | NDArray[np.float64], share: float) -> float | None:
    """Seconds that `share` of what was counted stays below."""
    sums = np.cumsum(counts)
    if not sums[-1]:
        return None
    # Of a share of nothing, the least that was counted: not the first bin, which may be empty.
    return float(BIN_S[int(np.searchsorted(sums, max(share * sums[-1], _LEAST)))])
