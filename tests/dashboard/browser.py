"""A page in a real browser. Owns: starting Streamlit and Debian's Chromium, and noticing what must not happen.

A `Visit` collects console errors, page errors and requests to other hosts from its first moment on; `clean()` is the
one place that judges them.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import urlopen

from playwright.sync_api import Browser, ConsoleMessage, Page, Request, sync_playwright

CHROMIUM = Path("/usr/bin/chromium")
REPOSITORY = Path(__file__).resolve().parents[2]
ARTIFACTS = Path(os.environ.get("ADMITSCOPE_ARTIFACTS") or REPOSITORY / "artifacts")

#: What keeps Debian's Chromium from speaking to anyone but the page.
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]

#: Generous: a shared machine may be slow, and nothing here measures speed.
PATIENCE_MS = int(os.environ.get("ADMITSCOPE_PATIENCE_MS", "45000"))


def free_port() -> int:
    """A port that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def streamlit(engine_url: str, log: Path, *, journals: Sequence[Path] = (), words: Sequence[str] = ()) -> Iterator[str]:
    """The page served as a user would serve it: by path, with no flag that the page needs. Yields its address.

    journals  shown instead of the engine
    words     more of the page's own command line
    """
    shown = [word for journal in journals for word in ("--journal", str(journal))] or ["--url", engine_url]
    port = free_port()
    command = [sys.executable, "-m", "streamlit", "run", str(REPOSITORY / "dashboard" / "app.py")]
    command += ["--server.port", str(port), "--server.address", "127.0.0.1", "--", *shown, *words]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, cwd=log.parent)
        try:
            _wait_until_served(f"http://127.0.0.1:{port}/_stcore/health", process, log)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                # On a machine that is busy beyond measure it takes longer; how it ends is not what is tested here.
                process.kill()
                process.wait()


def _wait_until_served(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(1200):
        if process.poll() is not None:
            raise RuntimeError(f"streamlit ended with {process.returncode}: {log.read_text()[-2000:]}")
        with contextlib.suppress(OSError), urlopen(url, timeout=1) as answer:
            if answer.status == 200:
                return
        time.sleep(0.1)
    raise RuntimeError(f"streamlit did not answer: {log.read_text()[-2000:]}")


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """Debian's browser, headless."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=FLAGS)
        try:
            yield browser
        finally:
            browser.close()


@dataclass
class Visit:
    """One viewer's browser page, and what went wrong in it so far."""

    page: Page
    problems: list[str] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.page.set_default_timeout(PATIENCE_MS)
        self.page.on("console", self._console)
        self.page.on("pageerror", lambda error: self.problems.append(f"page error: {error}"))
        self.page.on("request", self._request)

    def _console(self, message: ConsoleMessage) -> None:
        if message.type == "error":
            self.problems.append(f"console: {message.text}")

    def _request(self, request: Request) -> None:
        address = urlsplit(request.url)
        if address.scheme not in {"data", "blob"} and address.hostname not in {"127.0.0.1", "localhost"}:
            self.foreign.append(request.url)

    def clean(self) -> None:
        """No error in the console, nothing asked of another host, no red box of Streamlit."""
        assert not self.problems, self.problems
        assert not self.foreign, self.foreign
        assert self.page.locator('[data-testid="stException"]').count() == 0

    def open(self, url: str, view: str = "now") -> None:
        """Go to one view and wait until the engine's numbers are there."""
        self.page.goto(f"{url}/?view={view}")
        self.page.wait_for_selector('[data-testid="tile-waiting"]')

    def show(self, title: str) -> None:
        """Open a view by its button, as a person would."""
        self.page.get_by_role("radio", name=title, exact=True).or_(
            self.page.locator('[data-testid="stButtonGroup"] button', has_text=title)
        ).first.click()

    def step(self) -> int:
        """The engine's step that the head shows."""
        text = self.page.locator(".facts span", has_text="step").first.inner_text()
        return int("".join(filter(str.isdigit, text)))

    def wait_for_step_after(self, step: int) -> int:
        """Wait until the head shows a later step; returns it."""
        self.page.wait_for_function(
            """step => {
                const shown = [...document.querySelectorAll('*')].map(e => e.shadowRoot).filter(Boolean)
                    .flatMap(root => [...root.querySelectorAll('.facts span')])
                    .find(span => span.textContent.startsWith('step'));
                return shown && Number(shown.textContent.replace(/\\D/g, '')) > step;
            }""",
            arg=step,
        )
        return self.step()

    def picture(self, name: str) -> Path:
        """Save what is seen now among the artefacts."""
        ARTIFACTS.mkdir(parents=True, exist_ok=True)
        path = ARTIFACTS / f"{name}.png"
        self.page.screenshot(path=path)
        return path
