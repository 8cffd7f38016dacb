"""No false alarm: whole engines under everything at once break no law, and each seed is the same run every time."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

from engine.events import EngineStarted, RecordingSink, StepCompleted, StepPlanned
from tests.simulation.generate import scenario_of
from tests.simulation.run import run_seeds
from tests.simulation.scenario import load, save
from tests.simulation.seen import ALL, UNREACHABLE, not_seen
from tests.simulation.simulate import simulate
from tests.simulation.world import CLOCK_LAWS

ROOT = Path(__file__).resolve().parents[2]
SEEDS, STEPS = range(50), 300


def test_fifty_seeds_run_clean_and_reach_everything() -> None:
    """Audited after every step. A clean run says little unless it also went everywhere."""
    summary = run_seeds(SEEDS, steps=STEPS, audit_every=1, jobs=min(2, os.cpu_count() or 1))
    assert [(report.seed, report.failure) for report in summary.failed] == []
    assert not_seen(summary.seen) == []
    assert {key: summary.seen[key] for key in UNREACHABLE if summary.seen[key]} == {}, "reached after all"
    assert summary.line().startswith(f"sim: 50 of 50 seeds clean, {summary.steps} steps, 0 violations, hash ")
    assert summary.steps > 50 * STEPS


def test_seeds_run_clean_where_steps_overlap() -> None:
    """The same seeds with every step planned before the outcome of the one before it, where that can be."""
    sink = RecordingSink()
    reports = [simulate(scenario_of(seed, 150), overlap=True, sink=sink) for seed in range(22)]
    assert [(report.seed, report.failure) for report in reports if report.failure is not None] == []
    applied, ahead = 0, Counter[str]()
    for event in sink.events:
        if isinstance(event, EngineStarted):
            applied = 0
        elif isinstance(event, StepCompleted):
            applied = event.step
        elif isinstance(event, StepPlanned) and event.step > applied + 1:
            ahead["planned"] += 1
            ahead["preempted"] += len(event.preempted)
            ahead["prompts"] += len(event.prefills)
    assert ahead["planned"] > sum(report.steps for report in reports) // 2
    assert min(ahead["preempted"], ahead["prompts"]) > 0


def test_what_is_said_to_be_out_of_reach_is_on_the_list() -> None:
    assert UNREACHABLE.keys() <= ALL


def _printed(hash_seed: str, jobs: int) -> list[str]:
    """The lines with hashes, of a process of its own."""
    words = [sys.executable, "-m", "tests.simulation.run", "--hashes", "--seeds", "4", "--first", "3", "--steps", "120"]
    done = subprocess.run(
        [*words, "--jobs", str(jobs)],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": hash_seed, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [line for line in done.stdout.splitlines() if "hash" in line]


def test_one_seed_has_one_hash_in_every_process() -> None:
    first = _printed("1", jobs=1)
    assert len(first) == 5
    assert first == _printed("77", jobs=2)
    assert f"hash {simulate(scenario_of(3, 120)).hash}" in first[0]


def test_seeds_differ() -> None:
    assert len({simulate(scenario_of(seed, 40)).hash for seed in range(8)}) == 8


def test_a_scenario_survives_its_file(tmp_path: Path) -> None:
    scenario = scenario_of(11, 80)
    save(scenario, tmp_path / "scenario.json")
    assert load(tmp_path / "scenario.json") == scenario
    assert simulate(load(tmp_path / "scenario.json")).hash == simulate(scenario).hash


def test_how_often_is_audited_changes_nothing_in_the_run() -> None:
    every, seldom = (simulate(scenario_of(5, 120), audit_every=gap) for gap in (1, 50))
    assert every.hash == seldom.hash


def test_a_clock_that_falls_is_noticed_and_hurts_nobody() -> None:
    """Against its promise. The laws of time say so, no other does, and every request ends as it should."""
    falling = [scenario for scenario in (scenario_of(seed, 150) for seed in range(60)) if scenario.clock_falls]
    reports = [simulate(scenario) for scenario in falling]
    assert [report.failure for report in reports] == [None] * len(falling)
    assert sum(report.clock_alarms for report in reports) > 0
    assert CLOCK_LAWS
