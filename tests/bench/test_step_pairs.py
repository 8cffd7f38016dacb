"""What listeners cost, from pairs of steps: a known cost is found under drift and outliers."""

from __future__ import annotations

import random

import pytest

from bench.step_pairs import QUIET_US, Step, step_cost, trimmed_mean


def test_a_known_cost_is_found_although_the_machine_drifts() -> None:
    draw = random.Random(5)
    windows = []
    for _ in range(30):
        off, on = [], []
        drift_us = draw.gauss(0, 200)
        for step in range(160):
            beside_us = 4_000.0 if step % 20 == 0 else 0.0
            usual_us = 20_000 + draw.gauss(0, 150)
            off.append(Step(usual_us, 0.0))
            held_up_us = 30_000 if draw.random() < 0.005 else 0
            on.append(Step(usual_us + 30 + drift_us + 0.6 * beside_us + draw.gauss(0, 150) + held_up_us, beside_us))
        windows.append((off, on))
    found = step_cost(windows)
    assert found.busy == 0.05
    assert found.beside_us == 4_000
    assert found.busy_us == pytest.approx(2_400, abs=100)
    assert found.share == pytest.approx((found.quiet_us + 0.05 * 2_400) / 20_000, abs=0.0005)
    assert abs(found.quiet_us - 30) < 150, "what drifts is in it"


def test_the_cost_of_each_step_stays_with_the_windows_own_quiet_ones() -> None:
    slow = ([Step(10.0, 0.0)] * 3, [Step(1_010.0, 0.0), Step(1_010.0, 0.0), Step(1_110.0, QUIET_US)])
    fast = ([Step(10.0, 0.0)] * 3, [Step(10.0, 0.0), Step(10.0, 0.0), Step(110.0, QUIET_US)])
    assert step_cost([slow, fast]).busy_us == pytest.approx(100)


@pytest.mark.parametrize("on", [[Step(1.0, QUIET_US)], [Step(1.0, 0.0)] * 2])
def test_windows_that_cannot_be_compared_are_refused(on: list[Step]) -> None:
    with pytest.raises(ValueError, match=r"none of 1|shorter|longer"):
        step_cost([([Step(1.0, 0.0)], on)])


def test_a_mean_without_the_ends() -> None:
    assert trimmed_mean([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10_000.0]) == 5.5
    assert trimmed_mean([]) == 0.0
