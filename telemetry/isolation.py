"""IsolatedSink. Owns: the wall between the engine thread and a listener that runs on it.

A fault of a listener changes nothing for any request: it is counted, logged at a bounded rate, and the event goes on to
the next listener. The one exception is a listener whose verdict is meant to stop the engine (the invariant checker in
`raise` mode): its exception types are named in `lets_through` and pass.
"""

from __future__ import annotations

from engine.events import AnyEvent, EventSink
from telemetry.buffered import Closable, ErrorLog, Flushable, SinkStats


class IsolatedSink:
    """Calls `sink` on the engine thread and keeps its exceptions from the engine.

    component     name in counters and logs (`metrics`, `checker`, `read_model`)
    lets_through  exception types that reach the engine, because stopping it is their purpose
    """

    def __init__(self, sink: EventSink, component: str, *, lets_through: tuple[type[BaseException], ...] = ()) -> None:
        self._sink = sink
        self._lets_through = lets_through
        self._errors = ErrorLog(component)
        self._seen = 0

    def emit(self, event: AnyEvent) -> None:
        """Hand one event over. Raises only what `lets_through` names."""
        self._seen += 1
        try:
            self._sink.emit(event)
        except self._lets_through:
            raise
        except Exception as error:  # a broken listener must not end a step; it is counted instead
            self._errors.record(error, f"taking {type(event).__name__} of step {event.step}")

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
        """Pass on, when the listener holds events back."""
        if isinstance(self._sink, Flushable):
            self._sink.flush()

    def close(self) -> None:
        """Pass on, when the listener has something to give back."""
        if isinstance(self._sink, Closable):
            self._sink.close()
