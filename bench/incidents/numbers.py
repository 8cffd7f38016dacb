"""What the boards would show of one run. Owns: the few functions of PromQL that their panels use, over its scrapes.

The range is the whole run, so a rate is an increase divided by its length; the first scrape was made before anybody
came and is zero.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from telemetry.demo.scrape import Scrape
from telemetry.metric_catalog import CATALOG

_BOUNDS: Final = {metric.name: metric.bounds for metric in CATALOG if metric.kind == "histogram"}


class Numbers:
    """Scrapes of a run, as (seconds since its start, samples), in order."""

    def __init__(self, scrapes: Sequence[tuple[float, Scrape]]) -> None:
        self._scrapes = scrapes

    def increase(self, name: str, **labels: str) -> float:
        """`sum(increase(name{labels}))` over the run."""
        return self._scrapes[-1][1].total(name, **labels) - self._scrapes[0][1].total(name, **labels)

    def rate(self, name: str, **labels: str) -> float:
        """`sum(rate(name{labels}))`, a second."""
        return self.increase(name, **labels) / (self._scrapes[-1][0] - self._scrapes[0][0])

    def by(self, name: str, label: str) -> dict[str, float]:
        """`sum by (label) (increase(name))` over the run: those above 0, largest first."""
        return self._scrapes[-1][1].by(name, label)

    def quantile(self, q: float, name: str) -> float:
        """`histogram_quantile(q, sum by (le) (rate(name_bucket)))`: straight lines within a bucket, as Prometheus."""
        bounds = [*_BOUNDS[name], math.inf]
        words = [repr(float(bound)) if bound < math.inf else "+Inf" for bound in bounds]
        counts = [self.increase(f"{name}_bucket", le=word) for word in words]
        rank, below, start = q * counts[-1], 0.0, 0.0
        for bound, count in zip(bounds, counts, strict=True):
            if count >= rank and count > below:
                return start if bound == math.inf else start + (bound - start) * (rank - below) / (count - below)
            below, start = count, bound
        return math.nan

    def above(self, name: str, bound: float) -> float:
        """Share of observations above `bound`, which is a bucket's: what the objectives of the alerts read."""
        count = self.increase(f"{name}_count")
        return 1 - self.increase(f"{name}_bucket", le=repr(float(bound))) / count if count else math.nan

    def shares(self, name: str, label: str, whole: str) -> dict[str, float]:
        """`sum by (label) (rate(name_sum)) / sum(rate(whole_sum))`, largest first."""
        total = self.increase(f"{whole}_sum")
        return {value: part / total for value, part in self.by(f"{name}_sum", label).items()}

    def most(self, name: str, **labels: str) -> float:
        """`max_over_time(name{labels})`."""
        return max(value for _, value in self.series(name, **labels))

    def at(self, when_s: float, name: str, **labels: str) -> float:
        """`name{labels}` at the last scrape before `when_s`."""
        return [value for t_s, value in self.series(name, **labels) if t_s <= when_s][-1]

    def series(self, name: str, **labels: str) -> list[tuple[float, float]]:
        """(seconds, value) of each scrape."""
        return [(t_s, scrape.total(name, **labels)) for t_s, scrape in self._scrapes]

    def to_be_had(self) -> list[tuple[float, float]]:
        """Share of the pool that is free or can be evicted, over time."""
        whole = self._scrapes[0][1].total("kv_pages_capacity")
        free, cached = self.series("kv_pages", state="free"), self.series("kv_pages", state="evictable")
        return [(t_s, (value + more) / whole) for (t_s, value), (_, more) in zip(free, cached, strict=True)]
