"""What work beside the engine costs, from pairs of the same steps: those beside which nobody worked tell the noise."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Final, NamedTuple

#: A worker that looked whether there is anything to do did not work.
QUIET_US: Final = 20.0
#: Share of the busy steps that is left out at each end: a step that another program of the machine held up.
OUTLIERS: Final = 0.1


class Step(NamedTuple):
    """Microseconds of one step: wall time, and processor time of the threads beside the engine's meanwhile."""

    wall_us: float
    beside_us: float


class StepCost(NamedTuple):
    """What listeners cost.

    share      of the wall time of a step without them, over all steps
    quiet_us   median of what a step takes longer although nobody worked beside it
    busy_us    mean of what one takes longer beside workers, above that
    beside_us  what workers needed in one such step
    busy       share of the steps that are
    """

    share: float
    quiet_us: float
    busy_us: float
    beside_us: float
    busy: float


def step_cost(windows: Sequence[tuple[Sequence[Step], Sequence[Step]]]) -> StepCost:
    """Of (off, on): windows of the same steps, without listeners and with them.

    How fast the machine is drifts from window to window: what a busy step took longer is compared with the quiet ones
    of its own window. Raises ValueError for windows of different length, or without quiet steps.
    """
    quiet_us: list[float] = []
    busy: list[tuple[float, float]] = []
    walls_us: list[float] = []
    for off, on in windows:
        longer = [(after.wall_us - before.wall_us, after.beside_us) for before, after in zip(off, on, strict=True)]
        walls_us += [step.wall_us for step in off]
        here = [us for us, beside_us in longer if beside_us < QUIET_US]
        if not here:
            raise ValueError(f"none of {len(longer)} steps was free of work beside it")
        usual_us = statistics.median(here)
        quiet_us += here
        busy += [(us - usual_us, beside_us) for us, beside_us in longer if beside_us >= QUIET_US]
    share_busy = len(busy) / (len(busy) + len(quiet_us))
    base_us = statistics.median(quiet_us)
    excess_us = trimmed_mean([us for us, _ in busy])
    return StepCost(
        share=(base_us + share_busy * excess_us) / statistics.median(walls_us),
        quiet_us=base_us,
        busy_us=excess_us,
        beside_us=statistics.fmean(beside_us for _, beside_us in busy) if busy else 0.0,
        busy=share_busy,
    )


def trimmed_mean(values: Sequence[float]) -> float:
    """Mean without the OUTLIERS smallest and largest; 0 of nothing."""
    left_out = int(len(values) * OUTLIERS)
    kept = sorted(values)[left_out : len(values) - left_out]
    return statistics.fmean(kept) if kept else 0.0
