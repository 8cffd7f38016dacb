"""Errands of a page. Owns: one command at a time in a process of its own, with bounds, and what it says.

The child is an `admitscope` command: it gives way to others, may take so much memory and so much time, ends with its
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
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final, Generic, Literal, TypeVar

from telemetry.sim.progress import LINE_PREFIX

#: What a child of a page adds to its priority: whoever looks at the page comes first.
NICENESS: Final = 10
_GRACE_S: Final = 2.0
_MOST_ANSWER_BYTES: Final = 64 * 1024 * 1024
_KEPT_LINES: Final = 20
_KEPT_ANSWERS: Final = 8

State = Literal["running", "done", "failed", "cancelled"]
A = TypeVar("A", bound=Hashable)
R = TypeVar("R")


class Busy(RuntimeError):
    """Another errand of this kind runs; there is one at a time."""


@dataclass(frozen=True, slots=True)
class Errand(Generic[R]):
    """What is to be done.

    words     of the command, without `admitscope`
    read      the answer from what it prints; raises ValueError for what is none
    statuses  exit statuses with an answer
    too_long  what to do where its time is up
    """

    words: tuple[str, ...]
    read: Callable[[bytes], R]
    too_long: str
    statuses: frozenset[int] = frozenset({0, 1})


@dataclass(frozen=True, slots=True)
class Standing(Generic[R]):
    """How far it is. `share` 0 to 1 of the present `phase`; `result` when done, `error` when it failed."""

    state: State
    phase: str
    share: float
    elapsed_s: float
    result: R | None = None
    error: str = ""


class Run(Generic[A, R]):
    """One errand, from its start to its end. From any thread."""

    def __init__(self, ask: A, errand: Errand[R], *, time_limit_s: float) -> None:
        self.ask = ask
        self._errand = errand
        self._time_limit_s = time_limit_s
        self._began_s = time.monotonic()
        self._ended_s: float | None = None
        self._phase, self._share = "starting", 0.0
        self._words: deque[str] = deque(maxlen=_KEPT_LINES)
        self._result: R | None = None
        self._error = ""
        self._cancelled = False
        self._answer: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - read and closed when the child has ended
        self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
            [sys.executable, "-m", "telemetry.watchdog", "telemetry.cli", *errand.words],
            stdin=subprocess.PIPE,
            stdout=self._answer,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": _import_path(), "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        self._listener = threading.Thread(target=self._listen, name="errand", daemon=True)
        self._listener.start()
        self._clock = threading.Timer(time_limit_s, self._out_of_time)
        self._clock.daemon = True
        self._clock.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def standing(self) -> Standing[R]:
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

    def wait(self, timeout_s: float) -> Standing[R]:
        """Wait for its end, at most so long."""
        self._listener.join(timeout_s)
        return self.standing()

    def _out_of_time(self) -> None:
        if self._ended_s is None:
            self._error = f"it was ended after {self._time_limit_s:g} s, its limit: {self._errand.too_long}"
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
            if status in self._errand.statuses and said:
                self._result = self._errand.read(said)
                return
        except ValueError as error:
            self._words.append(f"its answer cannot be read: {error}")
        self._error = "\n".join(self._words) or f"it ended with status {status} and said nothing"


class OneAtATime(Generic[A, R]):
    """Errands of one kind, one at a time in this process; the latest answers are kept.

    errand  what is to be done for a question
    busy    the sentence of `Busy`
    """

    def __init__(self, errand: Callable[[A], Errand[R]], *, time_limit_s: float, busy: str) -> None:
        self._errand = errand
        self._time_limit_s = time_limit_s
        self._busy = busy
        self._lock = threading.Lock()
        self._answers: OrderedDict[A, Standing[R]] = OrderedDict()
        self.run: Run[A, R] | None = None

    def start(self, ask: A) -> Run[A, R]:
        """Begin. Raises Busy while another one runs."""
        with self._lock:
            if self.run is not None and self.run.standing().state == "running":
                raise Busy(self._busy)
            self._keep()
            self._answers.pop(ask, None)
            self.run = Run(ask, self._errand(ask), time_limit_s=self._time_limit_s)
            return self.run

    def standing(self, ask: A) -> Standing[R] | None:
        """How far this one is, or what it said; None when it was not asked for, or is forgotten."""
        run = self.run
        if run is not None and run.ask == ask:
            return run.standing()
        return self._answers.get(ask)

    def stop(self, ask: A) -> None:
        """End this one if it runs."""
        run = self.run
        if run is not None and run.ask == ask:
            run.cancel()

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


def _import_path() -> str:
    """Where this very package is, which need not be installed."""
    own = str(Path(__file__).resolve().parents[1])
    given = os.environ.get("PYTHONPATH")
    return own if not given else f"{own}{os.pathsep}{given}"
