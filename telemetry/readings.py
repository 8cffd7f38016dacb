"""Readings. Owns: what a `MetricsSink` shows, as the plain numbers that the invariant checker compares with its books.

Taken between two steps, on the thread that judges. Telemetry knows the checker's form of readings; the checker knows
nothing of telemetry.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Final

from engine.request import RequestState
from invariants.meter_books import Key, Readings
from invariants.time_laws import LifeReading
from telemetry.metric_catalog import CATALOG, FRONT_END
from telemetry.metrics import MetricsSink
from telemetry.request_timeline import RequestTimeline

#: Live requests whose times one audit looks at.
LIVES: Final = 64
_OWN: Final = tuple(metric for metric in CATALOG if metric.name not in FRONT_END)


def life_reading(request: RequestTimeline) -> LifeReading:
    """The times and parts of one request."""
    return LifeReading(
        rid=request.rid,
        accepted_ns=request.accepted_ns,
        enqueued_ns=request.enqueued_ns,
        admitted_ns=request.admitted_ns,
        first_token_ns=request.first_token_ns,
        finished_ns=request.finished_ns,
        ttft_ns=request.ttft_ns,
        ttft_parts=tuple(request.parts),
        wait_parts=(*request.blockers, *request.late_blockers),
        waited_to_ns=request.blocker_since_ns if request.state is RequestState.WAITING else None,
        between_ns=request.refused_between_ns,
    )


def readings_of(metrics: MetricsSink, *, lives_from: int = 0, also: Iterable[RequestTimeline] = ()) -> Readings:
    """Everything that `metrics` counts, and the times of LIVES live requests from place `lives_from` on.

    also  more requests whose times are to be looked at, such as ended ones
    """
    cells, at = metrics.snapshot(), metrics.at
    counters: dict[Key, int] = {}
    gauges: dict[Key, int] = {}
    observations: dict[Key, int] = {}
    for metric in _OWN:
        for value in metric.values:
            cell = at[metric.name, value]
            if metric.kind == "counter":
                counters[metric.name, value] = cells[cell]
            elif metric.kind == "gauge":
                gauges[metric.name, value] = cells[cell]
            else:
                observations[metric.name, value] = metric.observations(cells, cell)
    lives = [*islice(metrics.timeline.live.values(), lives_from, lives_from + LIVES), *also]
    return Readings(counters, gauges, observations, tuple(map(life_reading, lives)))
