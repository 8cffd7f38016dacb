"""Pictures of each page, from the real demo: `make screenshots`.

    python -m bench.screenshots [--seconds N] [--out DIR] [--only NAME]

Starts `admitscope demo` on free ports (real model, replayed trace) and waits until several requests wait. Then the page
is paused and the answers of "Now" are followed, as docs/tour.md tells it, so that the pictures show one moment. After
the load the journal of the same run is opened for the bar of a recording, and for What if. Each page is taken at
1440x900 and at 390x844, in the light theme; files are PNGs with a palette, page-NAME.png and page-NAME-390.png.

The narrow pictures begin at the choice of view, where the head of the page would fill the first screen.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
from PIL import Image
from playwright.sync_api import Error as PlaywrightError

from telemetry.client import LiveSource, SourceUnavailable
from tests.dashboard.browser import CHROMIUM, Visit, chromium, streamlit

ROOT: Final = Path(__file__).resolve().parents[1]
WIDE: Final = (1440, 900)
NARROW: Final = (390, 844)
#: A shared machine draws slowly; nothing here measures speed.
_PATIENCE_MS: Final = 90_000
#: The script of a page reruns after a change of size, and charts fit themselves.
_SETTLE_MS: Final = 2_500
#: What "Now" needs to be worth a picture: first tokens lately, requests that wait, the age of the oldest of them.
_FIRSTS, _WAITING, _OLDEST_S = 25, 5, 1.5
_START_S: Final = 240.0
_SMALLER_CHUNK: Final = 32


@dataclass
class Album:
    """Where pictures go, and which were taken."""

    folder: Path
    only: str | None = None
    sizes: dict[str, int] = field(default_factory=dict)

    def take(self, visit: Visit, name: str, *, narrow_from: str = ".st-key-controls") -> None:
        """Both pictures of what is open now; the narrow one begins at `narrow_from`."""
        if self.only not in {None, name}:
            return
        # Nothing is lit because the mouse happens to rest on it.
        visit.page.mouse.move(1, 1)
        visit.page.locator("[data-testid=stMain]").evaluate("node => node.scrollTo(0, 0)")
        visit.page.wait_for_timeout(_SETTLE_MS)
        self._write(visit, f"page-{name}.png")
        visit.page.set_viewport_size({"width": NARROW[0], "height": NARROW[1]})
        visit.page.wait_for_timeout(_SETTLE_MS)
        visit.page.locator(narrow_from).first.evaluate("node => node.scrollIntoView()")
        visit.page.wait_for_timeout(_SETTLE_MS // 5)
        self._write(visit, f"page-{name}-{NARROW[0]}.png")
        visit.page.set_viewport_size({"width": WIDE[0], "height": WIDE[1]})
        visit.page.wait_for_timeout(_SETTLE_MS)

    def _write(self, visit: Visit, file: str) -> None:
        picture = Image.open(io.BytesIO(visit.page.screenshot())).convert("RGB")
        self.folder.mkdir(parents=True, exist_ok=True)
        _with_palette(picture).save(self.folder / file, optimize=True)
        self.sizes[file] = (self.folder / file).stat().st_size
        sys.stdout.write(f"{file:<32} {self.sizes[file] / 1024:6.0f} KiB\n")
        sys.stdout.flush()


def _with_palette(picture: Image.Image) -> Image.Image:
    """The picture in 256 of its own colours.

    Each further colour is the one that is missed most: by the square of its distance, and by the root of how often it
    occurs, so that a green digit counts although letters of the text have more greys.
    """
    counted = picture.getcolors(maxcolors=picture.width * picture.height) or []
    colours = np.array([colour for _, colour in sorted(counted, reverse=True)], dtype=np.float64)
    weights = np.sqrt([count for count, _ in sorted(counted, reverse=True)])
    chosen = [0]
    missed = np.full(len(colours), np.inf)
    while len(chosen) < min(256, len(colours)):
        missed = np.minimum(missed, ((colours - colours[chosen[-1]]) ** 2).sum(axis=1))
        chosen.append(int((missed * weights).argmax()))
    palette = Image.new("P", (1, 1))
    palette.putpalette(colours[chosen].astype(np.uint8).tobytes())
    return picture.quantize(palette=palette, dither=Image.Dither.NONE)


@dataclass(frozen=True, slots=True)
class Demo:
    """A running demo: the addresses of its engine and of its page, and where it writes its journal."""

    engine: str
    page: str
    journals: Path


@contextlib.contextmanager
def demo(folder: Path) -> Iterator[Demo]:
    """`admitscope demo` on free ports. Ended by SIGINT, as a person would."""
    log, journals = folder / "demo.txt", folder / "journals"
    command = [sys.executable, "-m", "telemetry.cli", "demo", "--journal", str(journals)]
    command += ["--api-port", "0", "--dashboard-port", "0"]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT)
        try:
            yield Demo(*_addresses(process, log), journals)
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(timeout=60)


def _addresses(process: subprocess.Popen[bytes], log: Path) -> tuple[str, str]:
    """(engine, page), once the demo has named them: both answer then."""
    until = time.monotonic() + _START_S
    while time.monotonic() < until:
        text = log.read_text()
        found = {name: re.search(rf"^{name} +(http://127\.0\.0\.1:\d+)", text, re.M) for name in ("API", "dashboard")}
        if found["API"] and found["dashboard"]:
            return found["API"][1], found["dashboard"][1]
        if process.poll() is not None:
            raise SystemExit(f"the demo ended with {process.returncode}:\n{text[-2000:]}")
        time.sleep(0.25)
    raise SystemExit(f"the demo did not start in {_START_S:.0f} s:\n{log.read_text()[-2000:]}")


def _pause_at_a_queue(visit: Visit, engine: str, seconds: float) -> None:
    """Pause the page at a moment with something to see, at who waits longest; SystemExit when there is none.

    What is asked for in a pause is as old as its first reading: the story of that request is open when it begins.
    """
    source = LiveSource(engine, timeout_s=10.0)
    until = time.monotonic() + seconds
    # By the switch: a key would leave a frame around what has the focus.
    switch = visit.page.locator(".st-key-pace [data-testid=stCheckbox] label")
    stands = visit.page.get_by_test_id("data-age").filter(has_text="paused")
    while time.monotonic() < until:
        time.sleep(0.2)
        # A refusal for memory is the one that shows need against have in a ledger's panel.
        binding = visit.page.get_by_test_id("answer-ledger").locator("b").inner_text()
        if not binding.startswith("KV") or not _is_worth_it(source):
            continue
        _follow(visit, "longest", ".st-key-lanes_of_requests, ol.explain")
        switch.click()
        stands.wait_for()
        waiting = visit.page.get_by_test_id("tile-waiting").locator("b").inner_text()
        if int(waiting) >= _WAITING - 1 and visit.page.get_by_text("It is waiting now").count():
            return
        # The page was late: those who waited run by now.
        switch.click()
        stands.wait_for(state="detached")
        visit.show("Now")
        visit.page.get_by_test_id("answer-longest").wait_for()
        visit.page.wait_for_url("**view=now*")
    raise SystemExit(f"in {seconds:.0f} s there was no moment with {_WAITING} waiting requests: try --seconds 300")


def _is_worth_it(source: LiveSource) -> bool:
    with contextlib.suppress(SourceUnavailable):  # a busy engine answers the next time
        told, queue = source.breakdown(), source.queue(50)
        oldest_s = max((entry.age_s for entry in queue.entries), default=0.0)
        is_filled = told is not None and told.firsts_total >= _FIRSTS and sum(told.late.values()) > 0
        return is_filled and queue.total >= _WAITING and oldest_s >= _OLDEST_S
    return False


@contextlib.contextmanager
def _visiting() -> Iterator[Visit]:
    with chromium() as browser:
        size = {"width": WIDE[0], "height": WIDE[1]}
        context = browser.new_context(viewport=size, color_scheme="light", locale="en-GB")
        visit = Visit(context.new_page())
        visit.page.set_default_timeout(_PATIENCE_MS)
        try:
            yield visit
        except PlaywrightError:
            sys.stderr.write(f"what the page showed: {visit.picture('screenshots-failed')}\n")
            raise
        if visit.problems or visit.foreign:
            raise SystemExit(f"problems in the browser: {visit.problems}; other hosts asked: {visit.foreign}")
        context.close()


def _follow(visit: Visit, answer: str, until: str) -> None:
    """From "Now" to the view behind one of its answers."""
    if "view=now" not in visit.page.url:
        visit.show("Now")
    visit.page.get_by_test_id(f"answer-{answer}").click()
    visit.page.locator(until).first.wait_for()


def take_live(album: Album, visit: Visit, running: Demo, seconds: float) -> int:
    """One moment of a live engine through all its views. Returns the step of that moment."""
    page = visit.page
    visit.open(running.page)
    _pause_at_a_queue(visit, running.engine, seconds)
    step = visit.step()
    visit.page.locator("ol.explain").wait_for()
    # Looked at early, since the owner of a page is asked for when it is looked at.
    _follow(visit, "owner", ".st-key-page_owner")
    visit.show("Requests")
    visit.page.locator("ol.explain").wait_for()
    album.take(visit, "request")
    page.get_by_role("button", name="Close").first.click()
    page.locator(".st-key-lanes_of_requests").wait_for()
    album.take(visit, "requests")
    visit.show("Now")
    page.locator(".st-key-queue").wait_for()
    album.take(visit, "now", narrow_from="h1")
    _follow(visit, "ledger", ".st-key-candidates tbody tr")
    album.take(visit, "admission")
    _follow(visit, "queueing", "[data-testid=p99-queueing]")
    album.take(visit, "latency")
    _follow(visit, "owner", "canvas[data-pages]")
    album.take(visit, "kv")
    visit.show("Invariants")
    page.locator(".st-key-laws tbody tr").first.wait_for()
    album.take(visit, "invariants")
    # Before the demo ends: a page that loses its server says so in the console, and that counts as an error.
    page.goto("about:blank")
    return step


def take_recorded(album: Album, visit: Visit, page_url: str, step: int | None) -> None:
    """The bar of a recording (at `step`, else in its middle), What if over the same run, and a lesson."""
    page = visit.page
    page.goto(f"{page_url}/?view=kv")
    page.locator(".scrub input").wait_for()
    page.wait_for_function(
        """() => [...document.querySelectorAll('*')].map(e => e.shadowRoot).filter(Boolean)
            .flatMap(root => [...root.querySelectorAll('.scrub input')]).some(bar => Number(bar.max) > 100)"""
    )
    at = step or int(page.locator(".scrub input").get_attribute("max") or 2) // 2
    page.goto(f"{page_url}/?view=kv&at={at}")
    page.locator("canvas[data-pages]").wait_for()
    album.take(visit, "recorded")
    page.goto(f"{page_url}/?view=what_if&whatif=scheduler.chunked_prefill_size={_SMALLER_CHUNK}")
    page.get_by_role("button", name="Compare", exact=True).last.click()  # the form has one too
    page.get_by_test_id("whatif-sentence").wait_for(timeout=4 * _PATIENCE_MS)
    album.take(visit, "what-if", narrow_from="[data-testid=whatif-sentence]")
    page.goto(f"{page_url}/?view=classroom&lesson=four-requests&moment=4")
    page.get_by_test_id("moment").wait_for()
    album.take(visit, "classroom")


def main() -> int:
    """Take them all; 1 when a page showed an error in the browser."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=180.0, help="to wait at most for a queue (default: 180)")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "img", help="folder (default: docs/img)")
    parser.add_argument("--only", help="one picture, by its name: now, request, requests, admission, …")
    parser.add_argument("--journal", type=Path, help="skip the demo: only the pictures of a recorded run")
    asked = parser.parse_args()
    if not CHROMIUM.exists():
        raise SystemExit(f"needs Debian's chromium ({CHROMIUM}): apt-get install chromium")
    album = Album(asked.out, asked.only)
    with tempfile.TemporaryDirectory(prefix="admitscope-pictures-") as name, _visiting() as visit:
        folder = Path(name)
        journal, step = asked.journal, None
        if journal is None:
            with demo(folder) as running:
                step = take_live(album, visit, running, asked.seconds)
            journal = max((folder / "journals").glob("*.jsonl"))
        with streamlit("", folder / "page.txt", journals=[journal]) as page_url:
            take_recorded(album, visit, page_url, step)
    sys.stdout.write(f"{len(album.sizes)} pictures, {sum(album.sizes.values()) / 1024:.0f} KiB in {album.folder}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
