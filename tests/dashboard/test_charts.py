"""Charts: the browser can exchange the data of a living chart, and every mark has its unit and its name."""

from __future__ import annotations

import json
from typing import Any

import altair as alt
import pytest
from fake_engine import FakeEngine

from dashboard import charts, frames
from dashboard.theme import DARK, LIGHT, Palette


def made_from(engine: FakeEngine, colours: Palette) -> dict[str, alt.Chart | alt.LayerChart]:
    latency = frames.latency_frame(engine.answer("/observe/latency", {}))
    passes = engine.answer("/observe/passes", {"n": ["48"]})
    line = engine.detail(engine.finished[0].rid).timeline
    return {
        "ttft": charts.latency_chart(frames.quantile_frame(latency, "ttft"), colours),
        "tbt": charts.latency_chart(frames.quantile_frame(latency, "tbt"), colours),
        "steps": charts.steps_chart(frames.steps_frame(passes), colours),
        "parts": charts.parts_chart(frames.parts_frame(line), colours),
    }


def without_data(chart: alt.Chart | alt.LayerChart) -> str:
    """The specification with its data sets left out and their names, which are hashes of the data, made equal."""
    spec: dict[str, Any] = chart.to_dict()
    names = {name: f"data {i}" for i, name in enumerate(spec.pop("datasets", {}))}
    text = json.dumps(spec, sort_keys=True)
    for name, plain in names.items():
        text = text.replace(name, plain)
    return text


@pytest.mark.parametrize("colours", [LIGHT, DARK], ids=["light", "dark"])
def test_new_numbers_do_not_change_the_specification(engine: FakeEngine, colours: Palette) -> None:
    before = {name: without_data(chart) for name, chart in made_from(engine, colours).items()}
    for _ in range(60):
        engine.tick()
    after = {name: without_data(chart) for name, chart in made_from(engine, colours).items()}
    assert before == after


@pytest.mark.parametrize("colours", [LIGHT, DARK], ids=["light", "dark"])
def test_no_chart_asks_another_host(engine: FakeEngine, colours: Palette) -> None:
    for chart in made_from(engine, colours).values():
        assert '"url"' not in without_data(chart)


def test_lines_are_told_apart_without_colour(engine: FakeEngine) -> None:
    spec = made_from(engine, LIGHT)["ttft"].to_dict()
    dashes = spec["layer"][0]["encoding"]["strokeDash"]["scale"]
    assert dashes["domain"] == ["p99", "p50"]
    assert dashes["range"][0] != dashes["range"][1]


def test_time_begins_at_zero(engine: FakeEngine) -> None:
    spec = made_from(engine, LIGHT)["tbt"].to_dict()
    assert spec["layer"][0]["encoding"]["y"]["scale"]["zero"] is True
