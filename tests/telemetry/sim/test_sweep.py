"""A sweep is one simulation per load, says up to which of them limits are kept, and refuses what is no sweep."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from engine.events import RequestArrived, StepCompleted
from engine.scheduler.plan import StepKind, StepTimes
from telemetry.cli import main
from telemetry.sim.objectives import limits_of
from telemetry.sim.results import SimResult
from telemetry.sim.sweep import Point, SweepResult, _kept_to, _Queue, amount, sentence_of
from tests.telemetry.sim.recordings import config_of, cost_file, record

TRACE = ("azure-conv", "--limit", "60", "--cost", "h200-8b")


def sweep(capsys: pytest.CaptureFixture[str], *words: str) -> SweepResult:
    assert main(["sweep", *words, "--json"]) == 0
    return SweepResult.model_validate_json(capsys.readouterr().out)


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["sweep", *words]) == 2
    return capsys.readouterr().err


def point(load: float, ttft_p99: float, *exceeded: str) -> Point:
    names = (name for name, field in Point.model_fields.items() if field.is_required())
    return Point.model_validate(
        {**dict.fromkeys(names, 0), "served": 1, "load": load, "ttft_p99": ttft_p99, "exceeded": exceeded}
    )


def test_each_load_is_the_simulation_of_that_load(capsys: pytest.CaptureFixture[str]) -> None:
    result = sweep(capsys, *TRACE, "--rate", "64,4", "--seed", "7")
    assert (result.by, [one.load for one in result.points], result.requests) == ("rate", [4, 64], 60)
    for one in result.points:
        assert main(["sim", *TRACE, "--rate", f"{one.load:g}", "--seed", "7", "--json"]) == 0
        alone = SimResult.model_validate_json(capsys.readouterr().out)
        assert (one.served, one.throughput, one.retractions) == (alone.served, alone.tokens_per_s, alone.retractions)
        assert one.ttft_p99 == pytest.approx(alone.ttft.p99, rel=0.01), "kept in bins of one percent there"
        assert one.served_per_s == pytest.approx(alone.served / alone.duration_s, rel=1e-3)
        assert one.cache_hit_rate == alone.cache_hit_rate
    low, high = result.points
    assert (low.offered_per_s or 0) * 16 == pytest.approx(high.offered_per_s, rel=0.01), "the same gaps, shorter"
    assert low.waiting_mean < 1 < high.waiting_mean <= high.waiting_most
    assert result.violations == 0


def test_it_says_up_to_which_load_a_limit_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    free = sweep(capsys, *TRACE, "--rate", "2,8,64")
    assert free.kept_to is None
    assert free.sentence.startswith("From 2 to 64 requests a second, TTFT p50 goes from ")
    between = ((free.points[1].ttft_p99 or 0) + (free.points[2].ttft_p99 or 0)) / 2
    result = sweep(capsys, *TRACE, "--rate", "2,8,64", "--at-most", f"ttft_p99={between:.4f}")
    assert (result.kept_to, [one.exceeded for one in result.points]) == (8, [(), (), ("ttft_p99",)])
    assert result.sentence.startswith("Up to 8 requests a second it keeps TTFT p99 at most ")


def test_a_limit_may_be_a_multiple_of_the_lowest_load(capsys: pytest.CaptureFixture[str]) -> None:
    result = sweep(capsys, *TRACE, "--rate-scale", "1,60", "--at-most", "ttft_p50=1.5x")
    low, high = result.points
    assert (result.kept_to, high.exceeded) == (1, ("ttft_p50",))
    assert (high.ttft_p50 or 0) > 1.5 * (low.ttft_p50 or 0)


def azure(folder: Path, *lengths: tuple[int, int]) -> str:
    """A trace of requests that all come at once."""
    rows = (f"2023-11-16 18:15:46.6805900,{prompt},{output}\n" for prompt, output in lengths)
    file = folder / "trace.csv"
    file.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(rows), encoding="utf-8")
    return str(file)


def test_a_load_keeps_a_limit_that_is_its_own_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rounded to four digits, the lowest load's time would be below what the next one, its equal, measures."""
    words = ("--cost", "h200-8b", "--rate-scale", "2,400", "--at-most", "ttft_p99=1x", "--at-most", "tbt_p99=1x")
    result = sweep(capsys, azure(tmp_path, (374, 1), (396, 1)), *words)
    assert (result.kept_to, [one.exceeded for one in result.points]) == (400, [(), ()])
    assert result.limits == ("TTFT p99 at most 33.33 ms",), "answers of one token have no time between tokens"
    assert result.notes[-1] == "--at-most tbt_p99=1x was not judged: no request has that time at the lowest load"
    assert result.sentence.startswith("It keeps TTFT p99 at most 33.33 ms at every load tried")


def test_where_nobody_is_served_no_limit_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--cost", "h200-8b", "--rate", "2,400", "--set", "num_pages=2", "--at-most", "ttft_p99=1s")
    result = sweep(capsys, azure(tmp_path, (37_400, 1)), *words)
    assert (result.kept_to, [one.refused for one in result.points]) == (None, [1, 1])
    assert result.sentence == "No request ended by itself at any of these loads: there is nothing to tell of them."


def test_loads_are_written_as_they_were_typed() -> None:
    assert amount("concurrency", 1_048_575) == "1048575 clients"
    assert amount("rate", 0.25) == "0.25 requests a second"
    assert amount("rate_scale", 1e-6) == "1e-06 times as fast as recorded"


def test_loads_between_which_it_is_not_smooth_are_told() -> None:
    limits = limits_of(["ttft_p99=1s"])
    points = [point(1, 0.5), point(2, 1.5, "ttft_p99"), point(4, 0.9)]
    assert _kept_to(points) == 1, "not 4: a load between exceeds it"
    assert sentence_of("concurrency", points, limits) == (
        "Up to 1 client it keeps TTFT p99 at most 1 s. At 2, TTFT p99 is 1.5 s. Kept again at 4: what is between them "
        "is not smooth."
    )
    assert sentence_of("rate", points[1:2], limits) == (
        "Not even at 2 requests a second does it keep TTFT p99 at most 1 s: there TTFT p99 is 1.5 s."
    )
    assert sentence_of("rate", points[:1], limits).endswith("at every load tried, up to 1 request a second.")


def test_a_recorded_run_is_swept_by_clients_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    journal = record(tmp_path, config_of(), requests=24)
    file = tmp_path / "load.svg"
    words = (str(journal), "--concurrency", "1", "--concurrency", "8", "--cost", cost_file(tmp_path))
    result = sweep(capsys, *words, "--plot", str(file))
    one, eight = result.points
    assert one.offered_per_s is None
    assert one.waiting_most <= 1, "a client alone waits for nobody"
    assert eight.served_per_s > one.served_per_s
    assert ElementTree.parse(file).getroot().tag.endswith("svg")


def test_the_queue_is_averaged_over_time() -> None:
    queue = _Queue()

    def arrives(at_ns: int) -> None:
        queue.emit(RequestArrived(0, 0, at_ns + 30, "r", 1, 1, 1, b"", None, False, None, None, at_ns))

    def completed(at_ns: int, waiting: int) -> None:
        queue.emit(StepCompleted(0, 0, at_ns, StepKind.DECODE, (), StepTimes(), False, (0, 0, 0, 0), waiting, 1))

    arrives(100)
    completed(100, 4)
    arrives(200)
    completed(150, 2)
    completed(300, 0)
    assert queue.mean(500) == (4 * 50 + 2 * 150) / 400
    assert (queue.most, queue.came, queue.offered_per_s) == (4, 2, 1e7)


def test_what_is_no_sweep_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--rate-scale or --rate or --concurrency: a sweep needs two values or more" in refused(capsys, *TRACE)
    assert "--rate: a sweep needs two values or more, as in --rate 1,2,4" in refused(capsys, *TRACE, "--rate", "2,2")
    assert "--rate and --concurrency contradict" in refused(capsys, *TRACE, "--rate", "1,2", "--concurrency", "1,2")
    for word in ("-1", "0", "nan", "inf", "x", "1e7", "0x2"):
        said = refused(capsys, *TRACE, "--rate", f"2,{word}")
        assert f"--rate {word}: each load is a number above 0, at most 1,000,000" in said
    assert "--rate without a value: each load" in refused(capsys, *TRACE, "--rate", "2,,3")
    assert "--concurrency 1.5: each load is a whole number" in refused(capsys, *TRACE, "--concurrency", "1.5,2")
    assert "sweep.rate: Missing end delimiter" in refused(capsys, *TRACE, "--rate", "[1", "--rate", "2")
    many = ",".join(map(str, range(1, 70)))
    assert "69 values are too many; at most 64" in refused(capsys, *TRACE, "--concurrency", many)
    assert "--at-most e2e: must look like" in refused(capsys, *TRACE, "--rate", "1,2", "--at-most", "e2e")
    assert "no such file" in refused(capsys, "nowhere.jsonl", "--rate", "1,2")
