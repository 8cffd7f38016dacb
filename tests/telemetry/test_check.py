"""A journal is judged offline: a healthy one holds, a broken one is found out, by code that is not broken itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from invariants import LAWS, InvariantChecker
from telemetry.check import NEEDS_EACH_DECISION, check
from telemetry.check_report import render
from telemetry.cli import main
from telemetry.journal import JournalError, JournalSink
from telemetry.journal_reader import JournalReader
from tests.builders import CoreRun, Tap
from tests.sabotage import cache_faults, engine_faults, event_faults, index_faults
from tests.sabotage.scenario import FAULTS, Fault, config, same, workload
from tests.telemetry.live_run import TimedRun, busy, play

MODULES = (cache_faults, engine_faults, event_faults, index_faults)  # imported for the faults they register


def recorded(path: Path, fault: Fault | None = None) -> Path:
    """The journal of the sabotage workload, with `fault` in it."""
    sink = JournalSink(path)
    edit = fault.edit() if fault is not None and fault.edit is not None else same
    run = CoreRun(
        config(**(fault.settings if fault else {})), Tap(sink, edit, renumber=fault is None or fault.renumber)
    )
    with pytest.MonkeyPatch.context() as patch:
        if fault is not None and fault.engine is not None:
            fault.engine(run, patch)
        try:
            workload(run)
        except Exception:  # what a broken engine ends with is not the matter here: its record is
            assert fault is not None
        sink.close()
    return path


def fault_named(name: str) -> Fault:
    return next(fault for fault in FAULTS if fault.name == name)


def test_a_healthy_record_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = recorded(tmp_path / "run.jsonl")
    report = check(path)
    assert (report.verdict, report.exit_code) == ("held", 0)
    assert report.notes == ()
    assert report.audits > 0
    folded = [record for record in JournalReader(path).records() if record.type == "refusals_folded"]
    assert folded, "no refusal was folded: the interesting part is missing"
    # Everything was heard, what the journal only counts included.
    lines = sum(record.type[0].isupper() for record in JournalReader(path).records())
    assert report.events == lines + sum(record.count for record in folded)
    assert main(["check", str(path)]) == 0
    assert "every law held" in capsys.readouterr().out


@pytest.mark.parametrize("asked_step", [None, 3])
def test_a_closed_journal_says_whose_end_it_lacks(tmp_path: Path, asked_step: int | None) -> None:
    """A checkpoint at the end says that nothing was cut, not that everybody had an end."""
    sink = JournalSink(tmp_path / "run.jsonl")
    run = CoreRun(config(), sink)
    run.add("early", range(8), 2, ignore_eos=True)
    run.add("late", range(8), 50, ignore_eos=True)
    for _ in range(8):
        run.step()
    sink.close()
    report = check(sink.path, until_step=asked_step)
    assert report.verdict == "held"
    notes = [note for note in report.notes if "with no end of" in note]
    assert bool(notes) is (asked_step is None)
    assert all("with no end of 1 of its requests, the first of them late" in note for note in notes)


@pytest.mark.parametrize("seed", range(8))
def test_busy_records_hold(tmp_path: Path, seed: int) -> None:
    settings, operations = busy(seed)
    sink = JournalSink(tmp_path / "run.jsonl")
    play(TimedRun(settings, sink), operations)
    sink.close()
    report = check(sink.path)
    assert report.verdict == "held", render(report)
    assert report.notes == ()


@pytest.mark.parametrize(
    "name",
    [
        "a piece of length zero",
        "an admission charged twice",
        "decode rows charged twice",
        "a promise that skips the last running request",
        "an end that forgets to unlock",
        "two ends of one abort",
        "a full flag that stays latched",
        "an eviction of a locked node",
    ],
)
def test_a_broken_engine_is_found_out_by_its_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    fault = fault_named(name)
    path = recorded(tmp_path / "run.jsonl", fault)
    report = check(path)
    assert report.verdict == "broken"
    assert report.counts[fault.law] >= 1, render(report)
    assert report.violations
    assert main(["check", str(path), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["counts"] == report.counts


def test_most_faults_show_in_a_record_alone(tmp_path: Path) -> None:
    """Who reads a journal needs no broken code: what was published is enough."""
    events = [fault for fault in FAULTS if fault.edit is not None and fault.name != "a lost event"]
    missed = []
    for number, fault in enumerate(events):
        report = check(recorded(tmp_path / f"{number}.jsonl", fault))
        if fault.law not in report.counts:
            missed.append(f"{fault.law}: {fault.name}")
    assert missed == []


def test_reading_stops_where_it_is_told(tmp_path: Path) -> None:
    fault = fault_named("an admission charged twice")
    path = recorded(tmp_path / "run.jsonl", fault)
    first = check(path).violations[0]
    assert first.seq is not None
    before = check(path, until_seq=first.seq - 1)
    assert (before.verdict, before.events) == ("held", first.seq)
    upto = check(path, until_seq=first.seq)
    assert (upto.verdict, upto.events) == ("broken", first.seq + 1)
    assert check(path, until_step=first.step - 1).verdict == "held"
    assert check(path, until_step=first.step).verdict == "broken"
    assert check(path, until_step=first.step).steps == first.step


def test_a_pass_that_was_cut_off_is_made_to_its_end(tmp_path: Path) -> None:
    """A checker that raises stops the engine inside a pass: the decisions before are heard, folded ones too."""
    path = recorded(tmp_path / "whole.jsonl")
    whole = path.read_bytes().splitlines(keepends=True)
    for number in range(8, len(whole), 3):
        cut = tmp_path / "cut.jsonl"
        cut.write_bytes(b"".join(whole[:number]))
        report = check(cut)
        assert report.verdict == "held", f"after line {number}: {render(report)}"


def test_a_hole_is_no_broken_law_but_is_said(tmp_path: Path) -> None:
    report = check(recorded(tmp_path / "run.jsonl", fault_named("a lost event")))
    assert (report.verdict, report.exit_code) == ("incomplete", 2)
    assert "never reached the journal" in report.notes[0]


def test_a_record_that_was_cut_at_a_whole_line_is_said_to_have_no_clean_end(tmp_path: Path) -> None:
    path = recorded(tmp_path / "run.jsonl")
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1]))
    report = check(path)
    assert report.verdict == "held"
    (note,) = report.notes
    assert note.startswith("the journal has no clean end, and nothing behind it was judged: ")
    assert f"run.jsonl:{len(lines) - 1} is no closing checkpoint" in note
    assert check(path, until_step=3).notes == (), "what was asked for ends before"


def test_the_report_names_the_first_and_counts_the_rest(tmp_path: Path) -> None:
    path = recorded(tmp_path / "run.jsonl", fault_named("an admission charged twice"))
    report = check(path, limit=1)
    assert len(report.violations) == 1
    total = sum(report.counts.values())
    assert total > 1
    text = render(report)
    assert f"{total:,} violations" in text
    assert f"{total - 1:,} more are not shown" in text


@pytest.mark.parametrize(
    ("arguments", "content", "words"),
    [
        ({}, "", "the file is empty"),
        ({"snapshot": "absent.json"}, None, "absent.json"),
        ({"snapshot": "run.jsonl"}, None, "no snapshot"),
    ],
)
def test_what_cannot_be_read_is_named(
    tmp_path: Path, arguments: dict[str, Any], content: str | None, words: str
) -> None:
    path = tmp_path / "run.jsonl"
    if content is None:
        recorded(path)
    else:
        path.write_text(content)
    with pytest.raises(JournalError, match=words):
        check(path, **{name: tmp_path / value for name, value in arguments.items()})


def test_a_record_without_its_start_is_refused(tmp_path: Path) -> None:
    lines = recorded(tmp_path / "run.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "late.jsonl").write_bytes(lines[0] + b"".join(lines[2:]))
    with pytest.raises(JournalError, match="EngineStarted"):
        check(tmp_path / "late.jsonl")


def test_laws_that_need_each_decision_exist() -> None:
    assert LAWS.keys() >= NEEDS_EACH_DECISION
    assert InvariantChecker().laws_by_mode["raise"] == len(LAWS)
