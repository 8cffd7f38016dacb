"""The books. Owns: numbers of metric families as flat lists of ints, and what the front end's threads count."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Mapping
from typing import NamedTuple, Protocol

from engine.errors import RefusalCause
from engine.scheduler.plan import StepTimes
from engine.server.observer import CutCause
from telemetry.metric_catalog import CATALOG, FRONT_END, Metric


class Books:
    """Counters, gauges and histograms of some families as ints; `at` maps (name, label value) to a cell.

    Cells below `split` lie in `cells`. The others, of histograms that change with requests only, lie in a list of their
    own, so that what is copied at every step is short.
    """

    def __init__(self, families: tuple[Metric, ...]) -> None:
        self.at: dict[tuple[str, str], int] = {}
        #: Bounds in stored units, as whole numbers: an observation is one, and two ints compare quicker.
        self.bounds: dict[int, list[int]] = {}
        size = 0
        #: Where the second list begins.
        self.split = 0
        for metric in sorted(families, key=lambda family: family.seldom):
            for value in metric.values:
                self.at[metric.name, value] = size
                if metric.kind == "histogram":
                    bounds = [round(bound * metric.scale) for bound in metric.kept]
                    for part in range(len(metric.parts)):
                        self.bounds[size + part * metric.child] = bounds
                size += metric.width
            if not metric.seldom:
                self.split = size
        self.cells = [0] * self.split
        self._seldom = [0] * (size - self.split)
        self._seldom_copy: tuple[int, ...] | None = tuple(self._seldom)
        #: Increments below zero: dropped, because a counter must not fall, and counted.
        self.refused = 0

    def cell(self, name: str, value: str = "") -> int:
        """First cell of a family for a label value; KeyError when the catalogue has no such pair."""
        return self.at[name, value]

    def charge(self, cell: int, start: int, ends: Iterable[int], *, overlaps: bool) -> None:
        """Charge stretches that follow each other from `start` on to one cell after the other. One that ends before it
        begins is a fault, or where steps overlap a stretch that was charged before."""
        cells = self.cells
        for end in ends:
            if end >= start:
                cells[cell] += end - start
                start = end
            elif not overlaps:
                self.refused += 1
                start = end
            cell += 1

    def add(self, cell: int, amount: int) -> None:
        """Raise a counter."""
        if amount < 0:
            self.refused += 1
        else:
            self.cells[cell] += amount

    def observe(self, cell: int, value: int, count: int = 1) -> None:
        """`count` observations of `value`, in stored units (nanoseconds for times). Below zero: dropped and counted."""
        if value < 0 or count < 0:
            self.refused += 1
            return
        bounds, cells = self.bounds[cell], self.cells
        if cell >= self.split:
            cells, cell, self._seldom_copy = self._seldom, cell - self.split, None
        cells[cell + bisect_left(bounds, value)] += count
        cells[cell + len(bounds) + 1] += value * count

    def bucket(self, cell: int, value: int) -> int:
        """The cell that counts `value`, of the histogram that begins at `cell`."""
        return cell + bisect_left(self.bounds[cell], value)

    def copy(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """All cells as they are now, in two parts. For the thread that writes them."""
        if self._seldom_copy is None:
            self._seldom_copy = tuple(self._seldom)
        return tuple(self.cells), self._seldom_copy


class StepCells(NamedTuple):
    """Cells of one kind of step."""

    steps: int
    seconds: int
    tokens: int
    requests: int


class CheckerCounts(Protocol):
    """What an invariant checker counts; the maps only grow in value, and may lack entries that are zero."""

    @property
    def checks_by_group(self) -> Mapping[str, int]: ...

    @property
    def violations_by_id(self) -> Mapping[str, int]: ...

    @property
    def ns_by_tier(self) -> Mapping[int, int]: ...

    @property
    def internal_errors(self) -> int: ...

    @property
    def laws_by_mode(self) -> Mapping[str, int]: ...


class SinkCounts(Protocol):
    """What one sink says about itself."""

    @property
    def component(self) -> str: ...

    @property
    def accepted(self) -> int: ...

    @property
    def dropped(self) -> int: ...

    @property
    def errors(self) -> int: ...

    @property
    def queued(self) -> int: ...


class FrontEndMetrics:
    """What the HTTP layer counts: an observer for the server. Any thread."""

    def __init__(self) -> None:
        self._books = Books(tuple(metric for metric in CATALOG if metric.name in FRONT_END))
        self._lock = threading.Lock()
        cell = self._books.cell
        self._received = cell("requests_received_total")
        self._disconnects = cell("client_disconnects_total")
        self._send = cell("stream_send_seconds")
        self._first_bytes: deque[tuple[str, int]] = deque(maxlen=65_536)

    def on_received(self) -> None:
        """A request reached a generating route, whatever becomes of it."""
        with self._lock:
            self._books.cells[self._received] += 1

    def on_rejected(self, cause: RefusalCause) -> None:
        """A request was turned away."""
        cell = self._books.at["requests_rejected_total", cause]
        with self._lock:
            self._books.cells[cell] += 1

    def on_disconnect(self) -> None:
        """A client went away before its response was complete."""
        with self._lock:
            self._books.cells[self._disconnects] += 1

    def on_cut(self, cause: CutCause) -> None:
        """The server ended or refused a connection."""
        cell = self._books.at["connections_cut_total", cause]
        with self._lock:
            self._books.cells[cell] += 1

    def on_stream_send(self, ns: int) -> None:
        """One write to a stream took `ns` nanoseconds."""
        with self._lock:
            self._books.observe(self._send, ns)

    def on_first_byte(self, rid: str, t_ns: int) -> None:
        """The first byte of a response was written. Without this, TTFT is known only when the response is complete."""
        self._first_bytes.append((rid, t_ns))

    def take_first_bytes(self, until_ns: int | None = None) -> list[tuple[str, int]]:
        """First bytes since the last call, written by `until_ns`; for one thread, without a lock.

        Whoever is behind the engine must name the time it has come to: of later ones it does not know the request yet.
        """
        taken, waiting = [], self._first_bytes
        while waiting and (until_ns is None or waiting[0][1] <= until_ns):
            taken.append(waiting.popleft())
        return taken

    def snapshot(self) -> tuple[int, ...]:
        with self._lock:
            return tuple(self._books.cells)

    def rejected(self) -> dict[str, int]:
        """Requests turned away, by cause."""
        cells = self.snapshot()
        return {cause.value: cells[self._books.at["requests_rejected_total", cause]] for cause in RefusalCause}

    @property
    def refused(self) -> int:
        return self._books.refused

    @property
    def at(self) -> dict[tuple[str, str], int]:
        return self._books.at


def cuts_of(times: StepTimes) -> tuple[int, ...]:
    """Where the first six phases of a step end, in order: the stretches between its cuts."""
    return (
        times.plan_from_ns,
        times.planned_ns,
        times.committed_ns,
        times.launched_ns,
        times.ready_ns,
        times.applied_ns,
    )
