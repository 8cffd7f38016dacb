"""The numbers behind /metrics: right, complete from the start, bounded, and at zero when nothing runs."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from engine.clock import VirtualClock
from engine.errors import RefusalCause
from engine.events import AdmissionDecided, StepCompleted, StepPlanned
from engine.request import RequestState
from engine.scheduler.decision import Reason
from engine.scheduler.plan import StepTimes
from engine.server.observer import CutCause
from invariants.catalog import CATALOG as LAWS
from telemetry.exposition import PLAIN, Exposition
from telemetry.metric_catalog import CATALOG
from telemetry.metrics import MetricsSink
from telemetry.observe import BLOCKERS, PAGE_STATES, TTFT_PARTS
from telemetry.views import count_samples
from tests.builders import engine_config
from tests.telemetry.live_run import MS, TimedRun, busy, configs, operations, play

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


class Scraped:
    """A run with a MetricsSink, and scrapes of it."""

    def __init__(self, config: object = None, *, expects_responses: bool = False) -> None:
        self.clock = VirtualClock()
        self.sink = MetricsSink(clock=self.clock, expects_responses=expects_responses)
        self.exposition = Exposition(self.sink)
        self.run = TimedRun(config or engine_config(), self.sink)

    def scrape(self) -> Samples:
        self.clock.advance_ns(max(self.run.now_ns - self.clock.now_ns(), 0))
        samples: Samples = {}
        for family in text_string_to_metric_families(self.exposition.text()):
            for sample in family.samples:
                key = (sample.name.removeprefix("admitscope_"), tuple(sorted(sample.labels.items())))
                assert key not in samples, f"{key} is there twice"
                samples[key] = sample.value
        return samples

    def value(self, name: str, **labels: str) -> float:
        return self.scrape()[name, tuple(sorted(labels.items()))]


def _sum(samples: Samples, name: str) -> float:
    found = [value for (metric, _), value in samples.items() if metric == name]
    assert found, name
    return sum(found)


def test_every_series_exists_before_the_first_request_and_counters_are_zero() -> None:
    scraped = Scraped()
    samples = scraped.scrape()
    assert len(samples) == count_samples()
    assert count_samples() < 2000
    counters = {metric.name for metric in CATALOG if metric.kind == "counter"}
    assert all(value == 0 for (name, _), value in samples.items() if name in counters)
    assert {labels[0][1] for name, labels in samples if name == "violations_total"} == {law.id for law in LAWS}
    assert {labels[0][1] for name, labels in samples if name == "admissions_total"} == set(Reason) - {Reason.QUEUE_END}
    assert {labels[0][1] for name, labels in samples if name == "waiting_by_blocker"} == set(BLOCKERS)


def test_fr_37_no_label_holds_an_id_and_the_series_stay_as_many_over_ten_thousand_requests() -> None:
    scraped = Scraped(engine_config(num_pages=400, page_size=16, max_running_requests=200, max_prefill_tokens=8192))
    before = set(scraped.scrape())
    for start in range(0, 10_000, 200):
        for at in range(start, start + 200):
            scraped.sink.front_end.on_received()
            scraped.run.add(f"user-{at}", 3, 1)
        scraped.run.finish_all()
    samples = scraped.scrape()
    assert set(samples) == before
    assert samples["requests_finished_total", (("finish_reason", "length"),)] == 10_000
    assert samples["requests_received_total", ()] == 10_000
    assert "user-" not in scraped.exposition.text()
    assert not scraped.sink.timeline.live
    assert len(scraped.exposition.text()) < 1_000_000


def test_the_text_renderer_and_the_client_library_show_the_same() -> None:
    for seed in range(3):
        config, ops = busy(seed)
        scraped = Scraped(config)
        play(scraped.run, ops)
        scraped.sink.front_end.on_stream_send(3_000_000)
        scraped.sink.front_end.on_rejected(RefusalCause.QUEUE_FULL)
        ours = {
            (s.name, tuple(sorted(s.labels.items()))): s.value
            for family in text_string_to_metric_families(scraped.exposition.text())
            for s in family.samples
        }
        body, content_type = scraped.exposition.render("application/openmetrics-text; version=1.0.0")
        assert content_type.startswith("application/openmetrics-text")
        theirs = {
            (s.name, tuple(sorted(s.labels.items()))): s.value
            for family in openmetrics.text_string_to_metric_families(body.decode())
            for s in family.samples
        }
        assert ours == theirs
        assert scraped.exposition.render("text/plain;version=0.0.4")[1] == PLAIN
        assert scraped.exposition.render("")[1] == PLAIN


def test_types_and_questions_are_shown() -> None:
    families = {family.name: family for family in text_string_to_metric_families(Scraped().exposition.text())}
    assert len(families) == len(CATALOG) + 1 + 3
    for metric in CATALOG:
        family = families["admitscope_" + metric.name.removesuffix("_total")]
        assert (family.type, family.documentation) == (metric.kind, metric.help)
    build = families["admitscope_build_info"].samples[0]
    assert build.labels == {"version": "test", "model": "made-up", "attention_backend": "none", "page_size": "16"}


def test_fr_27_a_cache_hit_counts_once_however_often_the_request_was_examined() -> None:
    scraped = Scraped(engine_config(num_pages=40, page_size=4, schedule_conservativeness=1.0))
    run = scraped.run
    shared = list(range(64))
    run.add("first", shared, 1)
    run.finish_all()
    before = scraped.scrape()
    run.add("holder", 60, 30, ignore_eos=True)
    run.timed_step()
    run.add("waits", shared + list(range(500, 516)), 4)
    for _ in range(20):
        run.timed_step()
    waiting = scraped.scrape()
    refused = [e for e in run.recorded.events if isinstance(e, AdmissionDecided) and e.rid == "waits"]
    assert len(refused) >= 1
    cached = ("prompt_tokens_total", (("source", "cached"),))
    computed = ("prompt_tokens_total", (("source", "computed"),))
    assert waiting[cached] == before[cached], "a refused attempt is no hit"
    run.finish_all()
    after = scraped.scrape()
    assert (after[cached] - before[cached], after[computed] - before[computed]) == (64, 60 + 16)


def test_fr_28_gauges_are_zero_once_everybody_is_gone() -> None:
    scraped = Scraped(engine_config(max_running_requests=24, num_pages=200))
    for at in range(24):
        scraped.run.add(f"r{at}", 20, 5)
    scraped.run.timed_step()
    scraped.run.timed_step()
    during = scraped.scrape()
    assert _sum(during, "requests") == 24
    assert during["kv_pages", (("state", "private"),)] + during["kv_pages", (("state", "protected"),)] > 0
    scraped.run.finish_all()
    idle = scraped.scrape()
    for name in ("requests", "waiting_by_blocker", "waiting_tokens", "waiting_oldest_seconds", "promised_pages"):
        assert _sum(idle, name) == 0, name
    for state in ("private", "protected"):
        assert idle["kv_pages", (("state", state),)] == 0


def test_fr_28_an_abort_while_nothing_steps_is_seen_by_the_next_scrape() -> None:
    scraped = Scraped()
    scraped.run.add("a", 20, 5)
    scraped.run.now_ns += 3_000 * MS
    assert scraped.value("waiting_oldest_seconds") == 3.0
    assert scraped.value("waiting_tokens") == 20
    scraped.run.abort("a")
    samples = scraped.scrape()
    assert _sum(samples, "requests") == _sum(samples, "waiting_tokens") == _sum(samples, "waiting_oldest_seconds") == 0
    assert samples["requests_finished_total", (("finish_reason", "abort"),)] == 1


def test_fr_32_pool_pages_are_told_apart_by_owner() -> None:
    scraped = Scraped(engine_config(num_pages=100, page_size=16, max_running_requests=32))
    run = scraped.run
    run.add("old", 160, 1)
    run.finish_all()
    for at in range(10):
        run.add(f"r{at}", 17, 8, ignore_eos=True)
    run.timed_step()
    pages = {s: scraped.value("kv_pages", state=s) for s in ("free", "private", "protected", "evictable")}
    # Each running prompt of 17 tokens: one full page in the tree, one of its own. The finished prompt: ten pages.
    assert pages == {"free": 70, "private": 10, "protected": 10, "evictable": 10}
    assert sum(pages.values()) == scraped.value("kv_pages_capacity") == 100


@given(config=configs, ops=operations)
@settings(max_examples=50)
def test_every_waiting_request_has_one_blocker_and_numbers_agree_with_the_events(config: object, ops: list) -> None:
    scraped = Scraped(config)
    run = scraped.run

    def agree() -> None:
        cells, at = scraped.sink.snapshot(), scraped.sink.at
        shown = {key: cells[cell] for key, cell in at.items()}
        state = run.scheduler.state
        assert sum(shown["waiting_by_blocker", blocker] for blocker in BLOCKERS) == len(state.waiting)
        by_state = Counter(request.state for request in state.requests.values())
        waiting = shown["requests", "waiting"] + shown["requests", "retracted"]
        assert waiting == by_state[RequestState.WAITING]
        assert shown["requests", "prefill"] == by_state[RequestState.PREFILL]
        assert shown["requests", "decode"] == by_state[RequestState.DECODE]
        pages = [shown["kv_pages", page_state] for page_state in PAGE_STATES]
        assert tuple(pages) == run.scheduler.kv.pool.counts
        assert sum(pages) == shown["kv_pages_capacity", ""]

    rids = play(run, ops, check=agree)
    _totals_agree(scraped, rids)


def test_numbers_agree_with_the_events_under_pressure() -> None:
    for seed in range(20):
        config, ops = busy(seed)
        scraped = Scraped(config)
        faults = random.Random(seed)
        scraped.run.scheduler.kv.allocation_fault = lambda _caller, faults=faults: faults.random() < 0.05
        _totals_agree(scraped, play(scraped.run, ops))


def _totals_agree(scraped: Scraped, rids: list[str]) -> None:
    events, samples = scraped.run.recorded.events, scraped.scrape()
    tokens: Counter[str] = Counter()
    for event in events:
        if isinstance(event, StepCompleted):
            tokens.update(row.rid for row in event.rows)
    assert samples["generation_tokens_total", ()] == tokens.total()
    assert samples["inter_token_latency_seconds_count", ()] == tokens.total() - len(tokens)
    assert samples["time_to_first_token_seconds_count", ()] == len(tokens)
    assert _sum(samples, "requests_finished_total") == len(rids) == _sum(samples, "request_duration_seconds_count")
    assert _sum(samples, "ttft_component_seconds_count") == len(TTFT_PARTS) * len(tokens)
    components, whole = _sum(samples, "ttft_component_seconds_sum"), samples["time_to_first_token_seconds_sum", ()]
    assert components == pytest.approx(whole, abs=1e-9)
    assert samples["ttft_residual_seconds_total", ()] == 0
    decided = [event for event in events if isinstance(event, AdmissionDecided)]
    assert _sum(samples, "admissions_total") == len(decided)
    computed = samples["selected_tokens_total", (("kind", "computed"),)]
    assert computed == sum(event.selected_extend for event in decided)
    plans = [event for event in events if isinstance(event, StepPlanned)]
    assert _sum(samples, "steps_total") == len(plans)
    assert _sum(samples, "pass_ends_total") == sum(plan.pass_end is not None for plan in plans)
    assert samples["kv_pages_evicted_total", ()] == sum(plan.evicted_pages for plan in plans)
    assert _sum(samples, "kv_claim_failures_total") == sum(plan.claim_failed for plan in plans)
    retracted = sum(not victim.aborted for plan in plans for victim in plan.retractions)
    assert samples["retractions_total", (("cause", "kv_now"),)] == retracted
    assert samples["retractions_total", (("cause", "priority"),)] == sum(len(plan.preempted) for plan in plans)
    admitted_first = samples["queue_time_seconds_count", ()]
    assert _sum(samples, "prompt_tokens_total") == pytest.approx(_prompts_admitted(scraped))
    assert admitted_first >= len(tokens)
    assert scraped.sink.refused_increments == 0


def _prompts_admitted(scraped: Scraped) -> int:
    return sum(event.prompt_len for event in _first_admissions(scraped))


def _first_admissions(scraped: Scraped) -> list:
    seen: dict[str, object] = {}
    for event in scraped.run.recorded.events:
        if getattr(event, "cause", None) == "admit" and event.rid not in seen:
            seen[event.rid] = event
    return list(seen.values())


def test_fr_36_a_long_stall_lands_in_its_bucket_and_every_gap_counts_once() -> None:
    scraped = Scraped()
    scraped.run.add("a", 8, 20, ignore_eos=True)
    for _ in range(10):
        scraped.run.timed_step((0, 0, 0, 0, 0, 10 * MS, 0))
    scraped.run.timed_step((0, 0, 0, 0, 0, 2_000 * MS, 0))
    scraped.run.finish_all((0, 0, 0, 0, 0, 10 * MS, 0))
    samples = scraped.scrape()
    buckets = {
        dict(labels)["le"]: n for (name, labels), n in samples.items() if name == "inter_token_latency_seconds_bucket"
    }
    assert samples["inter_token_latency_seconds_count", ()] == 19
    assert (buckets["0.01"], buckets["1.0"], buckets["2.5"], buckets["+Inf"]) == (18, 18, 19, 19)
    assert samples["time_per_output_token_seconds_sum", ()] == pytest.approx((18 * 0.01 + 2.0) / 19, abs=1e-6)


def test_the_phases_partition_the_loop() -> None:
    scraped = Scraped()
    scraped.run.add("a", 8, 5)
    scraped.run.now_ns += 50
    for _ in range(5):
        scraped.run.timed_step((100, 1, 2, 3, 4, 5, 6))
    phases = {
        dict(labels)["phase"]: n for (name, labels), n in scraped.scrape().items() if name == "step_phase_seconds_total"
    }
    shown = {phase: round(seconds * 1e9) for phase, seconds in phases.items() if seconds}
    assert shown == {
        "drain": 5,
        "plan": 10,
        "commit": 15,
        "prepare": 20,
        "forward_wait": 25,
        "apply": 30,
        "publish": 400,
        "idle": 150,
    }
    assert sum(shown.values()) == scraped.run.now_ns


def test_idle_time_runs_on_between_events_and_never_falls() -> None:
    scraped = Scraped()
    scraped.run.now_ns += 7_000 * MS
    assert scraped.value("idle_seconds_total") == 7.0
    scraped.run.add("a", 8, 1)
    scraped.run.now_ns += 1_000 * MS
    assert scraped.value("idle_seconds_total") == 7.0
    scraped.run.finish_all()
    scraped.run.now_ns += 500 * MS
    assert scraped.value("idle_seconds_total") == 7.5


def test_a_scrape_before_a_late_arrival_is_not_taken_back() -> None:
    scraped = Scraped()
    scraped.clock.advance_ns(7_500 * MS)
    assert scraped.value("idle_seconds_total") == 7.5
    scraped.run.now_ns = 7_000 * MS  # it had arrived by then, but its event was still on the way
    scraped.run.add("a", 8, 1)
    assert scraped.value("idle_seconds_total") == 7.5


def test_fr_29_a_step_that_runs_backwards_is_refused_not_raised() -> None:
    scraped = Scraped()
    scraped.run.add("a", 8, 2)
    plan = scraped.run.timed_step()
    event = next(e for e in reversed(scraped.run.recorded.events) if isinstance(e, StepCompleted))
    before = scraped.scrape()
    times = StepTimes(100, 100, 100, 100, 100, 50, 20)
    scraped.sink.emit(StepCompleted(event.seq + 1, plan.step + 1, 20, event.kind, (), times, False, event.pages, 0, 0))
    after = scraped.scrape()
    assert after["telemetry_errors_total", (("component", "metrics"),)] >= 3
    phase = ("step_phase_seconds_total", (("phase", "forward_wait"),))
    assert after[phase] == before[phase]


def test_the_front_end_counts_from_its_own_threads() -> None:
    scraped = Scraped(expects_responses=True)
    front = scraped.sink.front_end
    front.on_received()
    front.on_disconnect()
    for cause in RefusalCause:
        front.on_rejected(cause)
    for cut in CutCause:
        front.on_cut(cut)
    front.on_stream_send(70_000)
    samples = scraped.scrape()
    assert samples["requests_received_total", ()] == samples["client_disconnects_total", ()] == 1
    assert {
        labels[0][1]: n for (name, labels), n in samples.items() if name == "requests_rejected_total"
    } == dict.fromkeys(map(str, RefusalCause), 1)
    assert all(samples["connections_cut_total", (("cause", cut),)] == 1 for cut in CutCause)
    assert samples["stream_send_seconds_sum", ()] == 7e-05
    scraped.run.add("a", 8, 3)
    scraped.run.timed_step()
    front.on_first_byte("a", scraped.run.now_ns + 4 * MS)
    assert scraped.value("time_to_first_token_seconds_count") == 0
    scraped.run.timed_step()
    assert scraped.value("time_to_first_token_seconds_sum") == 0.005
    assert scraped.value("ttft_component_seconds_sum", component="emit") == 0.004


def test_a_finished_request_is_emitting_until_its_response_is_out() -> None:
    scraped = Scraped(expects_responses=True)
    scraped.run.add("a", 8, 1)
    scraped.run.finish_all()
    assert scraped.value("requests", state="emitting") == 1
    scraped.run.respond("a", scraped.run.now_ns + 2 * MS)
    assert scraped.value("requests", state="emitting") == 0
    assert scraped.value("time_to_first_token_seconds_sum") == 0.003


def test_checker_and_sinks_are_asked_at_scrape_time() -> None:
    clock = VirtualClock()
    law = LAWS[0].id
    checker = SimpleNamespace(
        checks_by_group={"page": 9}, violations_by_id={law: 2}, ns_by_tier={1: 5_000_000}, internal_errors=1
    )
    sinks = [
        SimpleNamespace(component="journal", accepted=40, dropped=3, errors=1, queued=5),
        SimpleNamespace(component="elsewhere", accepted=1, dropped=1, errors=1, queued=1),
    ]
    sink = MetricsSink(clock=clock)
    TimedRun(engine_config(), sink)
    exposition = Exposition(sink, checker=checker, sinks=lambda: sinks, heartbeat=lambda: 12_000_000_000)
    shown = {
        line.rpartition(" ")[0]: float(line.rpartition(" ")[2])
        for line in exposition.text().splitlines()
        if line[0] != "#"
    }
    assert shown['admitscope_invariant_checks_total{group="page"}'] == 9
    assert shown[f'admitscope_violations_total{{id="{law}"}}'] == 2
    assert shown['admitscope_invariant_check_seconds_total{tier="1"}'] == 0.005
    assert shown['admitscope_telemetry_errors_total{component="checker"}'] == 1
    assert shown['admitscope_telemetry_events_total{sink="journal"}'] == 40
    assert shown['admitscope_telemetry_dropped_total{sink="journal"}'] == 3
    assert shown['admitscope_telemetry_queue_depth{sink="journal"}'] == 5
    assert shown["admitscope_heartbeat_timestamp_seconds"] == 12.0


def test_bounds_rise_and_cover_what_they_must() -> None:
    for metric in CATALOG:
        assert all(a < b for a, b in itertools.pairwise(metric.bounds)), metric.name
        assert metric.name.endswith("_total") == (metric.kind == "counter"), metric.name
        assert len(set(metric.values)) == len(metric.values), metric.name
        assert metric.label not in {"severity", "rid", "trace_id"}
