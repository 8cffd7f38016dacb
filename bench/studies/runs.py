"""Runs of a study. Owns: one simulation of a trace, and the figures that studies tell of it.

Equal arguments give equal figures on every machine: time is virtual, and nothing real is measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from telemetry.sim.arrivals import NS
from telemetry.sim.commands import SimCommand
from telemetry.sim.cost_model import CostModel, Estimator, Shape
from telemetry.sim.measure import Served
from telemetry.sim.parts import digits
from telemetry.sim.run import arrivals_of, plan_of
from telemetry.sim.trial import Trial
from telemetry.sim.whatif_figures import hit_rate

COST: Final = "h200-8b"
#: Traces that come with this program, and what they are called.
TRACES: Final = {"mooncake": "Mooncake conversation", "azure-conv": "Azure conversation"}
#: Every study says so of its times.
COST_WORDS: Final = (
    "Times are computed by the cost model `h200-8b` (an 8B model on one H200, from its data sheet, not measured): "
    "compare rows, do not believe milliseconds."
)
Figures = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One simulation: what it is called, what it sets, how fast requests come, and what they ask for."""

    name: str
    settings: Mapping[str, str]
    rate_scale: float = 1.0
    ask_for: int | None = None
    group: str = ""
    trace: str = "mooncake"


def simulated(run: Run, *, limit: int | None) -> Figures:
    """The figures of one run over the first `limit` requests of the trace, judged by the laws on the way."""
    command = SimCommand(
        trace=run.trace,
        set=tuple(f"{name}={value}" for name, value in run.settings.items()),
        rate_scale=run.rate_scale,
        limit=limit,
        ask_for=run.ask_for,
        cost=COST,
    )
    plan = plan_of(command)
    trial = Trial(plan, arrivals_of(command, plan.workload), cost=plan.cost, is_checked=True, version="")
    trial.run(lambda _: None, until_s=float("inf"))
    whole = trial.whole()
    return {
        "name": run.name,
        "group": run.group,
        "settings": dict(run.settings),
        "rate_scale": run.rate_scale,
        "requests": trial.loop.arrived,
        "refused": trial.loop.refused,
        "violations": trial.violations,
        **{name: digits(value) for name, value in trial.figures().items()},
        "hit_rate": digits(hit_rate(trial)),
        "duration_s": digits((trial.measure.end_ns - (trial.measure.start_ns or 0)) / NS),
        "steps": dict(sorted(trial.measure.steps_by_kind.items())),
        "retractions": trial.measure.retractions,
        "reasons": dict(trial.measure.reasons.most_common()),
        "decisions": trial.measure.reasons.total(),
        "longest_wait": digits(max((one.ttft_ns or 0) / NS for one in whole)),
        **_fairness(whole, plan.cost),
    }


def _fairness(served: list[Served], cost: CostModel) -> Figures:
    """TTFT of the shortest and the longest tenth of the prompts, and how evenly slowdowns are spread.

    A slowdown is the time to first token over what the prompt alone would take in one step, with nothing cached. Jain's
    index of them is 1 when all are equal, and 1 / n when one request has it all.
    """
    order = sorted(served, key=lambda one: one.prompt_len)
    tenth = max(len(order) // 10, 1)
    alone = Estimator(cost)
    shapes = (Shape(one.prompt_len, one.prompt_len * (one.prompt_len + 1) // 2, 1, 0, 0) for one in served)
    slow = np.array([(one.ttft_ns or 0) / sum(alone.of(shape)) for one, shape in zip(served, shapes, strict=True)])
    return {
        "shortest_p50": digits(_quantile(order[:tenth], 0.5)),
        "shortest_p99": digits(_quantile(order[:tenth], 0.99)),
        "longest_p50": digits(_quantile(order[-tenth:], 0.5)),
        "longest_p99": digits(_quantile(order[-tenth:], 0.99)),
        "slowdown_p50": digits(float(np.quantile(slow, 0.5))),
        "slowdown_p99": digits(float(np.quantile(slow, 0.99))),
        "jain": digits(float(slow.sum() ** 2 / (len(slow) * (slow**2).sum()))),
    }


def _quantile(served: list[Served], share: float) -> float:
    return float(np.quantile([(one.ttft_ns or 0) / NS for one in served], share, method="inverted_cdf"))
