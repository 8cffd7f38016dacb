"""Plots of one simulation. Owns: the queue over time, and how times to first token and between tokens are spread.

`Watch` hears a run beside everybody else and keeps little: a histogram of each measure, and at most MOST_POINTS of the
queue. Drawing needs the extra `plot`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np

from engine.events import AnyEvent, StepCompleted
from telemetry.sim.measure import BIN_S, Histogram, Measure
from telemetry.sim.results import Totals
from telemetry.sim.svg import HEIGHT, WIDTH, Row, data, write

MOST_POINTS: Final = 1_000
#: Steps of a curve: every half percent of what was counted.
_SHARES: Final = np.linspace(0.0, 1.0, 201)
_WORDS: Final = {"ttft": "time to first token", "tbt": "time between tokens"}


class Watch:
    """An event sink. Of the queue the longest of each stretch of steps remains, so that no peak is lost."""

    def __init__(self) -> None:
        self._totals = Totals()
        self._measure = Measure(self._totals.add)
        self._points: list[tuple[int, int, int]] = []
        self._every = 1
        self._inside = 0
        self._most = (0, 0, 0)

    def emit(self, event: AnyEvent) -> None:
        self._measure.emit(event)
        if isinstance(event, StepCompleted):
            self._queue(event)

    def _queue(self, event: StepCompleted) -> None:
        now = (event.t_ns, event.num_waiting, event.num_running)
        self._most = now if self._inside == 0 or now[1] > self._most[1] else self._most
        self._inside += 1
        if self._inside < self._every:
            return
        self._points.append(self._most)
        self._inside = 0
        if len(self._points) >= MOST_POINTS:
            pairs = zip(self._points[::2], self._points[1::2], strict=True)
            self._points = [max(pair, key=lambda point: point[1]) for pair in pairs]
            self._every *= 2

    def queue(self) -> list[Row]:
        """Waiting and running requests over virtual seconds."""
        points = [*self._points, *([self._most] if self._inside else [])]
        rows: list[Row] = []
        for t_ns, waiting, running in points:
            rows.append({"s": t_ns / 1e9, "requests": waiting, "what": "waiting"})
            rows.append({"s": t_ns / 1e9, "requests": running, "what": "running"})
        return rows

    def spread(self, name: str) -> list[Row]:
        """Share of the `ttft` or `tbt` that is at most so many seconds."""
        histogram: Histogram = getattr(self._totals, name)
        sums = np.cumsum(histogram.counts)
        if not sums[-1]:
            return []
        bins = np.searchsorted(sums, np.maximum(_SHARES * sums[-1], 1))
        return [
            {"seconds": float(f"{BIN_S[place]:.4g}"), "share": float(share)}
            for place, share in zip(bins.tolist(), _SHARES.tolist(), strict=True)
        ]


def write_plots(watch: Watch, folder: Path, title: str) -> list[Path]:
    """queue.svg, ttft.svg and tbt.svg in `folder`; what was never measured gets none. Raises UsageError."""
    files = []
    if rows := watch.queue():
        files.append(write(folder / "queue.svg", queue_chart(rows, title)))
    files += [
        write(folder / f"{name}.svg", spread_chart(rows, name, title))
        for name in _WORDS
        if (rows := watch.spread(name))
    ]
    return files


def queue_chart(rows: list[Row], title: str) -> Any:
    """Requests over virtual time."""
    import altair as alt

    return (
        alt.Chart(data(rows), title=title, width=WIDTH, height=HEIGHT)
        .mark_line(interpolate="step-after")
        .encode(
            x=alt.X("s:Q", title="virtual time (s)"),
            y=alt.Y("requests:Q", title="requests"),
            color=alt.Color("what:N", title=None, sort=["waiting", "running"]),
        )
    )


def spread_chart(rows: list[Row], name: str, title: str) -> Any:
    """The cumulative distribution, with the time on a logarithmic axis."""
    import altair as alt

    return (
        alt.Chart(data(rows), title=title, width=WIDTH, height=HEIGHT)
        .mark_line(interpolate="step-after")
        .encode(
            x=alt.X("seconds:Q", title=f"{_WORDS[name]} (s)", scale=alt.Scale(type="log")),
            y=alt.Y("share:Q", title="share at most so long", axis=alt.Axis(format="%")),
        )
    )
