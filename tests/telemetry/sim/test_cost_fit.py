"""The cost model finds what was planted, never goes below zero, and says when it is asked for more than it saw."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from telemetry.journal_reader import JournalReader
from telemetry.sim.cost_fit import StepSamples, fit, nnls
from telemetry.sim.cost_model import (
    CostError,
    CostModel,
    Estimator,
    Shape,
    load_cost,
    outside_words,
    presets,
    save_cost,
)
from telemetry.sim.journal_workload import Missing, read_events
from tests.telemetry.sim.recordings import COST, config_of, record


def hear(journal: Path, samples: StepSamples) -> None:
    for event in read_events(JournalReader(journal)):
        assert not isinstance(event, Missing)
        samples.emit(event)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.one_of(st.just(0.0), st.floats(1.0, 1e6)), min_size=4, max_size=7), st.integers(0, 2**32 - 1))
def test_planted_coefficients_come_back(planted: list[float], seed: int) -> None:
    table = np.random.default_rng(seed).uniform(1.0, 100.0, (60, len(planted)))
    found = nnls(table, table @ np.array(planted))
    assert np.allclose(found, planted, rtol=1e-5, atol=1e-5 * max(planted, default=1.0) + 1e-9)


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**32 - 1), st.integers(1, 8))
def test_the_answer_is_the_best_without_negative_coefficients(seed: int, columns: int) -> None:
    rng = np.random.default_rng(seed)
    table, target = rng.normal(size=(30, columns)), rng.normal(size=30)
    found = nnls(table, target)
    slope = table.T @ (table @ found - target)
    assert (found >= 0).all()
    # Kuhn and Tucker: a coefficient above 0 lies flat, one at 0 could only be worse above.
    assert (np.abs(slope[found > 0]) < 1e-6).all()
    assert (slope[found == 0] > -1e-6).all()


def test_a_journals_steps_give_the_cost_they_were_recorded_with(tmp_path: Path) -> None:
    samples = StepSamples()
    hear(record(tmp_path, config_of()), samples)
    model = fit(samples, name="journal", source="test")
    assert model.held_out is not None
    assert model.held_out.median < 0.01
    assert model.held_out.p95 < 0.02
    assert model.forward["prefill_tokens"] == pytest.approx(COST.forward["prefill_tokens"], rel=0.1)


def test_too_few_steps_are_refused(tmp_path: Path) -> None:
    samples = StepSamples()
    hear(record(tmp_path, config_of(), requests=1, outputs=(2, 3)), samples)
    with pytest.raises(CostError, match=r"steps that computed something; at least 40"):
        fit(samples, name="journal", source="test")


def test_steps_beyond_the_measurements_are_counted_and_named() -> None:
    model = CostModel(name="m", source="s", forward={"prefill_tokens": 1.0}, host={}, largest={"prefill_tokens": 100})
    estimator = Estimator(model)
    estimator.of(Shape(90, 0, 1, 0, 0))
    assert outside_words(estimator) == ""
    estimator.of(Shape(910, 0, 1, 0, 0))
    assert estimator.outside == 1
    words = outside_words(estimator)
    assert "1 of 2 steps (91% of the time)" in words
    assert "by prompt tokens in a step: up to 910, fitted up to 100" in words


def test_a_model_survives_its_file_and_a_wrong_one_is_named(tmp_path: Path) -> None:
    save_cost(COST, tmp_path / "c.json")
    assert load_cost(str(tmp_path / "c.json")) == COST
    (tmp_path / "c.json").write_text('{"name":"x","source":"y","forward":{"speed":1},"host":{}}')
    with pytest.raises(CostError, match=r"c\.json.*forward\.speed: no such feature"):
        load_cost(str(tmp_path / "c.json"))
    (tmp_path / "c.json").write_text('{"name":"x","source":"y","forward":{"step":-1},"host":{}}')
    with pytest.raises(CostError, match=r"forward\.step is -1\.0; at least 0"):
        load_cost(str(tmp_path / "c.json"))
    with pytest.raises(CostError, match=r"neither a preset \(.*h200-8b"):
        load_cost("nothing")


@pytest.mark.parametrize("name", presets())
def test_a_preset_says_where_it_is_from(name: str) -> None:
    model = load_cost(name)
    assert model.name == name
    assert model.source
    assert model.is_measured == (model.held_out is not None)
