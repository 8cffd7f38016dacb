"""When a worker beside the engine may run. Owns: the turns of workers, and the engine's forward as their window.

Work beside the engine thread is cheapest while the model computes: then the engine wants neither the interpreter's lock
nor what lies in the caches. `ForwardWindow` follows that by what the engine publishes; nobody asks the engine.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

#: How long a worker that has its turn may stand before the others go on without one.
TURN_S: Final = 0.02
#: An engine that publishes nothing for as long does nothing that a worker could disturb.
IDLE_S: Final = 0.005


class Bell:
    """Wakes one worker. Ringing twice before it looks is ringing once."""

    def __init__(self) -> None:
        #: Held while nobody rings.
        self._lock = threading.Lock()
        self._lock.acquire()

    def ring(self) -> None:
        """Any thread; waits for nobody."""
        if self._lock.locked():
            try:
                self._lock.release()
            except RuntimeError:  # another thread rang in between
                return

    def wait(self, timeout_s: float) -> bool:
        """Until somebody rings; False after `timeout_s`. The worker alone."""
        return self._lock.acquire(timeout=timeout_s)


class Turns:
    """One worker of this process drains its queue at a time: two would take the interpreter's lock from each other for
    each slice, which doubles the processor time of both. One that stands in its listener holds up nobody for long.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._moved: Callable[[], int] | None = None

    def take(self, moved: Callable[[], int]) -> bool:
        """Wait for a turn; `moved` rises while it is used. False: whoever has it stands, so go on without."""
        seen = None
        while not self._lock.acquire(timeout=TURN_S):
            holder = self._moved
            now = (holder, holder()) if holder is not None else None
            if now is not None and now == seen:
                return False
            seen = now
        self._moved = moved
        return True

    def give_back(self) -> None:
        """After a turn that was taken."""
        self._moved = None
        self._lock.release()


class ForwardWindow:
    """Whether the engine's model computes, by what the engine published last: a plan opens it, anything else shuts it.

    The engine thread sets `is_open` with each event, and rings where `is_awaited`.
    """

    def __init__(self, bell: Bell) -> None:
        self.is_open = False
        self.is_awaited = False
        self._bell = bell

    def wait(self, published: Callable[[], int], patience_s: float) -> bool:
        """Wait until it opens. False: the engine is idle (`published` stands), or it did not open for `patience_s`."""
        left_s = patience_s
        self.is_awaited = True
        try:
            while not self.is_open and left_s > 0:
                before = published()
                if not self._bell.wait(IDLE_S):
                    left_s -= IDLE_S
                    if published() == before:
                        return False
            return self.is_open
        finally:
            self.is_awaited = False
