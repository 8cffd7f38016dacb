"""Trials. Owns: one simulated run of a search, kept request by request, and the figures that a search compares."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from engine.events import EventSink, FanOut
from invariants.checker import InvariantChecker
from telemetry.sim.arrivals import Arrivals
from telemetry.sim.cost_model import CostModel, Estimator
from telemetry.sim.loop import Loop
from telemetry.sim.measure import BIN_S, Measure, Served
from telemetry.sim.objectives import LONGEST_GAP, THROUGHPUT
from telemetry.sim.run import Plan
from telemetry.sim.whatif_figures import QUANTILES, Requests, is_compared, throughput

#: Looking at the clock in every step would cost more than some steps.
_STEPS_A_LOOK: Final = 64


class OutOfTime(Exception):
    """The time of the search was over before this run was."""


class Trial:
    """One run of `plan`. After `run`: `served`, `measure` and `loop` as they ended.

    arrivals    its own: reading moves them
    is_checked  judge every event by the laws of the engine
    watch       hears every event too
    """

    def __init__(
        self,
        plan: Plan,
        arrivals: Arrivals,
        *,
        cost: CostModel,
        is_checked: bool,
        version: str,
        watch: EventSink | None = None,
    ) -> None:
        self.config = plan.config
        self.served: dict[str, Served] = {}
        self._known = plan.known
        self.measure = Measure(self._ended)
        self.estimator = Estimator(cost)
        self.checker = InvariantChecker(on_violation="record") if is_checked else None
        sinks: list[EventSink] = [sink for sink in (self.measure, self.checker, watch) if sink is not None]
        self.loop = Loop(
            plan.config,
            num_pages=plan.num_pages,
            arrivals=arrivals,
            cost=self.estimator,
            sink=FanOut(tuple(sinks)),
            version=version,
            model=plan.model,
            wall_ns=plan.wall_ns,
        )

    def run(self, tell: Callable[[int], None], *, until_s: float) -> Trial:
        """To its end. `tell` hears how many requests are over. Raises OutOfTime at `until_s` of the monotonic clock."""
        steps = 0
        while self.loop.step():
            steps += 1
            tell(self.loop.ended)
            if steps % _STEPS_A_LOOK == 0 and time.monotonic() > until_s:
                raise OutOfTime
        return self

    @property
    def violations(self) -> int:
        return 0 if self.checker is None else self.checker.total_violations

    @property
    def share_outside(self) -> float:
        """Share of the time that passed in steps larger than any that was fitted."""
        return self.estimator.outside_ns / max(self.estimator.total_ns, 1)

    def whole(self) -> list[Served]:
        """The requests that ended by themselves, with a first token."""
        return [one for one in self.served.values() if is_compared(one)]

    def figures(self) -> dict[str, float | None]:
        """By the names of `objectives.MEASURES`: seconds, and tokens a second."""
        whole = self.whole()
        return {**figures_of(whole), THROUGHPUT: throughput(self), LONGEST_GAP: longest_gap(whole)}

    def _ended(self, served: Served) -> None:
        served.is_whole = served.is_whole and (self._known is None or served.rid in self._known)
        self.served[served.rid] = served


def figures_of(served: Sequence[Served]) -> dict[str, float | None]:
    """The times of these requests, by name."""
    values = Requests(served).figures(np.ones(len(served)))
    return {f"{name}_p{round(share * 100)}": value for (name, share), value in zip(QUANTILES, values, strict=True)}


def longest_gap(served: Sequence[Served]) -> float | None:
    """Seconds that 99 % of the requests never wait between two tokens; None when nobody had two."""
    gaps = [float(BIN_S[max(one.gaps)]) for one in served if len(one.gaps)]
    return float(np.quantile(gaps, 0.99, method="inverted_cdf")) if gaps else None
