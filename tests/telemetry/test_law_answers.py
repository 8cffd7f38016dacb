"""Laws and evidence over the read API: what was counted, what broke, bundles opened, and nothing beyond the folder."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from engine.clock import VirtualClock
from engine.events import FanOut
from invariants.catalog import CATALOG
from invariants.modes import OnViolation
from telemetry import observe
from telemetry.checker_settings import CheckerConfig
from telemetry.checking import Checking
from telemetry.evidence import FOLDER
from telemetry.law_answers import LawBook
from telemetry.read_api import create_router
from telemetry.read_model import ReadModel
from tests.builders import CoreRun, engine_config
from tests.telemetry.test_evidence import Watched

BROKEN = "INV-PAGE-01"


def _client(model: ReadModel, laws: LawBook | None = None) -> TestClient:
    app = FastAPI()
    app.include_router(create_router(model, laws=laws))
    return TestClient(app)


def _checked(mode: OnViolation, config: CheckerConfig) -> tuple[ReadModel, LawBook, CoreRun]:
    clock = VirtualClock()
    checking = Checking(config, on_violation=mode, journal=None, run="r", clock=clock)
    model = ReadModel(clock=clock)
    laws = LawBook(model, checking, config=config)
    run = CoreRun(engine_config(), FanOut((model, checking.checker)))
    run.add("a", 40, 8)
    return model, laws, run


def test_a_broken_law_is_told_with_its_last_violation() -> None:
    model, laws, run = _checked("record", CheckerConfig(audit_every="order=10", overrides="INV-STEP-04=off"))
    run.step()
    run.scheduler.kv.pool._counts[0] += 1
    run.step()
    answer = observe.LawsAnswer.model_validate_json(_client(model, laws).get("/observe/laws").content)
    rows = {row.id: row for row in answer.laws}
    assert list(rows) == [law.id for law in CATALOG]
    assert answer.is_checked
    assert answer.events_ns > 0
    broken = rows[BROKEN]
    assert broken.violations > 0
    assert broken.last is not None
    assert broken.last.step == run.steps
    assert broken.last.expected != broken.last.found
    assert (rows["INV-STEP-04"].mode, rows["INV-STEP-04"].judged) == ("off", "never")
    assert (rows["INV-INDEX-01"].judged, rows["INV-INDEX-01"].audit_every) == ("audits", 10)
    assert rows["INV-CHUNK-01"].judged == "each"
    assert rows["INV-CHUNK-01"].family_checks > 0


def test_a_checker_that_is_off_or_missing_says_so() -> None:
    for laws in (_checked("off", CheckerConfig())[:2], (None, None)):
        model = laws[0]
        if model is None:
            model = _checked("off", CheckerConfig())[0]
        answer = observe.LawsAnswer.model_validate_json(_client(model, laws[1]).get("/observe/laws").content)
        assert not answer.is_checked
        assert "off" in answer.words or "no checker" in answer.words
        assert {row.judged for row in answer.laws} == {"never"}


@pytest.fixture
def evidence(tmp_path: Path) -> Iterator[tuple[TestClient, Path]]:
    watched = Watched(tmp_path)
    watched.work(3)
    watched.break_a_law()
    assert list(watched.bundles())
    model = ReadModel(clock=VirtualClock())
    for event in watched.checker.evidence():
        model.emit(event)
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "violation.json").write_text("{}")
    with _client(model, LawBook(model, folder=tmp_path / FOLDER, run="run")) as client:
        yield client, tmp_path / FOLDER


def test_bundles_are_listed_and_opened_at_the_offending_record(evidence: tuple[TestClient, Path]) -> None:
    client, _ = evidence
    listed = observe.EvidenceAnswer.model_validate_json(client.get("/observe/evidence").content)
    row = next(row for row in listed.rows if row.law == BROKEN)
    assert row.is_this_run
    assert row.size_bytes > 0
    opened = observe.EvidenceDetail.model_validate_json(client.get(f"/observe/evidence/{row.id}").content)
    offending = [record for record in opened.records if record.is_offending]
    assert len(offending) == 1
    assert offending[0] == opened.records[-1]
    assert offending[0].step == row.step
    assert offending[0].before_ms == 0
    assert (opened.differences[0].expected, opened.differences[0].found) == (row.expected, row.found)
    assert "check" in opened.commands[0][1]
    assert not any("page_keys" in record.text for record in opened.records)


@pytest.mark.parametrize("name", ["..%2Fsecret", "../secret", "%2e%2e", ".hidden", "nobody", "a%00b", "x" * 300])
def test_no_name_leads_out_of_the_folder(evidence: tuple[TestClient, Path], name: str) -> None:
    assert evidence[0].get(f"/observe/evidence/{name}").status_code == 404


def test_a_damaged_bundle_is_listed_and_says_so(evidence: tuple[TestClient, Path]) -> None:
    client, folder = evidence
    client.get("/observe/evidence")
    name = next(path.name for path in folder.iterdir())
    (folder / name / "events.jsonl").write_bytes(b'{"type":')
    (folder / name / "snapshot.json").write_bytes(b"[")
    opened = observe.EvidenceDetail.model_validate_json(client.get(f"/observe/evidence/{name}").content)
    assert opened.records == ()
    assert "cannot be read" in opened.taken
    (folder / "half").mkdir()
    (folder / "half" / "violation.json").write_text(json.dumps([1]))
    rows = observe.EvidenceAnswer.model_validate_json(client.get("/observe/evidence").content).rows
    assert next(row for row in rows if row.id == "half").error


ABOUT = {"id": BROKEN, "step": 3, "rid": "r", "expected": "a", "found": "b", "event_seqs": [1]}
DEEP = "[" * 100_000
ODD = {
    "step is 'abc', no whole number": ABOUT | {"step": "abc"},
    "step is None, no whole number": ABOUT | {"step": None},
    "step is [1], no whole number": ABOUT | {"step": [1]},
    "rid is 5, no text": ABOUT | {"rid": 5},
    "rid is [1], no text": ABOUT | {"rid": [1]},
    "commands is 'abc', no list": ABOUT | {"commands": "abc"},
    "commands is None, no list": ABOUT | {"commands": None},
    "event_seqs is None, no list": ABOUT | {"event_seqs": None},
    "event_seqs is 5, no list": ABOUT | {"event_seqs": 5},
    "": ABOUT | {"commands": [1, {"why": 5}], "event_seqs": ["x", 1]},
}


@pytest.mark.parametrize("why", ODD)
def test_an_odd_bundle_says_what_is_odd_and_shows_the_rest(evidence: tuple[TestClient, Path], why: str) -> None:
    client, folder = evidence
    (folder / "odd").mkdir()
    (folder / "odd" / "violation.json").write_text(json.dumps(ODD[why]))
    (folder / "odd" / "events.jsonl").write_text('{"type":"X","seq":1,"step":3,"t_ns":5}\n')
    listed = observe.EvidenceAnswer.model_validate_json(client.get("/observe/evidence").content)
    assert len(listed.rows) == listed.total > 1
    row = next(row for row in listed.rows if row.id == "odd")
    assert (row.error, row.law, row.found) == (why, BROKEN, "b")
    opened = observe.EvidenceDetail.model_validate_json(client.get("/observe/evidence/odd").content)
    assert (opened.row.error, [record.seq for record in opened.records]) == (why, [1])


@pytest.mark.parametrize(
    "line",
    [
        '{"type":"X","seq":1,"t_ns":1}',
        '{"type":"X","seq":1,"step":"s","t_ns":1}',
        '{"type":"X","seq":"a","step":1,"t_ns":1}',
        '{"type":"X","seq":1,"step":1,"t_ns":null}',
        '{"type":"X","seq":1,"step":1,"t_ns":1e999}',
        DEEP,
        "[1]",
    ],
)
def test_events_that_cannot_be_read_are_counted_and_the_others_shown(
    evidence: tuple[TestClient, Path], line: str
) -> None:
    client, folder = evidence
    name = next(path.name for path in folder.iterdir())
    before = observe.EvidenceDetail.model_validate_json(client.get(f"/observe/evidence/{name}").content)
    assert before.row.error == ""
    with (folder / name / "events.jsonl").open("a") as file:
        file.write(line + "\n")
    opened = observe.EvidenceDetail.model_validate_json(client.get(f"/observe/evidence/{name}").content)
    assert opened.row.error == "events.jsonl: 1 lines cannot be read"
    assert (opened.records, opened.records_total) == (before.records, before.records_total)


def test_a_deep_description_and_a_pipe_are_named_and_hold_up_nobody(evidence: tuple[TestClient, Path]) -> None:
    client, folder = evidence
    for name in ("deep", "pipe", "folder"):
        (folder / name).mkdir()
    (folder / "deep" / "violation.json").write_text(DEEP)
    os.mkfifo(folder / "pipe" / "violation.json")
    (folder / "folder" / "violation.json").mkdir()
    rows = observe.EvidenceAnswer.model_validate_json(client.get("/observe/evidence").content).rows
    errors = {row.id: row.error for row in rows if row.error}
    assert set(errors) == {"deep", "pipe", "folder"}
    assert "no regular file" in errors["pipe"]
    opened = observe.EvidenceDetail.model_validate_json(client.get("/observe/evidence/pipe").content)
    assert opened.row.error.startswith(errors["pipe"])
    whole = next(row.id for row in rows if not row.error)
    for file in ("events.jsonl", "snapshot.json"):
        (folder / whole / file).unlink()
        os.mkfifo(folder / whole / file)
    opened = observe.EvidenceDetail.model_validate_json(client.get(f"/observe/evidence/{whole}").content)
    assert opened.row.error == "events.jsonl: it is no regular file"
    assert opened.taken.endswith("it cannot be read: it is no regular file")


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/observe/tree?top=0", "top"),
        ("/observe/tree?top=201", "top"),
        ("/observe/tree?node=-1", "node"),
        ("/observe/tree?open=1,x", "open"),
        ("/observe/tree?open=" + ",".join(["1"] * 65), "open"),
        ("/observe/tree?deep=1", "deep"),
        ("/observe/pages/x", "page"),
    ],
)
def test_questions_about_memory_are_bounded(evidence: tuple[TestClient, Path], path: str, field: str) -> None:
    reply = evidence[0].get(path)
    assert reply.status_code == 400
    assert observe.ObserveError.model_validate_json(reply.content).field == field


def test_a_page_beyond_the_pool_is_not_found(evidence: tuple[TestClient, Path]) -> None:
    assert evidence[0].get("/observe/pages/0").status_code == 200
    assert evidence[0].get("/observe/pages/64").status_code == 404
    for method in ("post", "put", "delete", "patch"):
        assert getattr(evidence[0], method)("/observe/tree").status_code == 405
