"""Run a module that does not outlive its parent: `python -m telemetry.watchdog MODULE ARGS…`.

The parent keeps the write end of this process's standard input open and writes nothing. When the parent ends, however
it ends, the kernel closes the pipe; reading it returns, and this process ends itself. Works on every POSIX system, and
covers a parent that was killed with SIGKILL and could not clean up.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading
import time
from typing import Final

#: How long a process may take to end in order before it is killed.
GRACE_S: Final = 5.0


def end_with_parent(fd: int, grace_s: float = GRACE_S) -> threading.Thread:
    """Watch `fd` on a thread of its own; at its end SIGTERM this process and, after `grace_s`, SIGKILL its group."""
    thread = threading.Thread(target=_watch, args=(fd, grace_s), name="parent-watchdog", daemon=True)
    thread.start()
    return thread


def _watch(fd: int, grace_s: float) -> None:
    while os.read(fd, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(grace_s)
    # Started in a session of its own (processes.Child), so the group is this process and what it started.
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpgrp(), signal.SIGKILL)
    os._exit(1)


def main() -> None:
    """Take MODULE and its arguments from the command line and become it."""
    if len(sys.argv) < 2:
        sys.exit("usage: python -m telemetry.watchdog MODULE [ARGUMENTS]")
    # The module gets an empty standard input; the pipe moves aside, where nothing else reads from it.
    fd = os.dup(0)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    end_with_parent(fd)
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
