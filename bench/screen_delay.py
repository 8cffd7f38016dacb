"""From an event to the screen, measured in a real browser: `make bench-dashboard ARGS="--arrivals 20"`.

The tiny model is served, the page is opened on it in Debian's Chromium, refreshing every second as it does unless told,
and requests are sent one by one at moments that fall anywhere in a refresh. The clock runs from just before a request
is sent until the head of the page counts it: so it has the way to the engine, the intake, the read API, the refresh,
the rerun of the script and the drawing in it. Budget: 2 s.
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Final

import httpx
from playwright.sync_api import Page

from bench.tiny_server import tiny_server
from telemetry.client import LiveSource
from tests.dashboard.browser import CHROMIUM, Visit, chromium, streamlit

BUDGET_S: Final = 2.0
_PATIENCE_MS: Final = 90_000

#: Resolves in the frame in which the head counts so many requests. Components live in shadow roots.
_COUNTED: Final = """n => [...document.querySelectorAll('*')].map(e => e.shadowRoot).filter(Boolean)
    .some(root => [...root.querySelectorAll('[data-testid="tile-finished"] .sub')]
        .some(sub => sub.textContent.replace(/\\D/g, '') === String(n)))"""


def _seen_after_s(page: Page, url: str, number: int) -> float:
    """Send one request; seconds until the page counts it as the `number`th."""
    words = {"model": "tiny", "prompt": f"arrival {number}", "max_tokens": 4}
    sender = threading.Thread(
        target=httpx.post, args=(f"{url}/v1/completions",), kwargs={"json": words, "timeout": 60.0, "trust_env": False}
    )
    began = time.perf_counter()
    sender.start()
    page.wait_for_function(_COUNTED, arg=number, timeout=_PATIENCE_MS)
    took = time.perf_counter() - began
    sender.join()
    return took


def measure(arrivals: int) -> int:
    """Print median and worst of `arrivals`; 1 when one was later than the budget, or there is no browser."""
    if not CHROMIUM.exists():
        sys.stderr.write(f"needs Debian's chromium ({CHROMIUM}): apt-get install chromium\n")
        return 1
    chance = random.Random(1)
    with (
        tempfile.TemporaryDirectory() as folder,
        tiny_server(Path(folder)) as server,
        streamlit(server.url, Path(folder) / "page.txt") as url,
        chromium() as browser,
    ):
        visit = Visit(browser.new_context(viewport={"width": 1440, "height": 900}).new_page())
        visit.page.set_default_timeout(_PATIENCE_MS)
        visit.open(url)
        first = LiveSource(server.url, None, timeout_s=10.0).status().requests_received
        took = []
        for number in range(first + 1, first + arrivals + 2):
            visit.page.wait_for_timeout(chance.uniform(0.0, 1_000.0))
            took.append(_seen_after_s(visit.page, server.url, number))
        visit.clean()
    took = took[1:]  # the first request of an engine pays for what is loaded once
    sys.stdout.write(
        f"event to screen, {arrivals} arrivals, refresh every 1 s: median {statistics.median(took):.2f} s, "
        f"worst {max(took):.2f} s; budget {BUDGET_S:g} s\n"
    )
    return 0 if max(took) < BUDGET_S else 1
