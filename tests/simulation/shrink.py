"""Shrinking. Owns: making a failing scenario small while it fails alike — fewer steps, fewer operations, less of each.

Each pass proposes smaller scenarios, and the first that still fails in the same way is gone on from. That is greedy,
needs no more than the scenario itself, and ends: every accepted proposal is smaller, and a budget of time bounds all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

from msgspec.structs import asdict, replace
from pydantic import ValidationError

from engine.config import CacheConfig, SchedulerConfig
from engine.errors import ConfigError
from tests.simulation.scenario import AnyOp, Arrive, Scenario
from tests.simulation.simulate import Failure

#: Runs a scenario; the failure, None when it ends well.
Try = Callable[[Scenario], Failure | None]

_DEFAULTS: dict[str, dict[str, Any]] = {
    "scheduler": {name: field.default for name, field in SchedulerConfig.model_fields.items()},
    "cache": {name: field.default for name, field in CacheConfig.model_fields.items()},
}
_KEPT = frozenset({"page_size", "num_pages"})


class Shrinker:
    """One search. `best` is the smallest scenario found so far, `tries` how many were run."""

    def __init__(self, scenario: Scenario, failure: Failure, run: Try, *, budget_s: float) -> None:
        self.best = scenario
        self.failure = failure
        self.tries = 0
        self._run = run
        self._until = time.monotonic() + budget_s

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self._until

    def shrink(self) -> Scenario:
        """Passes until none finds anything more, or the time is over."""
        self._accept(self._until_failure())
        while not self.is_over:
            before = self.best
            self._fewer_ops()
            self._fewer_steps()
            for simpler in (_simpler_ops, _simpler_world, _simpler_config):
                self._greedy(simpler)
            if self.best == before:
                break
        return self.best

    def _accept(self, candidate: Scenario) -> bool:
        """Go on from `candidate` when it fails alike."""
        if candidate == self.best or self.is_over:
            return False
        self.tries += 1
        try:
            failure = self._run(candidate)
        except (ConfigError, ValidationError):  # no engine starts with this
            return False
        if failure is None or failure.what != self.failure.what:
            return False
        self.best, self.failure = candidate, failure
        return True

    def _until_failure(self) -> Scenario:
        """Nothing after the step that failed."""
        steps = min(self.best.steps, self.failure.step + 1)
        return replace(self.best, steps=steps, ops=tuple(op for op in self.best.ops if op.at < steps))

    def _fewer_ops(self) -> None:
        """Halves, quarters, … single operations taken out, from the end to the start."""
        size = max(1, len(self.best.ops) // 2)
        while not self.is_over:
            end = len(self.best.ops)
            while end > 0:
                ops = self.best.ops
                self._accept(replace(self.best, ops=ops[: max(0, end - size)] + ops[end:]))
                end -= size
            if size == 1:
                return
            size //= 2

    def _fewer_steps(self) -> None:
        """Gaps between operations closed: all at once, by halves, one by one; then no step after the last one."""
        for keep in (0, 1, 2, 4):
            self._accept(_with_gaps(self.best, [min(gap, keep) for gap in _gaps(self.best)]))
        for index in range(len(_gaps(self.best))):
            gaps = _gaps(self.best)
            for gap in dict.fromkeys((0, gaps[index] // 2, gaps[index] - 1)):
                if 0 <= gap < gaps[index] and self._accept(
                    _with_gaps(self.best, [*gaps[:index], gap, *gaps[index + 1 :]])
                ):
                    break
        last = max((op.at for op in self.best.ops), default=0)
        if last + 1 < self.best.steps:
            self._accept(replace(self.best, steps=last + 1))

    def _greedy(self, proposals: Callable[[Scenario], Iterator[Scenario]]) -> None:
        """The proposals on the best so far, again from the first after each success."""
        found = True
        while found and not self.is_over:
            found = any(self._accept(candidate) for candidate in proposals(self.best))


def _gaps(scenario: Scenario) -> list[int]:
    """Steps between each operation and the one before."""
    at = [0, *(op.at for op in scenario.ops)]
    return [later - earlier for earlier, later in pairwise(at)]


def _with_gaps(scenario: Scenario, gaps: list[int]) -> Scenario:
    ops, at = [], 0
    for op, gap in zip(scenario.ops, gaps, strict=True):
        at += gap
        ops.append(replace(op, at=at))
    tail = scenario.steps - 1 - max((op.at for op in scenario.ops), default=0)
    return replace(scenario, ops=tuple(ops), steps=at + 1 + max(0, tail))


def _smaller(name: str, value: Any, plain: Any) -> Iterator[Any]:
    """Simpler values of one field, simplest first."""
    if value == plain:
        return
    yield plain
    if isinstance(value, int) and not isinstance(value, bool):
        floor = plain if isinstance(plain, int) else 0
        for smaller in (value // 2, value - 1):
            if abs(smaller - floor) < abs(value - floor):
                yield smaller


def _simpler_ops(scenario: Scenario) -> Iterator[Scenario]:
    """One field of one operation towards its default."""
    for index, op in enumerate(scenario.ops):
        for name, value in asdict(op).items():
            if name in {"at", "rid", "phase"}:
                continue
            for smaller in _smaller(name, value, _PLAIN.get((type(op), name), 0)):
                yield replace(scenario, ops=_at(scenario.ops, index, replace(op, **{name: smaller})))


def _at(ops: tuple[AnyOp, ...], index: int, op: AnyOp) -> tuple[AnyOp, ...]:
    return (*ops[:index], op, *ops[index + 1 :])


_PLAIN: dict[tuple[type, str], Any] = {
    (Arrive, "own"): 1,
    (Arrive, "max_new"): 1,
    (Arrive, "ignore_eos"): True,
    (Arrive, "stops"): False,
    (Arrive, "in_flight"): False,
    (Arrive, "priority"): None,
    (Arrive, "routing_key"): None,
}


def _simpler_world(scenario: Scenario) -> Iterator[Scenario]:
    """Plain time, no closing rush."""
    for changes in ({"tick_ns": 0}, {"step_ns": 1_000_000}, {"closing": "drain"}, {"clock_falls": False}):
        name, value = next(iter(changes.items()))
        if getattr(scenario, name) != value:
            yield replace(scenario, **changes)


def _simpler_config(scenario: Scenario) -> Iterator[Scenario]:
    """One setting at its default; fewer pages, smaller pages, fewer rows."""
    for section, settings in scenario.config.items():
        for name, value in settings.items():
            options: list[Any] = [] if name in _KEPT else [_DEFAULTS[section][name]]
            if name in {"num_pages", "max_running_requests"}:
                options = [value // 2, value - 1]
            elif name == "page_size":
                options = [1]
            for option in options:
                if option != value and not (isinstance(option, int) and option < 1 and not isinstance(option, bool)):
                    yield replace(scenario, config={**scenario.config, section: {**settings, name: option}})
