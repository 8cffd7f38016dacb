"""The door to `check` for pages. Owns: one judging of a recording at a time, as a child process, and its report."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from telemetry.check_report import CheckReport
from telemetry.errands import NICENESS, Errand, OneAtATime, Run

#: The record is heard as it is read; what grows is the replayed pool and tree, and a page's own figures beside them.
MEMORY_MIB: Final = 1_024
TIME_LIMIT_S: Final = 600.0
#: Violations that the report names; all are counted.
SHOWN: Final = 200

#: What tells whether a journal is still the one that was judged.
Stamp = tuple[tuple[str, int, int], ...]


class CheckDoor(OneAtATime[Path, CheckReport]):
    """Judgings of recordings of one process, one at a time. Nothing is written beside a journal."""

    def __init__(self, *, time_limit_s: float = TIME_LIMIT_S, memory_mib: int = MEMORY_MIB) -> None:
        super().__init__(
            lambda journal: _check(journal, memory_mib),
            time_limit_s=time_limit_s,
            busy="another recording is being judged: wait for it, or stop it",
        )
        self._stamps: dict[Path, Stamp] = {}

    def start(self, ask: Path) -> Run[Path, CheckReport]:
        """Begin. Raises Busy while another one runs."""
        stamp = stamp_of(ask)
        run = super().start(ask)
        self._stamps[ask] = stamp
        return run

    def has_changed(self, journal: Path) -> bool:
        """Whether `journal` was written to since its judging began: then its verdict is of what it was."""
        return journal in self._stamps and self._stamps[journal] != stamp_of(journal)


def stamp_of(journal: Path) -> Stamp:
    """Name, size and time of the last change of the file, or of each file of a folder; of what is gone, nothing."""
    try:
        files = sorted(journal.iterdir()) if journal.is_dir() else [journal]
        found = [(file.name, file.stat()) for file in files]
    except OSError:
        return ()
    return tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in found)


def _check(journal: Path, memory_mib: int) -> Errand[CheckReport]:
    bounds = ("--memory-mib", str(memory_mib), "--niceness", str(NICENESS), "--limit", str(SHOWN))
    return Errand(
        ("check", "--json", "--progress-lines", *bounds, "--", str(journal)),
        CheckReport.model_validate_json,
        f"run `admitscope check` on {journal} in a terminal, which has no limit",
        # 2: the journal lacks events. So ends bad usage too, but then nothing is printed.
        statuses=frozenset({0, 1, 2}),
    )
