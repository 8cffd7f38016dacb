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

#: Runs a scenario for at most so many steps; the failure, None when there was none.
Try = Callable[[Scenario, int], Failure | None]
#: How much later than the best so far a smaller scenario may fail. Who fails much later would cost much time.
LATER = 10

_DEFAULTS: dict[str, dict[str, Any]] = {
    "scheduler": {name: field.default for name, field in SchedulerConfig.model_fields.items()},
    "cache": {name: field.default for name, field in CacheConfig.model_fields.items()},
}
#: Where small is simpler than the default.
_SMALLEST = {"page_size": 1, "num_pages": 2, "max_running_requests": 1}


class Shrinker:
    """One search. `best` is the smallest scenario found so far, `tries` how many were run.

    budget_s   seconds of processor time, so that a busy machine does not shrink less
    """

    def __init__(self, scenario: Scenario, failure: Failure, run: Try, *, budget_s: float) -> None:
        self.best = scenario
        self.failure = failure
        self.tries = 0
        self._run = run
        self._until = time.process_time() + budget_s

    @property
    def is_over(self) -> bool:
        return time.process_time() >= self._until

    def shrink(self) -> Scenario:
        """Passes until none finds anything more, or the time is over."""
        self._accept(self._until_failure())
        while not self.is_over:
            before = self.best
            self._fewer_ops()
            self._fewer_steps()
            self._simpler()
            if self.best == before:
                break
        return self.best

    def _accept(self, candidate: Scenario) -> bool:
        """Go on from `candidate` when it fails alike."""
        if candidate == self.best or self.is_over:
            return False
        self.tries += 1
        try:
            failure = self._run(candidate, self.failure.step + LATER)
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

    def _simpler(self) -> None:
        """Each value of the scenario by itself towards its plain one, as far as it goes."""
        for slot in _slots(self.best):
            while not self.is_over and any(self._accept(candidate) for candidate in _simpler_at(self.best, slot)):
                pass


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


#: (place, name): a field of the operation at a place, a setting of a section, or a field of the scenario itself.
Slot = tuple[int | str | None, str]

_PLAIN_OPS: dict[tuple[type, str], Any] = {
    (Arrive, "own"): 1,
    (Arrive, "max_new"): 1,
    (Arrive, "ignore_eos"): True,
    (Arrive, "priority"): None,
    (Arrive, "routing_key"): None,
}
_PLAIN_WORLD: dict[str, Any] = {"tick_ns": 0, "step_ns": 1_000_000, "closing": "drain", "clock_falls": False}


def _slots(scenario: Scenario) -> list[Slot]:
    """Everything that may become simpler: the world, then the configuration, then the operations."""
    world: list[Slot] = [(None, name) for name in _PLAIN_WORLD]
    config: list[Slot] = [(section, name) for section, settings in scenario.config.items() for name in settings]
    kept = {"at", "rid", "phase"}
    ops: list[Slot] = [
        (place, name) for place, op in enumerate(scenario.ops) for name in asdict(op) if name not in kept
    ]
    return world + config + ops


def _simpler_at(scenario: Scenario, slot: Slot) -> Iterator[Scenario]:
    """The scenario with simpler values at one slot, the simplest first."""
    place, name = slot
    match place:
        case None:
            for value in _towards(getattr(scenario, name), _PLAIN_WORLD[name]):
                yield replace(scenario, **{name: value})
        case str():
            settings = scenario.config[place]
            for value in _towards(settings[name], _SMALLEST.get(name, _DEFAULTS[place][name])):
                yield replace(scenario, config={**scenario.config, place: {**settings, name: value}})
        case int():
            op = scenario.ops[place]
            plain = _PLAIN_OPS.get((type(op), name), type(getattr(op, name))())
            for value in _towards(getattr(op, name), plain):
                ops: tuple[AnyOp, ...] = (
                    *scenario.ops[:place],
                    replace(op, **{name: value}),
                    *scenario.ops[place + 1 :],
                )
                yield replace(scenario, ops=ops)


def _towards(value: Any, plain: Any) -> Iterator[Any]:
    """The plain value; for a number also half the way to it, and one step."""
    if value == plain:
        return
    yield plain
    if isinstance(value, int) and not isinstance(value, bool):
        goal = plain if isinstance(plain, int) and abs(plain) < abs(value) else 0
        yield from dict.fromkeys(((value + goal) // 2, value - 1 if value > goal else value + 1))
