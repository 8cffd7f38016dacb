"""The door to what-if for pages. Owns: one comparison at a time, as a child process with bounds, and what it says.

The child is `admitscope whatif`: it gives way to others, may take so much memory and so much time, ends with its
parent, and can be ended at any moment. What comes back is its JSON, or its own sentence about what is wrong.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final, Literal

from pydantic import ValidationError

from telemetry.journal import JournalError
from telemetry.journal_reader import JournalReader
from telemetry.sim.journal_workload import Window
from telemetry.sim.progress import LINE_PREFIX
from telemetry.sim.whatif_result import WHATIF_VERSION, WhatifResult

MEMORY_MIB: Final = 2_048
TIME_LIMIT_S: Final = 600.0
_NICENESS: Final = 10
_GRACE_S: Final = 2.0
_MOST_ANSWER_BYTES: Final = 64 * 1024 * 1024
_KEPT_LINES: Final = 20
_KEPT_ANSWERS: Final = 8

State = Literal["running", "done", "failed", "cancelled"]


class Busy(RuntimeError):
    """Another comparison runs; there is one at a time."""


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


@dataclass(frozen=True, slots=True)
class Standing:
    """How far it is. `share` 0 to 1 of the present `phase`; `result` when done, `error` when it failed."""

    state: State
    phase: str
    share: float
    elapsed_s: float
    result: WhatifResult | None = None
    error: str = ""


class Run:
    """One comparison, from its start to its end. From any thread."""

    def __init__(self, ask: Ask, folder: Path, *, time_limit_s: float, memory_mib: int) -> None:
        self.ask = ask
        self._time_limit_s = time_limit_s
        self._began_s = time.monotonic()
        self._ended_s: float | None = None
        self._phase, self._share = "starting", 0.0
        self._words: deque[str] = deque(maxlen=_KEPT_LINES)
        self._result: WhatifResult | None = None
        self._error = ""
        self._cancelled = False
        self._answer: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - read and closed when the child has ended
        self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
            [sys.executable, "-m", "telemetry.watchdog", "telemetry.cli", *_words(ask, folder, memory_mib)],
            stdin=subprocess.PIPE,
            stdout=self._answer,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": _import_path(), "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        self._listener = threading.Thread(target=self._listen, name="whatif-child", daemon=True)
        self._listener.start()
        self._clock = threading.Timer(time_limit_s, self._out_of_time)
        self._clock.daemon = True
        self._clock.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def standing(self) -> Standing:
        """How far it is now."""
        elapsed = (self._ended_s or time.monotonic()) - self._began_s
        if self._ended_s is None:
            return Standing("running", self._phase, self._share, elapsed)
        if self._cancelled:
            return Standing("cancelled", self._phase, self._share, elapsed)
        if self._result is not None:
            return Standing("done", "done", 1.0, elapsed, self._result)
        return Standing("failed", self._phase, self._share, elapsed, error=self._error)

    def cancel(self) -> None:
        """End it; nothing is kept."""
        if self._ended_s is None:
            self._cancelled = True
            self._kill()

    def wait(self, timeout_s: float) -> Standing:
        """Wait for its end, at most so long."""
        self._listener.join(timeout_s)
        return self.standing()

    def _out_of_time(self) -> None:
        if self._ended_s is None:
            self._error = (
                f"it was ended after {self._time_limit_s:g} s, its limit: compare fewer requests, or run "
                f"`admitscope whatif` on {self.ask.journal} in a terminal"
            )
            self._kill()

    def _kill(self) -> None:
        """SIGTERM, and SIGKILL to its whole group where that is not enough."""
        self._process.terminate()

        def finish() -> None:
            if self._process.poll() is None:
                with contextlib.suppress(ProcessLookupError):  # it ended between the look and the signal
                    os.killpg(self._process.pid, signal.SIGKILL)

        timer = threading.Timer(_GRACE_S, finish)
        timer.daemon = True
        timer.start()

    def _listen(self) -> None:
        """Progress while it runs, then the answer. On a thread of its own."""
        process = self._process
        assert process.stderr is not None
        for raw in process.stderr:
            line = raw.decode("utf-8", "replace").rstrip()
            if line.startswith(LINE_PREFIX):
                share, _, phase = line.removeprefix(LINE_PREFIX).partition(" ")
                with contextlib.suppress(ValueError):  # a line cut by the end of the child
                    self._share, self._phase = float(share), phase
            elif line:
                self._words.append(line.removeprefix("admitscope: "))
        status = process.wait()
        for pipe in (process.stdin, process.stderr):
            if pipe is not None:
                pipe.close()
        self._clock.cancel()
        self._conclude(status)
        self._ended_s = time.monotonic()

    def _conclude(self, status: int) -> None:
        self._answer.seek(0)
        said = self._answer.read(_MOST_ANSWER_BYTES)
        self._answer.close()
        if self._error or self._cancelled:
            return
        try:
            if status in {0, 1} and said:
                result = WhatifResult.model_validate_json(said)
                if result.result_version > WHATIF_VERSION:
                    raise ValueError(f"the answer is of version {result.result_version}")
                self._result = result
                return
        except (ValidationError, ValueError) as error:
            self._words.append(f"its answer cannot be read: {error}")
        self._error = "\n".join(self._words) or f"it ended with status {status} and said nothing"


class Door:
    """Comparisons of one process, one at a time; the latest answers are kept.

    folder  where the journals of the simulated runs go; a temporary one unless named
    """

    def __init__(
        self, folder: Path | None = None, *, time_limit_s: float = TIME_LIMIT_S, memory_mib: int = MEMORY_MIB
    ) -> None:
        self._temporary = None if folder is not None else tempfile.TemporaryDirectory(prefix="admitscope-whatif-")
        self._folder = folder or Path(self._temporary.name if self._temporary is not None else "")
        self._time_limit_s = time_limit_s
        self._memory_mib = memory_mib
        self._lock = threading.Lock()
        self._count = 0
        self._answers: OrderedDict[Ask, Standing] = OrderedDict()
        self.run: Run | None = None

    def start(self, ask: Ask) -> Run:
        """Begin. Raises Busy while another one runs."""
        with self._lock:
            if self.run is not None and self.run.standing().state == "running":
                raise Busy("another comparison runs: wait for it, or stop it")
            self._keep()
            self._count += 1
            folder = self._folder / f"{self._count}"
            self.run = Run(ask, folder, time_limit_s=self._time_limit_s, memory_mib=self._memory_mib)
            return self.run

    def standing(self, ask: Ask) -> Standing | None:
        """How far this comparison is, or what it said; None when it was not asked for, or is forgotten."""
        run = self.run
        if run is not None and run.ask == ask:
            return run.standing()
        return self._answers.get(ask)

    def _keep(self) -> None:
        """The last answer stays when another question begins; of answers the latest few."""
        if self.run is not None and (said := self.run.standing()).state == "done":
            self._answers[self.run.ask] = said
            self._answers.move_to_end(self.run.ask)
            while len(self._answers) > _KEPT_ANSWERS:
                self._answers.popitem(last=False)

    def close(self) -> None:
        """End what runs."""
        if self.run is not None:
            self.run.cancel()
            self.run.wait(2 * _GRACE_S)
        if self._temporary is not None:
            self._temporary.cleanup()


def is_journal_of(path: str | None, engine_id: str) -> bool:
    """Whether the journal that a live engine names lies on this machine, and is that engine's own."""
    if path is None:
        return False
    try:
        return JournalReader(Path(path)).header.engine_id == engine_id
    except (JournalError, OSError):
        return False


def _words(ask: Ask, folder: Path, memory_mib: int) -> list[str]:
    words = ["whatif", "--json", "--progress-lines"]
    words += ["--memory-mib", str(memory_mib), "--niceness", str(_NICENESS), "--write-journals", str(folder)]
    words += [word for name, value in ask.settings for word in ("--set", f"{name}={value}")]
    words += [] if ask.limit is None else ["--limit", str(ask.limit)]
    bounds = zip(("--from-s", "--to-s"), ask.window, strict=True)
    words += [word for name, bound in bounds if bound is not None for word in (name, str(bound))]
    return [*words, "--", str(ask.journal)]


def _import_path() -> str:
    """Where this very package is, which need not be installed."""
    own = str(Path(__file__).resolve().parents[2])
    given = os.environ.get("PYTHONPATH")
    return own if not given else f"{own}{os.pathsep}{given}"
