"""Worker. Owns: the bounded way of facts from SGLang's scheduler thread to a journal, on a thread of its own.

The scheduler's thread only appends to a queue, and drops what finds it full: the journal then has a hole, and says so.
Nobody waits for a disk, and a fault of mapping or writing is counted and logged, never raised.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

from telemetry.error_log import ErrorLog
from telemetry.sglang.facts import AnyFact

_log = logging.getLogger(__name__)

CAPACITY: Final = 16_384
PERIOD_S: Final = 0.05
#: Facts between two looks at what else wants to run.
SLICE: Final = 64


class Target(Protocol):
    """What the worker feeds."""

    def take(self, fact: AnyFact) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


class Worker:
    """Takes facts from any one thread and feeds them to what `make` makes, which lives on the worker's thread alone.

    capacity  facts that may wait; beyond it the newest is dropped
    """

    def __init__(
        self, make: Callable[[], Target], *, capacity: int = CAPACITY, period_s: float = PERIOD_S, at_exit: bool = True
    ) -> None:
        if capacity < 1:
            raise ValueError(f"capacity is {capacity}; a queue holds at least 1 fact")
        self._make = make
        self._capacity = capacity
        self._period_s = period_s
        self._queue: deque[AnyFact] = deque()
        self._errors = ErrorLog("sglang recorder")
        self.taken = self.dropped = self.delivered = 0
        self._closing = False
        self._stop = threading.Event()
        _workers.add(self)
        self._thread = threading.Thread(target=self._live, name="admitscope-sglang", daemon=True)
        self._thread.start()
        if at_exit:
            atexit.register(self.close)

    @property
    def errors(self) -> int:
        """Faults of mapping and writing."""
        return self._errors.count

    def put(self, fact: AnyFact) -> None:
        """Queue one fact, or drop it. Waits for nobody, never raises."""
        if self._closing or len(self._queue) >= self._capacity:
            self.dropped += 1
            return
        self._queue.append(fact)
        self.taken += 1

    def close(self, timeout_s: float = 5.0) -> bool:
        """Feed what waits, close the target, end the thread. False when that took longer than `timeout_s`."""
        self._closing = True
        self._stop.set()
        self._thread.join(timeout_s)
        ended = not self._thread.is_alive()
        if not ended or self.dropped or self.errors:
            words = "sglang recorder: %d facts taken, %d delivered, %d dropped, %d faults"
            _log.warning(words, self.taken, self.delivered, self.dropped, self.errors)
        return ended

    def switch_off_copy(self) -> None:
        """In a forked process: the thread and the journal are the parent's. What is put here is dropped."""
        self._closing = True
        self._queue.clear()

    def _live(self) -> None:
        try:
            self._work()
        except BaseException as error:  # an end that a target asks for (SystemExit) is no reason to be silent
            # First: what comes from here on is dropped and counted, for nobody takes it.
            self._closing = True
            left = len(self._queue)
            self._errors.record(error, f"working: its thread has ended, with {left} facts not delivered")

    def _work(self) -> None:
        try:
            target = self._make()
        except Exception as error:  # a disk that is full, a folder that may not be written: SGLang goes on without
            self._closing = True
            self._errors.record(error, "opening the journal: nothing is recorded")
            return
        while True:
            closing = self._closing
            self._drain(target)
            self._guard(target.flush, "writing")
            if closing:
                break
            self._stop.wait(self._period_s)
        self._guard(target.close, "closing")

    def _drain(self, target: Target) -> None:
        while self._queue:
            for _ in range(min(len(self._queue), SLICE)):
                fact = self._queue.popleft()
                try:
                    target.take(fact)
                except Exception as error:  # as in `_guard`
                    self._errors.record(error, f"taking a {type(fact).__name__}")
                self.delivered += 1
            time.sleep(0)

    def _guard(self, action: Callable[[], None], doing: str) -> None:
        try:
            action()
        except Exception as error:  # whatever it is, the thread goes on: a full disk may have room again
            self._errors.record(error, doing)


#: Those of this process.
_workers: weakref.WeakSet[Worker] = weakref.WeakSet()


def _switch_off_copies() -> None:
    for worker in list(_workers):
        worker.switch_off_copy()


# SGLang forks: a child would fill a queue that no thread empties.
os.register_at_fork(after_in_child=_switch_off_copies)
