"""A clock that jumps: a machine that slept, or one whose clock was set back. Requests do not notice.

The engine's clock is monotonic by contract; a suspended machine makes it jump ahead. A clock that falls is broken, and
still nobody may lose a token, wait for ever, or be told a negative time.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from engine.clock import VirtualClock
from engine.events import RecordingSink
from engine.server.engine_thread import EngineStatus
from engine.server.health import liveness
from invariants.checker import InvariantChecker
from telemetry.metrics import MetricsSink
from tests.builders import engine_config
from tests.engine.stub_model import StubRun

HOUR_NS = 3_600_000_000_000


class JumpingClock(VirtualClock):
    """A clock that a test can set to anything."""

    def jump(self, delta_ns: int) -> None:
        self._now_ns += delta_ns


def play(jumps: dict[int, int]) -> tuple[StubRun, RecordingSink, InvariantChecker, MetricsSink]:
    """A busy run; `jumps` says by how much the clock moves before which step."""
    config = engine_config(
        num_pages=40, page_size=4, max_running_requests=4, chunked_prefill_size=8, max_prefill_tokens=16
    )
    recorded = RecordingSink()
    clock = JumpingClock(10 * HOUR_NS)
    metrics = MetricsSink(clock=clock)
    checker = InvariantChecker(on_violation="record")
    run = StubRun(config, recorded, checker, metrics)
    run.clock = clock
    run.engine._clock = clock
    dice = random.Random(5)
    for step in range(120):
        if step % 4 == 0 and step < 60:
            run.add(f"r{step}", [dice.randrange(200) for _ in range(dice.randrange(1, 30))], dice.randrange(1, 9))
        clock.jump(jumps.get(step, 0))
        run.step()
    run.run()
    return run, recorded, checker, metrics


JUMPS: Any = [
    pytest.param({20: 30 * HOUR_NS}, id="a night asleep"),
    pytest.param(dict.fromkeys(range(5, 60, 7), HOUR_NS), id="many naps"),
    pytest.param({20: -3 * HOUR_NS}, id="set back"),
    pytest.param({10: HOUR_NS, 20: -HOUR_NS, 30: 1, 40: -1}, id="to and fro"),
]


@pytest.mark.parametrize("jumps", JUMPS)
def test_outputs_and_decisions_are_those_of_a_clock_that_runs(jumps: dict[int, int]) -> None:
    calm, calm_events, _, _ = play({})
    jumped, events, checker, metrics = play(jumps)
    assert {rid: jumped.tokens(rid) for rid in jumped.requests} == {rid: calm.tokens(rid) for rid in calm.requests}
    for rid in jumped.requests:
        jumped.assert_right_tokens(rid)
    jumped.assert_nothing_held()
    assert [type(event) for event in events.events] == [type(event) for event in calm_events.events]
    assert min(metrics.snapshot()) >= 0, "nobody is told a negative time"
    assert checker.internal_errors == 0
    if all(jump >= 0 for jump in jumps.values()):
        assert checker.total_violations == 0


def test_a_sleep_is_not_taken_for_a_stall_for_longer_than_one_turn() -> None:
    """Right after a jump the last turn seems old; the next turn of the loop mends that."""
    status = EngineStatus(0, 0, 0, steps=3, waiting=1, running=1, has_work=True)
    assert liveness(status, HOUR_NS, 10.0).state == "blocked"
    fresh = EngineStatus(HOUR_NS, HOUR_NS, 0, steps=4, waiting=1, running=1, has_work=True)
    assert liveness(fresh, HOUR_NS + 1, 10.0).ok
