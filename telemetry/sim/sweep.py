"""Sweep. Owns: one workload at several loads, and up to which of them limits are kept.

Only the load differs: configuration, cost model, requests and their shared prefixes are the same at each. An open loop
that is asked for more than the engine can do answers it all the same, later: what tells is how long the queue became,
and how long the engine needed after the last request had come.
"""

from __future__ import annotations

import math
import time
from typing import Final

from engine.events import AnyEvent, RequestArrived, StepCompleted
from telemetry.settings import UsageError
from telemetry.sim.commands import SweepCommand
from telemetry.sim.cost_model import Estimator
from telemetry.sim.journal_workload import JournalWorkload
from telemetry.sim.objectives import MEASURES, THROUGHPUT, Figures, Limit, limits_of
from telemetry.sim.parts import CostUsed, Measured, Part, digits
from telemetry.sim.progress import Meter
from telemetry.sim.report import duration
from telemetry.sim.results import cost_used
from telemetry.sim.run import Plan, arrivals_of, gaps_of, plan_of
from telemetry.sim.trial import Trial
from telemetry.sim.whatif import recorded_run
from telemetry.sim.whatif_figures import ended_of
from telemetry.sim.workload import Held

RESULT_VERSION: Final = 1
_UNITS: Final = {"rate_scale": "times as fast as recorded", "rate": "requests a second", "concurrency": "clients"}
_ONE: Final = {"rate": "request a second", "concurrency": "client"}


class Point(Measured):
    """The run at one load. Times in seconds of virtual time, over requests that ended by themselves."""

    load: float
    """In the unit of `by`."""
    offered_per_s: float | None
    """Requests that came, by the second, until the last came; None when all came at once, and in a closed loop."""
    served_per_s: float
    """Requests that ended by themselves, by the second, until the last ended."""
    served: int
    """Ended by themselves."""
    refused: int
    """Could never fit."""
    waiting_most: int
    """The longest queue after a step."""
    waiting_mean: float
    """Its length on average over time."""
    after_last_s: float
    """From the last arrival to the last end."""
    cache_hit_rate: float | None
    """Prompt tokens found in the cache at first admission, of all prompt tokens."""
    retractions: int
    """Times that a running request was pushed back."""
    share_outside: float
    """Share of the time in steps larger than any that the cost model was fitted on."""
    exceeded: tuple[str, ...]
    """Limits that are not kept here."""


class SweepResult(Part):
    """All loads, lowest first. The JSON of `admitscope sweep --json`."""

    result_version: int = RESULT_VERSION
    """Raised when a field changes its meaning."""
    workload: str
    by: str
    """What is swept: rate_scale, rate, concurrency."""
    settings: dict[str, str]
    """What was set otherwise than in the base configuration."""
    policy: str
    requests: int
    limits: tuple[str, ...]
    """In words."""
    kept_to: float | None
    """The highest load up to which every load tried keeps the limits; None: not even the lowest, or no limit."""
    sentence: str
    points: tuple[Point, ...]
    cost: CostUsed
    """Over all loads together, as the last one left it."""
    violations: int
    plot: str | None
    wall_s: float
    notes: tuple[str, ...]


class _Queue:
    """Hears a run: when the last request came, and how long the queue was."""

    def __init__(self) -> None:
        self.first_ns: int | None = None
        self.last_ns = 0
        self.came = 0
        self.most = 0
        self._since_ns = 0
        self._length = 0
        self._sum_ns = 0

    def emit(self, event: AnyEvent) -> None:
        if isinstance(event, RequestArrived):
            # When its client sent it: between two steps the engine takes in what came during the first.
            sent_ns = min(event.accepted_ns or event.t_ns, event.t_ns)
            self.first_ns = sent_ns if self.first_ns is None else self.first_ns
            self.last_ns = sent_ns
            self.came += 1
        elif isinstance(event, StepCompleted):
            self._sum_ns += self._length * (event.t_ns - self._since_ns)
            self._since_ns, self._length = event.t_ns, event.num_waiting
            self.most = max(self.most, event.num_waiting)

    def mean(self, until_ns: int) -> float:
        return self._sum_ns / max(until_ns - (self.first_ns or 0), 1)

    @property
    def offered_per_s(self) -> float | None:
        """The gaps between arrivals are one fewer than the arrivals."""
        span_ns = self.last_ns - (self.first_ns or 0)
        return (self.came - 1) * 1e9 / span_ns if span_ns > 0 else None


def sweep(command: SweepCommand, progress: Meter, *, version: str = "") -> SweepResult:
    """Every load. Raises UsageError, TraceError, JournalError or CostError."""
    began = time.monotonic()
    limits, loads = limits_of(command.at_most), command.loads()
    progress.phase("reading", 0)
    plan = plan_of(command.simulation())
    plan.known = None if plan.journal is None else ended_of(recorded_run(plan.journal)[0])
    source = plan.workload
    plan.workload = Held(source)
    total = plan.workload.total()
    if not total:
        raise UsageError(f"{command.trace}: no request is in it; there is nothing to simulate")
    progress.phase("simulating", total * len(loads))
    points: list[Point] = []
    lowest: Figures = {}
    violations, estimator = 0, Estimator(plan.cost)
    for number, load in enumerate(loads):
        progress.say(f"{command.by.replace('_', ' ')} {plainly(load)}")
        trial, queue = _trial(command, plan, load, progress, before=number * total, version=version)
        figures = trial.figures()
        lowest = lowest or figures  # as measured: rounded, a load could exceed what it is equal to
        points.append(_point(load, trial, queue, figures, limits=limits, lowest=lowest, is_open=_is_open(command)))
        violations += trial.violations
        estimator = trial.estimator
    notes = [*plan.notes, *(gaps_of(source) if isinstance(source, JournalWorkload) else [])]
    notes += [
        f"--at-most {one.measure}={one.factor:g}x was not judged: no request has that time at the lowest load"
        for one in limits
        if one.most(lowest) is None
    ]
    limits = tuple(one for one in limits if one.most(lowest) is not None)
    return SweepResult(
        workload=plan.workload.name,
        by=command.by,
        settings=plan.settings,
        policy=plan.config.scheduler.schedule_policy.value,
        requests=total,
        limits=tuple(limit.words(lowest) for limit in limits),
        kept_to=_kept_to(points) if limits and _any_served(points) else None,
        sentence=sentence_of(command.by, points, limits),
        points=tuple(points),
        cost=cost_used(estimator),
        violations=violations,
        plot=None,
        wall_s=round(time.monotonic() - began, 2),
        notes=tuple(notes),
    )


def _is_open(command: SweepCommand) -> bool:
    return command.by != "concurrency"


def _trial(
    command: SweepCommand, plan: Plan, load: float, progress: Meter, *, before: int, version: str
) -> tuple[Trial, _Queue]:
    queue = _Queue()
    arrivals = arrivals_of(command.simulation(load), plan.workload)
    trial = Trial(plan, arrivals, cost=plan.cost, is_checked=command.check, version=version, watch=queue)
    trial.run(lambda ended: progress.tell(before + ended), until_s=math.inf)
    return trial, queue


def _point(
    load: float,
    trial: Trial,
    queue: _Queue,
    figures: Figures,
    *,
    limits: tuple[Limit, ...],
    lowest: Figures,
    is_open: bool,
) -> Point:
    whole = sum(one.is_whole for one in trial.served.values())
    first_ns, end_ns = queue.first_ns or 0, trial.measure.end_ns
    admitted = [one for one in trial.served.values() if one.cached_len is not None]
    prompts = sum(one.prompt_len for one in admitted)
    return Point.model_validate(
        {
            **{name: digits(value) for name, value in figures.items()},
            "load": load,
            "offered_per_s": digits(queue.offered_per_s) if is_open else None,
            "served_per_s": digits(whole * 1e9 / max(end_ns - first_ns, 1)),
            "served": whole,
            "refused": trial.loop.refused,
            "waiting_most": queue.most,
            "waiting_mean": digits(queue.mean(end_ns)),
            "after_last_s": digits(max(end_ns - queue.last_ns, 0) / 1e9),
            "cache_hit_rate": round(sum(one.cached_len or 0 for one in admitted) / prompts, 4) if prompts else None,
            "retractions": trial.measure.retractions,
            "share_outside": round(trial.share_outside, 4),
            "exceeded": [limit.measure for limit in limits if not limit.holds(figures, lowest)],
        }
    )


def _kept_to(points: list[Point]) -> float | None:
    """The load before the first that exceeds a limit."""
    kept = None
    for point in points:
        if point.exceeded:
            break
        kept = point.load
    return kept


def _any_served(points: list[Point]) -> bool:
    return any(point.served for point in points)


def sentence_of(by: str, points: list[Point], limits: tuple[Limit, ...]) -> str:
    """What the sweep found, in one sentence."""
    if not _any_served(points):
        return "No request ended by itself at any of these loads: there is nothing to tell of them."
    if not limits:
        return _growth(by, points)
    lowest: Figures = points[0].model_dump()
    words = " and ".join(limit.words(lowest) for limit in limits)
    first = next((point for point in points if point.exceeded), None)
    if first is None:
        return f"It keeps {words} at every load tried, up to {amount(by, points[-1].load)}."
    broken = " and ".join(f"{MEASURES[name]} is {duration(getattr(first, name))}" for name in first.exceeded)
    again = [plainly(point.load) for point in points if point.load > first.load and not point.exceeded]
    more = f" Kept again at {', '.join(again)}: what is between them is not smooth." if again else ""
    kept = _kept_to(points)
    if kept is None:
        return f"Not even at {amount(by, first.load)} does it keep {words}: there {broken}.{more}"
    return f"Up to {amount(by, kept)} it keeps {words}. At {plainly(first.load)}, {broken}.{more}"


def _growth(by: str, points: list[Point]) -> str:
    least, most = points[0], points[-1]
    parts = [
        f"{MEASURES[name]} goes from {_value(name, least)} to {_value(name, most)}"
        for name in ("ttft_p50", "ttft_p99", "tbt_p99", THROUGHPUT)
    ]
    return f"From {plainly(least.load)} to {amount(by, most.load)}, {', '.join(parts)}."


def _value(name: str, point: Point) -> str:
    value = getattr(point, name)
    if name != THROUGHPUT:
        return duration(value)
    return "–" if value is None else f"{value:,.4g} tokens/s"


def amount(by: str, load: float) -> str:
    """A load with its unit."""
    unit = _UNITS[by]
    return f"{plainly(load)} {_ONE.get(by, unit) if load == 1 else unit}"


def plainly(load: float) -> str:
    """A load as it was typed: a million clients is no 1e+06, and two loads are told apart."""
    return f"{load:.12g}"
