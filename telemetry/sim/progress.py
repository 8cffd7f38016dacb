"""Progress. Owns: what a long simulation says of itself on stderr: a bar with the time left, or lines.

Lines are for programs: `progress 0.42 baseline`, at most four a second; a terminal gets the bar.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

LINE_PREFIX: Final = "progress "
_EVERY_S: Final = 0.25
#: Looking at the clock in every step would cost more than the steps.
_STEPS_A_LOOK: Final = 64


class Meter:
    """Told of each step; shows something now and then."""

    def __init__(self, *, lines: TextIO | None = None, progress: Progress | None = None) -> None:
        self._lines = lines
        self._progress = progress
        self._task = progress.add_task("", total=None) if progress is not None else None
        self._phase, self._total = "", 0
        self._calls = 0
        self._next_s = 0.0

    def phase(self, name: str, total: int) -> None:
        """Begin a stretch of `total` requests."""
        self._phase, self._total = name, total
        self._calls, self._next_s = 0, 0.0
        if self._progress is not None and self._task is not None:
            self._progress.reset(self._task, total=total or None, description=name)

    def say(self, words: str) -> None:
        """Other words for the same stretch."""
        self._phase = words
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, description=words)

    def tell(self, done: int) -> None:
        """`done` requests of this stretch are over."""
        self._calls += 1
        if self._calls % _STEPS_A_LOOK or (self._lines is None and self._progress is None):
            return
        now_s = time.monotonic()
        if now_s < self._next_s:
            return
        self._next_s = now_s + _EVERY_S
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=done)
        if self._lines is not None:
            share = min(done / self._total, 1.0) if self._total else 0.0
            print(f"{LINE_PREFIX}{share:.3f} {self._phase}", file=self._lines, flush=True)


@contextmanager
def meter(*, quiet: bool, lines: bool) -> Iterator[Meter]:
    """A bar on a terminal, lines when asked for, else nothing."""
    if lines:
        yield Meter(lines=sys.stderr)
        return
    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield Meter()
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("requests"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        yield Meter(progress=progress)
