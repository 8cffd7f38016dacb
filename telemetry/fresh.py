"""Fresh. Owns: what a reader waits for before it looks: what was published before it asked, and the lock."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType


def _nothing() -> None:
    """Nobody is behind."""


class Fresh:
    """`with` it, a reader holds `lock`, and has before it all that was published before it asked.

    catch_up  brings that, and gives up in time; set by whoever feeds what is read from another thread
    """

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock
        self.catch_up: Callable[[], object] = _nothing

    def __enter__(self) -> None:
        self.catch_up()
        self._lock.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()
