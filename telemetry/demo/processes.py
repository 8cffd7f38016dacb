"""Child processes of the demo. Owns: starting one in a session of its own, and ending it for certain."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

_TAIL_LINES = 15


class Child:
    """One child: a Python module under the watchdog.

    A session of its own keeps the terminal's Ctrl-C away from it: the parent decides the order of ending. Errors and,
    unless `keep_output`, standard output go to `log`.
    """

    def __init__(
        self,
        name: str,
        module: str,
        arguments: Sequence[str] = (),
        *,
        log: Path,
        environment: Mapping[str, str] | None = None,
        keep_output: bool = False,
    ) -> None:
        self.name = name
        self.log = log
        with log.open("wb") as file:
            self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and modules
                [sys.executable, "-m", "telemetry.watchdog", module, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if keep_output else file,
                stderr=file,
                env={**os.environ, **(environment or {})},
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def output(self) -> IO[bytes]:
        """Standard output, for a child started with `keep_output`."""
        assert self._process.stdout is not None, f"{self.name} was not started with keep_output"
        return self._process.stdout

    def status(self) -> int | None:
        """Exit status; None while it runs."""
        return self._process.poll()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the child, if it still runs."""
        if self.status() is None:
            self._process.send_signal(number)

    def tail(self) -> str:
        """The last lines of its log."""
        return "\n".join(self.log.read_text("utf-8", "replace").splitlines()[-_TAIL_LINES:])

    def stop(self, timeout_s: float) -> int:
        """SIGTERM, then SIGKILL to its whole group after `timeout_s`. Returns the exit status; safe to call again."""
        self.signal(signal.SIGTERM)
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            pass
        finally:
            # What the child may have left in its group, and the child itself when it did not listen.
            with contextlib.suppress(ProcessLookupError):  # the group is gone already
                os.killpg(self.pid, signal.SIGKILL)
            status = self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    pipe.close()
        return status
