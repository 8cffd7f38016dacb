"""Resampling. Owns: quantiles of requests drawn anew, and the intervals that follow.

Requests are drawn, not tokens: tokens of one request are alike. Both runs see the same draw, so a difference is one of
configuration. The intervals say how much the answer depends on which requests happened to come; they do not say how
wrong the simulator is, and requests that queue together are less independent than they are taken to be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from telemetry.sim.measure import BINS, Served, quantile_of

_F64 = NDArray[np.float64]
LOW: Final = 0.025
HIGH: Final = 0.975
_LEAST: Final = float(np.nextafter(0.0, 1.0))


class Values:
    """One number for each request; quantiles of any draw of them."""

    def __init__(self, values: Sequence[float]) -> None:
        self._values = np.asarray(values, dtype=np.float64)
        self._order = np.argsort(self._values, kind="stable")
        self._sorted = self._values[self._order]

    def quantile(self, weights: _F64, share: float) -> float | None:
        """The least value that `share` of the draw does not exceed."""
        if not len(self._sorted):
            return None
        sums = np.cumsum(weights[self._order])
        place = int(np.searchsorted(sums, max(share * sums[-1], _LEAST)))
        return float(self._sorted[min(place, len(self._sorted) - 1)])

    def mean(self, weights: _F64) -> float | None:
        """Of the draw."""
        return float(np.average(self._values, weights=weights)) if len(self._values) else None


class Gaps:
    """Times between tokens of all requests, as counts by (request, bin)."""

    def __init__(self, served: Sequence[Served]) -> None:
        owners, bins, counts = [], [], []
        for index, one in enumerate(served):
            if len(one.gaps):
                found, count = np.unique(np.frombuffer(one.gaps, dtype=np.uint16), return_counts=True)
                owners.append(np.full(len(found), index))
                bins.append(found)
                counts.append(count)
        empty = np.zeros(0, dtype=np.int64)
        self._owners = np.concatenate(owners) if owners else empty
        self._bins = np.concatenate(bins).astype(np.int64) if bins else empty
        self._counts = np.concatenate(counts).astype(np.float64) if counts else empty.astype(np.float64)

    def counts(self, weights: _F64) -> _F64:
        """[BINS] gaps of the draw."""
        return np.bincount(self._bins, self._counts * weights[self._owners], BINS).astype(np.float64)

    def quantile(self, weights: _F64, share: float) -> float | None:
        """Seconds that `share` of the gaps of the draw stay below."""
        return quantile_of(self.counts(weights), share)


def draws(requests: int, resamples: int, seed: int) -> Iterator[_F64]:
    """How often each request is in a draw of as many as there are."""
    rng = np.random.default_rng(seed)
    shares = np.full(requests, 1 / requests)
    for _ in range(resamples):
        yield rng.multinomial(requests, shares).astype(np.float64)


Figures = Callable[[_F64], Sequence[float | None]]


def intervals(
    before: Figures, after: Figures, requests: int, *, resamples: int, seed: int
) -> tuple[list[tuple[float | None, ...]], ...]:
    """For each figure: (value, low, high) before, after, and of the difference."""
    ones = np.ones(requests)
    value_before, value_after = before(ones), after(ones)
    drawn_before, drawn_after = [], []
    for weights in draws(requests, resamples, seed) if requests else ():
        drawn_before.append(_numbers(before(weights)))
        drawn_after.append(_numbers(after(weights)))
    rows_before, rows_after = np.array(drawn_before), np.array(drawn_after)
    found: tuple[list[tuple[float | None, ...]], ...] = ([], [], [])
    for index, (one, other) in enumerate(zip(value_before, value_after, strict=True)):
        if one is None or other is None or not len(rows_before):
            for part, value in zip(found, (one, other, None), strict=True):
                part.append((value, None, None))
            continue
        columns = (rows_before[:, index], rows_after[:, index], rows_after[:, index] - rows_before[:, index])
        for part, value, column in zip(found, (one, other, other - one), columns, strict=True):
            low, high = np.nanquantile(column, (LOW, HIGH)).tolist()
            part.append((value, low, high))
    return found


def _numbers(figures: Sequence[float | None]) -> list[float]:
    return [float("nan") if figure is None else figure for figure in figures]
