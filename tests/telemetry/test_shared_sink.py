"""Listeners that share a worker: each behind its own wall, none ahead of what it is asked, none holding up a step."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from engine.clock import VirtualClock
from engine.events import AnyEvent, FanOut, RecordingSink
from telemetry import buffered
from telemetry.buffered import BufferedSink
from telemetry.exposition import Exposition
from telemetry.metrics import MetricsSink
from telemetry.shared_sink import SharedSink
from tests.builders import engine_config
from tests.telemetry.live_run import TimedRun

LONG_S = 1_000.0


class Ordered(RecordingSink):
    """Notes what is done to it, with its name, in a list that several share."""

    def __init__(self, name: str, done: list[str]) -> None:
        super().__init__()
        self.name, self.done = name, done

    def emit(self, event: AnyEvent) -> None:
        if event.step % 2 and self.name == "second":
            raise ValueError(f"label of step {event.step}")
        super().emit(event)

    def flush(self) -> None:
        self.done.append(f"flush {self.name}")

    def close(self) -> None:
        self.done.append(f"close {self.name}")
        if self.name == "second":
            raise OSError("no route")


def test_a_fault_of_one_is_counted_under_its_name_and_the_others_hear_all(numbered: Any) -> None:
    done: list[str] = []
    first, second, third = (Ordered(name, done) for name in ("first", "second", "third"))
    sink = SharedSink([("metrics", first), ("read_model", second), ("spans", third)])
    events = [numbered.planned(step) for step in range(100)]
    for event in events:
        sink.emit(event)
    assert sink.catch_up(30)
    assert first.events == third.events == events
    assert [event.step for event in second.events] == list(range(0, 100, 2))
    stats = {stats.component: stats for stats in sink.stats()}
    assert {name: one.errors for name, one in stats.items()} == {"metrics": 0, "read_model": 50, "spans": 0}
    assert {one.accepted for one in stats.values()} == {one.delivered for one in stats.values()} == {100}
    assert stats["read_model"].last_error == "ValueError: label of step 99"
    assert sink.close()
    assert done[-3:] == ["close first", "close second", "close third"]
    assert {stats.component: stats.errors for stats in sink.stats()}["read_model"] == 51
    assert sink.cpu_ns > 0


def test_catching_up_needs_no_period_and_waits_for_what_came_before(numbered: Any) -> None:
    kept = RecordingSink()
    sink = BufferedSink(kept, "metrics", period_s=LONG_S)
    for step in range(1_000):
        sink.emit(numbered.planned(step))
    assert sink.catch_up(30)
    assert len(kept.events) == 1_000
    assert sink.close()


def test_catching_up_gives_up_on_a_listener_that_stands(numbered: Any) -> None:
    go_on = threading.Event()

    class Standing:
        def emit(self, event: AnyEvent) -> None:
            assert go_on.wait(30)

    sink = BufferedSink(Standing(), "metrics", period_s=0.001)
    sink.emit(numbered.planned(0))
    assert not sink.catch_up(0.05)
    go_on.set()
    assert sink.catch_up(30)
    assert sink.close()


def test_a_plan_rings_for_the_worker_once_enough_wait(numbered: Any) -> None:
    heard = threading.Event()

    class Heard(RecordingSink):
        def emit(self, event: AnyEvent) -> None:
            super().emit(event)
            heard.set()

    sink = BufferedSink(Heard(), "metrics", period_s=LONG_S)
    for step in range(buffered._WORTH_A_RING):
        sink.emit(numbered.planned(step))
    assert not heard.wait(0.05), "fewer wait for the period"
    sink.emit(numbered.planned(1_000))
    assert heard.wait(30), "the period is long: nothing but a ring wakes the worker"
    assert sink.close()


def test_above_half_the_capacity_a_plan_gives_way_unless_the_worker_stands(
    numbered: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, slept = threading.Event(), []
    engine = threading.get_ident()
    sleep = time.sleep

    def noted(seconds: float) -> None:
        if threading.get_ident() == engine:
            slept.append(seconds)
        sleep(seconds)

    class Standing:
        def emit(self, event: AnyEvent) -> None:
            assert go_on.wait(30)

    monkeypatch.setattr(buffered.time, "sleep", noted)
    sink = BufferedSink(Standing(), "metrics", capacity=2 * buffered._WORTH_A_RING, period_s=LONG_S)
    sink._delivered = 7  # the worker has moved since the engine gave way last
    for step in range(buffered._WORTH_A_RING + 100):
        sink.emit(numbered.planned(step))
    assert slept == [buffered.GIVE_WAY_S], "once: after that the worker has not moved"
    go_on.set()
    assert sink.close()


def test_metrics_that_are_fed_in_batches_show_what_direct_ones_show() -> None:
    clock = VirtualClock()
    direct, behind = MetricsSink(clock=clock), MetricsSink(clock=clock, in_batches=True)
    shared = SharedSink([("metrics", behind)], period_s=LONG_S)
    behind.catch_up = lambda: shared.catch_up(30)
    run = TimedRun(engine_config(), FanOut((direct, shared)))
    for number in range(6):
        run.add(f"r{number}", 20 + number, 30, ignore_eos=True)
    ours, theirs = Exposition(behind), Exposition(direct)
    for _ in range(5):
        run.step()
        assert ours.text() == theirs.text(), "a scrape shows what was published before it"
    run.finish_all()
    assert ours.text() == theirs.text()
    assert not behind.has_gaps
    assert shared.close()


def test_an_event_that_never_came_is_a_gap() -> None:
    kept = RecordingSink()
    run = TimedRun(engine_config(), kept)
    run.add("r1", 20, 5, ignore_eos=True)
    run.finish_all()
    metrics = MetricsSink(clock=VirtualClock())
    for event in kept.events[:10] + kept.events[11:]:
        metrics.emit(event)
    assert metrics.has_gaps
    metrics = MetricsSink(clock=VirtualClock())
    for event in kept.events:
        metrics.emit(event)
    assert not metrics.has_gaps


def test_a_worker_that_stands_in_its_turn_does_not_stop_the_others(numbered: Any) -> None:
    inside, go_on = threading.Event(), threading.Event()

    class Standing:
        def emit(self, event: AnyEvent) -> None:
            inside.set()
            assert go_on.wait(60)

    standing, kept = BufferedSink(Standing(), "parquet", period_s=0.001), RecordingSink()
    standing.emit(numbered.planned(0))
    assert inside.wait(30), "it has its turn, and does not come back"
    other = BufferedSink(kept, "journal", period_s=0.001)
    for step in range(1, 50):
        other.emit(numbered.planned(step))
    assert other.flush(30)
    assert len(kept.events) == 49
    go_on.set()
    assert standing.close()
    assert other.close()


def test_workers_take_turns(numbered: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffered, "TURN_S", 30.0)  # a slow machine is not a worker that stands
    at_work, most = [0], [0]

    class Counting:
        def emit(self, event: AnyEvent) -> None:
            at_work[0] += 1
            most[0] = max(most[0], at_work[0])
            time.sleep(0.000_01)  # whoever may run beside it gets every chance
            at_work[0] -= 1

    sinks = [BufferedSink(Counting(), "journal", period_s=0.001) for _ in range(3)]
    for step in range(200):
        for sink in sinks:
            sink.emit(numbered.planned(step))
    assert all(sink.flush(30) for sink in sinks)
    assert all(sink.close() for sink in sinks)
    assert most == [1]


def test_a_first_byte_waits_for_the_events_that_came_before_it() -> None:
    """A worker that is behind does not know the request yet whose first byte was written meanwhile."""
    kept = RecordingSink()
    run = TimedRun(engine_config(), kept)
    run.add("early", 20, 3, ignore_eos=True)
    run.timed_step()
    run.add("late", 20, 3, ignore_eos=True)
    run.timed_step()
    written_ns = run.now_ns
    run.finish_all()
    metrics = MetricsSink(clock=VirtualClock(), expects_responses=True, in_batches=True)
    metrics.front_end.on_first_byte("late", written_ns)
    for event in kept.events:
        metrics.emit(event)
    request = metrics.timeline.emitting["late"]
    assert request.ttft_ns is not None
    assert request.first_byte_ns == written_ns


class Ending(RecordingSink):
    """Asks its thread to end."""

    def emit(self, event: AnyEvent) -> None:
        raise SystemExit


def test_the_end_of_the_shared_worker_is_an_error_of_each_and_no_scrape_is_fresh(numbered: Any) -> None:
    metrics = MetricsSink(clock=VirtualClock())
    sink = SharedSink([("metrics", metrics), ("read_model", Ending()), ("spans", RecordingSink())])
    metrics.catch_up = lambda: sink.catch_up(30)
    sink.emit(numbered.started())
    assert not metrics.catch_up(), "an audit compares nothing then"
    assert {stats.component: stats.errors for stats in sink.stats()} == {"metrics": 1, "read_model": 1, "spans": 1}
    text = Exposition(metrics, sinks=sink.stats).text()
    assert 'admitscope_telemetry_errors_total{component="read_model"} 1' in text
    assert not sink.close()
    assert sink.lost == 1
