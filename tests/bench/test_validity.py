"""Validity: how predictions are judged, on runs whose costs are known, and that the page is what was measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.studies import page
from bench.validity.__main__ import judge_all, slug
from bench.validity.judge import MEASURES, judged, lines_of
from bench.validity.runs import BASE, CASES, workload
from telemetry.sim.overrides import changed
from tests.telemetry.sim.recordings import record


def test_the_workload_is_the_same_every_time() -> None:
    assert workload(20, 7) == workload(20, 7) != workload(20, 8)
    sent = workload(20, 7)
    assert [one.at for one in sent] == sorted(one.at for one in sent)
    shared = [one.prompt[:64] for one in sent[::3]]
    assert len(set(shared)) == 1


def test_where_costs_are_known_predictions_come_true(tmp_path: Path) -> None:
    """The same requests under every configuration, by an engine whose steps take what the cost model can learn."""
    for name in ("base", *CASES):
        settings = {"cache.page_size": "16", "cache.num_pages": "600"}
        config = changed({}, settings | BASE | CASES.get(name, {}))
        folder = tmp_path / f"0-{slug(name)}"
        folder.mkdir()
        run = record(folder, config, requests=24, gap_ms=60.0, ends_early=False)
        run.rename(folder / "admitscope-20260101T000000.000000Z.jsonl")
    facts = {"machine": "none", "date": "never", "requests": 24, "repeats": 1, "threads": 1, "rate": 16.0}
    (tmp_path / "facts.json").write_text(json.dumps(facts))
    result = judge_all(tmp_path)
    rows = [one for case in result["cases"].values() for one in case.values()]
    assert len(rows) == len(CASES) * len(MEASURES)
    # Not nothing: mixed steps alone do not tell what a decode row costs without prompts beside it.
    assert all(abs(one["size_error"]) < 0.1 for one in rows)
    assert all(one["is_direction_right"] for one in rows if abs(one["change"]) > 0.02)
    assert any(abs(one["change"]) > 0.2 for one in rows)
    assert all(abs(one["checks"][name]) < 0.02 for one in result["baselines"] for name in MEASURES)
    assert len([line for line in lines_of(result) if line.startswith("| ")]) == 1 + len(rows) + 1 + 1


def _guess(before: float, after: float) -> dict[str, object]:
    one = {"before": before, "after": after, "is_clear": True, "is_within_error": False}
    return {"measures": dict.fromkeys(MEASURES, one)}


def test_a_wrong_direction_and_repeats_that_disagree_are_told_apart() -> None:
    before = [dict.fromkeys(MEASURES, 1.0)] * 2
    up = [dict.fromkeys(MEASURES, 1.5)] * 2
    wrong = judged(before, up, [_guess(1.0, 0.5)] * 2)["tbt_p99"]
    assert (wrong["repeats_agree"], wrong["is_direction_right"]) == (True, False)
    assert wrong["size_error"] == pytest.approx(0.5 / 1.5 - 1)
    torn = judged(before, [dict.fromkeys(MEASURES, 1.5), dict.fromkeys(MEASURES, 0.8)], [_guess(1.0, 1.1)] * 2)
    assert not torn["ttft_p50"]["repeats_agree"]
    right = judged(before, up, [_guess(2.0, 3.0)] * 2)["ttft_p99"]
    assert right["is_direction_right"]
    assert right["size_error"] == pytest.approx(0.0)


def test_the_page_is_what_was_measured() -> None:
    """`make validity ARGS=--docs` writes it; the run takes half an hour."""
    result = json.loads((page.FOLDER / "validity.json").read_text("utf-8"))
    text = (page.FOLDER / "validity.md").read_text("utf-8")
    assert page.figures_of(text) == lines_of(result)
    assert result["changes"] == CASES
    assert result["base"] == BASE
