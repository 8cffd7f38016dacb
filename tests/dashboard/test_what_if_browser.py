"""What if in a real browser: a setting typed in, both runs simulated, the answer read from the page."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("playwright", reason="needs the package playwright: pip install -e '.[dev]'")

from browser import ARTIFACTS, CHROMIUM, PATIENCE_MS, Visit, chromium, streamlit
from playwright.sync_api import expect

from tests.telemetry.sim.recordings import config_of, record

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not CHROMIUM.exists(), reason=f"needs Debian's chromium ({CHROMIUM}): apt-get install chromium"),
]

#: Both runs are simulated by a child, beside a browser and a page.
expect.set_options(timeout=6 * PATIENCE_MS)


def test_would_a_smaller_chunk_help(tmp_path: Path) -> None:
    config = config_of(num_pages=2_000, chunked_prefill_size=2_048)
    journal = record(tmp_path, config, requests=60, gap_ms=60.0, prompts=(40, 1_500), ends_early=False)
    with streamlit("", tmp_path / "streamlit.txt", journals=[journal]) as url, chromium() as browser:
        visit = Visit(browser.new_context(viewport={"width": 1440, "height": 900}).new_page())
        page = visit.page
        page.set_default_timeout(6 * PATIENCE_MS)
        page.goto(f"{url}/?view=what_if")
        chunk = page.get_by_label("Chunk size (tok)", exact=True)
        expect(chunk).to_have_value("2048")
        # Until it is read, the journal keeps the page coming anew.
        expect(page.get_by_text("events so far")).to_have_count(0)
        # A run of the page that is still on its way may draw the form anew, without what was typed.
        expect(page.get_by_test_id("stApp")).to_have_attribute("data-test-script-state", "notRunning")
        chunk.fill("128")
        # Enter hands the value over and compares in one event. A click on Compare, right after, was once lost on a
        # machine slowed down by others, between two drawings of the button.
        chunk.press("Enter")
        answer = page.get_by_test_id("whatif-sentence")
        expect(answer).to_contain_text(
            "A chunk of 128 instead of 2\u202f048 tokens: TBT p99 from ", timeout=6 * PATIENCE_MS
        )
        assert "whatif=scheduler.chunked_prefill_size" in page.url
        expect(page.locator("canvas, svg.marks").first).to_be_visible()
        ARTIFACTS.mkdir(exist_ok=True)
        page.set_viewport_size({"width": 1440, "height": 1900})
        page.wait_for_timeout(1_000)
        page.screenshot(path=ARTIFACTS / "page-what-if-1440x900.png")
        page.get_by_role("button", name="in Admission").first.click()
        expect(page.get_by_role("gridcell", name="admitted whole").first).to_be_visible(timeout=6 * PATIENCE_MS)
        assert "view=admission" in page.url
        assert "source=what+if%2C+before" in page.url
        visit.clean()
