"""The simulator's bench: its trace of short requests, what it measures of a child, and which missed aims it tells."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.simulation import Aim, Row, growth, measured, misses, short_requests, simulated
from telemetry.sim.traces import MooncakeTrace


def row(run: str, requests: int, cpu_s: float, **rest: Any) -> Row:
    made = Row(run, requests, 0, 0, wall_s=0.0, cpu_s=cpu_s, half_mib=None, end_mib=None, peak_mib=100.0)
    return replace(made, **rest)


def test_short_requests_are_a_trace_and_a_quarter_begins_like_others(tmp_path: Path) -> None:
    (tmp_path / "short.jsonl").write_text("".join(short_requests(4_000)))
    asks = list(MooncakeTrace(tmp_path / "short.jsonl", limit=None, ask_for=None).asks())
    assert len(asks) == 4_000
    assert asks[-1].arrival_ns == pytest.approx(40e9, rel=0.1), "100 a second"
    heads = [ask.blocks.head(32) for ask in asks]
    assert 3_000 < len(set(heads)) < 3_000 + 1_000 * 0.7, "one head for each of the others, and of a thousand most"


def test_what_a_child_costs_is_its_own(tmp_path: Path) -> None:
    found = simulated("few", "azure-conv", "--limit", "3", aim=Aim(cpu_s=1e-9))
    assert (found.requests, found.violations, found.aim_cpu_s) == (3, 0, 1e-9)
    assert 0 < found.cpu_s < 60
    assert 20 < found.peak_mib < 1_000
    assert misses([found]) == [f"few: {found.cpu_s:g} CPU s, aim 1e-09"]
    with pytest.raises(RuntimeError, match=r"status 2: .*no such file"):
        measured(["sim", str(tmp_path / "none.jsonl")])


def test_growth_is_that_of_the_runs_without_their_start() -> None:
    rows = [row("start", 1, 1.0), row("quarter, watched", 100, 11.0), row("watched", 400, 41.0)]
    assert growth(rows) == pytest.approx(1.0)
    assert growth([*rows[:2], row("watched", 400, 161.0)]) == pytest.approx(2.0)
    assert growth([rows[0], row("quarter, watched", 100, 1.5), rows[2]]) is None, "too short to say"


def test_aims_that_are_kept_are_not_said() -> None:
    kept = row("watched", 10, 5.0, aim_cpu_s=5.0, aim_peak_mib=100.0)
    assert misses([kept]) == []
    assert misses([replace(kept, peak_mib=101.0)]) == ["watched: 101 MiB, aim 100"]
