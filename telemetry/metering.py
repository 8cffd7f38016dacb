"""MeteredFanOut. Owns: handing each event to every listener, and what that costs the engine thread, by part.

A clock read costs as much as some listeners do, so one step in 16 is measured and stands for the others; a step's
events are measured all or none, so that no kind of event is favoured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from engine.events import AnyEvent, EventSink
from telemetry.metric_catalog import PARTS

_ONE_IN: Final = 16


class MeteredFanOut:
    """Hands each event to `(part, sink)` pairs in order; `part` is one of PARTS.

    clock_ns  nanoseconds that only rise
    """

    def __init__(self, sinks: Sequence[tuple[str, EventSink]], clock_ns: Callable[[], int]) -> None:
        unknown = sorted({part for part, _ in sinks} - set(PARTS))
        if unknown:
            raise ValueError(f"sinks name the parts {unknown}; there are {PARTS}")
        self._emits = tuple(sink.emit for _, sink in sinks)
        self._parts = tuple(sinks)
        self._clock_ns = clock_ns
        self.ns_by_part: dict[str, int] = dict.fromkeys(PARTS, 0)

    def emit(self, event: AnyEvent) -> None:
        """Hand one event to everybody. Raises what a listener raises."""
        if event.step % _ONE_IN:
            for emit in self._emits:
                emit(event)
            return
        before = self._clock_ns()
        for part, sink in self._parts:
            sink.emit(event)
            now = self._clock_ns()
            self.ns_by_part[part] += (now - before) * _ONE_IN
            before = now

    def numbers(self) -> Iterator[tuple[str, str, int]]:
        """(family, label value, number) for `/metrics`; estimates from the steps that were measured."""
        for part, spent in self.ns_by_part.items():
            yield "telemetry_seconds_total", part, spent
