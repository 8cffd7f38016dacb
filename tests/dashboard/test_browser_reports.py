"""Field reports FR-47 and FR-48 in a real browser, with an eye on what Streamlit's own wire carries."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("playwright", reason="needs the package playwright: pip install -e '.[dev]'")

from browser import CHROMIUM, PATIENCE_MS, Browser, Visit, chromium, streamlit
from fake_engine import FakeEngine, FakeServer, Ticker, warmed
from playwright.sync_api import Page, WebSocketRoute, expect
from streamlit.proto.ForwardMsg_pb2 import ForwardMsg

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not CHROMIUM.exists(), reason=f"needs Debian's chromium ({CHROMIUM}): apt-get install chromium"),
]

expect.set_options(timeout=PATIENCE_MS)

#: Refreshes that a person's choices have to outlive.
REFRESHES = 30


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as launched:
        yield launched


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    context = browser.new_context(viewport={"width": 1440, "height": 900})
    yield context.new_page()
    context.close()


@pytest.fixture(scope="module")
def dashboard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A page on a made-up engine under load."""
    engine = warmed(600)
    log = tmp_path_factory.mktemp("reports") / "streamlit.txt"
    with FakeServer(engine) as server, Ticker(engine), streamlit(server.url, log) as url:
        yield url


class Wire:
    """How each run of the script ended, as the browser was told."""

    def __init__(self, page: Page) -> None:
        self.runs: Counter[str] = Counter()
        page.on("websocket", lambda socket: socket.on("framereceived", self._received))

    def _received(self, frame: bytes | str) -> None:
        if isinstance(frame, str):
            return
        message = ForwardMsg.FromString(frame)
        if message.WhichOneof("type") == "script_finished":
            self.runs[ForwardMsg.ScriptFinishedStatus.Name(message.script_finished)] += 1

    def settled(self, visit: Visit) -> Counter[str]:
        """The runs so far, once what a person did is through: another interval is a run of the script, and it may
        come late on a busy machine. Three refreshes in a row without one say that none is on its way."""
        before = Counter(self.runs)
        while (
            self.runs["FINISHED_SUCCESSFULLY"] != before["FINISHED_SUCCESSFULLY"]
            or self.runs["FINISHED_FRAGMENT_RUN_SUCCESSFULLY"] < before["FINISHED_FRAGMENT_RUN_SUCCESSFULLY"] + 3
        ):
            if self.runs["FINISHED_SUCCESSFULLY"] != before["FINISHED_SUCCESSFULLY"]:
                before = Counter(self.runs)
            visit.wait_for_step_after(visit.step())
        assert self.runs["FINISHED_SUCCESSFULLY"] >= 1, "the wire shows runs of the script"
        return Counter(self.runs)


def test_fr_47_a_live_page_reruns_its_fragment_and_never_its_script(dashboard: str, page: Page) -> None:
    """A picked request, a filter and the second view stay over 30 refreshes; not one of them is a run of the script."""
    wire = Wire(page)
    visit = Visit(page)
    visit.open(dashboard)
    box = page.locator(".st-key-interval_box input")
    box.click()
    page.get_by_role("option", name="every 0.5 s").click()
    expect(box).to_have_value("every 0.5 s")
    table = page.locator(".st-key-queue")
    rid = table.locator("tbody tr[data-id]").nth(4).evaluate("row => { row.click(); return row.dataset.id; }")
    expect(page.locator("ol.explain")).to_contain_text(f"{rid} came with a prompt of")
    table.locator("input[type=search]").fill("order")
    before = wire.settled(visit)
    while wire.runs["FINISHED_FRAGMENT_RUN_SUCCESSFULLY"] < before["FINISHED_FRAGMENT_RUN_SUCCESSFULLY"] + REFRESHES:
        visit.wait_for_step_after(visit.step())
    assert wire.runs["FINISHED_SUCCESSFULLY"] == before["FINISHED_SUCCESSFULLY"], "a run of the whole script"
    expect(table.locator("input[type=search]")).to_have_value("order")
    expect(page.locator("ol.explain")).to_contain_text(f"{rid} came with a prompt of")
    visit.show("Requests")
    page.locator(".st-key-requests_finished").wait_for()
    visit.wait_for_step_after(visit.step())
    assert wire.runs["FINISHED_SUCCESSFULLY"] == before["FINISHED_SUCCESSFULLY"], "another view is no full run either"
    visit.clean()


def test_fr_48_a_cut_web_socket_is_seen_and_recovers_by_itself(dashboard: str, page: Page) -> None:
    """The connection drops and stays away for some seconds: old data is marked, then the page lives on, unloaded."""
    sockets: list[WebSocketRoute] = []
    cut = [False]

    def connect(socket: WebSocketRoute) -> None:
        if cut[0]:
            socket.close()
            return
        socket.connect_to_server()
        sockets.append(socket)

    page.route_web_socket("**/_stcore/stream", connect)
    visit = Visit(page)
    visit.open(dashboard)
    page.evaluate("window.loadedOnce = true")
    step = visit.wait_for_step_after(visit.step())
    cut[0] = True
    for socket in sockets:
        socket.close()
    page.wait_for_function("document.documentElement.dataset.admitscope === 'old'")
    expect(page.get_by_test_id("data-age")).to_contain_text("data is")
    expect(page.locator(".banner")).to_contain_text("No new data since ")
    cut[0] = False
    page.wait_for_function("document.documentElement.dataset.admitscope === 'live'", timeout=3 * PATIENCE_MS)
    visit.wait_for_step_after(step)
    assert page.evaluate("window.loadedOnce") is True, "no reload was needed"
    assert page.locator('[data-testid="stException"]').count() == 0
    assert visit.foreign == []


def test_fr_48_a_reload_and_a_restarted_engine_leave_no_old_numbers(page: Page, tmp_path: Path) -> None:
    """After a reload the timer is the new session's; after a restart counters begin anew and no rate is below 0."""
    old = warmed(400)
    with FakeServer(old) as server:
        port, engine_url = server.port, server.url
        with streamlit(engine_url, tmp_path / "streamlit.txt") as url:
            visit = Visit(page)
            visit.open(url)
            with Ticker(old):
                visit.wait_for_step_after(visit.step())
                page.reload()
                page.wait_for_selector('[data-testid="tile-waiting"]')
                visit.wait_for_step_after(visit.step())
            before = visit.step()
            server.__exit__()
            page.wait_for_function("document.documentElement.dataset.admitscope === 'old'")
            fresh: FakeEngine = warmed(20, seed=5)
            with FakeServer(fresh, port), Ticker(fresh):
                page.wait_for_function("document.documentElement.dataset.admitscope === 'live'")
                page.wait_for_function(
                    """before => [...document.querySelectorAll('*')].map(e => e.shadowRoot).filter(Boolean)
                        .flatMap(root => [...root.querySelectorAll('.facts span')])
                        .some(span => span.textContent.startsWith('step')
                            && Number(span.textContent.replace(/\\D/g, '')) < before)""",
                    arg=before,
                )
                visit.wait_for_step_after(visit.step())
                tiles = page.locator("[data-testid^=tile-]").all_inner_texts()
                assert tiles
                assert not any("-" in text.replace("\u2013", "") for text in tiles), tiles
                assert page.locator('[data-testid="stException"]').count() == 0
