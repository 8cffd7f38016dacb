"""What listeners cost the engine thread is measured in one step of 16, for every event of it, by part."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest

from engine.events import AnyEvent, RecordingSink, StepCompleted, StepPlanned
from telemetry.buffered import BufferedSink
from telemetry.metering import MeteredFanOut
from tests.builders import engine_config
from tests.telemetry.live_run import MS, TimedRun


class Ticks:
    """A clock that rises by what its sinks say they take."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        return self.now


class Costly:
    def __init__(self, clock: Ticks, cost: int) -> None:
        self.clock, self.cost, self.seen = clock, cost, 0

    def emit(self, event: AnyEvent) -> None:
        self.clock.now += self.cost
        self.seen += event.step % 16 == 0


def test_costs_are_those_of_the_measured_steps_times_sixteen() -> None:
    clock, kept = Ticks(), RecordingSink()
    check, count = Costly(clock, 7), Costly(clock, 3)
    fan_out = MeteredFanOut([("publish", kept), ("check", check), ("worker", count)], clock)
    run = TimedRun(engine_config(), fan_out)
    run.add("r1", 8, 60, ignore_eos=True)
    run.finish_all()
    assert len(kept.events) == len(run.recorded.events)
    assert check.seen >= 5
    shown = {part: ns for _, part, ns in fan_out.numbers()}
    assert shown == {
        "publish": 0,
        "check": 16 * 7 * check.seen,
        "collector": 0,
        "lent": 0,
        "metric": 0,
        "worker": 16 * 3 * count.seen,
    }


def test_a_listener_that_raises_stops_the_others_as_without_measuring() -> None:
    class Raising:
        def emit(self, event: AnyEvent) -> None:
            raise RuntimeError(type(event).__name__)

    first, last = RecordingSink(), RecordingSink()
    fan_out = MeteredFanOut([("publish", first), ("check", Raising()), ("worker", last)], lambda: 0)
    with pytest.raises(RuntimeError, match="EngineStarted"):
        TimedRun(engine_config(), fan_out)
    assert len(first.events) == 1
    assert not last.events


def test_unknown_parts_are_refused() -> None:
    with pytest.raises(ValueError, match="elsewhere"):
        MeteredFanOut([("elsewhere", RecordingSink())], lambda: 0)


# --- queues -----------------------------------------------------------------------------------------------------------


class Batches(BufferedSink):
    """A queue that notes how events came to it."""

    def __init__(self) -> None:
        super().__init__(RecordingSink(), "journal", period_s=1_000.0)
        self.batches: list[list[AnyEvent]] = []

    def hand(self, events: Sequence[AnyEvent]) -> None:
        self.batches.append(list(events))
        super().hand(events)


def test_queues_get_events_when_a_step_is_planned_and_when_it_is_over() -> None:
    queue = Batches()
    run = TimedRun(engine_config(), MeteredFanOut([], lambda: 0, queues=[queue]))
    run.add("r1", 8, 20, ignore_eos=True)
    run.finish_all()
    assert queue.flush(30)
    ends = [type(batch[-1]) for batch in queue.batches]
    assert ends == [StepPlanned, StepCompleted] * (len(ends) // 2), "none in between, and none alone"
    assert [event for batch in queue.batches for event in batch] == run.recorded.events
    assert queue.close()


def test_whoever_asks_a_queue_gets_what_was_published_before(numbered: Any) -> None:
    """Between two steps too, and after the last."""
    first, second = RecordingSink(), RecordingSink()
    queues = [BufferedSink(sink, "journal", period_s=1_000.0) for sink in (first, second)]
    fan_out, seen = MeteredFanOut([], lambda: 0, queues=queues), []
    fan_out.emit(numbered.started())
    assert queues[0].catch_up(30)
    assert len(first.events) == 1
    fan_out.emit(numbered.arrived("r1"))
    queues[1].call(lambda: seen.append(len(second.events)))
    assert queues[1].flush(30)
    assert seen == [2], "called after what was published before it"
    fan_out.emit(numbered.arrived("r2"))
    assert all(queue.close() for queue in queues)
    assert first.events == second.events == numbered.events


def test_what_is_published_while_others_ask_keeps_its_order(numbered: Any) -> None:
    kept = RecordingSink()
    queue = BufferedSink(kept, "journal", period_s=0.001)
    fan_out, is_over = MeteredFanOut([], lambda: 0, queues=[queue]), threading.Event()

    def ask() -> None:
        while not is_over.is_set():
            fan_out.hand_over()

    askers = [threading.Thread(target=ask) for _ in range(3)]
    for asker in askers:
        asker.start()
    for number in range(5_000):
        fan_out.emit(numbered.arrived("r1") if number % 7 else numbered.planned(number))
    is_over.set()
    for asker in askers:
        asker.join()
    assert queue.close()
    assert kept.events == numbered.events


def test_the_window_of_a_queue_is_open_from_a_plan_to_the_next_event(numbered: Any) -> None:
    queue = BufferedSink(RecordingSink(), "journal")
    fan_out, seen = MeteredFanOut([], lambda: 0, queues=[queue]), []
    for event in (numbered.planned(1), numbered.arrived("r1"), numbered.arrived("r2"), numbered.planned(2)):
        fan_out.emit(event)
        seen.append(queue.window.forward.is_open)
    assert seen == [True, False, False, True]
    assert queue.close()


def test_a_queue_is_told_how_long_the_batch_of_the_last_step_took_to_prepare(monkeypatch: pytest.MonkeyPatch) -> None:
    queue, told = BufferedSink(RecordingSink(), "journal"), []
    fan_out = MeteredFanOut([], lambda: 0, queues=[queue])
    monkeypatch.setattr(queue.window.forward, "open", lambda now_ns, prepare_ns: told.append(prepare_ns))
    run = TimedRun(engine_config(), fan_out)
    run.add("r1", 8, 3, ignore_eos=True)
    for prepare_ns in (70, 80, 90):
        run.timed_step((0, 0, 0, 0, prepare_ns, MS, 0))
    assert told == [0, 70, 80]
    assert queue.close()
