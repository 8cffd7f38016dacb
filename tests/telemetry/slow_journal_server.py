"""A server whose journal is on a slow disk. Owns: what the test of a cut drain runs as a process of its own.

Each event takes 50 ms to be written, and the end waits 2 s for the journal. Everything else is `admitscope serve`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

EVENT_S = 0.05
WRITE_OUT_S = 2.0


def slow(take: Any) -> Any:
    """`take` as a slow disk makes it."""

    def wrapped(journal: Any, events: Sequence[Any]) -> None:
        time.sleep(EVENT_S * len(events))
        take(journal, events)

    return wrapped


if __name__ == "__main__":
    from telemetry import listeners
    from telemetry.cli import main
    from telemetry.journal_cap import CappedJournal

    CappedJournal.take = slow(CappedJournal.take)
    listeners.WRITE_OUT_S = WRITE_OUT_S
    sys.exit(main())
