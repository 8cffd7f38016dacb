"""A server process with the tiny model. Owns: starting it, and what can be seen of it from outside.

Memory and files come from /proc, everything else from the read API.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import httpx

from bench.tiny_model import write_tiny_model
from telemetry.demo.processes import Child
from telemetry.demo.scrape import Scrape

_START_S: Final = 120.0
_PAGE_BYTES: Final = 4096
MIB: Final = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Held:
    """What is held at one moment: requests in any state, pages that are not free or cache, reads of /proc."""

    requests: int
    pages_private: int
    pages_locked: int
    files: int
    violations: int
    telemetry_errors: int

    @property
    def is_nothing(self) -> bool:
        """No request is live, and no page, lock or row with it."""
        return not (self.requests or self.pages_private or self.pages_locked)


class TinyServer:
    """A running `admitscope serve` on a free port, with its journal."""

    def __init__(self, child: Child, url: str) -> None:
        self.child = child
        self.url = url

    def rss_bytes(self) -> int:
        """Resident memory of the process."""
        pages = Path(f"/proc/{self.child.pid}/statm").read_text(encoding="ascii").split()[1]
        return int(pages) * _PAGE_BYTES

    def files(self) -> int:
        """Open file descriptors, sockets included."""
        return sum(1 for _ in Path(f"/proc/{self.child.pid}/fd").iterdir())

    def held(self) -> Held:
        """Ask the server; the connection that asks is closed before files are counted."""
        answer = httpx.get(f"{self.url}/metrics", timeout=30.0, trust_env=False)
        answer.raise_for_status()
        scrape = Scrape(answer.text)
        return Held(
            requests=int(scrape.total("requests")),
            pages_private=int(scrape.total("kv_pages", state="private")),
            pages_locked=int(scrape.total("kv_pages", state="protected")),
            files=self.files(),
            violations=int(scrape.total("violations_total")),
            telemetry_errors=int(scrape.total("telemetry_errors_total") + scrape.total("telemetry_dropped_total")),
        )

    def until_nothing_is_held(self, files: int, timeout_s: float = 30.0) -> Held:
        """What is held once nothing is, or when time is up."""
        deadline = time.monotonic() + timeout_s
        held = self.held()
        while not (held.is_nothing and held.files <= files) and time.monotonic() < deadline:
            time.sleep(0.2)
            held = self.held()
        return held


@contextmanager
def tiny_server(folder: Path, flags: Sequence[str] = ()) -> Iterator[TinyServer]:
    """Write the model into `folder`, serve it, and stop the process. Raises RuntimeError when it does not start."""
    words = ["serve", "--server.port", "0", "--model.path", str(write_tiny_model(folder / "tiny"))]
    words += ["--executor.threads", "1", "--journal", str(folder / "journals"), *flags]
    child = Child("server", "telemetry.cli", words, log=folder / "server.log")
    try:
        yield TinyServer(child, _url(child))
    finally:
        child.stop(60.0)


def _url(child: Child) -> str:
    """Where it answers, once its journal is open, if it writes one: a moment later, and one more file that it holds."""
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline and child.status() is None:
        text = child.log.read_text("utf-8")
        found = re.search(r"API +(http://\S+)/v1", text)
        journal = re.search(r"^ +journal +(\S.*)$", text, re.MULTILINE)
        if found and "  page" in text and (journal is None or Path(journal[1]).exists()):
            return found[1]
        time.sleep(0.05)
    raise RuntimeError(f"the server did not start:\n{child.tail()}")
