"""Judging a recording from the page: nothing is claimed before, everything is told after, and a violation opens."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from streamlit.testing.v1 import AppTest

from dashboard import frames_laws as frames
from dashboard.theme import LIGHT
from dashboard.views import judging
from telemetry.check import check
from telemetry.check_door import CheckDoor
from telemetry.check_report import CheckReport
from telemetry.law_answers import judged_laws
from telemetry.observe import LawsAnswer
from tests.telemetry.test_check import fault_named, recorded

APP = Path(__file__).resolve().parents[2] / "dashboard" / "app.py"
Open = Callable[..., AppTest]


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recorded(tmp_path_factory.mktemp("broken") / "run.jsonl", fault_named("an admission charged twice"))


@pytest.fixture(scope="module")
def report(broken: Path) -> CheckReport:
    return check(broken, limit=200)


@pytest.fixture
def own_door(monkeypatch: pytest.MonkeyPatch) -> Iterator[CheckDoor]:
    made = CheckDoor()
    monkeypatch.setattr(judging, "door", lambda: made)
    yield made
    made.close()


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch, own_door: CheckDoor) -> Open:
    def opened(path: Path, **address: str) -> AppTest:
        monkeypatch.setattr("sys.argv", ["streamlit", "--journal", str(path)])
        at = AppTest.from_file(str(APP), default_timeout=60)
        at.query_params.update({"view": "invariants", **address})
        return until(at.run(), lambda: bool(tables(at)))

    return opened


def until(at: AppTest, is_so: Callable[[], bool]) -> AppTest:
    for _ in range(600):
        assert not at.exception
        if is_so():
            return at
        time.sleep(0.05)
        at.run()
    raise AssertionError(said(at))


def said(at: AppTest) -> str:
    return "\n".join(each.proto.body for each in at.get("html"))


def tables(at: AppTest) -> dict[str, dict[str, Any]]:
    found = [
        json.loads(each.proto.json) for each in at.get("bidi_component") if "live_table" in each.proto.component_name
    ]
    return {data["name"]: data for data in found}


def tile(at: AppTest) -> tuple[str, str]:
    (pulse,) = [json.loads(e.proto.json) for e in at.get("bidi_component") if "pulse" in e.proto.component_name]
    found = next(each for each in pulse["tiles"] if each["id"] == "violations")
    return found["values"][0][1], found["sub"]


def judged(at: AppTest) -> AppTest:
    at.button(key="judge").click().run()
    return until(at, lambda: 'data-testid="verdict"' in said(at))


def test_a_broken_recording_is_judged_from_the_page_and_opens_at_the_step(
    page: Open, broken: Path, report: CheckReport
) -> None:
    at = page(broken)
    assert "Not judged yet" in said(at)
    assert f"admitscope check {broken}" in said(at)
    assert tile(at) == ("–", "not judged yet")
    laws = tables(at)["laws"]
    assert laws["note"].endswith("not judged yet")
    assert [column["label"] for column in laws["columns"]][3:8] == [
        "Judged", "Checks", "Cost grows with", "Violations", "Last"
    ]  # fmt: skip
    assert {(row["cells"][3][0], row["cells"][4][0], row["cells"][6][0]) for row in laws["rows"]} == {
        ("not judged yet", "–", "–")
    }
    judged(at)
    total = sum(report.counts.values())
    assert f"{total} violations of {len(report.counts)} laws." in said(at)
    assert tile(at) == (str(total), "in the whole recording")
    first = tables(at)["laws"]["rows"][0]
    assert first["id"] in report.counts
    assert first["cells"][6][1] == max(report.counts.values())
    assert first["cells"][7][1] == report.last[first["id"]].step
    violations = tables(at)["violations"]["rows"]
    assert [row["cells"][1][1] for row in violations] == [found.step for found in report.violations]
    at.session_state["selected"] = {**at.session_state["selected"], "broken": "1"}
    at.run()
    assert report.violations[1].expected.split()[0] in said(at)
    at.button(key="broken_to_step").click().run()
    step = str(report.violations[1].step)
    selected = at.session_state["selected"]
    assert (selected["view"], selected["at"], selected["step"]) == ("admission", step, step)


def test_a_recording_in_which_every_law_held_says_over_what(page: Open, tmp_path: Path) -> None:
    path = recorded(tmp_path / "run.jsonl")
    found = check(path)
    at = judged(page(path))
    assert "Every law held." in said(at)
    assert f"events of {found.steps} steps" in said(at).replace("\u202f", "")
    assert "violations" not in tables(at)
    assert tile(at) == ("0", "in the whole recording")
    # A link to the same page of the same process shows the verdict too.
    assert "Every law held." in said(page(path))


def test_a_verdict_that_comes_between_the_head_and_the_view_is_in_both(
    page: Open, tmp_path: Path, own_door: CheckDoor, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = recorded(tmp_path / "run.jsonl")
    at = judged(page(path))
    asked, standing = [0], own_door.standing

    def later(journal: Path) -> Any:
        asked[0] += 1
        return standing(journal) if asked[0] > 1 else None

    monkeypatch.setattr(own_door, "standing", later)
    at.run()
    assert "Every law held." in said(at)
    assert tile(at)[1] == "in the whole recording"


def test_a_verdict_says_when_the_journal_was_written_to_since(page: Open, tmp_path: Path) -> None:
    """It was kept by path: a journal that grew was still said to have been judged whole."""
    path = recorded(tmp_path / "run.jsonl")
    whole = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(whole[: len(whole) // 2]))
    at = judged(page(path))
    assert not at.warning
    first = tile(at)
    assert first[1] == "in the whole recording"
    path.write_bytes(b"".join(whole))
    at.run()
    assert "The journal was written to since." in at.warning[0].value
    assert tile(at) == (first[0], "judged before it grew")
    at.button(key="judge").click().run()
    until(at, lambda: 'data-testid="verdict"' in said(at))
    assert not at.warning
    assert tile(at)[1] == "in the whole recording"


def test_a_journal_that_cannot_be_judged_says_why(page: Open, tmp_path: Path) -> None:
    """It was altered after the page had read it: the command's own words are shown."""
    path = recorded(tmp_path / "run.jsonl")
    at = page(path)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0], *lines[2:]]))
    at.button(key="judge").click().run()
    until(at, lambda: "It did not work" in said(at))
    assert "the laws need the engine&#x27;s first event" in said(at)
    assert at.button(key="judge").label == "Judge this recording"


def test_a_judging_can_be_stopped(page: Open, broken: Path, own_door: CheckDoor) -> None:
    """The child is stopped where it stands; that it is slow is played by a command that never ends."""
    made = own_door._errand(broken)
    endless = ("serve", "--server.port", "0", "--journal", "none", "--executor.kind", "simulated")
    own_door._errand = lambda _: type(made)(endless, made.read, made.too_long)
    at = page(broken)
    at.button(key="judge").click().run()
    at.button(key="judging_stop").click().run()
    until(at, lambda: "Stopped" in said(at))
    assert tile(at) == ("–", "not judged yet")


def test_only_what_was_judged_has_numbers(report: CheckReport) -> None:
    answer = LawsAnswer(
        engine_id="e",
        observe_seq=1,
        step=1,
        t_ns=0,
        t_wall_s=0.0,
        is_checked=True,
        words="",
        laws=judged_laws(report),
    )
    rows = {row["id"]: row for row in frames.laws_table(answer, LIGHT, kind="journal").rows}
    assert rows["INV-METER-01"]["cells"][3][0] == "not by a record"
    assert rows["INV-METER-01"]["quiet"]
