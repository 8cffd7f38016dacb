"""MeteredFanOut. Owns: handing each event to every listener, and what that costs the engine thread, by part.

A step publishes some thirty events. To a queue they go together: when a step is planned, when it is over, and whenever
somebody is about to ask what a queue has brought (`BufferedSink.refill`), the queue's own worker included. So nothing
waits here for longer than a worker's period, and the engine thread does for each event little more than keep it.

A clock read costs as much as some listeners do, so one step in 16 is measured and stands for the others; a step's
events are measured all or none, so that no kind of event is favoured.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from engine.events import AnyEvent, EventSink, StepCompleted, StepPlanned
from telemetry.buffered import BufferedSink
from telemetry.metric_catalog import PARTS
from telemetry.pacing import Forward

_ONE_IN: Final = 16
_PUBLISH: Final = "publish"
_ENDS_A_HALF: Final = frozenset({StepPlanned, StepCompleted})


class MeteredFanOut:
    """Hands each event to `(part, sink)` pairs in order, which `queues` come before; `part` is one of PARTS.

    clock_ns  nanoseconds that only rise
    """

    def __init__(
        self,
        sinks: Sequence[tuple[str, EventSink]],
        clock_ns: Callable[[], int],
        *,
        queues: Sequence[BufferedSink] = (),
    ) -> None:
        unknown = sorted({part for part, _ in sinks} - set(PARTS))
        if unknown:
            raise ValueError(f"sinks name the parts {unknown}; there are {PARTS}")
        self._emits = tuple(sink.emit for _, sink in sinks)
        self._parts = tuple(sinks)
        self._clock_ns = clock_ns
        self.ns_by_part: dict[str, int] = dict.fromkeys(PARTS, 0)
        self._queues = tuple(queues)
        #: Published, and in no queue yet. The engine thread appends; whoever holds the lock takes out.
        self._kept: deque[AnyEvent] = deque()
        self._append = self._kept.append
        self._lock = threading.Lock()
        self._is_computing = False
        #: The last plan's step, and whether outcomes come after the next plan, as they do where steps overlap.
        self._planned_step = 0
        self._lags = False
        #: How long it took to put together the batch of the last step.
        self._prepare_ns = 0
        #: When the queues' workers may work.
        self._forward = Forward()
        for queue in queues:
            queue.refill = self.hand_over
            queue.window.forward = self._forward

    def emit(self, event: AnyEvent) -> None:
        """Hand one event to everybody. Raises what a listener raises."""
        if event.step % _ONE_IN:
            # What `_keep` does, without a call for each event.
            if self._is_computing and not (self._lags and event.step == self._planned_step):
                self._computed()
            self._append(event)
            if type(event) in _ENDS_A_HALF:
                self._half_over(event)
            for emit in self._emits:
                emit(event)
            return
        before = self._clock_ns()
        self._keep(event)
        now = self._clock_ns()
        self.ns_by_part[_PUBLISH] += (now - before) * _ONE_IN
        before = now
        for part, sink in self._parts:
            sink.emit(event)
            now = self._clock_ns()
            self.ns_by_part[part] += (now - before) * _ONE_IN
            before = now

    def hand_over(self) -> None:
        """Give the queues what was published by now. Any thread."""
        kept = self._kept
        with self._lock:
            events = [kept.popleft() for _ in range(len(kept))]
            if events:
                for queue in self._queues:
                    queue.hand(events)

    def numbers(self) -> Iterator[tuple[str, str, int]]:
        """(family, label value, number) for `/metrics`; estimates from the steps that were measured."""
        for part, spent in self.ns_by_part.items():
            yield "telemetry_seconds_total", part, spent

    def _keep(self, event: AnyEvent) -> None:
        # What follows from a plan at once, where steps overlap, is told while its batch is put together.
        if self._is_computing and not (self._lags and event.step == self._planned_step):
            self._computed()
        self._append(event)
        if type(event) in _ENDS_A_HALF:
            self._half_over(event)

    def _half_over(self, event: AnyEvent) -> None:
        """A step was planned, or is over."""
        self.hand_over()
        if isinstance(event, StepCompleted):
            self._prepare_ns = event.times.launched_ns - event.times.committed_ns
            self._lags = event.step < self._planned_step
            return
        self._is_computing, self._planned_step = True, event.step
        self._forward.open(time.monotonic_ns(), self._prepare_ns)
        for queue in self._queues:
            queue.planned()

    def _computed(self) -> None:
        """The model has come back: this is no time any more to work beside the engine."""
        self._is_computing = False
        self._forward.shut(time.monotonic_ns())
