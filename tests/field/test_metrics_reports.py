"""Reported faults of numbers: FR-27, 29, 31, 32, 33, 36, on the text of /metrics and the read API of real runs.

More of them: tests/telemetry/test_metrics.py, test_read_model.py; over HTTP: test_outcome_reports.py.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from engine.clock import VirtualClock
from engine.events import AdmissionDecided, FanOut, RecordingSink, RequestTransitioned, StepPlanned
from engine.scheduler.decision import ADMITTED
from telemetry.buffered import BufferedSink
from telemetry.exposition import Exposition
from telemetry.isolation import IsolatedSink
from telemetry.journal import JournalSink
from telemetry.metric_books import Books
from telemetry.metric_catalog import CATALOG, Metric
from telemetry.metrics import MetricsSink
from tests.builders import engine_config
from tests.engine.stub_model import StubRun
from tests.field.test_admission_reports import prompt
from tests.telemetry.live_run import MS, TimedRun
from tests.telemetry.test_metrics import Samples, Scraped
from tests.telemetry.test_read_model import Watched

BY_NAME = {metric.name: metric for metric in CATALOG}


@pytest.mark.parametrize("chunk", [None, 64])
@pytest.mark.parametrize("mixed", [True, False])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("accounting", ["reference", "exact"])
def test_fr_27_twenty_refusals_add_no_hit(page_size: int, mixed: bool, chunk: int | None, accounting: str) -> None:
    """Nothing is counted while the request waits; then 80 prompt tokens, 64 of them cached, once; attempts apart."""
    scraped = Scraped(
        engine_config(
            page_size=page_size,
            num_pages=192 // page_size,
            enable_mixed_chunk=mixed,
            chunked_prefill_size=chunk,
            kv_accounting=accounting,
        )
    )
    run = scraped.run
    shared = list(range(64))
    run.add("first", shared, 1)
    run.finish_all()
    run.add("holder", 60, 40, ignore_eos=True)
    run.timed_step()
    before = scraped.scrape()
    run.add("waits", shared + list(range(500, 516)), 30, ignore_eos=True)
    run.add("held", 20, 90, ignore_eos=True)
    for _ in range(20):
        run.timed_step()
    during = scraped.scrape()
    prompt_tokens = [key for key in during if key[0] == "prompt_tokens_total"]
    attempts = [key for key in during if key[0] == "admissions_total"]
    admitted = {event.rid for event in run.recorded.events if isinstance(event, AdmissionDecided) and _admits(event)}
    assert "held" not in admitted, "the scenario must refuse"
    waited = {"waits", "held"} - admitted
    if waited == {"waits", "held"}:
        assert all(during[key] == before[key] for key in prompt_tokens)
    assert sum(during[key] - before[key] for key in attempts) >= 1
    run.finish_all()
    after = scraped.scrape()
    source = {key[1][0][1]: after[key] - before[key] for key in prompt_tokens}
    assert source == {"cached": 64, "computed": 16 + 20}
    selected = {key[1][0][1]: after[key] for key in after if key[0] == "selected_tokens_total"}
    assert selected["cached"] == 64


def _admits(event: AdmissionDecided) -> bool:
    return event.reason in ADMITTED


def test_fr_29_faults_inside_telemetry_cost_no_request_and_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A counter moved by -5, a sink that raises on every fifth event, a journal on a full disk: all requests end."""

    class Raising:
        def __init__(self) -> None:
            self.seen = 0

        def emit(self, event: object) -> None:
            self.seen += 1
            if self.seen % 5 == 0:
                raise ValueError("a label value")

    clock = VirtualClock()
    metrics = MetricsSink(clock=clock)
    spans = IsolatedSink(Raising(), "spans")
    journal = BufferedSink(JournalSink(Path("/dev/full")), "journal", period_s=0.001)
    exposition = Exposition(metrics, sinks=lambda: (spans.stats(), journal.stats()))
    honest = Books.add

    def negative(self: Books, cell: int, amount: int) -> None:
        honest(self, cell, -5 if cell == self.at.get(("prompt_tokens_total", "computed")) else amount)

    monkeypatch.setattr(Books, "add", negative)
    run = StubRun(engine_config(num_pages=64), FanOut((IsolatedSink(metrics, "metrics"), spans, journal)))
    with caplog.at_level(logging.ERROR, "admitscope.telemetry"):
        for number in range(6):
            run.add(f"r{number}", prompt(number, 30), 8)
        run.run()
        journal.close()
    assert all(run.end(f"r{number}") == ("length", "") for number in range(6))
    for rid in run.requests:
        run.assert_right_tokens(rid)
    run.assert_nothing_held()
    shown = _shown(exposition)
    assert shown['prompt_tokens_total{source="computed"}'] == 0, "a counter does not fall"
    assert shown["generation_tokens_total"] == 48, "the others go on"
    assert shown['telemetry_errors_total{component="metrics"}'] > 0
    assert shown['telemetry_errors_total{component="spans"}'] > 1
    assert shown['telemetry_errors_total{component="journal"}'] > 0
    lines = [record.getMessage() for record in caplog.records]
    assert len([line for line in lines if "spans" in line]) == 1, "one line for many faults"
    assert any("a label value" in line for line in lines)


def _shown(exposition: Exposition) -> dict[str, float]:
    lines = [line.removeprefix("admitscope_") for line in exposition.text().splitlines() if not line.startswith("#")]
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}


def quantile(metric: Metric, samples: Samples, q: float) -> float:
    """What Prometheus' histogram_quantile says."""
    cumulative = [
        (float(dict(labels)["le"]), count)
        for (name, labels), count in samples.items()
        if name == f"{metric.name}_bucket" and count >= 0
    ]
    cumulative.sort()
    total = cumulative[-1][1]
    lower, below = 0.0, 0.0
    for upper, count in cumulative:
        if count >= q * total and count > below:
            assert upper != float("inf"), f"{metric.name}: an observation beyond the last bound"
            return lower + (upper - lower) * (q * total - below) / (count - below)
        lower, below = upper, count
    raise AssertionError(metric.name)


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        pytest.param("step_seconds", 0.002, 0.002, id="step 2 ms"),
        pytest.param("plan_seconds", 50e-6, 50e-6, id="scheduling 50 us"),
        pytest.param("queue_time_seconds", 0.005, 900.0, id="queue 5 ms and 900 s"),
        pytest.param("time_to_first_token_seconds", 0.03, 200.0, id="TTFT 30 ms and 200 s"),
        pytest.param("inter_token_latency_seconds", 0.005, 10.0, id="ITL 5 ms and 10 s"),
        pytest.param("chunk_tokens", 100_000.0, 100_000.0, id="prompt of 100k tokens"),
    ],
)
def test_fr_31_quantiles_from_buckets_are_near_what_was_observed(name: str, low: float, high: float) -> None:
    """97 low and 3 high values: p50 and p99 from the exposed buckets err by less than 30 percent."""
    metric = BY_NAME[name]
    sink = MetricsSink(clock=VirtualClock())
    cell = sink._books.cell(name, metric.values[0])
    for value, times in ((low, 97), (high, 3)):
        sink._books.observe(cell, round(value * metric.scale), times)
    sink._publish(0)
    samples = Scraped.scrape(_Only(sink))
    if metric.label is not None:
        samples = {
            (sample, tuple(pair for pair in labels if pair[0] == "le")): count
            for (sample, labels), count in samples.items()
            if not sample.startswith(name) or dict(labels)[metric.label] == metric.values[0]
        }
    assert quantile(metric, samples, 0.5) == pytest.approx(low, rel=0.3)
    assert quantile(metric, samples, 0.99) == pytest.approx(high, rel=0.3)


class _Only:
    """What Scraped needs to scrape one sink."""

    def __init__(self, sink: MetricsSink) -> None:
        self.clock = VirtualClock()
        self.exposition = Exposition(sink)
        self.run = type("Still", (), {"now_ns": 0})


def test_fr_32_kv_gauges_say_free_cached_and_held_and_add_up() -> None:
    """Ten prompts of 17 tokens run (2 pages each), one of 160 is cached, in 1,600 tokens of pages of 16."""
    scraped = Scraped(engine_config(num_pages=100, page_size=16))
    run = scraped.run
    run.add("old", 160, 1)
    run.finish_all()
    for number in range(10):
        run.add(f"r{number}", 17, 8, ignore_eos=True)
    run.timed_step()
    run.timed_step()
    samples = scraped.scrape()
    tokens = {dict(labels)["state"]: 16 * n for (name, labels), n in samples.items() if name == "kv_pages"}
    assert (tokens["free"], tokens["evictable"]) == (1120, 160)
    assert tokens["private"] + tokens["protected"] == 320
    assert sum(tokens.values()) == 16 * samples["kv_pages_capacity", ()] == 1600
    # What they may still say is promised, and stands apart from what is held.
    assert samples["promised_pages", ()] > 0
    held = tokens["private"] + tokens["protected"]
    run.finish_all()
    samples = scraped.scrape()
    assert samples["promised_pages", ()] == 0
    assert held > 0 == samples["kv_pages", (("state", "private"),)]
    assert "Sum = kv_pages_capacity" in BY_NAME["kv_pages"].help


def waiting_at(limit: str) -> Watched:
    """A run in which request `waits` waits for `limit` and nothing else."""
    options: dict[str, Any] = {
        "rows": {"max_running_requests": 1},
        "kv_total": {"num_pages": 20, "page_size": 4},
        "prefill_max": {"prefill_max_requests": 1},
        "delay": {"prefill_delay_max_passes": 50, "prefill_delay_until_waiting": 5},
        "chunk": {"page_size": 16, "num_pages": 64, "chunked_prefill_size": 24, "max_running_requests": 32},
        "compute": {"max_prefill_tokens": 40, "chunked_prefill_size": None, "page_size": 1, "num_pages": 400},
    }[limit]
    watched = Watched(engine_config(**options))
    run = watched.run
    if limit in {"rows", "kv_total", "delay"}:
        run.add("runs", 30, 30, ignore_eos=True)
        run.timed_step()
        run.timed_step()
    if limit == "compute":
        run.add("first", 30, 4)
    elif limit == "prefill_max":
        run.add("first", 8, 4)
    elif limit == "chunk":
        run.add("first", 20, 4)
    run.add("waits", 30, 10)
    run.timed_step()
    return watched


@pytest.mark.parametrize("limit", ["rows", "kv_total", "prefill_max", "delay", "chunk", "compute"])
def test_fr_33_who_waits_is_shown_with_the_limit_and_both_sides(limit: str) -> None:
    """Each limit binds alone: age, place, last look, reason, need and have; and the sum over reasons is the queue."""
    watched = waiting_at(limit)
    entry = watched.entries()["waits"]
    assert entry.blocker == limit
    assert entry.position == 0
    assert entry.age_s > 0
    assert entry.last_evaluated_step == watched.run.steps
    assert entry.reason is not None
    assert entry.need is not None
    assert entry.have is not None
    assert entry.need >= entry.have, "the reason implies its inequality"
    assert entry.times_passed_over == 0
    answer = watched.model.queue(500)
    assert answer.total == sum(answer.by_blocker.values()) == 1


@pytest.mark.parametrize("accounting", ["reference", "exact"])
def test_fr_33_a_refusal_for_memory_needs_more_than_it_has(accounting: str) -> None:
    """The reference's test is strict, so equal is refused; pages counted exactly may be used to the last."""
    watched = Watched(engine_config(num_pages=20, page_size=4, kv_accounting=accounting))
    run = watched.run
    run.add("runs", 30, 30, ignore_eos=True)
    run.timed_step()
    for number in range(3):
        run.add(f"w{number}", 30, 10)
    for _ in range(12):
        run.timed_step()
    memory = {"kv_total_exhausted", "kv_now_exhausted"}
    refused = [e for e in run.recorded.events if isinstance(e, AdmissionDecided) and e.reason in memory]
    refused = [event for event in refused if event.reason not in ADMITTED]
    assert refused
    for event in refused:
        assert event.need is not None
        assert event.have is not None
        assert event.need > event.have or (accounting == "reference" and event.need == event.have)


def test_fr_33_who_was_passed_over_says_how_often_and_by_whom() -> None:
    """A short prompt goes first under shortest-prefill-first; the long one counts it and names who ended the pass."""
    watched = Watched(
        engine_config(schedule_policy="shortest-prefill-first", prefill_max_requests=1, max_running_requests=8)
    )
    run = watched.run
    run.add("waits", 60, 4)
    for number in range(4):
        run.add(f"short{number}", 10, 4)
        run.timed_step()
    entry = watched.entries()["waits"]
    assert entry.times_passed_over == entry.overtaken_by == 4, "the pass that looked at it last included"
    assert entry.overtaker is not None
    assert (entry.overtaker.policy, entry.overtaker.order_key) == ("shortest-prefill-first", "uncached_tokens")
    assert (entry.overtaker.rid, entry.overtaker.key, entry.overtaker.own_key) == ("short3", 10, 60)
    assert entry.passes_waited == 4
    assert (entry.blocker, entry.reason) in {("prefill_max", "prefill_max_reached"), ("order", "prefill_max_reached")}


@pytest.mark.parametrize("mixed", [True, False])
def test_fr_36_a_stall_of_two_seconds_is_one_gap_and_the_record_names_its_cause(mixed: bool) -> None:
    """10 tokens at 10 ms, a step of 2 s in which another prompt is computed, 10 more: 19 gaps, one of them long."""
    scraped = Scraped(engine_config(num_pages=400, enable_mixed_chunk=mixed))
    run: TimedRun = scraped.run
    run.add("a", 8, 20, ignore_eos=True)
    for _ in range(10):
        run.timed_step((0, 0, 0, 0, 0, 10 * MS, 0))
    run.add("long", 3000, 1)
    run.timed_step((0, 0, 0, 0, 0, 2_000 * MS, 0))
    run.finish_all((0, 0, 0, 0, 0, 10 * MS, 0))
    samples = scraped.scrape()
    assert samples["inter_token_latency_seconds_count", ()] == 19
    assert samples["inter_token_latency_seconds_bucket", (("le", "1.0"),)] == 18
    assert samples["inter_token_latency_seconds_bucket", (("le", "0.002"),)] == 0, "no gap is zero"
    assert samples["time_per_output_token_seconds_count", ()] == 1, "the mean is another family"
    stalled = next(
        event for event in run.recorded.events if isinstance(event, StepPlanned) and event.prefills and event.step > 5
    )
    assert [row.rid for row in stalled.prefills] == ["long"]
    assert (stalled.decodes == ("a",)) is mixed


def test_fr_36_two_tokens_in_one_event_are_two_tokens() -> None:
    """The gap is between tokens as the engine made them, whatever a client receives at once."""
    scraped = Scraped(engine_config(num_pages=64), expects_responses=True)
    scraped.run.add("a", 8, 6, ignore_eos=True)
    scraped.run.finish_all((0, 0, 0, 0, 0, 10 * MS, 0))
    scraped.run.respond("a", scraped.run.now_ns + 500 * MS)
    samples = scraped.scrape()
    assert samples["inter_token_latency_seconds_count", ()] == 5
    assert samples["inter_token_latency_seconds_bucket", (("le", "0.01"),)] == 5


def test_fr_30_every_end_has_one_cause_of_a_closed_list() -> None:
    """What tests/field/test_outcome_reports.py sees over HTTP, here for the causes that a scheduler alone has."""
    recorded = RecordingSink()
    clock = VirtualClock()
    metrics = MetricsSink(clock=clock)
    run = StubRun(engine_config(page_size=16, num_pages=6), FanOut((recorded, metrics)))
    run.add("wall", prompt(0, 40), 60)
    run.run()
    run.add("fails", prompt(1, 20), 5)
    run.model.fail_next = True
    run.run()
    run.add("gone", prompt(2, 20), 5)
    run.engine.abort_request("gone")
    run.run()
    shown = _shown(Exposition(metrics))
    ended = {event.rid: event.cause for event in recorded.events if _is_end(event)}
    causes = {key.split('"')[1]: n for key, n in shown.items() if key.startswith("request_ends_total")}
    assert {cause: n for cause, n in causes.items() if n} == {"length": 1, "error": 1, "abort": 1}
    assert set(ended) == {"wall", "fails", "gone"}
    by_reason = [n for key, n in shown.items() if key.startswith("requests_finished_total")]
    assert sum(by_reason) == sum(causes.values()) == 3


def _is_end(event: object) -> bool:
    return isinstance(event, RequestTransitioned) and event.target == "finished"
