"""Admission, requests and latency as a script: one pass is one pass, and empty states say what to do."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from fake_engine import FakeEngine, FakeServer
from streamlit.testing.v1 import AppTest
from test_app import APP, component, opened, select, texts, tile

from dashboard import formats as f
from dashboard.feed import MAX_PASSES
from telemetry.observe import RecentFirsts

Page = Callable[[], AppTest]


@pytest.fixture
def page(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> Page:
    """Opens the page on the server, as a new viewer."""
    monkeypatch.setenv("ADMITSCOPE_URL", server.url)
    return lambda: AppTest.from_file(str(APP), default_timeout=60)


def charts(at: AppTest) -> list[dict[str, object]]:
    return [json.loads(element.proto.spec) for element in at.get("vega_lite_chart")]


def captions(at: AppTest) -> str:
    return "\n".join(element.value for element in at.caption)


def test_title_bars_and_table_are_of_one_pass_while_passes_are_made(
    page: Page, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dashboard.feed.Feed._is_fresh", lambda *_: False)
    at = opened(page(), "admission")
    seen = set()
    for _ in range(4):
        engine.tick()
        at.run()
        story, table = component(at, "pass_story"), component(at, "live_table", "candidates")
        step = story["step"]
        assert "".join(filter(str.isdigit, story["title"])) == str(step)
        assert "".join(filter(str.isdigit, table["note"].split("·")[0])) == str(step)
        assert {row["id"].split("/")[0] for row in table["rows"]} == {str(step)}
        row = next(row for row in engine.passes if row.step == step)
        left = {panel["code"]: panel["bars"] for panel in story["ledgers"]}
        assert left["rem_chunk"][0]["amount"] == str(row.limits.rem_chunk).removesuffix(".0")
        seen.add(step)
    assert len(seen) > 1


def test_an_empty_pass_can_be_picked_and_says_why_it_was_empty(page: Page, engine: FakeEngine) -> None:
    last = engine.passes[-1].model_copy(
        update={"candidates": (), "moves": (), "end": "skipped", "end_reason": "full_flag_set", "budget_open": None}
    )
    engine.passes[-1] = last
    at = opened(select(page(), step=last.step), "admission")
    assert not at.exception
    story = component(at, "pass_story")
    assert story["step"] == last.step
    assert "an earlier one found the batch full" in story["empty"]
    assert story["ledgers"] == []
    assert "an earlier one found the batch full" in component(at, "live_table", "candidates")["empty"][1]


def test_a_pass_that_left_the_last_ones_is_still_found_where_the_engine_remembers_it(
    page: Page, engine: FakeEngine
) -> None:
    """The click on a busy machine, and a link to a step: both come after the last 48."""
    old = next(row for row in list(engine.passes)[:-MAX_PASSES] if row.candidates)
    at = opened(select(page(), step=old.step), "admission")
    assert component(at, "pass_story")["step"] == old.step
    assert "is not among the last" not in captions(at)


def test_a_step_of_long_ago_is_said_to_be_gone(page: Page) -> None:
    at = opened(select(page(), step=999_999), "admission")
    assert "is not among the last" in captions(at)


def test_the_requests_view_draws_as_many_lanes_as_were_chosen(page: Page) -> None:
    at = opened(page(), "requests")
    assert not at.exception
    assert "20 of " in captions(at)
    select(at, lanes="waiting", n="10").run()
    assert "10 of " in captions(at)
    assert len(charts(at)) == 1
    table = component(at, "live_table", "requests_finished")
    assert table["note"].endswith("finished · Waited longest")
    waited = [row["cells"][3][1] for row in table["rows"]]
    assert waited == sorted(waited, reverse=True)
    came = [row["cells"][1][1] for row in component(select(at, lanes="arrival").run(), "live_table")["rows"]]
    assert came == sorted(came, reverse=True), "as the column says that is shown"


def test_a_story_has_a_lane_parts_trace_and_the_raw_records(page: Page, engine: FakeEngine) -> None:
    done = next(req for req in engine.finished if len(req.chunks) > 1)
    at = opened(select(page(), rid=done.rid), "requests")
    assert not at.exception
    assert f"It ended by {done.finish}" in texts(at)
    assert len(charts(at)) == 2
    assert "It has no trace" in captions(at)
    raw = json.loads(at.json[0].value)
    assert raw["request"]["rid"] == done.rid
    assert len(raw["lane"]["spans"]) >= 2 * len(done.chunks) - 1


def test_a_trace_is_a_link_where_it_is_known_who_shows_traces(
    page: Page, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    row, trace_id = engine.request_row, "4bf92f3577b34da6a3ce929d0e0e4736"
    monkeypatch.setattr(engine, "request_row", lambda req: row(req).model_copy(update={"trace_id": trace_id}))
    monkeypatch.setattr("sys.argv", ["streamlit", "--trace-url", "http://127.0.0.1:16686/trace/{trace_id}?ui=1"])
    at = opened(select(page(), rid=engine.finished[0].rid), "requests")
    assert not at.exception
    assert at.code[0].value == trace_id
    (link,) = at.get("link_button")
    assert link.proto.url == f"http://127.0.0.1:16686/trace/{trace_id}?ui=1"


def test_a_request_of_an_older_engine_has_a_story_without_a_lane(
    page: Page, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = engine.detail
    monkeypatch.setattr(engine, "detail", lambda rid: whole(rid).model_copy(update={"lane": None}))
    at = opened(select(page(), rid=engine.finished[0].rid), "requests")
    assert not at.exception
    assert "It ended by" in texts(at)


def test_the_latency_view_answers_in_words_and_shows_five_charts(page: Page, engine: FakeEngine) -> None:
    at = opened(page(), "latency")
    assert not at.exception
    said = texts(at)
    assert "of p99 TTFT is queueing" in said
    assert "first tokens within 1" in said
    told = engine.answer("/observe/breakdown", {})
    late = f.count(sum(told.late.values()))
    assert f"Why {late} of" in "\n".join(one.value for one in at.subheader)
    assert len(charts(at)) == 5


def beyond(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, waiting: int | None) -> None:
    """Let the engine's breakdown say how many wait longer than p99."""
    whole = engine.answer("/observe/breakdown", {})
    tails = tuple(tail.model_copy(update={"waiting_longer": waiting}) for tail in whole.tails)
    recent = None
    if waiting is not None:
        recent = RecentFirsts(
            window_s=60.0, count=1_234, p50_s=0.5, p99_s=4.0, queue_share=0.25, waiting_longer=waiting
        )
    told = whole.model_copy(update={"tails": tails, "recent": recent})
    answer = engine.answer
    monkeypatch.setattr(
        engine, "answer", lambda path, query: told if path == "/observe/breakdown" else answer(path, query)
    )


def test_who_waits_beyond_p99_is_said_where_p99_is_shown(
    page: Page, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    beyond(engine, monkeypatch, 8_765)
    at = opened(page(), "latency")
    assert "8 765 requests that still wait for their first token have waited longer than that" in texts(at)
    ttft = tile(at, "ttft")
    assert [value[1] for value in ttft["values"]] == ["500", "4.00"]
    assert ttft["sub"] == "last 60 s · n 1 234 · 25 % in queue · 8 765 wait longer than p99"


def test_a_time_to_first_token_says_of_whom_and_until_when(page: Page) -> None:
    """The views measured different requests up to different ends, and their medians differed for no reason told."""
    at = opened(page(), "now")
    until_sent = "From arrival until the first byte is sent, of the requests with a first token in the last 60 s"
    assert tile(at, "ttft")["help"].split("\n")[-1] == until_sent
    assert "the number at the top ends when the first byte is sent, and ranks those of the last 60 s" in captions(at)


@pytest.mark.parametrize("waiting", [0, None])
def test_nobody_beyond_p99_is_no_remark(
    waiting: int | None, page: Page, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None: an engine older than the count, whose requests are ranked by the page."""
    beyond(engine, monkeypatch, waiting)
    at = opened(page(), "latency")
    assert "have waited longer than that" not in texts(at)
    assert "wait longer" not in tile(at, "ttft")["sub"]
    assert tile(at, "ttft")["sub"].startswith("last 60 s · n ")


def test_an_address_that_names_no_view_is_told_which_there_are(page: Page) -> None:
    at = select(page(), view="memory").run()
    (warning,) = [each.value for each in at.warning]
    assert warning.startswith("The address says view='memory', which does not exist here. Possible: now, admission, ")
    assert warning.endswith("classroom.")
    assert component(at, "live_table", "queue")["rows"], "and the first view is there"
    assert not list(opened(at, "kv").warning)


@pytest.mark.parametrize(
    ("name", "value", "known"),
    [
        ("lang", "xx", "en, zh-CN"),
        ("mode", "zzz", "state, owner"),
        ("list", "zzz", "finished, live"),
        ("source", "elsewhere", "127.0.0.1:"),
        ("step", "-1", "a whole number from 0 on"),
    ],
)
def test_what_an_address_says_in_vain_is_told_with_what_is_possible(
    page: Page, name: str, value: str, known: str
) -> None:
    at = select(page(), **{name: value}).run()
    (warning,) = [each.value for each in at.warning]
    assert warning.startswith(f"The address says {name}='{value}', which does not exist here. Possible: {known}")


def test_an_engine_without_a_breakdown_is_said_to_be_older(
    page: Page, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = engine.answer
    monkeypatch.setattr(
        engine, "answer", lambda path, query: None if path == "/observe/breakdown" else answer(path, query)
    )
    at = opened(page(), "latency")
    assert not at.exception
    assert "Its engine is older than this page" in texts(at)
    assert component(at, "pulse")["error"] is None


def test_the_views_speak_chinese(page: Page, engine: FakeEngine) -> None:
    at = opened(select(page(), lang="zh-CN"), "latency")
    assert "是排队" in texts(at)
    opened(at, "admission")
    assert component(at, "pass_story")["title"].startswith("第")
    assert component(at, "pass_story")["queue"]["title"] == "排序前后的队列"


@pytest.mark.parametrize(("view", "words"), [("latency", "No token in the last"), ("requests", "Requests")])
def test_a_fresh_engine_has_empty_states(view: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeServer(FakeEngine(busy=False)) as server:
        monkeypatch.setenv("ADMITSCOPE_URL", server.url)
        at = opened(AppTest.from_file(str(APP), default_timeout=60), view)
        assert not at.exception
        assert words in texts(at) + "\n".join(one.value for one in at.subheader)
