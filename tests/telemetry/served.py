"""A server as a process of its own, for tests. Owns: starting it, waiting until it is ready, ending it."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

CANARY = "The canary called Zerbinetta sang at the Fugger house. "
DEADLINE_S = 120


@contextmanager
def served(folder: Path, *flags: str) -> Iterator[str]:
    """A server of its own process, journal in `folder`; ended by SIGINT. Yields its URL."""
    log = folder / "server.log"
    command = [sys.executable, "-m", "telemetry.cli", "serve", "--server.port", "0", "--journal", str(folder), *flags]
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
        try:
            yield ready_url(process, log)
            process.send_signal(signal.SIGINT)
            assert process.wait(DEADLINE_S) == 0, log.read_text()
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()


def ready_url(process: subprocess.Popen[bytes], log: Path) -> str:
    """Polls until the server says it is ready."""
    with httpx.Client(trust_env=False) as client:
        for _ in range(DEADLINE_S * 20):
            found = re.search(r"http://127\.0\.0\.1:\d+", log.read_text())
            assert process.poll() is None, log.read_text()
            if found:
                try:
                    if client.get(f"{found[0]}/ready").status_code == httpx.codes.OK:
                        return found[0]
                except httpx.TransportError:
                    pass
            try:
                process.wait(0.05)
            except subprocess.TimeoutExpired:
                continue
    raise AssertionError(log.read_text())
