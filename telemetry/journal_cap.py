"""CappedJournal. Owns: that a journal which nobody watches does not fill the disk."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from engine.events import AnyEvent
from telemetry.journal import ROTATE_BYTES, JournalSink
from telemetry.schema_parts import SourcePart

_log = logging.getLogger(__name__)
_MIB: Final = 1024 * 1024


class CappedJournal:
    """A journal of at most about `max_mib` MiB: what comes after is not recorded, and a log line says so.

    The start is kept, not the end: a replay needs every input from the first on.
    """

    def __init__(self, path: Path, *, max_mib: int, source: SourcePart | None = None) -> None:
        if max_mib < 1:
            raise ValueError(f"max_mib is {max_mib}; a journal needs at least 1")
        rotate_bytes = min(ROTATE_BYTES, max(max_mib * _MIB // 4, 1))
        self._sink = JournalSink(path, rotate_bytes=rotate_bytes, source=source)
        self._max_segments = max(max_mib * _MIB // rotate_bytes, 1)
        self._max_mib = max_mib
        self.is_full = False

    @property
    def path(self) -> Path:
        """The journal's first file."""
        return self._sink.path

    def emit(self, event: AnyEvent) -> None:
        """Record one event, unless the journal is full. Raises OSError when writing fails."""
        self.take((event,))

    def take(self, events: Sequence[AnyEvent]) -> None:
        """Record several; the same."""
        if self.is_full:
            return
        self._sink.take(events)
        if self._sink.segment >= self._max_segments:
            self.is_full = True
            self._sink.close()
            _log.warning("%s holds %d MiB, its limit: this run is recorded up to here", self.path, self._max_mib)

    def flush(self) -> None:
        """Write what waits."""
        if not self.is_full:
            self._sink.flush()

    def close(self) -> None:
        """Write everything and close the file."""
        self._sink.close()
