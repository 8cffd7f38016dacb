"""Python's search for reference cycles in a serving process. Owns: when it runs, and how long it has stood in the way.

A collection stops every thread, the engine's too. By default one comes after 700 new containers, and each looks once
more at what the read model keeps for good: 256 running requests leave tuples of 256 in every step. So what was there
before the first request is never looked at again (`gc.freeze`), the engine at work is interrupted rarely, and the
search is made up for while it has nothing to do. docs/adr/0026-the-collector-waits.md has the figures.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

#: New containers that outlive their step before a busy engine is interrupted; some thousand steps of a full one.
BUSY_THRESHOLD: Final = (50_000, 20, 100)
#: How often to look whether the engine rests; twice in a row is resting.
LOOK_S: Final = 1.0
#: Fewer new containers than that are not worth a collection.
WORTH_IT: Final = 2_000


class QuietCollector:
    """Collects while nothing is served, and counts what every collection took. One in a process.

    is_busy   whether the engine has work; any thread
    """

    def __init__(self, is_busy: Callable[[], bool], *, look_s: float = LOOK_S) -> None:
        self._is_busy = is_busy
        self._look_s = look_s
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._live, name="admitscope-collector", daemon=True)
        self._before = gc.get_threshold()
        self._began_ns = 0
        #: Wall time of all collections of this process since `start`, in which no thread ran; and how many.
        self.spent_ns = 0
        self.collections = 0

    def start(self) -> None:
        """Once all is loaded: keep it out of every later collection, and take over."""
        gc.collect()
        gc.freeze()
        gc.set_threshold(*BUSY_THRESHOLD)
        gc.callbacks.append(self._note)
        self._thread.start()

    def stop(self) -> None:
        """Leave the interpreter as it was. May be called twice, and without a start."""
        self._stopping.set()
        if self._note in gc.callbacks:
            gc.callbacks.remove(self._note)
            gc.set_threshold(*self._before)
            gc.unfreeze()
            self._thread.join()

    def _note(self, phase: str, _info: Mapping[str, Any]) -> None:
        # Collections never overlap, and the interpreter's lock is held throughout.
        if phase == "start":
            self._began_ns = time.perf_counter_ns()
        elif self._began_ns:
            self.spent_ns += time.perf_counter_ns() - self._began_ns
            self.collections += 1

    def _live(self) -> None:
        has_rested = False
        while not self._stopping.wait(self._look_s):
            rests = not self._is_busy()
            if rests and has_rested and gc.get_count()[0] >= WORTH_IT:
                gc.collect()
            has_rested = rests
