"""Reported faults of live pages, on the real page over a real served engine: FR-46 and FR-49.

In a real browser: tests/dashboard/test_browser.py (FR-47, FR-48).
"""

from __future__ import annotations

import ast
import gc
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from streamlit.testing.v1 import AppTest

from dashboard.feed import MAX_PASSES, MAX_ROWS, Look
from telemetry.read_model import KEPT_FINISHED, KEPT_STEPS
from tests.engine.server.live import until
from tests.field.whole import Whole, whole

DASHBOARD = Path(__file__).resolve().parents[2] / "dashboard"
VIEWS = ("now", "admission", "kv", "requests")
#: What one refresh of one view may send to a browser, in bytes.
MOST_BYTES = 300_000


def _page(live: Whole, monkeypatch: pytest.MonkeyPatch) -> AppTest:
    monkeypatch.setenv("ADMITSCOPE_URL", live.url)
    # Every run of the script fetches anew, as if its interval had passed.
    monkeypatch.setattr("dashboard.feed.Feed._is_fresh", lambda *_: False)
    return AppTest.from_file(str(DASHBOARD / "app.py"), default_timeout=60)


def _opened(page: AppTest, view: str) -> AppTest:
    page.session_state["view"] = view
    page.run()
    assert not page.exception
    return page


def _components(page: AppTest) -> list[str]:
    return [element.proto.json for element in page.get("bidi_component")]


@pytest.mark.parametrize(
    ("warm_up", "refreshes"),
    [pytest.param(60, 140, id="200"), pytest.param(300, 1_800, id="1800", marks=pytest.mark.slow)],
)
def test_fr_46_memory_stays_where_it_is_over_forced_refreshes(
    warm_up: int, refreshes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three sessions on a busy engine; two are closed half-way. Less than 5 percent more after the warm-up."""
    process = psutil.Process()
    with whole(scheduler={"max_running_requests": 16}, server={"max_queued_requests": 600}) as live:
        # What the engine keeps for readers is full from the start: only the page's own memory is to move.
        live.post(prompt=[f"done {number}" for number in range(75)], n=8, max_tokens=20, ignore_eos=True)
        assert live.status.steps > KEPT_STEPS
        live.executor._step_s = 0.005
        busy = threading.Event()
        threads = [threading.Thread(target=_load, args=(live, busy)) for _ in range(2)]
        for thread in threads:
            thread.start()
        try:
            pages = [_page(live, monkeypatch) for _ in range(3)]
            for number in range(warm_up):
                _opened(pages[number % 3], VIEWS[number % 4])
            gc.collect()
            before = process.memory_info().rss
            kept = _looks()
            for number in range(refreshes):
                if number == refreshes // 2:
                    del pages[1:]
                _opened(pages[number % len(pages)], VIEWS[number % 4])
            gc.collect()
            after = process.memory_info().rss
        finally:
            busy.set()
            for thread in threads:
                thread.join(30)
    assert after < 1.05 * before, f"{before / 1e6:.0f} MB became {after / 1e6:.0f} MB"
    assert _looks() <= kept, "closed sessions keep no look"


def _load(live: Whole, done: threading.Event) -> None:
    while not done.is_set():
        live.post(max_tokens=12, ignore_eos=True)


def _looks() -> int:
    # By type, not isinstance: some modules answer a look at their class with a warning.
    return sum(type(thing) is Look for thing in gc.get_objects())


def test_fr_46_no_script_of_the_page_runs_for_ever() -> None:
    """A refresh is a rerun of a fragment; nothing loops or sleeps."""
    for path in DASHBOARD.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.While):
                assert not (isinstance(node.test, ast.Constant) and node.test.value), f"{path}:{node.lineno}"
            if isinstance(node, ast.Attribute):
                assert node.attr != "sleep", f"{path}:{node.lineno}"


@pytest.fixture(scope="module")
def crowded() -> Iterator[Whole]:
    """4,800 requests wait at an engine that has finished 600 and made more steps than anybody keeps."""
    with whole(
        scheduler={"max_running_requests": 16},
        server={"max_queued_requests": 6_000, "drain_timeout_s": 0.0},
        cache={"num_pages": 2_048},
    ) as live:
        done = live.post(prompt=[f"done {number}" for number in range(75)], n=8, max_tokens=20, ignore_eos=True)
        assert done.status_code == 200
        assert live.status.steps > KEPT_STEPS
        live.executor.gate.clear()
        crowd = threading.Thread(
            target=lambda: live.post(prompt=[f"waits {number}" for number in range(600)], n=8, ignore_eos=True)
        )
        crowd.start()
        until(lambda: live.instance.engine_thread.open_replies == 4_800, "all of them came")
        until(lambda: live.http.get("/observe/status").json()["waiting"] >= 4_700, "they wait")
        yield live
        live.executor.gate.set()
        live.instance.engine_thread.begin_shutdown(0.0)
        crowd.join(60)


@pytest.mark.parametrize("view", VIEWS)
def test_fr_49_a_refresh_sends_a_bounded_part_and_the_total(
    view: str, crowded: Whole, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every table has a few hundred rows at most, a view is below 300 kB, and the page says how many there are."""
    page = _opened(_page(crowded, monkeypatch), view)
    sent = [json.loads(text) for text in _components(page)]
    rows = {data["name"]: len(data["rows"]) for data in sent if "rows" in data}
    assert rows
    assert max(rows.values()) <= MAX_ROWS
    panels = [len(text) for text in _components(page)]
    panels += [len(element.proto.SerializeToString()) for element in page.get("arrow_vega_lite_chart")]
    assert max(panels) < MOST_BYTES
    assert sum(panels) < 2 * MOST_BYTES
    if view == "now":
        queue = next(data for data in sent if data.get("name") == "queue")
        waiting = crowded.http.get("/observe/status").json()["waiting"]
        assert f"{waiting // 1000}" in json.dumps(queue, ensure_ascii=False), "the total is shown"
        words = json.dumps(queue, ensure_ascii=False)
        assert str(waiting) in "".join(char for char in words if char not in "\u202f ,"), words[-300:]


def test_fr_49_the_engines_answers_are_bounded_whatever_it_did(crowded: Whole) -> None:
    """Asked for more than it gives, the read API refuses by number; asked for all, it sends what it keeps."""
    http = crowded.http
    assert len(http.get(f"/observe/passes?n={KEPT_STEPS}").json()["passes"]) == KEPT_STEPS
    assert http.get(f"/observe/passes?n={KEPT_STEPS + 1}").status_code == 400
    queue = http.get(f"/observe/queue?limit={MAX_ROWS}").json()
    assert (len(queue["entries"]), queue["total"]) == (MAX_ROWS, sum(queue["by_blocker"].values()))
    assert queue["total"] > 4_700
    requests = http.get(f"/observe/requests?limit={MAX_ROWS}").json()
    assert len(requests["finished"]) == min(KEPT_FINISHED, MAX_ROWS)
    assert len(requests["live"]) == MAX_ROWS
    assert len(http.get(f"/observe/passes?n={MAX_PASSES}").content) < MOST_BYTES
    assert len(http.get("/observe/latency").content) < MOST_BYTES
    assert len(http.get(f"/observe/queue?limit={MAX_ROWS}").content) < MOST_BYTES
    one = requests["finished"][0]["rid"]
    assert len(http.get(f"/observe/requests/{one}").content) < MOST_BYTES
