"""Evidence of a broken law: whole, bounded, found again by the command in it, and never in the engine's way."""

from __future__ import annotations

import errno
import json
import shlex
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from engine.clock import VirtualClock
from engine.events import AnyEvent
from engine.kvcache.snapshot import SchedulerSnapshot
from invariants import InvariantChecker, OnViolation
from invariants.checker import EVIDENCE_EVENTS
from invariants.meter_books import Readings
from telemetry import evidence as evidence_module
from telemetry.cli import main
from telemetry.evidence import EvidenceRecorder
from telemetry.evidence_bundle import EVENTS_FILE, SNAPSHOT_FILE, VIOLATION_FILE, Picture
from telemetry.journal import JournalSink
from telemetry.journal_reader import JournalReader
from tests.builders import CoreRun, engine_config

MS = 1_000_000


class Watched:
    """A core whose checker records and hands violations to a recorder, as beside a server."""

    def __init__(self, folder: Path, *, journal: bool = True, mode: OnViolation = "record", **limits: Any) -> None:
        self.clock = VirtualClock()
        self.journal_goes_on = True
        self.folder = folder / "evidence"
        self.journal = JournalSink(folder / "run.jsonl") if journal else None
        self.recorder = EvidenceRecorder(
            folder=self.folder,
            run="run",
            journal=lambda: self.journal.path if self.journal is not None and self.journal_goes_on else None,
            look=lambda: (self.checker.started, self.checker.evidence(), self.checker.audited),
            picture=self.picture,
            mode_of=self.mode_of,
            clock=self.clock,
            **({"per_law": 2, "interval_s": 10.0, "max_mib": 8} | limits),
        )
        self.checker = InvariantChecker(on_violation=mode, listener=self.recorder)
        self.run = CoreRun(engine_config(), self)

    def emit(self, event: AnyEvent) -> None:
        if self.journal is not None:
            self.journal.emit(event)
        self.checker.emit(event)

    def picture(self) -> Picture:
        return Picture(self.run.scheduler.snapshot(), "between two steps")

    def mode_of(self, law: str) -> OnViolation:
        return self.checker.mode_of(law)

    def work(self, steps: int) -> None:
        """Steps with somebody running."""
        for _ in range(steps):
            if not self.run.has_work:
                self.run.add(f"r{self.run.steps}", 40, 30)
            self.run.step()

    def break_a_law(self) -> None:
        """A running count that is one too high, for one step."""
        pool = self.run.scheduler.kv.pool
        pool._counts[0] += 1
        self.work(1)
        pool._counts[0] -= 1

    def bundles(self) -> dict[str, dict[str, Any]]:
        """Name → violation.json, once everything is written."""
        assert self.recorder.close()
        if self.journal is not None:
            self.journal.close()
        assert not list(self.folder.glob(".*")), "something half-written is left"
        return {
            folder.name: json.loads((folder / VIOLATION_FILE).read_text("utf-8"))
            for folder in sorted(self.folder.glob("*"))
        }


def run_command(entry: dict[str, str]) -> int:
    """Run a printed command in this process; its exit status."""
    words = shlex.split(entry["command"])
    assert words[0].endswith("admitscope")
    return main(words[1:])


def test_a_bundle_says_what_broke_and_holds_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    watched = Watched(tmp_path)
    watched.work(3)
    watched.break_a_law()
    found = watched.bundles()
    step = watched.run.steps
    about = found[f"run-INV-PAGE-01-{step}"]
    assert about["id"] == "INV-PAGE-01"
    assert about["law"].startswith("The four page counts")
    assert about["expected"] != about["found"]
    assert (about["step"], about["mode"], about["found_by"]) == (step, "record", "event")
    assert about["config"]["cache"]["num_pages"] == 64
    assert about["events"]["from_the_start"] is True
    assert about["snapshot"] == {"file": SNAPSHOT_FILE, "taken": "between two steps"}
    folder = watched.folder / f"run-INV-PAGE-01-{step}"
    records = list(JournalReader(folder / EVENTS_FILE).records())
    assert records[1].type == "EngineStarted"
    snapshot = json.loads((folder / SNAPSHOT_FILE).read_bytes())
    assert snapshot["kv"]["num_pages"] == 64
    check, replay = about["commands"]
    assert run_command(check) == 1
    said = capsys.readouterr().out
    assert f"INV-PAGE-01 at step {step}" in said
    assert about["found"] in said
    assert run_command(replay) == 1  # the counts of a healthy pool differ from the record
    # The plan and the outcome of the step both show it: one bundle for one law and step.
    assert watched.recorder.counts == {"written": 1, "limited": 1, "full": 0, "failed": 0}


def test_a_long_run_is_judged_from_its_journal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    watched = Watched(tmp_path)
    watched.work(1_000)
    assert len(watched.checker.evidence()) == EVIDENCE_EVENTS
    watched.break_a_law()
    (about,) = watched.bundles().values()
    assert about["events"]["from_the_start"] is False
    assert about["events"]["last_seq"] - about["events"]["first_seq"] == EVIDENCE_EVENTS - 1
    lines = list(JournalReader(next(watched.folder.glob("*")) / EVENTS_FILE).records())
    assert len(lines) == EVIDENCE_EVENTS + 1
    assert f"--until-seq {about['events']['last_seq']}" in about["commands"][0]["command"]
    assert run_command(about["commands"][0]) == 1
    assert f"{about['id']} at step {about['step']}" in capsys.readouterr().out


def test_without_a_record_from_the_start_no_command_is_promised(tmp_path: Path) -> None:
    watched = Watched(tmp_path, journal=False)
    watched.work(1_000)
    watched.break_a_law()
    (about,) = watched.bundles().values()
    assert about["commands"] == []
    assert about["journal"] is None


def test_a_journal_that_ended_before_is_not_named(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    watched.work(1_000)
    watched.journal_goes_on = False
    watched.break_a_law()
    (about,) = watched.bundles().values()
    assert about["commands"] == []


def test_a_law_about_listeners_promises_no_more_than_a_record_holds(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    watched.work(2)
    watched.checker.audit(watched.run.scheduler.snapshot())
    watched.checker.audit_readings(Readings(counters={("steps_total", "decode"): -1}))
    found = [about for about in watched.bundles().values() if about["id"] == "INV-METER-02"]
    assert found
    assert "what listeners counted is in no record" in found[0]["commands"][0]["why"]


def test_what_only_an_audit_sees_is_seen_again_in_its_snapshot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    watched = Watched(tmp_path)
    watched.work(4)
    lease = next(iter(watched.run.scheduler.kv.leases.values()))
    watched.run.scheduler.kv.pool._owners[int(lease.pages[-1])] += 1
    watched.checker.audit(watched.run.scheduler.snapshot())
    about = next(iter(watched.bundles().values()))
    assert about["found_by"] == "audit"
    assert "by the audit itself" in about["snapshot"]["taken"]
    assert "--snapshot" in about["commands"][0]["command"]
    assert run_command(about["commands"][0]) == 1
    said = capsys.readouterr().out
    assert "by audit" in said
    assert about["found"] in said


def test_a_broken_law_of_every_step_is_written_now_and_then(tmp_path: Path) -> None:
    watched = Watched(tmp_path, per_law=2, interval_s=10.0)
    for _ in range(5):
        watched.break_a_law()
    assert watched.recorder.counts["limited"] == 5 + 3
    watched.clock.advance_ns(10_000 * MS)
    watched.break_a_law()
    watched.break_a_law()
    found = [about["id"] for about in watched.bundles().values()]
    assert max(map(found.count, found)) == 3  # two at once, one after the interval
    assert watched.recorder.counts["written"] == len(found)
    assert sum(watched.recorder.counts.values()) == watched.checker.total_violations


def test_the_size_of_a_run_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence_module, "_MIB", 1_024)
    watched = Watched(tmp_path, per_law=50, max_mib=40)
    for _ in range(40):
        watched.break_a_law()
        time.sleep(0.001)
    watched.bundles()
    assert watched.recorder.counts["full"] > 0
    assert watched.recorder.counts["written"] > 0
    size = sum(path.stat().st_size for path in watched.folder.rglob("*") if path.is_file())
    assert size <= 40 * 1_024


def test_a_snapshot_that_is_too_large_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(tmp_path)
    monkeypatch.setattr(evidence_module, "encoded_snapshot", lambda _picture: b" " * (9 << 20))
    watched.break_a_law()
    about = next(iter(watched.bundles().values()))
    assert about["snapshot"]["file"] is None
    assert "left out" in about["snapshot"]["taken"]


@pytest.mark.parametrize("where", ["mkdir", "write_bytes", "rename"])
def test_a_full_disk_is_counted_and_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    watched = Watched(tmp_path)

    def full(_self: Path, *_args: object, **_kwargs: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, where, full)
        watched.break_a_law()
        watched.work(3)
        deadline = time.monotonic() + 30
        while not watched.recorder.counts["failed"] and time.monotonic() < deadline:
            time.sleep(0.01)
    assert watched.recorder.counts["failed"] > 0
    watched.break_a_law()  # and room again
    found = watched.bundles()
    assert watched.recorder.counts["written"] == len(found) > 0


def test_evidence_never_waits_for_its_disk(tmp_path: Path) -> None:
    """The recorder stands still; violations go on, and those beyond its queue are counted."""
    watched = Watched(tmp_path, per_law=500)
    gate = threading.Event()
    real = watched.picture

    def slow() -> Picture:
        gate.wait(30)
        return real()

    watched.recorder._picture = slow
    for _ in range(60):
        watched.break_a_law()
    assert watched.recorder.counts["limited"] > 0
    gate.set()
    found = watched.bundles()
    assert watched.recorder.counts["written"] == len(found) > 0
    assert sum(watched.recorder.counts.values()) == watched.checker.total_violations


def test_a_gap_in_the_numbers_stays_visible(tmp_path: Path) -> None:
    """A lost event is a broken law: the bundle shows the hole instead of a line about it."""
    watched = Watched(tmp_path, journal=False)
    watched.work(2)
    publisher = watched.run.scheduler.publisher
    publisher.seq += 1
    watched.work(1)
    found = [about for about in watched.bundles().values() if about["id"] == "INV-STEP-02"]
    assert found
    assert [run_command(command) for command in found[0]["commands"]] == [1, 1], "judged, and replayed"


def test_the_snapshot_of_a_bundle_reads_back(tmp_path: Path) -> None:
    import msgspec

    watched = Watched(tmp_path)
    watched.break_a_law()
    name = next(iter(watched.bundles()))
    raw = (watched.folder / name / SNAPSHOT_FILE).read_bytes()
    assert msgspec.json.decode(raw, type=SchedulerSnapshot).kv.page_size == 16
