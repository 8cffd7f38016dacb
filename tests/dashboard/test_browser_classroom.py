"""A lesson in a real browser, with no engine: keys step it, an answer is checked, and the address holds the place."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("playwright", reason="needs the package playwright: pip install 'admitscope[dev]'")

from browser import CHROMIUM, PATIENCE_MS, Visit, chromium, streamlit
from playwright.sync_api import Page, expect

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not CHROMIUM.exists(), reason=f"needs Debian's chromium ({CHROMIUM}): apt-get install chromium"),
]

expect.set_options(timeout=3 * PATIENCE_MS)


@pytest.fixture
def visit(tmp_path: Path) -> Iterator[Visit]:
    with streamlit("http://127.0.0.1:9", tmp_path / "streamlit.txt") as url, chromium() as browser:
        context = browser.new_context(viewport={"width": 1440, "height": 900}, base_url=url)
        visiting = Visit(context.new_page())
        visiting.page.set_default_timeout(3 * PATIENCE_MS)
        yield visiting
        visiting.clean()
        context.close()


def press(page: Page, key: str, then: str) -> None:
    """Press `key` until the moment says `then`: one that falls into a refresh of the head is not heard, nor kept."""
    moment = page.get_by_test_id("moment").get_by_text(then)
    page.wait_for_function("() => document.documentElement.dataset.keys")
    for _ in range(4):
        page.keyboard.press(key)
        try:
            expect(moment.first).to_be_visible(timeout=5_000)
        except AssertionError:
            continue
        return
    raise AssertionError(f"{key} does not lead to {then!r}: {page.get_by_test_id('moment').inner_text()}")


def test_a_lesson_is_stepped_by_keys_and_a_prediction_is_checked(visit: Visit) -> None:
    page = visit.page
    page.goto("/?view=classroom&lesson=four-requests&moment=3", wait_until="commit")
    moment = page.get_by_test_id("moment")
    expect(moment).to_contain_text(
        "remaining_total = free 228×16 + evictable 4×16 − decode rows 8 − promised 336 = 3368"
    )
    page.get_by_role("button", name="Next").wait_for()
    press(page, "ArrowRight", "A comes up: 160 tokens")
    page.get_by_role("button", name="admitted whole (admitted_whole)").click()
    verdict = page.get_by_test_id("verdict")
    expect(verdict).to_contain_text("The scheduler decided otherwise: admitted, first chunk only")
    press(page, "ArrowRight", "Admitted · A")
    press(page, "ArrowLeft", "A comes up: 160 tokens")
    expect(verdict).to_have_count(0)
    page.wait_for_url("**moment=4**")
    page.reload(wait_until="commit")
    expect(moment).to_contain_text("A comes up: 160 tokens")
    # The lesson is never faded, though no engine answers.
    assert page.locator(".st-key-live").evaluate("live => getComputedStyle(live).opacity") == "1"
