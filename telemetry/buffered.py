"""BufferedSink. Owns: the hand-over from the engine thread to a slow listener on a thread of its own.

The engine thread only adds to a bounded deque, because `extend` and `popleft` are atomic, so neither side ever waits
for the other. A plan rings for the worker: the engine computes next, mostly without the interpreter, so that is when
work beside it costs least. Without plans the worker looks every `period_s`, which bounds the latency of what it feeds.

Workers take turns, and work in slices (`telemetry.pacing.Pace`). Where a queue grows all the same, the engine is busy
without a pause: then the worker takes no breaks, and above half the capacity each plan gives way for GIVE_WAY_S, unless
the worker stands still.

A full queue drops the newest event and counts it. Whatever the listener raises is counted and logged at a bounded
rate, never raised. What is no fault but an end (`SystemExit`) ends the worker: that is counted and logged too, what
comes then is dropped, and nobody is told that he caught up.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, cast

from engine.events import AnyEvent, EventSink, StepPlanned
from engine.executor.base import LendCore
from telemetry.error_log import ErrorLog
from telemetry.pacing import TURN_S, Bell, ForwardWindow, Pace, Turns
from telemetry.takers import Closable, Flushable, SinkStats, Taker, takers_of

_LOG: Final = logging.getLogger("admitscope.telemetry")

CAPACITY: Final = 65_536
PERIOD_S: Final = 0.2
#: What the engine thread gives away at a plan when a worker cannot follow.
GIVE_WAY_S: Final = 0.001
#: Events taken at once, and those for which a plan rings; fewer wait for the period. A worker is in the way of the
#: engine's caches in every step beside which it works: to work longer, but as seldom as the period allows, costs the
#: engine half as much. Where more come in a period, a longer queue would cost memory that is in no cache.
_BATCH: Final = 8
_WORTH_A_RING: Final = 512
#: The same beside a model that leaves nobody's memory in a cache anyway.
_WORTH_A_LOAN: Final = 2_048
#: And the events that one listener is given, batch after batch, before the next hears the first of them: each time that
#: they change, the next one's code and books have left the caches.
_STRETCH: Final = 1_024
#: As many waiting events are no delay but a backlog: no more breaks.
_BACKLOG: Final = 4_096
#: How often a close that takes long says what is left, and looks how far it is.
CLOSE_LOG_EVERY_S: Final = 5.0
CLOSE_LOOK_S: Final = 0.05


_TURNS: Final = Turns()


def _nothing() -> None:
    """Nobody keeps anything back."""


class BufferedSink:
    """Feeds `sink` from a worker thread. `emit` is for the engine thread, everything else for any thread.

    component  name in counters and logs (`journal`, `spans`, …)
    capacity   events that may wait; beyond it the newest is dropped
    batch      events that are taken at once: as many as the listener does in a part of a slice
    """

    def __init__(
        self,
        sink: EventSink,
        component: str,
        *,
        capacity: int = CAPACITY,
        period_s: float = PERIOD_S,
        batch: int = _BATCH,
    ) -> None:
        if capacity < 1:
            raise ValueError(f"capacity is {capacity}; a queue holds at least 1 event")
        self._sink = sink
        self._takers = takers_of(sink)
        self._capacity = capacity
        self._period_s, self._worth_a_ring = period_s, _WORTH_A_RING
        self._batch = self._stretch = batch
        self._queue: deque[AnyEvent] = deque()
        #: (events delivered before it, what to do then), in that order.
        self._calls: deque[tuple[int, Callable[[], object]]] = deque()
        self._errors = ErrorLog(component)
        self._accepted = 0
        self._delivered = 0
        self._dropped = 0
        self._gave_way_at = 0
        #: Batches that some listener took: it rises while a worker moves, which `_delivered` may not for a while.
        self._moved = 0
        #: Processor time of the worker.
        self.cpu_ns = 0
        #: Events up to here were delivered, and flushed.
        self._settled = 0
        #: Who waits for the worker now.
        self._askers = 0
        self._closing = False
        #: Ended in order: all was delivered, and the listener closed. A worker that died, or was given up, never is.
        self._has_ended = False
        self._given_up = False
        self._bell = Bell()
        #: The worker waits for its period to end, or for a bell.
        self._rests = False
        #: When work beside the engine costs it least.
        self.window = ForwardWindow(self._bell)
        self.pace = Pace(self.window, published=self._count_accepted, is_asked=self._is_asked)
        #: Brings what was published and not handed over yet. Set by whoever keeps some back; any thread calls it.
        self.refill: Callable[[], None] = _nothing
        self._drained = threading.Condition()
        self._rounds = 0
        self._thread = threading.Thread(target=self._live, name=f"admitscope-{component}", daemon=True)
        self._thread.start()

    def emit(self, event: AnyEvent) -> None:
        """Queue one event, or drop it when `capacity` wait or after `close`. Waits for nobody, never raises."""
        forward = self.window.forward
        forward.shut(time.monotonic_ns())
        self.hand((event,))
        if type(event) is StepPlanned:
            forward.open(time.monotonic_ns())
            self.planned()

    def hand(self, events: Sequence[AnyEvent]) -> None:
        """Queue several, and drop those for which there is no room. One thread at a time; waits for nobody."""
        room = 0 if self._closing else max(self._capacity - len(self._queue), 0)
        if room < len(events):
            self._dropped += len(events) - room
            events = events[:room]
        self._queue.extend(events)
        self._accepted += len(events)

    def planned(self) -> None:
        """The last event was a plan, with which the forward has opened. The engine thread alone."""
        waiting = len(self._queue)
        window = self.window
        if (window.is_awaited and window.forward.is_of_use) or (self._rests and waiting > self._worth_a_ring):
            self._rests = False
            self._bell.ring()
        # A worker that cannot follow is at work: it neither rests nor waits.
        if 2 * waiting > self._capacity and self._count() != self._gave_way_at:
            self._gave_way_at = self._count()
            time.sleep(GIVE_WAY_S)

    def share_processors(self, lend_core: LendCore, *, period_s: float) -> None:
        """The engine computes on every processor that the worker could have: it asks for one, and wakes up as seldom as
        that. Before the first event."""
        self.pace.lend_core, self._period_s = lend_core, period_s
        self._worth_a_ring, self._stretch = _WORTH_A_LOAN, max(_STRETCH, self._batch)

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

    def call(self, action: Callable[[], object]) -> None:
        """Run `action` on the worker once all that was emitted before is delivered, and anything after it is.

        For the engine thread. What it raises is counted as an error of this component. After `close` nobody runs it.
        """
        if self._closing:
            return
        self.refill()
        self._calls.append((self._accepted, action))

    def catch_up(self, timeout_s: float) -> bool:
        """Wait until everything emitted before this call was delivered and flushed. False after `timeout_s`."""
        self.refill()
        target = self._accepted
        return self._await(lambda: self._settled >= target, timeout_s)

    def flush(self, timeout_s: float = 5.0) -> bool:
        """The same, and the listener is flushed again even if nothing was new."""
        self.refill()
        # The round under way may have looked at the queue already: the one after it counts.
        target = self._rounds + 2
        return self._await(lambda: self._has_ended or self._rounds >= target, timeout_s)

    def _await(self, is_done: Callable[[], bool], timeout_s: float) -> bool:
        if is_done():
            return True
        deadline = time.monotonic() + timeout_s
        with self._drained:
            self._askers += 1
            try:
                while not is_done() and self._thread.is_alive():
                    self._bell.ring()
                    if not self._drained.wait(0.01) and time.monotonic() >= deadline:
                        return is_done()
            finally:
                self._askers -= 1
        return is_done()

    @property
    def lent_ns(self) -> int:
        """See `Pace`."""
        return self.pace.lent_ns

    @property
    def thread_ns(self) -> int:
        """Processor time of the worker up to now, in the middle of a round too. Raises OSError once it has ended."""
        return time.clock_gettime_ns(time.pthread_getcpuclockid(cast("int", self._thread.ident)))

    @property
    def dropped(self) -> int:
        """Events that were refused because the queue was full, or after its end."""
        return self._dropped

    @property
    def lost(self) -> int:
        """Events that were taken over and never reached the listener; those that still wait among them."""
        return self._accepted - self._delivered

    def close(self, timeout_s: float = 10.0, *, most_s: float | None = None) -> bool:
        """Deliver what waits, close the listener, end the thread. False when that failed; a log line says what is lost.

        timeout_s  longest wait while nothing is delivered
        most_s     longest wait in all, as long as something is; None: as `timeout_s`
        """
        self.refill()
        self._closing = True
        self._given_up = False  # closing once more goes on where the last try gave up
        self._bell.ring()
        began = moved = told = time.monotonic()
        delivered, most_s = self._delivered, timeout_s if most_s is None else most_s
        while self._thread.is_alive():
            now = time.monotonic()
            if self._delivered != delivered:
                delivered, moved = self._delivered, now
            if now - moved >= timeout_s or now - began >= most_s:
                break
            if now - told >= CLOSE_LOG_EVERY_S:
                told = now
                left_s = most_s - (now - began)
                _LOG.warning("%s: %d events still to be written; given up in %.0f s", self._name, self.lost, left_s)
            self._thread.join(CLOSE_LOOK_S)
        if not self._has_ended:
            self._give_up(time.monotonic() - began)
        return self._has_ended

    def _give_up(self, waited_s: float) -> None:
        """Stop the worker at its next event, so that what is lost can be counted, and say it."""
        self._given_up = True
        self._thread.join(TURN_S)
        if not self._has_ended:
            words = "%s: %d of %d events are lost: not written %.1f s after the end, %d more were dropped before"
            _LOG.error(words, self._name, self.lost, self._accepted, waited_s, self._dropped)

    @property
    def _name(self) -> str:
        return self._errors.component

    def _live(self) -> None:
        try:
            self._work()
        except BaseException as error:  # an end that a listener asks for (SystemExit) is no reason to be silent
            # First: what comes from here on is dropped and counted, for nobody takes it.
            self._closing = True
            self._errors.record(error, f"working: its thread has ended, with {self.lost} events not delivered")

    def _work(self) -> None:
        while not self._given_up:
            closing = self._closing
            self._rests = True
            self._bell.wait(0 if closing else self._period_s)
            self._rests = False
            self.refill()
            self._take_turn()
            if isinstance(self._sink, Flushable):
                self._guard(self._sink.flush, "writing")
            with self._drained:
                self._settled = self._delivered
                self._rounds += 1
                self._drained.notify_all()
            self.cpu_ns = time.thread_time_ns()
            if closing:
                break
        if self._given_up:
            return  # a journal that is cut must not end as if it were whole
        if isinstance(self._sink, Closable):
            self._guard(self._sink.close, "closing")
        self._has_ended = True

    def _take_turn(self) -> None:
        """Drain the queue, one worker after another."""
        if not self._queue and not self._calls:
            return
        has_turn = _TURNS.take(self._count)
        self.pace.begin()
        try:
            self._drain()
        finally:
            self.pace.end()
            if has_turn:
                _TURNS.give_back()

    def _count(self) -> int:
        return self._delivered + self._moved

    def _is_asked(self) -> bool:
        return self._askers > 0

    def _count_accepted(self) -> int:
        return self._accepted

    def _drain(self) -> None:
        queue, waiting = self._queue, len(self._queue)
        takers = self._takers
        while not self._given_up:
            if waiting:
                self.pace.before_work(is_polite=self._is_polite)
            # A call that comes after this look comes after all that wait by now.
            most = min(waiting, self._stretch)
            if self._calls:
                most = min(most, self._run_calls())
            if not most:
                return
            events = [queue.popleft() for _ in range(most)]
            waiting -= len(events)
            if takers:
                self._hand_out(takers, events)
            else:
                self._emit(events)

    def _hand_out(self, takers: Sequence[Taker], events: Sequence[AnyEvent]) -> None:
        """To one taker after the other, so that each finds its own code and books in the caches for all of them."""
        doing = f"taking events up to step {events[-1].step}"
        for at, take in enumerate(takers):
            for first in range(0, len(events), self._batch):
                if at or first:
                    self.pace.before_work(is_polite=self._is_polite)
                self._guard(partial(take, events[first : first + self._batch]), doing)
                self._moved += 1
        self._delivered += len(events)

    def _run_calls(self) -> int:
        """Run those that are due. Returns how many events may be delivered before the next is."""
        calls = self._calls
        while calls:
            due, action = calls[0]
            if due > self._delivered:
                return due - self._delivered
            calls.popleft()
            self._guard(action, "running what was asked for in between")
        return self._stretch

    def _emit(self, events: Sequence[AnyEvent]) -> None:
        for event in events:
            if self._given_up:
                return
            try:
                self._sink.emit(event)
            except Exception as error:  # whatever a listener raises must not end its thread
                self._errors.record(error, f"taking {type(event).__name__} of step {event.step}")
            self._delivered += 1

    @property
    def _is_polite(self) -> bool:
        return not self._closing and len(self._queue) <= _BACKLOG

    def _guard(self, action: Callable[[], object], doing: str) -> None:
        try:
            action()
        except Exception as error:  # whatever a listener raises must not end its thread
            self._errors.record(error, doing)
