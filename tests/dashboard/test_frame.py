"""The frame: places, the bar of a recording, engines beside each other, downloads, and what is said in trouble."""

from __future__ import annotations

import csv
import gzip
import io
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine, FakeServer
from streamlit.testing.v1 import AppTest

from dashboard.downloads import csv_of
from dashboard.feed import Look
from dashboard.fleet import fleet_table
from dashboard.places import Place
from dashboard.session import Playing
from dashboard.tables import Table
from dashboard.theme import LIGHT
from dashboard.troubles import trouble
from telemetry.client import LiveSource, SourceUnavailable
from telemetry.journal_gaps import gaps_in
from telemetry.recorded import RecordedSource, Recording

APP = Path(__file__).resolve().parents[2] / "dashboard" / "app.py"
JOURNAL = Path(__file__).resolve().parents[1] / "telemetry" / "data" / "cookbook.jsonl.gz"

Open = Callable[..., AppTest]


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> Open:
    """Opens the page with these words on the command line, at this address."""

    def opened(*words: str, **address: str) -> AppTest:
        monkeypatch.setattr("sys.argv", ["streamlit", *words])
        at = AppTest.from_file(str(APP), default_timeout=60)
        at.query_params.update(address)
        return at.run()

    return opened


def sent(at: AppTest, name: str, key: str | None = None) -> dict[str, Any]:
    """What a component in the browser was sent; tables are told apart by `key`."""
    found = [json.loads(each.proto.json) for each in at.get("bidi_component") if name in each.proto.component_name]
    (chosen,) = [data for data in found if key is None or data["name"] == key]
    return chosen


def read(at: AppTest) -> AppTest:
    """Run again until the journal is read."""
    for _ in range(200):
        # Before the first event there is nothing to move along.
        notes = [
            json.loads(bar.proto.json)["notes"]
            for bar in at.get("bidi_component")
            if "scrub" in bar.proto.component_name
        ]
        if notes and not any(word in notes[0] for word in ("Reading", "正在读取")):
            return at
        time.sleep(0.05)
        at.run()
    raise AssertionError("the journal was not read")


def step_of(at: AppTest) -> int:
    return int(dict(sent(at, "pulse")["facts"])["step"].replace("\u202f", ""))


@pytest.fixture
def recorded(page: Open) -> AppTest:
    """The page of a journal, read to its end."""
    at = page("--journal", str(JOURNAL))
    for _ in range(200):
        if [each for each in at.get("bidi_component") if "scrub" in each.proto.component_name]:
            return read(at)
        time.sleep(0.05)
        at.run()
    raise AssertionError("no bar appeared")


def test_a_journal_is_shown_at_its_end_and_at_any_step_of_the_address(recorded: AppTest, page: Open) -> None:
    assert not recorded.exception
    assert sent(recorded, "scrub")["index"] == sent(recorded, "scrub")["last"]
    assert sent(recorded, "pulse")["stands"].startswith("recorded ")
    at = read(page("--journal", str(JOURNAL), at="120", view="admission"))
    assert step_of(at) == 120
    assert sent(at, "scrub")["said"].startswith("step 120 of 855")
    assert sent(at, "live_table", "passes")["rows"][0]["id"] == "120"
    timed = read(page("--journal", str(JOURNAL), at="1.5s"))
    assert 120 < step_of(timed) < 855


@pytest.mark.parametrize(("text", "step"), [("abc", 855), ("-1", 1), ("999999", 855), ("99s", 855), ("nans", 855)])
def test_a_moment_that_a_recording_does_not_have_is_told(recorded: AppTest, page: Open, text: str, step: int) -> None:
    at = read(page("--journal", str(JOURNAL), at=text))
    assert step_of(at) == step
    (warning,) = [each.value for each in at.warning]
    assert warning.startswith(f"The address says at='{text}', which does not exist here. Possible: a step up to 855")
    assert not list(read(page("--journal", str(JOURNAL), at="2.5s")).warning)


@pytest.mark.parametrize("view", ["now", "requests"])
def test_a_request_that_a_recording_does_not_have_is_no_engines_lapse(recorded: AppTest, page: Open, view: str) -> None:
    at = read(page("--journal", str(JOURNAL), rid="r9999", view=view))
    body = "".join(each.proto.body for each in at.get("html"))
    assert "This recording has no request r9999" in body
    assert "The engine" not in body


def test_an_empty_queue_of_a_recording_advises_to_move_the_slider(recorded: AppTest, page: Open) -> None:
    at = read(page("--journal", str(JOURNAL), at="855", view="now"))
    table = sent(at, "live_table", "queue")
    assert table["rows"] == []
    assert table["empty"][1] == "Move the slider above to another moment of the recording."
    at = read(page("--journal", str(JOURNAL), at="0", view="latency"))
    told = "".join(each.proto.body for each in at.get("html"))
    assert "Send requests" not in told
    assert "Move the slider above" in told


def test_a_recording_leads_to_its_fullest_step_and_to_its_slowest_request(recorded: AppTest, page: Open) -> None:
    """It opens at its end, where nobody waits and there is nothing to read."""
    goes = {each["id"]: each for each in sent(recorded, "answers")["lines"]}
    assert list(goes)[:2] == ["fullest", "slowest"]
    at = read(page("--journal", str(JOURNAL), at=str(goes["fullest"]["go"]["at"])))
    waiting = len(sent(at, "live_table", "queue")["rows"])
    assert goes["fullest"]["rest"] == f"{waiting} waiting"
    assert waiting > 1
    named = read(page("--journal", str(JOURNAL), at="fullest"))
    assert step_of(named) == goes["fullest"]["go"]["at"]
    slow = goes["slowest"]["go"]
    assert step_of(read(page("--journal", str(JOURNAL), at="slowest"))) == slow["at"]
    told = read(page("--journal", str(JOURNAL), **{name: str(value) for name, value in slow.items()}))
    body = "".join(each.proto.body for each in told.get("html"))
    assert f"Request {slow['rid']} arrived" in body
    assert "Its first token came after" in body


def test_nobody_is_asked_to_click_a_request_where_none_waits(recorded: AppTest, page: Open) -> None:
    advice = "Click a request to read why it waits."
    assert advice not in [each.value for each in recorded.caption]
    assert advice in [each.value for each in read(page("--journal", str(JOURNAL), at="fullest")).caption]


@pytest.mark.parametrize("view", ["now", "admission", "requests", "latency", "kv"])
def test_every_view_shows_a_recording(recorded: AppTest, page: Open, view: str) -> None:
    at = read(page("--journal", str(JOURNAL), at="200", view=view))
    assert not at.exception
    assert step_of(at) == 200


@pytest.mark.parametrize("at_text", ["-1", "soon", "1e400s", "nan s", "999999999999999999999", "s"])
def test_a_moment_that_makes_no_sense_shows_another_one(recorded: AppTest, page: Open, at_text: str) -> None:
    at = read(page("--journal", str(JOURNAL), at=at_text))
    assert not at.exception
    assert 1 <= step_of(at) <= 855


def error_of(at: AppTest) -> tuple[str, str, str]:
    """What the head says of a journal that cannot be read, once it was tried."""
    for _ in range(100):
        if sent(at, "pulse")["error"] is not None:
            break
        time.sleep(0.05)
        at.run()
    title, what, advice = sent(at, "pulse")["error"]
    return title, what, advice


def test_a_journal_that_is_none_says_so_with_file_line_and_command(page: Open, tmp_path: Path) -> None:
    path = tmp_path / "broken.jsonl"
    path.write_text("no journal\n")
    at = page("--journal", str(path))
    said = error_of(at)
    assert said[0] == "This journal cannot be read."
    assert "broken.jsonl:1" in said[1]
    assert said[2].endswith(f"admitscope check {path}")


@pytest.mark.parametrize("is_there", [True, False])
def test_nobody_is_told_to_check_a_journal_that_is_empty_or_gone(page: Open, tmp_path: Path, *, is_there: bool) -> None:
    path = tmp_path / "none.jsonl"
    if is_there:
        path.touch()
    at = page("--journal", str(path))
    title, what, advice = error_of(at)
    assert title == "This journal cannot be read."
    assert f"{path}: {'the file is empty' if is_there else 'no such journal'}" in what
    assert advice == "Give the journal of a run that was written: admitscope dashboard --journal FILE"


def test_a_played_recording_is_where_its_speed_takes_it() -> None:
    playing = Playing(since_mono_s=100.0, from_s=2.0, speed=4.0)
    assert playing.at_s(100.0) == 2.0
    assert playing.at_s(102.5) == 12.0


def test_two_engines_stand_beside_each_other_and_one_is_looked_into(page: Open, engine: FakeEngine) -> None:
    with FakeServer(engine) as one, FakeServer(FakeEngine(seed=5, busy=False)) as other:
        at = page("--url", one.url, "--url", other.url)
        for _ in range(100):
            rows = sent(at, "live_table", "fleet")["rows"]
            if rows[1]["cells"][1][0] == "idle":
                break
            time.sleep(0.05)
            at.run()
        assert [row["cells"][1][0] for row in rows] == ["runs", "idle"]
        assert rows[0]["cells"][3][1] == len(engine.waiting)
        at.selectbox(key="source_box").set_value(rows[1]["id"]).run()
        assert at.session_state["selected"]["source"] == rows[1]["id"]
        assert sent(at, "live_table", "fleet")["selected"] == rows[1]["id"]
        assert sent(at, "pulse")["tiles"][0]["values"] == [["", "0", "req"]]


def test_what_was_selected_of_one_engine_is_not_asked_of_another(page: Open, engine: FakeEngine) -> None:
    with FakeServer(engine) as one, FakeServer(FakeEngine(seed=5, busy=False)) as other:
        at = page("--url", one.url, "--url", other.url, view="now", rid=engine.waiting[0].rid, pause="1")
        at.selectbox(key="source_box").set_value(other.url.removeprefix("http://")).run()
        assert at.session_state["selected"] == {"view": "now", "source": other.url.removeprefix("http://")}
        assert at.session_state["frozen"] is None


def test_an_objective_that_is_missed_is_shown_and_said(page: Open, engine: FakeEngine) -> None:
    with FakeServer(engine) as server:
        at = page("--url", server.url, "--ttft-ms", "1", "--tbt-ms", "60000")
    tiles = {tile["id"]: tile for tile in sent(at, "pulse")["tiles"]}
    assert tiles["ttft"]["late"]
    assert tiles["ttft"]["aim"] == "aim 1.0\u00a0ms"
    assert not tiles["tbt"]["late"]


def test_every_number_of_the_head_leads_to_a_view(page: Open, engine: FakeEngine) -> None:
    with FakeServer(engine) as server:
        at = page("--url", server.url)
    leads = {tile["id"]: tile["go"]["view"] for tile in sent(at, "pulse")["tiles"]}
    assert leads == {
        "waiting": "admission",
        "running": "requests",
        "tokens": "admission",
        "ttft": "latency",
        "tbt": "latency",
        "kv": "kv",
        "finished": "requests",
        "violations": "invariants",
    }


def test_the_page_speaks_chinese_where_it_is_asked_to(page: Open, engine: FakeEngine) -> None:
    with FakeServer(engine) as server:
        at = page("--url", server.url, lang="zh-CN")
        assert at.segmented_control(key="view_box_zh-CN").options[0] == "当前"
        at.selectbox(key="lang_box_zh-CN").set_value("en").run()
        assert at.segmented_control(key="view_box").options[0] == "Now"
        assert at.session_state["selected"]["lang"] == "en"


def test_a_recorded_request_is_explained_in_the_language_of_the_page(page: Open) -> None:
    recording = Recording(JOURNAL, in_background=False)
    source = RecordedSource(recording)
    source.seek(recording.at_step(120))
    rid = source.requests().live[0].rid
    at = read(page("--journal", str(JOURNAL), at="120", view="requests", rid=rid, lang="zh-CN"))
    (said,) = [each.proto.body for each in at.get("html") if 'data-testid="explain"' in each.proto.body]
    assert f"<li>请求 {rid} 到达，提示词 " in said
    assert "arrived" not in said
    at.selectbox(key="lang_box_zh-CN").set_value("en").run()
    (said,) = [each.proto.body for each in at.get("html") if 'data-testid="explain"' in each.proto.body]
    assert f"<li>Request {rid} arrived with a prompt of " in said


def test_a_table_is_downloaded_with_units_full_ids_and_plain_numbers() -> None:
    table = Table(
        columns=(
            {"label": "Request", "kind": "mono", "unit": "", "help": ""},
            {"label": "Needs", "kind": "num", "unit": "tok", "help": ""},
            {"label": "Note", "kind": "text", "unit": "", "help": ""},
        ),
        rows=[
            {"id": "a", "cells": [["chat…7", "chatcmpl-7"], ["1\u202f024", 1024], "x, y"]},
            {"id": "b", "cells": [["=1+1", "=1+1"], ["–", -1e308], "-2"]},
        ],
    )
    rows = list(csv.reader(io.StringIO(csv_of(table))))
    assert rows == [["Request", "Needs (tok)", "Note"], ["chatcmpl-7", "1024", "x, y"], ["'=1+1", "", "'-2"]]


def test_the_open_view_offers_its_tables(page: Open, engine: FakeEngine) -> None:
    with FakeServer(engine) as server:
        at = page("--url", server.url, view="admission")
        labels = [button.proto.label for button in at.get("download_button")]
        assert f"passes · {len(sent(at, 'live_table', 'passes')['rows'])}" in labels
        assert any(label.startswith("candidates · ") for label in labels)


ENGINE = Place("engine", "http://127.0.0.1:8123", "127.0.0.1:8123")


@pytest.mark.parametrize(
    ("status", "kind", "advice"),
    [
        (401, "key", "Set ADMITSCOPE_API_KEY to the engine's server.api_key, and start the page again."),
        (404, "foreign", "Give the address of an engine: admitscope dashboard http://HOST:PORT"),
        (500, "failed", "The engine's log says why. The page tries again by itself."),
    ],
)
def test_each_way_of_failing_has_its_advice(status: int, kind: str, advice: str) -> None:
    import httpx

    source = LiveSource(ENGINE.where, transport=httpx.MockTransport(lambda _: httpx.Response(status)))
    with pytest.raises(SourceUnavailable) as caught:
        source.status()
    assert caught.value.kind == kind
    said = trouble(Look(error=str(caught.value), error_kind=kind), ENGINE)
    assert said is not None
    assert said.advice == advice


def test_an_engine_that_is_not_there_is_started_with_its_port() -> None:
    said = trouble(Look(error="gone", error_kind="unreachable", failing_wall_s=1.0), ENGINE)
    assert said is not None
    assert "`admitscope serve --server.port 8123`" in said.advice
    assert trouble(Look(), ENGINE) is None


def test_the_fleet_keeps_the_last_numbers_of_an_engine_that_is_gone(engine: FakeEngine) -> None:
    gone = Look(status=engine.status(), error="gone", error_kind="unreachable", contact_mono_s=10.0)
    never = Look(error="gone", error_kind="key")
    table = fleet_table([(ENGINE, gone), (ENGINE, never)], LIGHT, now_mono_s=70.0)
    assert [row["quiet"] for row in table.rows] == [True, True]
    assert [row["cells"][1][0] for row in table.rows] == ["does not answer", "no usable answer"]
    assert table.rows[0]["cells"][2][0] == "60.0\u00a0s"
    assert {len(row["cells"]) for row in table.rows} == {len(table.columns)}


def test_a_recording_with_a_gap_says_so_beside_its_bar(page: Open, tmp_path: Path) -> None:
    """At a step behind it also what that means; in the language of the page."""
    lines = gzip.decompress(JOURNAL.read_bytes()).splitlines(keepends=True)
    path = tmp_path / "run.jsonl"
    path.write_bytes(b"".join([*lines[:400], *lines[500:]]))
    gap = gaps_in(path).first
    assert gap is not None
    at = page("--journal", str(path), at="855")
    while not any("scrub" in each.proto.component_name for each in at.get("bidi_component")):
        assert not at.exception
        time.sleep(0.05)  # the first run may come before the first step was read
        at.run()
    assert sent(read(at), "scrub")["notes"] == f"{gap.text()} What is shown behind it may be wrong."
    before = read(page("--journal", str(path), at="1"))
    assert sent(before, "scrub")["notes"] == gap.text()
    chinese = read(page("--journal", str(path), at="1", lang="zh-CN"))
    assert sent(chinese, "scrub")["notes"].startswith("日志中间缺少")
