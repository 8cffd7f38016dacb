"""Memory and laws in a real browser: nodes open and light up, a law and a bundle are read, and links lead on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("playwright", reason="needs the package playwright: pip install -e '.[dev]'")

import fake_kv
from browser import CHROMIUM, PATIENCE_MS, Visit, chromium, streamlit
from fake_engine import FakeEngine, FakeServer, Ticker, warmed
from playwright.sync_api import expect

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not CHROMIUM.exists(), reason=f"needs Debian's chromium ({CHROMIUM}): apt-get install chromium"),
]

expect.set_options(timeout=PATIENCE_MS)


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Visit, str, FakeEngine]]:
    """One visit to a page on a made-up engine that broke a law; judged at the end."""
    engine = warmed(600)
    engine.violations = {fake_kv.BROKEN: 3}
    log = tmp_path_factory.mktemp("kv") / "streamlit.txt"
    with FakeServer(engine) as server, Ticker(engine), streamlit(server.url, log) as url, chromium() as browser:
        context = browser.new_context(viewport={"width": 1440, "height": 900})
        visit = Visit(context.new_page())
        yield visit, url, engine
        visit.clean()
        context.close()


def test_a_node_is_picked_and_stays_in_the_address(scene: tuple[Visit, str, FakeEngine]) -> None:
    visit, url, _ = scene
    visit.open(url, "kv")
    row = visit.page.locator(".st-key-tree tr.node[data-node='1']")
    row.click()
    card = visit.page.locator(".st-key-picked_node")
    expect(card).to_contain_text("Path from the root (pages): 1 (24)")
    visit.page.wait_for_url("**node=1*")
    visit.wait_for_step_after(visit.step())
    expect(row).to_have_attribute("aria-selected", "true")
    visit.page.reload()
    expect(card).to_contain_text("Path from the root (pages): 1 (24)")
    row.focus()
    row.press("ArrowDown")
    expect(visit.page.locator(".st-key-tree tr.node:focus")).to_have_count(1)
    card.get_by_role("button", name="Close").click()
    expect(card).to_have_count(0)


def test_a_bundle_is_opened_in_place_and_leads_to_its_step(scene: tuple[Visit, str, FakeEngine]) -> None:
    visit, url, _ = scene
    visit.open(url, "invariants")
    laws = visit.page.locator(".st-key-laws tbody tr[data-id]")
    expect(laws.first).to_contain_text(fake_kv.BROKEN)
    laws.first.click()
    expect(visit.page.get_by_test_id("law")).to_contain_text("Last broken in step")
    visit.page.locator(".st-key-evidence tbody tr[data-id]").first.click()
    expect(visit.page.get_by_test_id("bundle")).to_contain_text("Expected 1024 in all; found 1025 in all.")
    expect(visit.page.locator(".st-key-bundle_records tbody tr").first).to_contain_text("offending")
    expect(visit.page.get_by_text("admitscope check journals/fake.jsonl")).to_be_visible()
    visit.page.wait_for_url("**bundle=*")
    visit.page.locator(".st-key-bundle_to_step button").first.click()
    visit.page.wait_for_url("**view=admission*")


@pytest.mark.parametrize("view", ["kv", "invariants"])
def test_a_narrow_window_is_not_overrun(scene: tuple[Visit, str, FakeEngine], view: str) -> None:
    visit, url, _ = scene
    visit.page.set_viewport_size({"width": 390, "height": 844})
    visit.open(url, view)
    visit.page.locator(".st-key-tree table, .st-key-laws table").first.wait_for()
    assert visit.page.evaluate("document.querySelector('.stMain').scrollWidth - window.innerWidth") <= 0
