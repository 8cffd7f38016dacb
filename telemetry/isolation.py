"""IsolatedSink. Owns: the wall between a listener and the thread that it shares with others, such as the engine's.

A fault of a listener changes nothing for any request: it is counted, logged at a bounded rate, and the event goes on to
the next listener. The one exception is a listener whose verdict is meant to stop the engine (the invariant checker in
`raise` mode): its exception types are named in `lets_through` and pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from operator import length_hint
from typing import Protocol, runtime_checkable

from engine.events import AnyEvent, EventSink
from telemetry.error_log import ErrorLog
from telemetry.takers import Closable, FailsLate, Flushable, SinkStats


@runtime_checkable
class Feedable(Protocol):
    """A listener that takes many events quicker together than one by one."""

    def feed(self, events: Iterator[AnyEvent], /) -> None:
        """Take them all, one after the other. Raises what one of them raises; who calls goes on with those after it."""


class IsolatedSink:
    """Calls `sink` on the thread it is called on, and keeps its exceptions from that thread.

    component     name in counters and logs (`metrics`, `checker`, `read_model`)
    lets_through  exception types that reach the engine, because stopping it is their purpose
    """

    def __init__(self, sink: EventSink, component: str, *, lets_through: tuple[type[BaseException], ...] = ()) -> None:
        self._sink = sink
        self._lets_through = lets_through
        self._errors = ErrorLog(component)
        self._seen = 0
        self._feed = sink.feed if isinstance(sink, Feedable) else self._emit_each
        self._late_faults = sink.late_faults if isinstance(sink, FailsLate) else list

    def emit(self, event: AnyEvent) -> None:
        """Hand one event over. Raises only what `lets_through` names."""
        self._seen += 1
        try:
            self._sink.emit(event)
        except self._lets_through:
            raise
        except Exception as error:  # a broken listener must not end a step; it is counted instead
            self.fault(error, event)

    def take(self, events: Sequence[AnyEvent]) -> None:
        """Hand several over. An event that raises is counted, and the next one follows."""
        self._seen += len(events)
        rest, left = iter(events), len(events)
        while left:
            try:
                self._feed(rest)
            except self._lets_through:
                raise
            except Exception as error:  # a broken listener must not end the thread; it is counted instead
                if length_hint(rest) == left:
                    next(rest)  # it was not even looked at
                left = length_hint(rest)
                self.fault(error, events[len(events) - left - 1])
            else:
                break
        for late, event in self._late_faults():
            self.fault(late, event)

    def hear(self, events: int) -> None:
        """So many events are handed to the listener by somebody who knows it better; see `fault`."""
        self._seen += events

    def fault(self, error: Exception, event: AnyEvent) -> None:
        """The listener raised `error` there, while it took `event`."""
        self._errors.record(error, f"taking {type(event).__name__} of step {event.step}")

    def _emit_each(self, events: Iterator[AnyEvent]) -> None:
        emit = self._sink.emit
        for event in events:
            emit(event)

    @property
    def component(self) -> str:
        return self._errors.component

    def stats(self) -> SinkStats:
        """The counters now; nothing is ever queued or dropped here."""
        return SinkStats(
            self._errors.component,
            self._seen,
            self._seen - self._errors.count,
            0,
            self._errors.count,
            0,
            self._errors.last,
        )

    def flush(self) -> None:
        """Pass on, when the listener holds events back. What it raises is counted."""
        if isinstance(self._sink, Flushable):
            self._guard(self._sink.flush, "writing")

    def close(self) -> None:
        """Pass on, when the listener has something to give back. What it raises is counted."""
        if isinstance(self._sink, Closable):
            self._guard(self._sink.close, "closing")

    def _guard(self, action: Callable[[], None], doing: str) -> None:
        try:
            action()
        except self._lets_through:
            raise
        except Exception as error:  # a broken listener must not end the thread; it is counted instead
            self._errors.record(error, doing)
