"""What-if finds the configuration that is better by construction, and its numbers are what they say."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from telemetry.check import check
from telemetry.cli import main
from telemetry.sim.bootstrap import Values
from telemetry.sim.journal_workload import recorded_of
from telemetry.sim.run import config_notes
from telemetry.sim.whatif import recorded_run
from telemetry.sim.whatif_figures import with_errors
from telemetry.sim.whatif_result import Compared, Interval, ModelCheck, Setting, WhatifResult
from telemetry.sim.whatif_words import sentence_of
from tests.telemetry.sim.recordings import config_of, cost_file, record


def whatif(capsys: pytest.CaptureFixture[str], journal: Path, *words: str) -> WhatifResult:
    assert main(["whatif", str(journal), "--json", "--resamples", "60", *words]) == 0
    return WhatifResult.model_validate_json(capsys.readouterr().out)


def row(result: WhatifResult, name: str) -> Compared:
    return next(one for one in result.compared if one.name == name)


@pytest.fixture
def long_beside_decodes(tmp_path: Path) -> Path:
    """Prompts of up to 1,500 tokens, whole, at 50 µs a token, come while others decode at 4 ms a step."""
    config = config_of(num_pages=2_000, chunked_prefill_size=2_048)
    return record(tmp_path, config, requests=40, gap_ms=60.0, prompts=(40, 1_500), outputs=(30, 60), ends_early=False)


def test_a_smaller_chunk_shortens_the_gaps_that_long_prompts_make(
    long_beside_decodes: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = whatif(capsys, long_beside_decodes, "--set", "chunked_prefill_size=128")
    gaps = row(result, "tbt_p99")
    assert gaps.is_clear
    # 4 ms and the decodes beside 128 tokens of 50 µs, against up to 1,500 of them.
    assert (gaps.after.value or 0) < 0.03 < 0.05 < (gaps.before.value or 0)
    assert (gaps.difference.high or 0) < 0
    assert result.sentence.startswith("A chunk of 128 instead of 2,048 would take TBT p99 from ")
    assert result.reasons_after["admitted_next_chunk"] > result.reasons_before.get("admitted_next_chunk", 0)
    first = result.first_difference
    assert first is not None
    assert (first.before.reason, first.after.reason) == ("admitted_whole", "admitted_first_chunk")
    assert first.after.selected_extend == 128
    assert result.violations == 0


def test_the_baseline_is_the_recorded_run_where_costs_are_known(
    long_beside_decodes: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    result = whatif(capsys, long_beside_decodes, "--set", "chunked_prefill_size=512", "--cost", cost_file(tmp_path))
    assert all(abs(one.error or 0) < 1e-3 for one in result.model_checks)
    assert (result.model_error or 0) < 1e-3


def test_no_change_is_no_difference(long_beside_decodes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--set", "max_prefill_tokens=100000", "--set", "chunked_prefill_size=2048")
    result = whatif(capsys, long_beside_decodes, *words)
    assert [one.name for one in result.settings] == ["scheduler.max_prefill_tokens"]
    assert "--set scheduler.chunked_prefill_size=2048: the recorded run has this value" in result.notes
    assert result.first_difference is None
    assert {one.difference.value for one in result.compared} == {0.0}
    assert not any(one.is_clear for one in result.compared)
    assert (result.faster, result.slower) == (0.0, 0.0)


def test_a_larger_pool_ends_retractions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = config_of(num_pages=45, schedule_conservativeness=0.01, clip_max_new_tokens=1)
    journal = record(tmp_path, config, gap_ms=4.0, prompts=(20, 120), outputs=(60, 120), ends_early=False)
    result = whatif(capsys, journal, "--set", "num_pages=900")
    retractions = row(result, "retractions")
    assert (retractions.before.value or 0) > 0
    assert retractions.after.value == 0
    assert (result.slower or 0) < 0.2 < (result.faster or 0)
    assert (row(result, "ttft_p90").difference.value or 0) < 0


@pytest.mark.parametrize("page_size", [8, 32, 24])
def test_pages_of_another_size_hold_as_many_tokens_and_still_share(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], page_size: int
) -> None:
    journal = record(tmp_path, config_of(), gap_ms=20.0)
    result = whatif(capsys, journal, "--set", f"page_size={page_size}", "--write-journals", str(tmp_path / "out"))
    rate = row(result, "cache_hit_rate")
    assert (rate.before.value or 0) > 0.05
    assert (rate.after.value or 0) == pytest.approx(rate.before.value or 0, abs=0.06)
    assert result.journal_after is not None
    assert check(Path(result.journal_after)).exit_code == 0
    started = json.loads(Path(result.journal_after).read_text().splitlines()[1])
    assert started["num_pages"] * page_size == pytest.approx(200 * 16, abs=page_size)


def test_fairness_covers_every_compared_request(long_beside_decodes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = whatif(capsys, long_beside_decodes, "--set", "schedule_policy=fcfs")
    assert sum(one.requests for one in result.fairness) == result.requests == len(result.pairs) == 40
    edges = [(one.prompt_from, one.prompt_to) for one in result.fairness]
    assert all(first <= last for first, last in edges)
    assert all(one[1] < other[0] for one, other in itertools.pairwise(edges))


def test_limit_takes_the_first_requests(long_beside_decodes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = whatif(capsys, long_beside_decodes, "--set", "chunked_prefill_size=512", "--limit", "10")
    assert {one.rid for one in result.pairs} == {f"r{number}" for number in range(10)}


def test_requests_that_the_record_cuts_off_are_in_neither_table(
    long_beside_decodes: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    lines = long_beside_decodes.read_text(encoding="utf-8").splitlines(keepends=True)
    torn = tmp_path / "torn.jsonl"
    torn.write_text("".join(lines[: len(lines) // 2]), encoding="utf-8")
    arrived = sum('"type":"RequestArrived"' in line for line in lines[: len(lines) // 2])
    result = whatif(capsys, torn, "--set", "chunked_prefill_size=512", "--cost", cost_file(tmp_path))
    assert result.unfinished > 0
    assert result.left_out == result.unfinished
    assert result.requests == arrived - result.unfinished
    happened, _ = recorded_run(torn)
    assert {one.rid for one in result.pairs} == {rid for rid, one in happened.items() if one.is_whole}
    # Both tables are of the same requests: the recorded run, simulated, is the side before.
    simulated = {one.name: one.simulated for one in result.model_checks}
    assert simulated == {name: row(result, name).before.value for name in simulated}


@pytest.mark.parametrize("window", [("--from-s", "0.5"), ("--to-s", "1.5"), ("--limit", "20")])
def test_a_part_of_a_run_has_no_recorded_times_to_be_held_against(
    long_beside_decodes: Path, capsys: pytest.CaptureFixture[str], window: tuple[str, str]
) -> None:
    result = whatif(capsys, long_beside_decodes, "--set", "chunked_prefill_size=512", *window)
    assert (result.model_checks, result.model_error) == ((), None)
    assert {one.is_within_error for one in result.compared} == {None}
    assert any("the simulator's error is not known here" in note for note in result.notes)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=40), st.sampled_from([0.0, 0.5, 0.9, 1.0]), st.data())
def test_a_weighted_quantile_is_that_of_the_values_repeated(values: list[float], share: float, data: Any) -> None:
    weights = data.draw(st.lists(st.integers(0, 3), min_size=len(values), max_size=len(values)).filter(any))
    repeated = np.repeat(values, weights)
    found = Values(values).quantile(np.array(weights, dtype=float), share)
    assert found == pytest.approx(np.quantile(repeated, share, method="inverted_cdf"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--set", "chunk_size=1"], "--set chunk_size: no such setting"),
        (
            ["--set", "chunked_prefill_size=ten"],
            "--set scheduler.chunked_prefill_size: Input should be a valid integer",
        ),
        (["--set", "chunked_prefill_size=4"], "scheduler.chunked_prefill_size=4 is below cache.page_size=16"),
        (["--set", "page_size"], "must look like name=value"),
        (["--set", "page_size=8", "--set", "cache.page-size=4"], "cache.page_size is given twice"),
        (["--set", "executor.device=cpu"], "decides nothing in a simulation"),
        (["--set", "memory_mib=9"], "has no effect while cache.num_pages is 200"),
        ([], "nothing to compare"),
        (
            ["--set", "page_size=16", "--set", "num_pages=200"],
            "--set cache.num_pages=200: the recorded run has this value\nadmitscope: nothing would be changed",
        ),
    ],
)
def test_a_setting_that_cannot_be_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    journal = record(tmp_path, config_of(), requests=3)
    assert main(["whatif", str(journal), *words]) == 2
    assert said in capsys.readouterr().err


def test_the_tables_say_what_was_found(long_beside_decodes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["whatif", str(long_beside_decodes), "--set", "chunked_prefill_size=128", "--resamples", "60"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "40 requests compared in pairs, 0 left out" in said
    assert "they part in step" in said
    assert "its error on" in said


def figure(*, low: float, high: float, recorded: float) -> Compared:
    """TBT p99 from 0.400 s to 0.330 s in the simulator, beside what was recorded."""
    spread = Interval(value=-0.07, low=low, high=high)
    bare = Compared(
        name="tbt_p99",
        unit="s",
        before=Interval(value=0.4, low=0.3, high=0.5),
        after=Interval(value=0.33, low=0.3, high=0.5),
        difference=spread,
        is_clear=high < 0,
        model_error=None,
        is_within_error=None,
    )
    check = ModelCheck(name="tbt_p99", recorded=recorded, simulated=0.4, error=round(0.4 / recorded - 1, 4))
    return with_errors([bare], [check])[0]


@pytest.mark.parametrize(
    ("low", "recorded", "within", "said"),
    [
        (-0.08, 0.9, True, "; take the direction, not the number: the simulator is off by 56% here, more than this"),
        (0.02, 0.9, True, "; no finding: the simulator is off by 56% here, more than this change)"),
        (-0.08, 0.41, False, "(difference -80 ms to -60 ms)."),
        (0.02, 0.41, False, ", so no clear difference)"),
    ],
)
def test_a_change_smaller_than_the_error_of_the_simulator_is_told_as_no_number(
    low: float, recorded: float, within: bool, said: str
) -> None:
    one = figure(low=min(low, -0.08), high=max(low, -0.06), recorded=recorded)
    assert one.is_within_error is within
    sentence = sentence_of((Setting(name="scheduler.chunked_prefill_size", before="96", after="32"),), (one,))
    assert said in sentence
    assert sentence.endswith("Intervals are of requests under the simulator, without its error.")


def test_a_cost_model_that_does_not_fit_is_told_before_any_number() -> None:
    settings = (Setting(name="scheduler.chunked_prefill_size", before="96", after="32"),)
    misfit = "the cost model does not fit (median error of a step 56% …)"
    sentence = sentence_of(settings, (figure(low=-0.08, high=-0.06, recorded=0.41),), misfit=misfit)
    assert sentence.startswith(f"No finding: {misfit}. A chunk of 32 instead of 96 would take ")


def test_a_figure_that_was_not_recorded_has_no_error(
    long_beside_decodes: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """With the costs of the recording the simulator is right, and every change is larger than its error."""
    result = whatif(capsys, long_beside_decodes, "--set", "chunked_prefill_size=128", "--cost", cost_file(tmp_path))
    assert row(result, "tbt_p99").is_within_error is False
    assert row(result, "steps").model_error is row(result, "steps").is_within_error is None


def test_what_the_simulated_engine_does_otherwise_is_noted(tmp_path: Path) -> None:
    recorded = recorded_of(record(tmp_path, config_of(), requests=4))
    assert config_notes(recorded.config, recorded) == []
    smaller = recorded.config.model_copy(update={"cache": recorded.config.cache.model_copy(update={"page_size": 1})})
    assert "whole pages of 16 tokens" in config_notes(smaller, recorded)[0]
    overlapping = recorded.config.executor.model_copy(update={"overlap": True})
    overlapped = msgspec.structs.replace(recorded, config=recorded.config.model_copy(update={"executor": overlapping}))
    assert "simulated ones follow one another" in config_notes(overlapped.config, overlapped)[0]
