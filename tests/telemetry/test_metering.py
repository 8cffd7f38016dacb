"""What listeners cost the engine thread is measured in one step of 16, for every event of it, by part."""

from __future__ import annotations

import pytest

from engine.events import AnyEvent, RecordingSink
from telemetry.metering import MeteredFanOut
from tests.builders import engine_config
from tests.telemetry.live_run import TimedRun


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
