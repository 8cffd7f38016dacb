"""BufferedSink. Owns: the hand-over from the engine thread to a slow listener on a thread of its own.

The engine thread only appends to a bounded deque: no lock and no wake-up, because `deque.append` and `popleft` are
atomic, so neither side ever waits for the other. The worker looks every `period_s`, which also bounds the latency of
what it feeds; `flush` wakes it at once. It gives the interpreter lock away every few events, so that a long queue
does not hold up the engine thread. A full queue drops the newest event and counts it. Whatever the listener raises is
counted and logged at a bounded rate, never raised.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol, runtime_checkable

import msgspec

from engine.events import AnyEvent, EventSink

_LOG: Final = logging.getLogger("admitscope.telemetry")

CAPACITY: Final = 65_536
PERIOD_S: Final = 0.05
LOG_EVERY_S: Final = 10.0
_EVENTS_PER_TURN: Final = 64


@runtime_checkable
class Flushable(Protocol):
    """A sink that holds events back for a while."""

    def flush(self) -> None: ...


@runtime_checkable
class Closable(Protocol):
    """A sink with something to give back."""

    def close(self) -> None: ...


class SinkStats(msgspec.Struct, frozen=True):
    """Counters of one sink since its start.

    accepted   events taken over from the engine; `delivered` of them have reached the listener
    dropped    events refused because the queue was full
    errors     exceptions of the listener, `last_error` the latest in words
    """

    component: str
    accepted: int
    delivered: int
    dropped: int
    errors: int
    queued: int
    last_error: str = ""


class ErrorLog:
    """Counts the errors of one component and logs them at most every `every_s` seconds, with what was left out."""

    def __init__(self, component: str, *, every_s: float = LOG_EVERY_S) -> None:
        self.component = component
        self.count = 0
        self.last = ""
        self._every_s = every_s
        self._silent_until = 0.0
        self._unlogged = 0

    def record(self, error: BaseException, doing: str) -> None:
        """One more error. `doing` says what was attempted, without any payload."""
        self.count += 1
        self.last = f"{type(error).__name__}: {error}"
        now = time.monotonic()
        if now < self._silent_until:
            self._unlogged += 1
            return
        also, self._unlogged, self._silent_until = self._unlogged, 0, now + self._every_s
        _LOG.error("%s failed while %s (%s); %d more since the last report", self.component, doing, self.last, also)


class BufferedSink:
    """Feeds `sink` from a worker thread. `emit` is for the engine thread, everything else for any thread.

    component  name in counters and logs (`journal`, `spans`, …)
    capacity   events that may wait; beyond it the newest is dropped
    """

    def __init__(
        self, sink: EventSink, component: str, *, capacity: int = CAPACITY, period_s: float = PERIOD_S
    ) -> None:
        if capacity < 1:
            raise ValueError(f"capacity is {capacity}; a queue holds at least 1 event")
        self._sink = sink
        self._capacity = capacity
        self._period_s = period_s
        self._queue: deque[AnyEvent] = deque()
        self._errors = ErrorLog(component)
        self._accepted = 0
        self._delivered = 0
        self._dropped = 0
        self._closing = False
        self._wake = threading.Event()
        self._drained = threading.Condition()
        self._rounds = 0
        self._thread = threading.Thread(target=self._work, name=f"admitscope-{component}", daemon=True)
        self._thread.start()

    def emit(self, event: AnyEvent) -> None:
        """Queue one event, or drop it when `capacity` wait or after `close`. Never blocks, never raises."""
        if len(self._queue) >= self._capacity or self._closing:
            self._dropped += 1
            return
        self._queue.append(event)
        self._accepted += 1

    def stats(self) -> SinkStats:
        """The counters now."""
        return SinkStats(
            self._errors.component,
            self._accepted,
            self._delivered,
            self._dropped,
            self._errors.count,
            len(self._queue),
            self._errors.last,
        )

    def flush(self, timeout_s: float = 5.0) -> bool:
        """Wait until everything emitted before this call was delivered and flushed. False after `timeout_s`."""
        with self._drained:
            # The round under way may have looked at the queue already: the one after it counts.
            target = self._rounds + 2
            deadline = time.monotonic() + timeout_s
            while self._rounds < target and self._thread.is_alive():
                self._wake.set()
                if not self._drained.wait(0.01) and time.monotonic() >= deadline:
                    return False
        return True

    def close(self, timeout_s: float = 10.0) -> bool:
        """Deliver what waits, close the listener, end the thread. False when it did not end in `timeout_s`."""
        self._closing = True
        self._wake.set()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while True:
            closing = self._closing
            self._wake.wait(0 if closing else self._period_s)
            self._wake.clear()
            self._drain()
            with self._drained:
                self._rounds += 1
                self._drained.notify_all()
            if closing:
                break
        if isinstance(self._sink, Closable):
            self._guard(self._sink.close, "closing")

    def _drain(self) -> None:
        queue = self._queue
        for turn in range(len(queue)):
            if turn % _EVENTS_PER_TURN == 0:
                time.sleep(0)
            event = queue.popleft()
            try:
                self._sink.emit(event)
            except Exception as error:  # whatever a listener raises must not end its thread
                self._errors.record(error, f"taking {type(event).__name__} of step {event.step}")
            self._delivered += 1
        if isinstance(self._sink, Flushable):
            self._guard(self._sink.flush, "writing")

    def _guard(self, action: Callable[[], None], doing: str) -> None:
        try:
            action()
        except Exception as error:  # whatever a listener raises must not end its thread
            self._errors.record(error, doing)
