"""The page as a script: what each view shows of an engine, what stays over refreshes, and what a pause freezes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import pytest
from fake_engine import FakeEngine, FakeServer
from streamlit.testing.v1 import AppTest

from dashboard.places import settings_from

APP = Path(__file__).resolve().parents[2] / "dashboard" / "app.py"

Page = Callable[[], AppTest]


@pytest.fixture
def page(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> Page:
    """Opens the page on the server, as a new viewer."""
    monkeypatch.setenv("ADMITSCOPE_URL", server.url)
    return lambda: AppTest.from_file(str(APP), default_timeout=60)


def component(at: AppTest, name: str, key: str | None = None) -> dict[str, Any]:
    """What a component in the browser was sent. Several have one name: `key` is the table's."""
    found = [
        json.loads(element.proto.json) for element in at.get("bidi_component") if name in element.proto.component_name
    ]
    chosen = [data for data in found if key is None or data["name"] == key]
    assert len(chosen) == 1, f"{name} {key}: {len(chosen)} of {len(found)}"
    return chosen[0]


def tile(at: AppTest, name: str) -> dict[str, Any]:
    return next(tile for tile in component(at, "pulse")["tiles"] if tile["id"] == name)


def select(at: AppTest, **values: object) -> AppTest:
    """Select as a click would, or, before the first run, as the address says."""
    if "selected" in at.session_state:
        at.session_state["selected"] = {**at.session_state["selected"], **{k: str(v) for k, v in values.items()}}
    else:
        at.query_params.update({name: str(value) for name, value in values.items()})
    return at


def opened(at: AppTest, view: str) -> AppTest:
    return select(at, view=view).run()


def texts(at: AppTest) -> str:
    return "\n".join(element.proto.body for element in at.get("html"))


def test_the_head_shows_the_engines_own_numbers(page: Page, engine: FakeEngine) -> None:
    at = page().run()
    assert not at.exception
    status = engine.status()
    assert tile(at, "waiting")["values"] == [["", str(status.waiting), "req"]]
    assert tile(at, "running")["sub"] == "of 24 rows"
    mix = component(at, "pulse")["mix"]
    assert {
        part["label"].replace(" ", "_").lower(): part["count"] for part in mix["parts"]
    } == status.waiting_by_blocker
    assert component(at, "pulse")["error"] is None


def test_a_refresh_brings_new_numbers_and_keeps_what_was_picked(
    page: Page, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = page().run()
    picked = engine.waiting[3].rid
    select(at, rid=picked)
    at.session_state["interval_s"] = 0.5
    before = component(at, "pulse")["facts"]
    for _ in range(4):
        engine.tick()
    monkeypatch.setattr("dashboard.feed.Feed._is_fresh", lambda *_: False)
    at.run()
    assert component(at, "pulse")["facts"] != before
    assert component(at, "live_table", "queue")["selected"] == picked
    assert at.session_state["view_box"] == "now"
    assert at.session_state["interval_s"] == 0.5
    assert f"{picked} came with a prompt of" in texts(at)


def test_the_admission_view_shows_the_newest_pass_until_one_is_picked(page: Page, engine: FakeEngine) -> None:
    at = opened(page(), "admission")
    newest = next(row for row in reversed(engine.passes) if row.candidates)
    rows = component(at, "live_table", "candidates")["rows"]
    assert [row["cells"][1][1] for row in rows] == [c.rid for c in newest.candidates]
    older = [row for row in engine.passes if row.candidates][-5]
    select(at, step=older.step)
    at.run()
    assert [row["cells"][1][1] for row in component(at, "live_table", "candidates")["rows"]] == [
        c.rid for c in older.candidates
    ]
    assert component(at, "live_table", "passes")["selected"] == str(older.step)
    assert component(at, "pass_story")["step"] == older.step
    at.button(key="follow_newest").click().run()
    assert "step" not in at.session_state["selected"]


def test_a_picked_pass_stays_after_it_left_the_list(
    page: Page, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = opened(page(), "admission")
    old = next(row for row in reversed(engine.passes) if row.candidates)
    select(at, step=old.step)
    at.run()
    for _ in range(200):
        engine.tick()
    monkeypatch.setattr("dashboard.feed.Feed._is_fresh", lambda *_: False)
    at.run()
    assert str(old.step) not in {row["id"] for row in component(at, "live_table", "passes")["rows"]}
    assert component(at, "live_table", "candidates")["rows"][0]["cells"][1][1] == old.candidates[0].rid


def test_the_map_shows_pages_by_state_and_by_owner_and_says_who_holds_one(page: Page, engine: FakeEngine) -> None:
    at = opened(page(), "kv")
    assert component(at, "page_map")["mode"] == "state"
    assert component(at, "page_map")["count"] == engine.num_pages
    held = next(i for i, owner in enumerate(engine.owners) if owner.startswith("req:"))
    select(at, page=held, mode="owner")
    at.run()
    assert component(at, "page_map")["chosen"] == held
    assert component(at, "page_map")["mode"] == "owner"
    assert engine.owners[held].removeprefix("req:") in at.text[0].value
    assert component(at, "live_table", "owners")["rows"]


def test_a_request_is_explained_with_its_parts_and_decisions(page: Page, engine: FakeEngine) -> None:
    done = engine.finished[2]
    at = page()
    select(at, rid=done.rid)
    opened(at, "requests")
    assert not at.exception
    assert f"It ended by {done.finish}" in texts(at)
    assert len(component(at, "live_table", "decisions_of_request")["rows"]) == len(done.decisions)
    assert component(at, "live_table", "requests_finished")["selected"] == done.rid
    at.button(key="close_story").click().run()
    assert "It ended by" not in texts(at)


def test_everything_that_is_selected_stands_in_the_address(page: Page, engine: FakeEngine) -> None:
    rid, step = engine.waiting[2].rid, next(row.step for row in engine.passes if row.candidates)
    at = select(page(), view="admission", step=step, rid=rid, lang="zh-CN").run()
    assert component(at, "live_table", "passes")["selected"] == str(step)
    at.segmented_control(key="view_box_zh-CN").set_value("kv").run()
    assert at.session_state["selected"]["view"] == "kv"
    assert at.session_state["selected"]["step"] == str(step)
    at.segmented_control(key="mode_box_zh-CN").set_value("owner").run()
    assert component(at, "page_map")["mode"] == "owner"
    again = page()
    again.query_params.update(dict(parse_qsl(component(at, "pulse")["address"])))
    again.run()
    assert component(again, "page_map")["mode"] == "owner"
    assert again.segmented_control(key="view_box_zh-CN").options[0] == "当前"
    assert component(opened(again, "now"), "live_table", "queue")["selected"] == rid


@pytest.mark.parametrize(
    "address",
    [{"step": "-1"}, {"page": "1e9"}, {"view": "nothing"}, {"mode": "x"}, {"lang": "fr"}, {"rid": "r" * 9999}],
)
def test_an_address_that_makes_no_sense_shows_the_page_all_the_same(page: Page, address: dict[str, str]) -> None:
    for view in ("now", "admission", "kv"):
        at = select(page(), **{"view": view, **address}).run()
        assert not at.exception


def test_an_id_that_the_engine_does_not_know_is_said_to_be_unknown(page: Page) -> None:
    at = page()
    select(at, rid="<b>nobody</b>")
    opened(at, "requests")
    assert "does not know &lt;b&gt;nobody&lt;/b&gt;" in texts(at)


def test_fr_47_pause_freezes_every_panel_at_one_moment(
    page: Page, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = page().run()
    at.toggle(key="pause_box").set_value(True).run()
    step = engine.step
    monkeypatch.setattr("dashboard.feed.Feed._is_fresh", lambda *_: False)
    for _ in range(50):
        engine.tick()
    for view in ("now", "admission", "kv", "requests"):
        opened(at, view)
        assert not at.exception
        facts = dict(component(at, "pulse")["facts"])
        assert facts["step"].replace("\u202f", "") == str(step)
        assert component(at, "pulse")["paused"] is True
    opened(at, "admission")
    assert component(at, "live_table", "passes")["rows"][0]["id"] == str(step)
    at.toggle(key="pause_box").set_value(False).run()
    assert dict(component(at, "pulse")["facts"])["step"].replace("\u202f", "") == str(engine.step)
    assert at.session_state["frozen"] is None


def test_while_paused_what_the_answers_lead_to_is_of_the_same_moment(
    page: Page, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the map would give a page to one owner, and the sentence below it to another."""
    at = page().run()
    at.toggle(key="pause_box").set_value(True).run()
    goes = {each["id"]: each["go"] for each in component(at, "answers")["lines"]}
    step = engine.step
    monkeypatch.setattr("dashboard.feed.Feed._is_fresh", lambda *_: False)
    for _ in range(50):
        engine.tick()
    select(at, **goes["longest"]).run()
    assert not at.exception
    assert "the rest stands at step" not in "\n".join(each.value for each in at.caption)
    select(at, **goes["owner"]).run()
    assert not at.exception
    assert at.session_state["frozen_asked"]["page", goes["owner"]["page"]].value.step == step
    (kept,) = at.session_state["frozen_detail"].values()
    assert kept.detail.step == step


def test_a_paused_tree_and_a_chosen_page_are_of_the_moment_of_the_pause_whenever_they_are_looked_at(
    page: Page, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked for when the view is opened, they would be younger than the map beside them."""
    at = page().run()
    select(at, page=3).run()
    at.toggle(key="pause_box").set_value(True).run()
    step = engine.step
    monkeypatch.setattr("dashboard.feed.Feed._is_fresh", lambda *_: False)
    for _ in range(50):
        engine.tick()
    opened(at, "kv")
    assert not at.exception
    kept = at.session_state["frozen_asked"]
    assert {(key[0], asked.value.step) for key, asked in kept.items()} == {("tree", step), ("page", step)}
    (longest,) = at.session_state["frozen_detail"].values()
    assert longest.detail.step == step, "so is the request that waits longest, which was not looked at yet"
    assert "the rest stands at step" not in "\n".join(each.value for each in at.caption)
    # What is asked for later is said to be younger.
    select(at, node=2).run()
    assert f"later; the rest stands at step {step}." in "\n".join(each.value for each in at.caption).replace(
        "\u202f", ""
    )


@pytest.mark.parametrize("view", ["now", "admission", "kv", "requests"])
def test_every_view_of_a_fresh_engine_says_what_to_do(
    view: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with FakeServer(FakeEngine(busy=False)) as server:
        monkeypatch.setenv("ADMITSCOPE_URL", server.url)
        at = opened(AppTest.from_file(str(APP), default_timeout=60), view)
        assert not at.exception
        assert component(at, "pulse")["mix"]["title"].startswith("No requests yet")


@pytest.mark.parametrize("view", ["now", "admission", "kv", "requests"])
def test_every_view_of_an_engine_that_never_answered_names_it(view: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeServer(FakeEngine(busy=False)) as server:
        url = server.url
    monkeypatch.setenv("ADMITSCOPE_URL", url)
    at = opened(AppTest.from_file(str(APP), default_timeout=60), view)
    assert not at.exception
    assert url in component(at, "pulse")["error"][1]
    assert "admitscope serve" in component(at, "pulse")["error"][2]
    assert component(at, "pulse")["age_s"] is None
    assert "admitscope serve" in texts(at)


def test_fr_48_an_engine_that_goes_away_leaves_its_last_numbers_and_comes_back(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dashboard.feed.Feed._is_fresh", lambda *_: False)
    with FakeServer(engine) as server:
        monkeypatch.setenv("ADMITSCOPE_URL", server.url)
        at = AppTest.from_file(str(APP), default_timeout=60).run()
        port, waiting = server.port, tile(at, "waiting")
    at.run()
    gone = component(at, "pulse")
    assert re.fullmatch(
        r"The engine does not answer since \d\d:\d\d:\d\d. Last contact \d\d:\d\d:\d\d.", gone["error"][0]
    )
    assert tile(at, "waiting") == waiting
    with FakeServer(engine, port):
        at.run()
        assert component(at, "pulse")["error"] is None


def test_violations_and_a_loop_that_stands_still_are_said_aloud(page: Page, engine: FakeEngine) -> None:
    engine.violations = {"KV-1": 2}
    at = page().run()
    assert tile(at, "violations")["tone"] == "bad"
    assert component(at, "pulse")["warning"] == ["2 violations of invariants.", "KV-1 (2)"]


def test_fr_46_a_session_keeps_nothing_that_grows(
    page: Page, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dashboard.feed.Feed._is_fresh", lambda *_: False)
    at = page().run()
    keys = set(at.session_state._state.filtered_state)
    for _ in range(10):
        engine.tick()
        at.run()
    assert set(at.session_state._state.filtered_state) == keys


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://h", "http://", "file:///etc/passwd"])
def test_an_address_that_is_none_is_refused_with_an_example(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"http://127\.0\.0\.1:8000 is expected"):
        settings_from(["--url", url], {})
    monkeypatch.setenv("ADMITSCOPE_URL", url)
    at = AppTest.from_file(str(APP), default_timeout=60).run()
    assert not at.exception
    assert url in at.error[0].value
