"""Judging for pages: a report with the latest violation of each law, its bounds, and a folder left as it was."""

from __future__ import annotations

from pathlib import Path

import pytest

from invariants import LAWS
from telemetry.check import check
from telemetry.check_door import CheckDoor
from telemetry.cli import main
from telemetry.errands import Busy
from telemetry.law_answers import judged_laws
from telemetry.sim.progress import LINE_PREFIX
from tests.telemetry.sim.test_door import gone
from tests.telemetry.test_check import fault_named, recorded

PATIENCE_S = 120.0
FAULT = "an admission charged twice"


def seen(folder: Path) -> dict[str, tuple[int, int]]:
    return {path.name: (path.stat().st_size, path.stat().st_mtime_ns) for path in folder.iterdir()}


def test_a_child_reports_what_check_finds_and_writes_nothing(tmp_path: Path) -> None:
    path = recorded(tmp_path / "a name with spaces.jsonl", fault_named(FAULT))
    before = seen(tmp_path)
    door = CheckDoor()
    found = door.start(path).wait(PATIENCE_S)
    assert found.state == "done", found.error
    assert found.result == check(path, limit=200)
    assert found.result.verdict == "broken"
    assert seen(tmp_path) == before
    door.close()


def test_a_journal_with_a_hole_has_a_report_and_one_that_is_none_a_sentence(tmp_path: Path) -> None:
    door = CheckDoor()
    path = recorded(tmp_path / "run.jsonl", fault_named("a lost event"))
    found = door.start(path).wait(PATIENCE_S)
    assert found.result is not None
    assert found.result.verdict == "incomplete"
    none = tmp_path / "none.jsonl"
    none.write_text("no journal\n")
    refused = door.start(none).wait(PATIENCE_S)
    assert refused.state == "failed"
    assert refused.error.startswith(f"{none}:1: no journal header")
    # What was answered before is not forgotten.
    kept = door.standing(path)
    assert kept is not None
    assert kept.result == found.result
    assert door.standing(tmp_path / "another.jsonl") is None
    door.close()


def test_one_recording_at_a_time_and_stopped_when_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    endless = ("serve", "--server.port", "0", "--journal", "none", "--executor.kind", "simulated")
    whole = CheckDoor()
    errand = whole._errand(tmp_path)
    monkeypatch.setattr(whole, "_errand", lambda _: type(errand)(endless, errand.read, errand.too_long))
    run = whole.start(tmp_path / "one.jsonl")
    with pytest.raises(Busy, match="another recording is being judged"):
        whole.start(tmp_path / "two.jsonl")
    whole.stop(tmp_path / "two.jsonl")
    assert run.standing().state == "running", "it was not the one to stop"
    whole.stop(tmp_path / "one.jsonl")
    assert run.wait(PATIENCE_S).state == "cancelled"
    assert gone(run.pid)


def test_the_latest_violation_of_each_law_has_its_step_and_the_time_of_the_record(tmp_path: Path) -> None:
    path = recorded(tmp_path / "run.jsonl", fault_named(FAULT))
    steps: list[int] = []
    report = check(path, limit=10_000, tell=steps.append)
    assert set(report.last) == set(report.counts)
    for law, last in report.last.items():
        of_law = [found for found in report.violations if found.id == law]
        assert len(of_law) == report.counts[law]
        assert last == of_law[-1]
    assert [found.t_wall_s for found in report.violations] == sorted(found.t_wall_s for found in report.violations)
    assert len(steps) == report.events
    assert steps[-1] == report.steps


def test_laws_of_a_judging_say_what_a_record_can_be_held_to(tmp_path: Path) -> None:
    report = check(recorded(tmp_path / "run.jsonl", fault_named(FAULT)))
    rows = {row.id: row for row in judged_laws(report)}
    assert rows.keys() == LAWS.keys()
    assert {law: row.violations for law, row in rows.items() if row.violations} == report.counts
    broken = rows[next(iter(report.counts))]
    assert broken.last is not None
    assert broken.last.step == report.last[broken.id].step
    healthy = check(recorded(tmp_path / "healthy.jsonl"))
    assert healthy.audits
    rows = {row.id: row for row in judged_laws(healthy)}
    assert rows["INV-LOCK-03"].judged == "recount", "the replayed state is audited"
    assert rows["INV-INDEX-01"].judged == "audits"
    # Nobody hands a record the numbers of a listener.
    assert {rows[law].judged for law in ("INV-METER-01", "INV-SPAN-01", "INV-TIME-02")} == {"never"}
    off = report.model_copy(update={"unjudged": ("INV-PAGE-01",)})
    assert next(row for row in judged_laws(off) if row.id == "INV-PAGE-01").judged == "never"


def test_progress_is_lines_for_programs_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(recorded(tmp_path / "run.jsonl"))
    assert main(["check", path]) == 0
    assert capsys.readouterr().err == ""
    assert main(["check", path, "--progress-lines"]) == 0
    said = capsys.readouterr().err.splitlines()
    assert said
    assert all(line.startswith(LINE_PREFIX) and line.endswith(" judging") for line in said)


def test_memory_that_is_not_enough_is_said_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The limit itself is the kernel's, and would bind this process too: that it was hit is what is played here."""

    def hit(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr("telemetry.check.check", hit)
    limits: list[int | None] = []
    monkeypatch.setattr("telemetry.sim.limits.limit_memory", limits.append)
    assert main(["check", str(tmp_path / "run.jsonl"), "--memory-mib", "512"]) == 2
    assert limits == [512]
    assert "--memory-mib 512 is not enough to judge this journal" in capsys.readouterr().err
