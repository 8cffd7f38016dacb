"""The door to what-if for pages. Owns: one comparison at a time, as a child process with bounds, and its answer."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from telemetry.errands import NICENESS, Errand, OneAtATime
from telemetry.journal import JournalError
from telemetry.journal_reader import JournalReader
from telemetry.sim.journal_workload import Window
from telemetry.sim.whatif_result import WHATIF_VERSION, WhatifResult

MEMORY_MIB: Final = 2_048
TIME_LIMIT_S: Final = 600.0


@dataclass(frozen=True, slots=True)
class Ask:
    """What is to be compared: a journal, the settings to change, at most how many requests, and those of which seconds
    of the run. Hashable, as a key.
    """

    journal: Path
    settings: tuple[tuple[str, str], ...]
    limit: int | None = None
    window: Window = (None, None)

    @classmethod
    def of(
        cls, journal: Path, settings: Mapping[str, str], limit: int | None = None, window: Window = (None, None)
    ) -> Ask:
        """From settings by name, in whatever order."""
        return cls(journal, tuple(sorted(settings.items())), limit, window)


class Door(OneAtATime[Ask, WhatifResult]):
    """Comparisons of one process, one at a time; the latest answers are kept.

    folder  where the journals of the simulated runs go; a temporary one unless named
    """

    def __init__(
        self, folder: Path | None = None, *, time_limit_s: float = TIME_LIMIT_S, memory_mib: int = MEMORY_MIB
    ) -> None:
        super().__init__(
            self._whatif, time_limit_s=time_limit_s, busy="another comparison runs: wait for it, or stop it"
        )
        self._temporary = None if folder is not None else tempfile.TemporaryDirectory(prefix="admitscope-whatif-")
        self._folder = folder or Path(self._temporary.name if self._temporary is not None else "")
        self._memory_mib = memory_mib
        self._count = 0

    def close(self) -> None:
        """End what runs, and remove what it wrote to a temporary folder."""
        super().close()
        if self._temporary is not None:
            self._temporary.cleanup()

    def _whatif(self, ask: Ask) -> Errand[WhatifResult]:
        self._count += 1
        return Errand(
            tuple(_words(ask, self._folder / f"{self._count}", self._memory_mib)),
            _answer,
            f"compare fewer requests, or run `admitscope whatif` on {ask.journal} in a terminal",
        )


def is_journal_of(path: str | None, engine_id: str) -> bool:
    """Whether the journal that a live engine names lies on this machine, and is that engine's own."""
    if path is None:
        return False
    try:
        return JournalReader(Path(path)).header.engine_id == engine_id
    except (JournalError, OSError):
        return False


def _answer(said: bytes) -> WhatifResult:
    result = WhatifResult.model_validate_json(said)
    if result.result_version > WHATIF_VERSION:
        raise ValueError(f"the answer is of version {result.result_version}")
    return result


def _words(ask: Ask, folder: Path, memory_mib: int) -> list[str]:
    words = ["whatif", "--json", "--progress-lines"]
    words += ["--memory-mib", str(memory_mib), "--niceness", str(NICENESS), "--write-journals", str(folder)]
    words += [word for name, value in ask.settings for word in ("--set", f"{name}={value}")]
    words += [] if ask.limit is None else ["--limit", str(ask.limit)]
    bounds = zip(("--from-s", "--to-s"), ask.window, strict=True)
    words += [word for name, bound in bounds if bound is not None for word in (name, str(bound))]
    return [*words, "--", str(ask.journal)]
