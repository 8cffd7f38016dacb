"""The view "What if": the form holds the recorded values, a comparison answers in a sentence, links show the same."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from fake_engine import FakeEngine, FakeServer
from streamlit.testing.v1 import AppTest

from dashboard import charts_whatif
from dashboard import frames_whatif as frames
from dashboard import whatif_form as form
from dashboard.views import what_if
from dashboard.words import CHINESE, ENGLISH, speak
from telemetry.sim.door import Ask, Door
from telemetry.sim.journal_workload import recorded_of
from telemetry.sim.whatif_result import WhatifResult
from tests.telemetry.sim.recordings import config_of, record

APP = Path(__file__).resolve().parents[2] / "dashboard" / "app.py"
Open = Callable[..., AppTest]


@pytest.fixture(scope="module")
def journal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prompts of up to 1,200 tokens, whole, beside others that decode."""
    config = config_of(num_pages=2_000, chunked_prefill_size=2_048)
    folder = tmp_path_factory.mktemp("whatif")
    return record(folder, config, requests=30, gap_ms=60.0, prompts=(40, 1_200), outputs=(20, 40), ends_early=False)


@pytest.fixture(scope="module")
def own_door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    """One for these tests, so that none is left open."""
    made = Door(tmp_path_factory.mktemp("door"))
    yield made
    made.close()


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch, journal: Path, own_door: Door) -> Open:
    """Opens the view on the journal, at this address."""
    monkeypatch.setattr(what_if, "door", lambda: own_door)

    def opened(**address: str) -> AppTest:
        monkeypatch.setattr("sys.argv", ["streamlit", "--journal", str(journal)])
        at = AppTest.from_file(str(APP), default_timeout=60)
        at.query_params.update({"view": "what_if", **address})
        return at.run()

    return opened


def field(at: AppTest, kind: str, name: str) -> Any:
    return next(each for each in getattr(at, kind) if each.key and each.key.endswith(f"_{name}"))


def said(at: AppTest) -> str:
    return "\n".join(element.proto.body for element in at.get("html"))


def table(at: AppTest, key: str) -> list[list[Any]]:
    found = [
        json.loads(each.proto.json) for each in at.get("bidi_component") if "live_table" in each.proto.component_name
    ]
    return [row["cells"] for data in found if data["name"] == key for row in data["rows"]]


def answered(at: AppTest) -> AppTest:
    """Run again until the answer is there."""
    for _ in range(600):
        assert not at.exception
        if "whatif-sentence" in said(at):
            return at
        time.sleep(0.1)
        at.run()
    raise AssertionError(said(at))


def test_the_form_begins_with_the_recorded_values(page: Open) -> None:
    at = page()
    assert not at.exception
    assert field(at, "number_input", "scheduler.chunked_prefill_size").value == 2_048
    assert field(at, "number_input", "cache.num_pages").value == 2_000
    assert field(at, "selectbox", "scheduler.schedule_policy").value == "lpm"
    assert "would a smaller chunk have shortened the time between tokens?" in said(at)


def test_a_smaller_chunk_is_compared_told_and_linked(page: Open) -> None:
    at = page()
    field(at, "number_input", "scheduler.chunked_prefill_size").set_value(128)
    at.button(key="whatif_compare").click().run()
    at = answered(at)
    assert at.session_state["selected"]["whatif"] == "scheduler.chunked_prefill_size=128"
    assert "A chunk of 128 instead of 2\u202f048 tokens: TBT p99 from " in said(at)
    assert "no clear difference" not in said(at).split("TTFT p50")[0]
    rows = {cells[0]: cells for cells in table(at, "whatif_compared")}
    assert rows["TBT p99"][2][1] < rows["TBT p99"][1][1]
    assert table(at, "whatif_differences")[0][4] == "admitted first chunk, 128 tok"
    assert {cells[0] for cells in table(at, "whatif_reasons")} >= {"admitted whole", "admitted next chunk"}
    # A link shows the form and the answer as they are.
    linked = answered(page(whatif="scheduler.chunked_prefill_size=128"))
    assert field(linked, "number_input", "scheduler.chunked_prefill_size").value == 128
    # The first difference, in the journal that the simulation left.
    opened = next(each for each in linked.button if each.key and each.key.startswith("whatif_open_"))
    opened.click().run()
    assert linked.session_state["selected"]["view"] == "admission"
    assert linked.session_state["selected"]["source"] == "what if, before"


def test_a_link_that_was_never_compared_is_compared_by_the_button_beside_its_settings(page: Open) -> None:
    at = page(whatif="scheduler.max_running_requests=8", first="10")
    assert "Not compared yet" in said(at)
    at.button(key="whatif_compare_link").click().run()
    assert "8 instead of 16 rows" in said(answered(at))
    assert "“Before” is simulated too, of all requests that ended by themselves in both runs" in captions(at)


def test_a_stretch_of_the_run_is_compared_alone_and_stands_in_the_address(page: Open) -> None:
    at = page()
    field(at, "number_input", "scheduler.chunked_prefill_size").set_value(128)
    field(at, "number_input", "from").set_value(0.2)
    field(at, "number_input", "to").set_value(0.1)
    at.button(key="whatif_compare").click().run()
    assert "No request comes between these seconds" in at.warning[0].value
    field(at, "number_input", "to").set_value(0.6)
    at.button(key="whatif_compare").click().run()
    selected = at.session_state["selected"]
    assert (selected["from"], selected["to"]) == ("0.2", "0.6")
    assert "both runs begin at 0.2 s with an empty engine" in said(answered(at)) + captions(at)


def captions(at: AppTest) -> str:
    return "\n".join(each.value for each in at.caption)


def test_settings_that_contradict_each_other_are_told(page: Open) -> None:
    at = page()
    field(at, "number_input", "cache.page_size").set_value(512)
    field(at, "number_input", "scheduler.chunked_prefill_size").set_value(64)
    at.button(key="whatif_compare").click().run()
    for _ in range(600):
        if "It did not work" in said(at):
            break
        time.sleep(0.1)
        at.run()
    assert "scheduler.chunked_prefill_size=64 is below cache.page_size=512" in said(at)


@pytest.mark.parametrize(
    "text", ["nonsense", "a.b=1", "scheduler.page_size=3,", "cache.page_size=0", "executor.kind=x"]
)
def test_a_link_with_nonsense_shows_the_recorded_values(page: Open, text: str) -> None:
    at = page(whatif=text)
    assert not at.exception
    assert field(at, "number_input", "cache.page_size").value == 16


def test_an_engine_without_a_journal_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, engine: FakeEngine, server: FakeServer
) -> None:
    assert engine.status().journal is None
    monkeypatch.setattr("sys.argv", ["streamlit", "--url", server.url])
    at = AppTest.from_file(str(APP), default_timeout=60)
    at.query_params["view"] = "what_if"
    at.run()
    assert not at.exception
    assert "This engine writes no journal" in said(at)
    assert "--journal journals" in said(at)


def test_settings_survive_an_address(journal: Path) -> None:
    recorded = recorded_of(journal)
    now = form.present(recorded)
    chosen = now | {
        "scheduler.chunked_prefill_size": None,
        "scheduler.enable_mixed_chunk": False,
        "cache.page_size": 32,
    }
    settings = form.differing(now, chosen)
    text = form.to_address(settings)
    assert text == "cache.page_size=32,scheduler.chunked_prefill_size=none,scheduler.enable_mixed_chunk=false"
    assert form.from_address(text) == settings
    assert form.values_of(settings, recorded) == chosen


def test_the_sentence_in_chinese(own_door: Door, journal: Path) -> None:
    ask = Ask.of(journal, {"scheduler.schedule_policy": "fcfs"})
    found = own_door.start(ask).wait(60.0)
    assert found.result is not None
    speak(CHINESE)
    try:
        assert frames.sentence(found.result).startswith("策略 fcfs 而不是 lpm：TBT p99 从 ")
    finally:
        speak(ENGLISH)


@pytest.fixture(scope="module")
def compared(own_door: Door, journal: Path) -> WhatifResult:
    """A smaller chunk: clear in the gaps between tokens."""
    found = own_door.start(Ask.of(journal, {"scheduler.chunked_prefill_size": "128"})).wait(60.0)
    assert found.result is not None
    return found.result


@pytest.mark.parametrize(
    ("error", "clear", "said"),
    [
        (0.0, True, None),
        (
            -0.56,
            True,
            "the simulator is off by 56\u00a0% here, more than this change: take the direction, not the number)",
        ),
        (-0.56, False, "off by 56\u00a0% here, more than this change: no finding)"),
    ],
)
def test_a_change_within_the_simulators_error_is_hedged_where_it_is_told(
    compared: WhatifResult, error: float, clear: bool, said: str | None
) -> None:
    figures = [
        one.model_copy(update={"model_error": error, "is_within_error": error != 0, "is_clear": clear})
        for one in compared.compared
        if one.name == "tbt_p99"
    ]
    result = compared.model_copy(update={"compared": tuple(figures)})
    sentence = frames.sentence(result)
    cell = frames.compared_table(result).rows[0]["cells"][-1]
    if said is None:
        assert "off by" not in sentence
        assert "more than" not in cell
    else:
        assert said in sentence
        assert cell == "\u221256.0\u00a0%: more than the change"


def test_a_cost_model_that_does_not_fit_is_told_before_any_number(compared: WhatifResult) -> None:
    """The same limit as where a search recommends nothing."""
    unfit = (
        "No finding: the cost model does not fit. It misses a step by 56\u00a0% in the median; at most 30\u00a0% is "
    )
    for error, begins in ((0.56, unfit), (0.3, "A chunk")):
        cost = compared.cost_before.model_copy(update={"median_error": error})
        assert frames.sentence(compared.model_copy(update={"cost_before": cost})).startswith(begins)


def test_steps_beyond_the_fit_are_told_in_words_for_each_run(compared: WhatifResult) -> None:
    beyond = {
        "steps": 690,
        "steps_outside": 7,
        "share_outside": 0.01,
        "most_outside": "decode_context",
        "most_asked": 1_249,
        "most_fitted": 1_190,
    }
    result = compared.model_copy(update={"cost_after": compared.cost_after.model_copy(update=beyond)})
    assert frames.cost_notes(result)[-1] == (
        "After: 7 of 690 steps (1\u00a0% of the time) are beyond what the cost model was fitted on; most of them by "
        "K/V tokens that decode rows read: up to 1\u202f249, fitted up to 1\u202f190."
    )


@pytest.mark.parametrize(
    ("values", "ticks"),
    [
        ([0.21, 0.49], [0.2, 0.5]),
        ([0.3], [0.2, 0.5]),
        ([0.2, 0.2], [0.1, 0.2, 0.5]),
        ([0.009, 0.11], [0.005, 0.01, 0.02, 0.05, 0.1, 0.2]),
        ([], [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0]),
    ],
)
def test_a_log_axis_of_times_has_ticks_on_both_sides_of_its_values(values: list[float], ticks: list[float]) -> None:
    assert charts_whatif.ticks(pd.Series(values, dtype=float)) == ticks
