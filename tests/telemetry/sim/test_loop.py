"""The simulated engine decides as the real one does, the same in every run, and keeps every law."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from telemetry.check import check
from telemetry.cli import main
from telemetry.journal_reader import JournalReader
from telemetry.replay import replay
from telemetry.sim.arrivals import ClosedLoop, OpenLoop, poisson
from telemetry.sim.traces import PACKAGED, AzureTrace
from tests.telemetry.sim.recordings import config_of, cost_file, record

#: Facts of the core but times; what differs between the engine and its simulation is only in EngineStarted.
DECISIVE = ("RequestArrived", "RequestTransitioned", "AdmissionDecided", "StepPlanned", "PagesMoved", "LockChanged")


def facts(journal: Path, *, times: bool) -> list[dict[str, Any]]:
    """The decisive events of a journal, as they stand in it."""
    found = []
    for line, _ in JournalReader(journal).read(lambda raw: raw):
        event = json.loads(line.raw)
        if event["type"] in DECISIVE:
            for name in () if times else ("t_ns", "accepted_ns", "seq"):
                event.pop(name, None)
            event.pop("accepted_ns", None)
            found.append(event)
    return found


def simulated(journal: Path, folder: Path, *words: str) -> Path:
    """The journal of its simulation."""
    out = folder / "sim"
    assert main(["sim", str(journal), "--journal", str(out), "--json", *words]) == 0
    [file] = out.glob("*.jsonl")
    return file


@pytest.mark.parametrize(
    "scheduler",
    [
        {},
        {"schedule_policy": "fcfs", "enable_mixed_chunk": False},
        {"schedule_conservativeness": 0.05, "kv_accounting": "exact"},
        {"chunked_prefill_size": None, "schedule_policy": "hrrn"},
    ],
)
def test_with_the_recorded_costs_every_event_is_the_recorded_one(tmp_path: Path, scheduler: dict[str, Any]) -> None:
    journal = record(tmp_path, config_of(num_pages=60, **scheduler), gap_ms=9.0)
    again = simulated(journal, tmp_path, "--cost", cost_file(tmp_path))
    recorded = facts(journal, times=True)
    # The record begins at 7 ms of its clock, the simulation at 0.
    shifted = [event | {"t_ns": event["t_ns"] + 7_000_000} for event in facts(again, times=True)]
    assert len(recorded) > 500
    assert shifted == recorded


def test_clients_that_left_leave_again(tmp_path: Path) -> None:
    journal = record(tmp_path, config_of(num_pages=60), gap_ms=9.0, leaves_after_ms=90.0)
    again = simulated(journal, tmp_path, "--cost", cost_file(tmp_path))
    recorded = facts(journal, times=False)
    assert sum(event.get("cause") == "abort" for event in recorded) > 3
    assert facts(again, times=False) == recorded


def test_a_record_that_stops_in_the_middle_is_simulated_and_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = record(tmp_path, config_of(), gap_ms=9.0).read_bytes().splitlines(keepends=True)
    torn = tmp_path / "torn" / "run.jsonl"
    torn.parent.mkdir()
    hole = b'{"type":"events_missing","after_seq":1,"before_seq":9,"missing":7}\n'
    torn.write_bytes(b"".join(lines[: len(lines) * 2 // 3]) + hole + lines[-1][:20])
    result = outcome(capsys, str(torn), "--cost", cost_file(tmp_path))
    notes = " ".join(result["notes"])
    assert "requests had not ended where the record ends" in notes
    assert "7 events never reached the journal" in notes
    assert result["served"] == result["requests"] > 10


def test_when_all_came_before_the_first_step_no_cost_changes_a_decision(tmp_path: Path) -> None:
    journal = record(tmp_path, config_of(num_pages=60), gap_ms=0.0)
    again = simulated(journal, tmp_path, "--cost", "h200-8b")
    assert facts(again, times=False) == facts(journal, times=False)


def test_a_simulated_journal_replays_and_keeps_every_law(tmp_path: Path) -> None:
    file = simulated(record(tmp_path, config_of(num_pages=50)), tmp_path)
    assert replay(file).verdict == "identical"
    assert check(file).exit_code == 0


def outcome(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["sim", *words, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_equal_runs_have_equal_hashes_and_other_seeds_other_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["azure-conv", "--limit", "25", "--cost", "h200-8b", "--rate", "20"]
    journals = [outcome(capsys, *words, "--seed", "4", "--journal", str(tmp_path / name)) for name in "ab"]
    bare = outcome(capsys, *words, "--seed", "4", "--hash", "--no-check")
    other = outcome(capsys, *words, "--seed", "5", "--hash", "--no-check")
    assert journals[0]["event_hash"] == journals[1]["event_hash"] == bare["event_hash"]
    assert other["event_hash"] != bare["event_hash"]
    files = [next((tmp_path / name).glob("*.jsonl")).read_bytes() for name in "ab"]
    assert files[0] == files[1]
    assert json.loads(files[0].splitlines()[-1])["hash"] == bare["event_hash"], "the journal's last checkpoint"


def test_a_pool_too_small_for_a_prompt_refuses_it_and_says_what_sets_it(capsys: pytest.CaptureFixture[str]) -> None:
    result = outcome(capsys, "azure-conv", "--limit", "20", "--cost", "h200-8b", "--set", "num_pages=40")
    assert result["refused"] > 0
    assert result["refused"] + result["requests"] == 20
    assert "cache.num_pages sets it" in result["notes"][0]


def test_faster_arrivals_wait_longer(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["azure-conv", "--limit", "60", "--cost", "h200-8b", "--no-check", "--set", "max_running_requests=4"]
    slow, fast = (outcome(capsys, *words, "--rate-scale", scale) for scale in ("1", "50"))
    assert fast["duration_s"] < slow["duration_s"]
    assert fast["ttft"]["p90"] > 2 * slow["ttft"]["p90"]


def test_a_closed_loop_never_has_more_requests_than_clients(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["azure-conv", "--limit", "40", "--cost", "h200-8b", "--no-check"]
    one, many = (outcome(capsys, *words, "--concurrency", clients) for clients in ("1", "8"))
    assert one["served"] == many["served"] == 40
    assert one["steps_by_kind"].get("mixed", 0) == 0, "alone nobody decodes beside a prompt"
    assert many["duration_s"] < one["duration_s"] / 2


def trace(limit: int) -> AzureTrace:
    return AzureTrace(PACKAGED["azure-conv"], limit=limit, ask_for=None)


def test_poisson_arrivals_have_the_asked_rate() -> None:
    last = [ask.arrival_ns for ask in poisson(trace(2000).asks(), rate=50.0, seed=1)][-1]
    assert last / 1e9 == pytest.approx(2000 / 50, rel=0.1)


def test_a_closed_loop_hands_out_the_next_when_one_ended() -> None:
    loop = ClosedLoop(trace(3).asks(), concurrency=2)
    assert loop.next_ns() == 0
    loop.take()
    loop.take()
    assert loop.next_ns() is None
    loop.ended(77)
    assert loop.next_ns() == 77
    assert loop.take().arrival_ns == 77
    loop.ended(90)
    assert loop.next_ns() is None, "the trace is over"


def test_an_open_loop_scales_times() -> None:
    plain, twice = OpenLoop(trace(2).asks()), OpenLoop(trace(2).asks(), scale=2.0)
    for loop in (plain, twice):
        loop.take()
    assert twice.next_ns() == round((plain.next_ns() or 0) / 2)
