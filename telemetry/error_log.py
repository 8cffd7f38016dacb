"""ErrorLog. Owns: counting what a component fails at, and saying so without filling the log."""

from __future__ import annotations

import logging
import time
from typing import Final

_LOG: Final = logging.getLogger("admitscope.telemetry")

LOG_EVERY_S: Final = 10.0


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
