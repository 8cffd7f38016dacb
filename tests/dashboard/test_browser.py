"""The page in a real browser: it lives, it keeps what a person chose, it says when it is old, and it asks no one else.

ADMITSCOPE_BROWSER_URL points the tests that need no control over the engine at the page of a real one. Screenshots go
to ADMITSCOPE_ARTIFACTS, else to ./artifacts.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("playwright", reason="needs the package playwright: pip install -e '.[dev]'")

from browser import CHROMIUM, PATIENCE_MS, Browser, Visit, chromium, streamlit
from fake_engine import FakeEngine, FakeServer, Ticker, warmed
from playwright.sync_api import Locator, expect

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not CHROMIUM.exists(), reason=f"needs Debian's chromium ({CHROMIUM}): apt-get install chromium"),
]

expect.set_options(timeout=PATIENCE_MS)

REAL_PAGE = os.environ.get("ADMITSCOPE_BROWSER_URL")

Visitor = Callable[..., Visit]


@dataclass
class Stage:
    """A page and the made-up engine behind it; the engine is None for a real page."""

    url: str
    engine: FakeEngine | None = None
    engine_url: str = ""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as launched:
        yield launched


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """A living page: the real one when it is named, else one on a made-up engine under load."""
    if REAL_PAGE:
        yield Stage(REAL_PAGE.rstrip("/"))
        return
    engine = warmed(600)
    log = tmp_path_factory.mktemp("page") / "streamlit.txt"
    with FakeServer(engine) as server, Ticker(engine), streamlit(server.url, log) as url:
        yield Stage(url, engine, server.url)


@pytest.fixture
def visitor(browser: Browser) -> Iterator[Visitor]:
    """Opens a browser window; every window that was opened is judged at the end."""
    visits: list[Visit] = []
    contexts = []

    def enter(width: int = 1440, height: int = 900, scheme: str = "light") -> Visit:
        context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
        contexts.append(context)
        visits.append(Visit(context.new_page()))
        return visits[-1]

    yield enter
    try:
        for visit in visits:
            visit.clean()
    finally:
        for context in contexts:
            context.close()


def picked(row: Locator) -> str:
    """Click a row and say whose it was, in one moment: rows move."""
    rid: str = row.evaluate("row => { row.click(); return row.dataset.id; }")
    return rid


def test_the_page_loads_and_its_numbers_advance(stage: Stage, visitor: Visitor) -> None:
    visit = visitor()
    visit.open(stage.url)
    first = visit.step()
    second = visit.wait_for_step_after(first)
    visit.wait_for_step_after(second)
    expect(visit.page.get_by_test_id("data-age")).to_contain_text("data is")
    expect(visit.page.locator(".st-key-interval_box input")).to_have_value("every 1 s")
    assert visit.page.evaluate("document.documentElement.dataset.admitscope") == "live"


def test_each_waiting_request_shows_its_reason(stage: Stage, visitor: Visitor) -> None:
    visit = visitor()
    visit.open(stage.url)
    row = visit.page.locator(".st-key-queue tbody tr[data-id]").first
    row.wait_for()
    assert row.locator("td.pill").inner_text().strip()
    expect(row.locator("td.bar")).to_contain_text("s")


def test_fr_47_choice_filter_order_and_view_survive_refreshes(stage: Stage, visitor: Visitor) -> None:
    if stage.engine is None:
        pytest.skip("needs an engine whose queue never empties")
    visit = visitor()
    visit.open(stage.url)
    table = visit.page.locator(".st-key-queue")
    rid = picked(table.locator("tbody tr[data-id]").nth(4))
    expect(visit.page.locator("ol.explain")).to_contain_text(f"{rid} came with a prompt of")
    box = table.locator("input[type=search]")
    box.fill("order")
    table.get_by_role("button", name="Age").click()
    step = visit.step()
    for _ in range(5):
        step = visit.wait_for_step_after(step)
    expect(box).to_have_value("order")
    expect(table.locator("th[aria-sort=descending]")).to_contain_text("Age")
    expect(table.locator(".note")).to_contain_text("match")
    expect(visit.page.locator("ol.explain")).to_contain_text(f"{rid} came with a prompt of")
    visit.show("K/V pages")
    visit.page.locator("canvas[data-pages]").wait_for()
    visit.show("Now")
    expect(box).to_have_value("order")
    visit.page.reload()
    expect(visit.page.locator(".st-key-queue tbody tr[data-id]").first).to_be_visible()


def test_fr_47_another_pace_stays(stage: Stage, visitor: Visitor) -> None:
    visit = visitor()
    visit.open(stage.url)
    box = visit.page.locator(".st-key-interval_box input")
    box.click()
    visit.page.get_by_role("option", name="every 2 s").click()
    visit.wait_for_step_after(visit.wait_for_step_after(visit.step()))
    expect(box).to_have_value("every 2 s")
    visit.show("Requests")
    visit.page.locator(".st-key-requests_finished").wait_for()
    expect(box).to_have_value("every 2 s")


def test_a_view_has_an_address_of_its_own(stage: Stage, visitor: Visitor) -> None:
    visit = visitor()
    visit.open(stage.url)
    visit.show("Admission")
    visit.page.wait_for_url("**view=admission*")
    visit.page.get_by_text("Tokens computed in the last steps").wait_for()
    visit.page.reload()
    visit.page.get_by_text("Tokens computed in the last steps").wait_for()


def test_a_picked_pass_is_held_while_newer_ones_are_made(stage: Stage, visitor: Visitor) -> None:
    visit = visitor()
    visit.open(stage.url, "admission")
    row = visit.page.locator(".st-key-passes tbody tr[data-id]").nth(3)
    row.wait_for()
    step = picked(row)
    heading = visit.page.locator(".st-key-pass_story h3")
    follow = visit.page.get_by_role("button", name="Follow the newest pass again")
    follow.wait_for()
    shown = re.compile(r"\D*" + r"\D?".join(step) + "$")
    expect(heading).to_have_text(shown)
    visit.wait_for_step_after(visit.wait_for_step_after(visit.step()))
    expect(heading).to_have_text(shown)
    expect(visit.page.locator(".st-key-candidates tbody tr[data-id]").first).to_be_visible()
    follow.click()
    expect(heading).not_to_have_text(shown)


def settled_grid(canvas: Any) -> tuple[int, int]:
    """(cell size, columns) of the page map once they stand still: it fits itself to the width as the page fills."""
    seen: list[tuple[int, int]] = []
    for _ in range(50):
        seen.append((int(canvas.get_attribute("data-size")), int(canvas.get_attribute("data-columns"))))
        if len(seen) >= 6 and len(set(seen[-6:])) == 1:
            break
        canvas.page.wait_for_timeout(200)
    return seen[-1]


def test_the_map_draws_pages_and_a_click_names_their_owner(stage: Stage, visitor: Visitor) -> None:
    visit = visitor()
    visit.open(stage.url, "kv")
    canvas = visit.page.locator("canvas[data-pages]")
    canvas.wait_for()
    painted = canvas.evaluate(
        """canvas => {
            const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
            const seen = new Set();
            for (let i = 0; i < data.length; i += 4) if (data[i + 3]) seen.add(data.slice(i, i + 3).join());
            return seen.size;
        }"""
    )
    assert painted >= 3
    size, columns = settled_grid(canvas)
    page = 1 if stage.engine is None else stage.engine.nodes["node:1"][0]
    canvas.click(position={"x": page % columns * size + size // 3, "y": page // columns * size + size // 3})
    sentence = visit.page.locator(".st-key-page_owner")
    expect(sentence).to_contain_text(f"Page {page} is ")
    if stage.engine is not None:
        expect(sentence).to_contain_text("it belongs to node 1, a shared prefix of 24 pages")
    visit.page.get_by_text("By owner", exact=True).click()
    expect(visit.page.locator(".st-key-page_map .key")).to_contain_text("free")
    canvas.press("ArrowRight")
    caption = visit.page.locator(".st-key-page_map figcaption")
    expect(caption).to_contain_text(f"page {page + 1} ")
    visit.page.get_by_text("By state", exact=True).click()
    expect(visit.page.locator(".st-key-page_map .key")).to_contain_text("evictable")
    for _ in range(12):  # over refreshes of a live page as well
        assert f"page {page + 1} " in caption.inner_text()
        visit.page.wait_for_timeout(250)


def test_a_request_is_explained_by_click_and_by_typed_id(stage: Stage, visitor: Visitor) -> None:
    visit = visitor()
    visit.open(stage.url, "requests")
    row = visit.page.locator(".st-key-requests_finished tbody tr[data-id]").nth(2)
    held = visit.page.locator(".st-key-requests_finished .note").get_by_text("held while the pointer is here")
    for _ in range(10):  # the lanes above are drawn a little later, and push the table away from under the pointer
        row.hover()
        visit.page.wait_for_timeout(500)
        if held.count():
            break
    expect(held).to_be_visible()
    row.click()
    visit.page.get_by_text("Where its time to first token went").wait_for()
    first = visit.page.locator("ol.explain").inner_text()
    assert first.strip()
    expect(visit.page.locator(".st-key-decisions_of_request tbody tr[data-id]").first).to_be_visible()
    box = visit.page.locator(".st-key-requests_finished input[type=search]")
    box.fill("no-such-request")
    box.press("Enter")
    visit.page.get_by_text("The engine does not know no-such-request").wait_for()
    visit.page.get_by_role("button", name="Close").click()
    visit.page.get_by_text("Click a request, or type its id").wait_for()


def test_fr_47_pause_stops_every_panel_and_resuming_continues(stage: Stage, visitor: Visitor) -> None:
    visit = visitor()
    visit.open(stage.url)
    pause = visit.page.locator(".st-key-pause_box label").first
    pause.click()
    expect(visit.page.get_by_test_id("data-age")).to_contain_text("paused at")
    step = visit.step()
    visit.show("Admission")
    visit.page.locator(".st-key-passes tbody tr[data-id]").first.wait_for()
    visit.show("Now")
    visit.page.locator(".st-key-queue").wait_for()
    assert visit.step() == step
    pause.click()
    visit.wait_for_step_after(step)


def test_fr_48_a_gone_engine_is_said_aloud_and_its_return_needs_no_reload(visitor: Visitor, tmp_path: Path) -> None:
    if REAL_PAGE:
        pytest.skip("needs an engine that may be stopped")
    engine = warmed(200)
    with FakeServer(engine) as server:
        port, engine_url = server.port, server.url
        with streamlit(engine_url, tmp_path / "streamlit.txt") as url:
            visit = visitor()
            visit.open(url)
            server.__exit__()
            banner = visit.page.locator(".banner")
            expect(banner).to_contain_text(re.compile(r"The engine does not answer since \S+ Last contact "))
            visit.page.wait_for_function("document.documentElement.dataset.admitscope === 'old'")
            expect(visit.page.locator(".fresh.old")).to_be_visible()
            visit.picture("page-engine-gone-1440x900")
            with FakeServer(engine, port):
                engine.tick()
                expect(banner).to_be_hidden()
                visit.page.wait_for_function("document.documentElement.dataset.admitscope === 'live'")


def test_fr_48_a_page_whose_dashboard_died_does_not_look_alive(browser: Browser, tmp_path: Path) -> None:
    if REAL_PAGE:
        pytest.skip("needs a dashboard that may be stopped")
    context = browser.new_context(viewport={"width": 1440, "height": 900})
    try:
        # The lost web socket is an error in the console, rightly: this visit is not judged.
        visit = Visit(context.new_page())
        with FakeServer(warmed(200)) as server, streamlit(server.url, tmp_path / "streamlit.txt") as url:
            visit.open(url)
        visit.page.wait_for_function("document.documentElement.dataset.admitscope === 'old'")
        expect(visit.page.locator(".banner")).to_contain_text("No new data since ")
    finally:
        context.close()


@pytest.mark.parametrize("view", ["now", "admission", "kv", "requests"])
@pytest.mark.parametrize(
    ("size", "scheme"), [((1440, 900), "light"), ((1440, 900), "dark"), ((390, 844), "light")], ids=str
)
def test_the_page_fits_its_window(
    stage: Stage, visitor: Visitor, view: str, size: tuple[int, int], scheme: str
) -> None:
    visit = visitor(*size, scheme)
    visit.open(stage.url, view)
    wanted = {
        "now": ".st-key-queue .scroller",
        "admission": ".st-key-pass_story h3",
        "kv": "canvas[data-pages]",
        "requests": ".st-key-requests_finished .scroller",
    }[view]
    visit.page.locator(wanted).first.wait_for()
    visit.wait_for_step_after(visit.step())
    too_wide = visit.page.evaluate("document.querySelector('.stMain').scrollWidth - window.innerWidth")
    assert too_wide <= 0, f"the page is {too_wide} px wider than the window"
    visit.picture(f"page-{view}-{size[0]}x{size[1]}-{scheme}")


def test_title_bars_and_queue_of_a_pass_stay_together_under_load(stage: Stage, visitor: Visitor) -> None:
    visit = visitor()
    visit.open(stage.url, "admission")
    story = visit.page.locator(".st-key-pass_story section.pass")
    story.wait_for()
    seen = set()
    for _ in range(12):
        title, *others = story.evaluate(
            """root => [root.querySelector('h3').textContent.replace(/\\D/g, ''), root.dataset.step,
                root.querySelector('.ledgers').dataset.step]"""
        )
        assert others == [title, title]
        seen.add(title)
        visit.page.wait_for_timeout(300)
    assert len(seen) > 1
    expect(story.locator("figure[data-ledger=rem_chunk] .line").first).to_contain_text("limit")
    # Bars of one ledger are compared by eye: one scale needs tracks of one width, the refused request's too.
    for figure in story.locator("figure").all():
        widths = figure.locator(".track").evaluate_all("all => all.map(each => each.getBoundingClientRect().width)")
        assert max(widths, default=0) - min(widths, default=0) < 1, widths


def test_a_lane_that_is_clicked_tells_its_story(stage: Stage, visitor: Visitor) -> None:
    visit = visitor()
    visit.open(stage.url, "requests&lanes=waiting&pause=1")
    bar = visit.page.locator('[data-testid="stVegaLiteChart"] .mark-rect path').first
    bar.wait_for()
    bar.dispatch_event("click")
    visit.page.get_by_text("What happened, and why").wait_for()
    visit.page.wait_for_url("**rid=*")
    visit.page.locator(".st-key-raw_records summary").click()
    expect(visit.page.locator(".st-key-raw_records")).to_contain_text("timeline")


def test_the_latency_view_draws_its_charts_and_answers_in_words(stage: Stage, visitor: Visitor) -> None:
    visit = visitor()
    visit.open(stage.url, "latency")
    expect(visit.page.get_by_test_id("p99-queueing")).to_contain_text("of p99 TTFT is queueing")
    charts = visit.page.locator('[data-testid="stVegaLiteChart"]')
    charts.nth(3).wait_for()
    for chart in charts.all():
        # A share of 0 % is a bar without height.
        chart.locator(".mark-rect path, .mark-symbol path").first.wait_for(state="attached")
