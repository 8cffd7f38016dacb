"""Steps of a recording. Owns: two readings of it, so that a step back finds one that stands there already.

Forward, a step folds the events of that step. Back, it reads a kept state and folds what came after: with ten thousand
waiting that is a third of a second. Who stepped back mostly does so again, and looks at what is shown first: meanwhile
the other reading is brought to the step before.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

from telemetry.recorded import Moment, RecordedSource, Recording

#: A reading that is so little behind goes forward by itself.
_NEAR: Final = 8


class RecordedSteps:
    """Sources of one recording. Not safe between threads: its user asks for one place at a time."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._source = RecordedSource(recording)
        self._behind: RecordedSource | None = None
        self._pool: ThreadPoolExecutor | None = None
        #: The step that the other reading is being brought to, or stands at.
        self._coming: tuple[int, Future[None]] | None = None

    def at(self, moment: Moment) -> RecordedSource:
        """A source that stands at `moment`, until the next call."""
        before = self._source.moment
        if before is not None and self._coming is not None and self._coming[0] == moment.index < before.index:
            self._coming[1].result()
            assert self._behind is not None, "what comes is there"
            self._source, self._behind, self._coming = self._behind, self._source, None
        self._source.seek(moment)
        if before is not None and not before.index <= moment.index <= before.index + _NEAR:
            self._prepare(moment.index - 1)
        return self._source

    def _prepare(self, index: int) -> None:
        """Bring the other reading to the step `index`, beside."""
        if index < 0:
            return
        if self._behind is None or self._pool is None:
            self._behind = RecordedSource(self._recording)
            self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="step-back")
        if self._coming is not None:
            self._coming[1].cancel()
        self._coming = index, self._pool.submit(self._behind.seek, self._recording.moment(index))

    def close(self) -> None:
        """Prepare nothing more."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
