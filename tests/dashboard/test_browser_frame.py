"""The frame in a real browser: keys, links of numbers, a recording's bar, engines beside each other, downloads."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("playwright", reason="needs the package playwright: pip install -e '.[dev]'")

from browser import CHROMIUM, PATIENCE_MS, Browser, Visit, chromium, streamlit
from fake_engine import FakeServer, Ticker, warmed
from playwright.sync_api import expect

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not CHROMIUM.exists(), reason=f"needs Debian's chromium ({CHROMIUM}): apt-get install chromium"),
]

expect.set_options(timeout=PATIENCE_MS)

JOURNAL = Path(__file__).resolve().parents[1] / "telemetry" / "data" / "cookbook.jsonl.gz"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as launched:
        yield launched


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A page with a living engine and a journal."""
    engine = warmed(600)
    log = tmp_path_factory.mktemp("page") / "streamlit.txt"
    with (
        FakeServer(engine) as server,
        Ticker(engine),
        streamlit(server.url, log, words=["--journal", str(JOURNAL), "--url", "http://127.0.0.1:9"]) as url,
    ):
        yield url


@pytest.fixture
def visit(browser: Browser) -> Iterator[Visit]:
    """A window, judged at its end."""
    context = browser.new_context(viewport={"width": 1440, "height": 900}, accept_downloads=True)
    entered = Visit(context.new_page())
    yield entered
    try:
        entered.clean()
    finally:
        context.close()


def at_engine(visit: Visit, stage: str) -> None:
    """Show the living engine, by its row among the engines."""
    visit.page.goto(f"{stage}/?view=now&source=127.0.0.1:9")
    row = visit.page.locator(".st-key-fleet tbody tr[data-id]", has_text="runs")
    row.wait_for()
    row.click()
    visit.page.locator('[data-testid="tile-waiting"]').wait_for()


def wait_for_index(visit: Visit, index: int) -> None:
    expect(visit.page.locator(".scrub input")).to_have_value(str(index))


def test_keys_choose_views_pause_and_walk_through_the_passes_kept(visit: Visit, stage: str) -> None:
    at_engine(visit, stage)
    visit.page.locator("h1").click()
    visit.page.locator("html[data-keys]").wait_for(state="attached")
    visit.page.keyboard.press("2")
    visit.page.wait_for_url("**view=admission*")
    visit.page.locator(".st-key-passes tbody tr[data-id]").first.wait_for()
    visit.page.keyboard.press("Space")
    expect(visit.page.get_by_test_id("data-age")).to_contain_text("paused at")
    visit.page.keyboard.press("ArrowLeft")
    visit.page.wait_for_url(re.compile("step="))
    first = re.search(r"step=(\d+)", visit.page.url)
    visit.page.keyboard.press("ArrowLeft")
    visit.page.wait_for_function("old => !location.search.includes(old)", arg=first[0] if first else "")
    visit.page.keyboard.press("Space")
    expect(visit.page.get_by_test_id("data-age")).to_contain_text("old")


#: Each text of a tile's label that its small line covers, by what is drawn.
_COVERED = """() => [...document.querySelectorAll('*')].map(e => e.shadowRoot).filter(Boolean)
    .flatMap(root => [...root.querySelectorAll('.tile')]).flatMap(tile => {
        const line = tile.querySelector('svg'), label = tile.querySelector('.label');
        const drawn = line && line.getBoundingClientRect();
        if (!drawn || !drawn.width) return [];
        const words = document.createRange();
        words.selectNodeContents(label);
        return words.getBoundingClientRect().right > drawn.left ? [label.textContent] : [];
    })"""


def test_the_small_lines_leave_the_labels_free_at_every_width(visit: Visit, stage: str) -> None:
    at_engine(visit, stage)
    for width in (390, 700, 800, 1190, 1200, 1250, 1300, 1366, 1440, 1920):
        visit.page.set_viewport_size({"width": width, "height": 900})
        assert visit.page.evaluate(_COVERED) == [], width


def test_a_key_that_is_typed_into_a_field_is_text(visit: Visit, stage: str) -> None:
    at_engine(visit, stage)
    box = visit.page.locator(".st-key-queue input[type=search]")
    box.fill("")
    box.press_sequentially("2 3")
    expect(box).to_have_value("2 3")
    assert "view=now" in visit.page.url


def test_a_number_and_an_answer_lead_to_their_views(visit: Visit, stage: str) -> None:
    at_engine(visit, stage)
    visit.page.get_by_test_id("tile-kv").click()
    visit.page.wait_for_url("**view=kv*")
    visit.page.locator("canvas[data-pages]").wait_for()
    visit.show("Now")
    answer = visit.page.get_by_test_id("answer-longest")
    expect(answer).to_contain_text(re.compile(r"\d"))
    answer.click()
    visit.page.wait_for_url(re.compile("view=requests.*rid=|rid=.*view=requests"))
    visit.page.locator("ol.explain").wait_for()
    visit.page.go_back()


def test_a_recording_is_walked_played_and_linked(visit: Visit, stage: str) -> None:
    visit.page.goto(f"{stage}/?source={JOURNAL.name}&at=300")
    expect(visit.page.locator(".scrub output")).to_contain_text("of 855")
    wait_for_index(visit, 299)
    assert visit.step() == 300
    visit.page.locator(".scrub .back").click()
    wait_for_index(visit, 298)
    visit.page.wait_for_url("**at=299*")
    visit.page.keyboard.press("Escape")
    visit.page.locator("h1").click()
    visit.page.keyboard.press("ArrowRight")
    wait_for_index(visit, 299)
    slider = visit.page.locator(".scrub input")
    slider.evaluate("node => { node.value = '99'; node.dispatchEvent(new Event('input')); }")
    visit.page.wait_for_url("**at=100*")
    expect(visit.page.locator(".scrub output")).to_contain_text("step 100 of 855")
    visit.page.reload()
    wait_for_index(visit, 99)
    visit.page.locator(".scrub .play").click()
    visit.wait_for_step_after(100)
    visit.page.locator("h1").click()
    visit.page.keyboard.press("Space")
    expect(visit.page.locator(".scrub .play")).to_have_text("▶")
    assert visit.step() > 100
    visit.picture("page-recorded-1440x900")


def test_what_is_shown_is_downloaded(visit: Visit, stage: str) -> None:
    visit.page.goto(f"{stage}/?source={JOURNAL.name}&at=300")
    visit.page.locator(".scrub output").wait_for()
    # The charts have buttons of that name too, for their pictures.
    visit.page.get_by_test_id("stPopoverButton").filter(has_text="Download").click()
    with visit.page.expect_download() as caught:
        visit.page.get_by_role("button", name=re.compile(r"^queue · \d+")).click()
    text = Path(caught.value.path()).read_text(encoding="utf-8")
    assert caught.value.suggested_filename == "admitscope-now-queue.csv"
    assert text.startswith("#,Request,Waits for,Needs (tok),Has (tok)")
    assert text.count("\n") > 5


def test_the_page_speaks_the_language_of_the_browser(browser: Browser, stage: str) -> None:
    context = browser.new_context(locale="zh-CN", viewport={"width": 390, "height": 844})
    try:
        visit = Visit(context.new_page())
        visit.page.goto(f"{stage}/?source={JOURNAL.name}")
        expect(visit.page.get_by_text("准入", exact=True).first).to_be_visible()
        visit.clean()
    finally:
        context.close()
