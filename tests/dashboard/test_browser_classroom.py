"""A lesson in a real browser, with no engine: each key counts once, an answer is checked, and the address
holds the place.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("playwright", reason="needs the package playwright: pip install -e '.[dev]'")

from browser import CHROMIUM, PATIENCE_MS, REPOSITORY, Visit, chromium, streamlit
from playwright.sync_api import Locator, Page, WebSocketRoute, expect

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not CHROMIUM.exists(), reason=f"needs Debian's chromium ({CHROMIUM}): apt-get install chromium"),
]

LESSONS = REPOSITORY / "telemetry" / "lessons" / "data"

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


def opened(page: Page, address: str) -> Locator:
    """The moment of a lesson at `address`, once the page hears keys."""
    page.goto(address, wait_until="commit")
    # Not by a function of the page: a document that has only just been committed has no element yet.
    page.locator("html[data-keys]").wait_for(state="attached")
    return page.get_by_test_id("moment")


def test_a_lesson_is_stepped_by_keys_and_a_prediction_is_checked(visit: Visit) -> None:
    page = visit.page
    moment = opened(page, "/?view=classroom&lesson=four-requests&moment=3")
    expect(moment).to_contain_text(
        "remaining_total = free 228×16 + evictable 4×16 − decode rows 8 − promised 336 = 3368"
    )
    page.keyboard.press("ArrowRight")
    expect(moment).to_contain_text("A comes up: 160 tokens")
    page.get_by_role("button", name="admitted whole (admitted_whole)").click()
    verdict = page.get_by_test_id("verdict")
    expect(verdict).to_contain_text("The scheduler decided otherwise: admitted, first chunk only")
    page.keyboard.press("ArrowRight")
    expect(moment).to_contain_text("Admitted · A")
    page.keyboard.press("ArrowLeft")
    expect(moment).to_contain_text("A comes up: 160 tokens")
    expect(verdict).to_have_count(0)
    page.wait_for_url("**moment=4**")
    page.reload(wait_until="commit")
    expect(moment).to_contain_text("A comes up: 160 tokens")
    # The lesson is never faded, though no engine answers.
    assert page.locator(".st-key-live").evaluate("live => getComputedStyle(live).opacity") == "1"


def test_each_key_counts_once_however_quick_and_the_browser_goes_back_by_moments(visit: Visit) -> None:
    page = visit.page
    opened(page, "/?view=classroom&lesson=four-requests")
    for _ in range(5):
        page.keyboard.press("ArrowRight")
    page.wait_for_url("**moment=5**")
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    page.wait_for_url("**moment=3**")
    expect(page.get_by_text("Moment 3 of").first).to_be_visible()
    # A view chosen by the mouse does not keep the arrows for itself.
    visit.show("Classroom")
    page.keyboard.press("ArrowRight")
    page.wait_for_url("**moment=4**")
    page.go_back()
    page.wait_for_url("**moment=3**")
    expect(page.get_by_text("Moment 3 of").first).to_be_visible()
    page.go_forward()
    page.wait_for_url("**moment=4**")
    expect(page.get_by_text("Moment 4 of").first).to_be_visible()


def test_a_key_is_heard_though_its_message_is_lost(visit: Visit) -> None:
    lost: list[str | bytes] = []

    def lose_the_first(socket: WebSocketRoute) -> None:
        server = socket.connect_to_server()

        def pass_on(message: str | bytes) -> None:
            if not lost and isinstance(message, bytes) and b"ArrowRight" in message:
                lost.append(message)
            else:
                server.send(message)

        socket.on_message(pass_on)

    page = visit.page
    page.route_web_socket("**/_stcore/stream", lose_the_first)
    opened(page, "/?view=classroom&lesson=four-requests&moment=3")
    page.keyboard.press("ArrowRight")
    page.wait_for_url("**moment=4**")
    expect(page.get_by_text("Moment 4 of").first).to_be_visible()
    assert lost


def test_a_lesson_file_is_opened_from_the_page(visit: Visit, tmp_path: Path) -> None:
    page = visit.page
    moment = opened(page, "/?view=classroom")
    page.get_by_text("Open a lesson of your own").click()
    broken = tmp_path / "broken.toml"
    broken.write_text("id = 3\n", encoding="utf-8")
    page.locator("input[type=file]").set_input_files(broken)
    expect(page.get_by_role("alert").filter(has_text="This lesson cannot be played as it is.")).to_be_visible()
    text = (LESSONS / "1-four-requests.toml").read_text(encoding="utf-8")
    own = tmp_path / "own.toml"
    own.write_text(text.replace('id = "four-requests"', 'id = "our-own"', 1), encoding="utf-8")
    page.locator("input[type=file]").set_input_files(own)
    page.wait_for_url("**lesson=our-own**")
    expect(moment).to_contain_text("Eight requests decode")
