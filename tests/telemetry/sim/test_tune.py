"""Tune finds what is better by construction, says how sure that is, and says nothing where nothing is better."""

from __future__ import annotations

import json
import random
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import EngineConfig
from telemetry.cli import main
from telemetry.settings import UsageError
from telemetry.sim.measure import Served
from telemetry.sim.objectives import FRONT, THROUGHPUT, dominates, limits_of, objective_of, score
from telemetry.sim.search import Search, Tried, neighbours
from telemetry.sim.space import Dimension, Space, space_of
from telemetry.sim.tune import Bench, luck_of
from telemetry.sim.tune_result import TuneResult
from tests.telemetry.sim.recordings import config_of, cost_file, record


def tune(capsys: pytest.CaptureFixture[str], journal: Path, *words: str) -> TuneResult:
    assert main(["tune", str(journal), "--json", "--resamples", "60", *words]) == 0
    return TuneResult.model_validate_json(capsys.readouterr().out)


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["tune", *words]) == 2
    return capsys.readouterr().err


@pytest.fixture
def long_beside_decodes(tmp_path: Path) -> Path:
    """Prompts of up to 1,500 tokens, whole, at 50 µs a token, come while others decode at 4 ms a step."""
    config = config_of(num_pages=2_000, chunked_prefill_size=2_048)
    return record(tmp_path, config, requests=20, gap_ms=60.0, prompts=(40, 1_500), outputs=(20, 40), ends_early=False)


def test_it_finds_the_chunk_that_shortens_gaps(
    long_beside_decodes: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ("--vary", "chunked_prefill_size=128,512", "--objective", "tbt_p99", "--cost", cost_file(tmp_path))
    result = tune(capsys, long_beside_decodes, *words)
    assert (result.ended_by, result.tried, result.space) == ("space", 3, 3)
    assert result.verdict == "gain"
    assert result.recommended == {"scheduler.chunked_prefill_size": "128"}
    assert result.command == "admitscope serve --scheduler.chunked-prefill-size 128"
    assert 0 < (result.gain_low or 0) <= (result.gain or 0) <= (result.gain_high or 0)
    assert result.sentence.startswith("Set chunked_prefill_size=128 (now 2048): TBT p99 goes from ")
    # The planted costs are the recorded ones: the simulator has no error to speak of.
    assert abs(result.simulator_error or 0) < 1e-3
    assert "less than this change" in result.sentence
    assert result.violations == 0


def test_a_limit_bars_what_would_have_won(
    long_beside_decodes: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["--vary", "chunked_prefill_size=128,512", "--objective", "tbt_p99", "--cost", cost_file(tmp_path)]
    free = {one.trial: one for one in tune(capsys, long_beside_decodes, *words).candidates}
    smallest = next(one for one in free.values() if one.settings.get("scheduler.chunked_prefill_size") == "128")
    limit = (smallest.ttft_p99 or 0) * 0.999
    result = tune(capsys, long_beside_decodes, *words, "--at-most", f"ttft_p99={limit:.6f}")
    barred = next(one for one in result.candidates if one.settings == smallest.settings)
    assert barred.why_not.startswith("exceeds the limit: TTFT p99 at most ")
    assert result.recommended != smallest.settings


def test_nothing_better_keeps_what_there_is(
    long_beside_decodes: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ("--vary", "schedule_conservativeness=0.9,1.0", "--cost", cost_file(tmp_path))
    result = tune(capsys, long_beside_decodes, *words)
    assert result.verdict == "none"
    assert result.recommended == {}
    assert result.command == ""
    assert result.sentence.startswith(
        "Keep the present configuration: of 2 that were tried, none has a better TTFT p99"
    )


def test_the_same_seed_searches_the_same_way_and_another_one_otherwise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    journal = record(tmp_path, config_of(), requests=8)
    words = ("--trials", "14", "--cost", cost_file(tmp_path))
    found = []
    for seed in ("1", "1", "2"):
        result = tune(capsys, journal, *words, "--seed", seed)
        found.append([(one.trial, one.settings) for one in result.candidates])
        assert result.ended_by == "trials"
        assert 14 <= result.tried <= 14 + len(result.varied)
    assert found[0] == found[1] != found[2]


def test_sizes_that_were_never_measured_are_not_searched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    journal = record(tmp_path, config_of(), requests=20)
    result = tune(capsys, journal, "--trials", "3")
    assert max(map(int, result.varied["scheduler.chunked_prefill_size"])) == 96
    assert any(note.startswith("scheduler.chunked_prefill_size above 96 is not searched") for note in result.notes)
    assert result.model_checks


def test_a_trace_has_no_recorded_times_to_be_held_against(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--cost", "h200-8b", "--limit", "25", "--vary", "enable_mixed_chunk", "--objective", "tbt_p99")
    result = tune(capsys, Path("mooncake"), *words)
    assert result.model_checks == ()
    assert result.simulator_error is None
    assert "the simulator's error is not known" in result.sentence or result.verdict in {"none", "unclear"}
    # Without mixed steps decodes wait for whole queues of prompts: rare, so the percentile of gaps does not show it.
    by = {one.settings.get("scheduler.enable_mixed_chunk", "true"): one for one in result.candidates}
    assert (by["false"].longest_gap_p99 or 0) > (by["true"].longest_gap_p99 or 0)


def test_the_terminal_gets_a_sentence_tables_and_a_picture(
    long_beside_decodes: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    picture = tmp_path / "pictures" / "front.svg"
    words = ["--vary", "chunked_prefill_size=128", "--objective", "tbt_p99", "--plot", str(picture)]
    assert main(["tune", str(long_beside_decodes), *words, "--at-most", "ttft_p99=9x"]) == 0
    out = capsys.readouterr().out
    assert "after: chunked_prefill_size=128" in out
    assert "the baseline" in out
    assert "limit: TTFT p99 at most " in out
    words = list(ElementTree.fromstring(picture.read_text("utf-8")).itertext())
    assert {"TTFT p99 (s)", "TBT p99 (s)", "baseline"} <= set(words)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--objective", "tbt_p98"], "--objective tbt_p98: no such objective (did you mean tbt_p99?)"),
        (["--at-most", "throughput=3"], "throughput is not a time of a run"),
        (["--at-most", "tbt_p99=0"], "0 is no time; above 0 to 1,000,000"),
        (["--at-most", "tbt_p99"], "must look like measure=time"),
        (["--vary", "chunk=3"], "--vary chunk: no such setting"),
        (["--vary", "chunked_prefill_size=64,-1"], "greater than or equal to 1; got '-1'"),
        (["--vary", "chunked_prefill_size=64", "--vary", "chunked_prefill_size=32"], "is given twice"),
        (["--vary", "kv_accounting"], "name its values"),
        (["--vary", "memory_mib=64,128"], "vary cache.num_pages"),
        (["--vary", "schedule_policy=lpm"], "lpm is the only value there is to try"),
        (["--trials", "1"], "greater than or equal to 2"),
        (["--timeout-s", "0"], "greater than 0"),
        (["--rate", "3", "--concurrency", "2"], "contradict each other"),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    journal = record(tmp_path, config_of(), requests=2)
    assert said in refused(capsys, str(journal), "--cost", cost_file(tmp_path), *words)


def test_time_that_is_over_before_the_baseline_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, "mooncake", "--cost", "h200-8b", "--limit", "60", "--timeout-s", "0.001")
    assert "--timeout-s 0.001 was over before the baseline was simulated" in said


def _tried(number: int, place: tuple[int, ...], **figures: float) -> Tried:
    known = {"ttft_p99": 1.0, "tbt_p99": 1.0, THROUGHPUT: 1.0, **figures}
    return Tried(number, place, {"a": str(place)} if number else {}, known, 0.0, 0, {})


def _search(values: int, figure_of: list[dict[str, float]], *, trials: int = 50, base: int = 0) -> Search:
    space = Space((Dimension("a", tuple(map(str, range(values))), base, is_ordered=True),), ())

    def run(number: int, place: tuple[int, ...], _: dict[str, str]) -> Tried:
        return _tried(number, place, **figure_of[place[0]])

    return Search(space, run, objective="ttft_p99", limits=(), trials=trials, seed=0)


def test_of_equals_in_the_objective_the_one_that_is_better_otherwise_wins() -> None:
    search = _search(3, [{}, {"ttft_p99": 0.5}, {"ttft_p99": 0.502, "tbt_p99": 0.2}])
    search.run()
    assert search.best().place == (2,)


def test_a_needless_change_is_left_out() -> None:
    space = Space(tuple(Dimension(name, ("0", "1"), 0, is_ordered=False) for name in "ab"), ())

    def run(number: int, place: tuple[int, ...], _: dict[str, str]) -> Tried:
        return _tried(number, place, ttft_p99=0.5 - 0.0005 * place[1] if place[0] else 1.0 - 0.0005 * place[1])

    search = Search(space, run, objective="ttft_p99", limits=(), trials=10, seed=0)
    search.run()
    assert search.best().place == (1, 1)
    assert search.simpler().place == (1, 0)


def test_the_last_quarter_of_the_trials_walks_from_the_best_to_the_top() -> None:
    space = Space(tuple(Dimension(name, tuple(map(str, range(20))), 0, is_ordered=True) for name in "ab"), ())

    def run(number: int, place: tuple[int, ...], _: dict[str, str]) -> Tried:
        return _tried(number, place, ttft_p99=1.0 + abs(place[0] - 13) + abs(place[1] - 17))

    search = Search(space, run, objective="ttft_p99", limits=(), trials=60, seed=5)
    search.run()
    assert search.best().place == (13, 17)
    assert len(search.tried) == 60


_FIGURES = st.fixed_dictionaries({name: st.sampled_from([0.5, 1.0, 2.0]) for name in FRONT})


@given(st.lists(_FIGURES, min_size=1, max_size=6))
@settings(max_examples=60, deadline=None)
def test_the_front_is_what_nothing_betters(figures: list[dict[str, float]]) -> None:
    search = _search(len(figures), figures)
    search.run()
    front = search.front()
    assert front
    for place, one in search.tried.items():
        beaten = any(
            all(
                (other.figures[name] or 0) >= (one.figures[name] or 0)
                if name == THROUGHPUT
                else (other.figures[name] or 0) <= (one.figures[name] or 0)
                for name in FRONT
            )
            and other.figures != one.figures
            for other in search.tried.values()
        )
        assert (place not in front) == beaten


@given(_FIGURES, _FIGURES)
def test_what_dominates_scores_better_for_every_objective_of_the_front(
    one: dict[str, float], other: dict[str, float]
) -> None:
    base = dict.fromkeys(FRONT, 1.0)
    if dominates(one, other):
        assert all(score(name, one, base) < score(name, other, base) for name in FRONT)


@given(st.integers(1, 20_000), st.integers(1, 512), st.sampled_from([1, 16, 64]))
@settings(max_examples=60, deadline=None)
def test_the_usual_space_holds_the_baseline_and_only_what_can_be(chunk: int, rows: int, page: int) -> None:
    config = EngineConfig.model_validate(
        {
            "scheduler": {"chunked_prefill_size": chunk * page, "max_running_requests": rows},
            "cache": {"page_size": page},
        }
    )
    space = space_of((), config, {})
    for dimension in space.dimensions:
        section, _, field = dimension.name.partition(".")
        own = getattr(getattr(config, section), field)
        assert str(getattr(own, "value", own)).lower() == dimension.values[dimension.base] or float(own) == float(
            dimension.values[dimension.base]
        )
        assert len(set(dimension.values)) == len(dimension.values) > 1


def test_neighbours_change_one_setting_by_one_step() -> None:
    dimensions = (Dimension("a", ("1", "2", "4"), 0, is_ordered=True), Dimension("b", ("x", "y"), 0, is_ordered=False))
    assert list(neighbours((1, 0), dimensions)) == [(0, 0), (2, 0), (1, 1)]


def test_limits_and_objectives_are_read_as_written() -> None:
    assert [limit.most({"tbt_p99": 0.2}) for limit in limits_of(["tbt-p99=250ms", "tbt_p99=.3", "tbt_p99=1.5x"])] == [
        0.25,
        0.3,
        pytest.approx(0.3),
    ]
    assert objective_of("TTFT-P99") == "ttft_p99"
    with pytest.raises(UsageError, match="longest_gap_p99: no such objective"):
        objective_of("longest_gap_p99")


def test_the_best_of_many_equals_is_all_luck() -> None:
    """Runs that differ by chance alone: whoever wins, wins by chance, and the estimate says by about how much."""
    import numpy as np

    rng = np.random.default_rng(4)

    def served(times: list[float]) -> dict[str, Served]:
        found = {}
        for index, seconds in enumerate(times):
            one = Served.__new__(Served)
            one.rid, one.ttft_ns, one.is_whole = f"r{index}", round(seconds * 1e9), True
            found[one.rid] = one
        return found

    runs = [_tried(number, (number,)) for number in range(8)]
    for run in runs:
        run.served = served(rng.exponential(1.0, 60).tolist())
    lucky = luck_of(runs, runs[0], "ttft_p50", seed=1)
    for run in runs[1:]:
        run.served = runs[0].served
    same = luck_of(runs, runs[0], "ttft_p50", seed=1)
    assert (lucky or 0) > 0.02
    assert same == 0.0


def test_progress_lines_go_up_to_the_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    journal = record(tmp_path, config_of(), requests=8)
    words = ["--vary", "schedule_policy", "--cost", cost_file(tmp_path), "--progress-lines", "--json"]
    assert main(["tune", str(journal), *words]) == 0
    captured = capsys.readouterr()
    json.loads(captured.out)
    assert all(line.startswith("progress ") for line in captured.err.splitlines())


def _shaken(journal: Path, to: Path) -> Path:
    """The same run with steps that took, at random, up to fifty times as long: no cost model predicts them."""
    rng, rows = random.Random(4), []
    for line in journal.read_text(encoding="utf-8").splitlines():
        if line.startswith('{"type":"StepCompleted"'):
            event = json.loads(line)
            event["times"]["launched_ns"] = event["times"]["ready_ns"] - rng.choice((1_000, 400_000, 50_000_000))
            line = json.dumps(event, separators=(",", ":"))  # noqa: PLW2901 - altered or as it was
        rows.append(line + "\n")
    to.write_text("".join(rows), encoding="utf-8")
    return to


def test_a_cost_model_that_does_not_fit_recommends_nothing(
    long_beside_decodes: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    shaken = _shaken(long_beside_decodes, tmp_path / "shaken.jsonl")
    result = tune(capsys, shaken, "--vary", "chunked_prefill_size=128,2048", "--objective", "tbt_p99")
    assert result.verdict == "unfit"
    assert result.sentence.startswith("No recommendation: the cost model does not fit (median error of a step ")
    assert (result.recommended, result.command) == ({}, "")


def test_an_interrupted_search_says_what_it_tried(
    long_beside_decodes: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = Bench.try_one

    def interrupted(self: Bench, number: int, place: tuple[int, ...], settings: dict[str, str]) -> Tried:
        if number == 2:
            raise KeyboardInterrupt
        return ran(self, number, place, settings)

    monkeypatch.setattr(Bench, "try_one", interrupted)
    words = ("--vary", "chunked_prefill_size=64,128,2048", "--objective", "tbt_p99")
    assert main(["tune", str(long_beside_decodes), *words]) == 130
    said = capsys.readouterr().err
    assert "stopped after 2 configurations; the best of them so far is chunked_prefill_size=" in said
    assert "so it is no recommendation" in said
