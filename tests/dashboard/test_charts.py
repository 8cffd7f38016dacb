"""Charts: the browser can exchange the data of a living chart, and every mark has its unit and its name."""

from __future__ import annotations

import json
from typing import Any

import altair as alt
import pandas as pd
import pytest
from fake_engine import FakeEngine

from dashboard import charts, charts_lanes, charts_latency, formats, frames, frames_lanes, frames_latency
from dashboard.theme import DARK, LIGHT, Palette
from dashboard.words import CHINESE, ENGLISH, speak, t


def made_from(engine: FakeEngine, colours: Palette) -> dict[str, alt.Chart | alt.LayerChart]:
    latency = frames.latency_frame(engine.answer("/observe/latency", {}))
    passes = engine.answer("/observe/passes", {"n": ["48"]})
    line = engine.detail(engine.finished[0].rid).timeline
    return {
        "ttft": charts.latency_chart(frames.quantile_frame(latency, "ttft"), colours),
        "tbt": charts.latency_chart(frames.quantile_frame(latency, "tbt"), colours),
        "steps": charts.steps_chart(frames.steps_frame(passes), colours),
        "parts": charts.parts_chart(frames.parts_frame(line), colours),
        **latency_charts(engine, colours),
        **lane_charts(engine, colours),
    }


def latency_charts(engine: FakeEngine, colours: Palette) -> dict[str, alt.Chart | alt.LayerChart]:
    told = engine.answer("/observe/breakdown", {})
    objective = pd.DataFrame([(told.ttft_objective_s, "objective")], columns=["seconds", "words"])
    late = frames_latency.stall_frame(told.model_copy(update={"late": {"kernel": 2}}))
    return {
        "stack": charts_latency.stack_chart(frames_latency.stack_frame(told), colours),
        "gaps": charts_latency.gap_chart(frames_latency.gap_frame(told), objective, colours),
        "late": charts_latency.stall_chart(late, colours),
        "firsts": charts_latency.first_chart(frames_latency.first_frame(told), objective, colours),
        "deciles": charts_latency.decile_chart(frames_latency.decile_frame(told), colours),
    }


def lane_charts(engine: FakeEngine, colours: Palette) -> dict[str, alt.Chart | alt.LayerChart]:
    lanes = engine.answer("/observe/lanes", {"n": ["80"]}).lanes
    return {
        "many": charts_lanes.many_chart(frames_lanes.span_frame(lanes), frames_lanes.mark_frame(lanes), colours),
        "one": charts_lanes.one_chart(frames_lanes.span_frame(lanes[:1]), frames_lanes.mark_frame(lanes[:1]), colours),
    }


def titles_of(spec: object) -> set[str]:
    """Titles of all axes that are drawn."""
    if isinstance(spec, list):
        return set().union(*map(titles_of, spec)) if spec else set()
    if not isinstance(spec, dict):
        return set()
    found = titles_of([value for name, value in spec.items() if name != "datasets"])
    for name in ("x", "y"):
        channel = spec.get(name)
        if isinstance(channel, dict) and channel.get("title"):
            found.add(channel["title"])
    return found


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


def test_a_line_ends_where_nothing_was_observed(engine: FakeEngine) -> None:
    spec = made_from(engine, LIGHT)["tbt"].to_dict()
    assert spec["layer"][0]["encoding"]["detail"]["field"] == "run"


def test_axes_of_the_latency_view_say_what_they_count(engine: FakeEngine) -> None:
    titles = {name: titles_of(chart.to_dict()) for name, chart in latency_charts(engine, LIGHT).items()}
    assert titles["stack"] == {"mean TTFT"}
    assert titles["gaps"] == {"gap between two tokens (log)", "share of gaps"}
    assert titles["firsts"] == {"prompt length, tok", "TTFT (log)"}
    assert titles["deciles"] == {"prompt length, tok", "within the objective"}
    assert titles_of(lane_charts(engine, LIGHT)["one"].to_dict()) == {"since it was accepted"}


def test_axes_and_parts_are_named_in_the_readers_language(engine: FakeEngine) -> None:
    speak(CHINESE)
    try:
        titles = set().union(*(titles_of(chart.to_dict()) for chart in made_from(engine, LIGHT).values()))
        part, lane = formats.cause_name("between_chunks"), t(frames_lanes.DONE["between"])
        blocker = formats.cause_name("kv_total")
    finally:
        speak(ENGLISH)
    assert {"自接受起", "平均 TTFT", "提示词长度，tok"} <= titles
    assert [title for title in titles if title.isascii()] == ["tok"], "a unit"
    assert part == lane == "分块之间"
    assert blocker == "KV total", "a code of the engine"
