"""SharedSink. Owns: one queue and one thread for several listeners that none waits on a disk or a network.

A thread for each listener would wake, and take the interpreter's lock from the engine, once for each of them. A fault
of one listener is its own: it is counted under its name, and the others hear the event all the same. Whoever may wait
for something outside of this process (a journal's disk) does not belong here, because the others would wait with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from engine.events import AnyEvent, EventSink
from telemetry.buffered import CAPACITY, BufferedSink
from telemetry.isolation import IsolatedSink
from telemetry.shared_timeline import SharedTimeline
from telemetry.takers import SinkStats

#: Events that each listener is handed at once, about four steps: what it needs for one it has at hand for the others.
BATCH: Final = 64
#: Longer than the journal's, which is what a killed engine leaves: whoever wants to know what listeners know asks, and
#: gets what was published before. Beside a model on the same processors it is the waking up that costs.
PERIOD_S: Final = 0.5


class _Several:
    """Hands events on to each, in order; never raises."""

    def __init__(self, takers: Sequence[IsolatedSink | SharedTimeline]) -> None:
        self.takers = tuple(taker.take for taker in takers)
        self.sinks = tuple(
            sink for taker in takers for sink in (taker.sinks if isinstance(taker, SharedTimeline) else (taker,))
        )

    def emit(self, event: AnyEvent) -> None:
        for take in self.takers:
            take((event,))

    def flush(self) -> None:
        for sink in self.sinks:
            sink.flush()

    def close(self) -> None:
        for sink in self.sinks:
            sink.close()


class SharedSink:
    """Feeds `listeners`, (component, sink) in order, from one worker thread. `emit` is for the engine thread.

    together  after them, two that share a timeline

    The last one is closed last: a collector that hangs holds up nobody else.
    """

    def __init__(
        self,
        listeners: Sequence[tuple[str, EventSink]],
        *,
        together: SharedTimeline | None = None,
        capacity: int = CAPACITY,
        period_s: float = PERIOD_S,
    ) -> None:
        takers: list[IsolatedSink | SharedTimeline] = [IsolatedSink(sink, component) for component, sink in listeners]
        if together is not None:
            takers.append(together)
        self._several = _Several(takers)
        name = listeners[0][0] if len(takers) == 1 else "listeners"
        self._queue = BufferedSink(self._several, name, capacity=capacity, period_s=period_s, batch=BATCH)
        #: All of these: see `BufferedSink`.
        self.emit = self._queue.emit
        self.call = self._queue.call
        self.catch_up = self._queue.catch_up
        self.flush = self._queue.flush
        self.close = self._queue.close
        self.share_processors = self._queue.share_processors

    @property
    def queue(self) -> BufferedSink:
        """The one queue of all of them."""
        return self._queue

    @property
    def dropped(self) -> int:
        """Events that no listener will hear."""
        return self._queue.dropped

    @property
    def lost(self) -> int:
        """Events that were taken over and never reached the listeners."""
        return self._queue.lost

    @property
    def cpu_ns(self) -> int:
        """Processor time of the worker."""
        return self._queue.cpu_ns

    @property
    def lent_ns(self) -> int:
        """See `Pace`."""
        return self._queue.lent_ns

    @property
    def thread_ns(self) -> int:
        """See `BufferedSink`."""
        return self._queue.thread_ns

    @property
    def components(self) -> tuple[str, ...]:
        return tuple(sink.component for sink in self._several.sinks)

    def stats(self) -> Iterator[SinkStats]:
        """For each listener: the counters of the queue, which are those of all, and its own errors.

        An error of the queue is the end of the worker, which is an error of each.
        """
        queue = self._queue.stats()
        for sink in self._several.sinks:
            own = sink.stats()
            yield msgspec.structs.replace(
                queue,
                component=own.component,
                errors=own.errors + queue.errors,
                last_error=queue.last_error or own.last_error,
            )
