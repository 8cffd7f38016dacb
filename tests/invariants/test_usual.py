"""What is judged in one look is followed as the laws, one by one, would have followed it."""

from __future__ import annotations

from collections import Counter, deque
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.config import EngineConfig
from engine.errors import RequestRefused
from engine.events import AnyEvent, EngineStarted, StepCompleted
from invariants import InvariantChecker, usual
from tests.builders import CoreRun, engine_config
from tests.workloads import JOBS, MAX_STEPS, Job, configs

_PLAIN = (int, float, str, bytes, bool, type(None))


def picture(thing: Any, seen: dict[int, int] | None = None) -> Any:
    """Everything that a book holds, in a form that can be compared."""
    seen = {} if seen is None else seen
    if isinstance(thing, _PLAIN) or callable(thing):
        return thing if isinstance(thing, _PLAIN) else None
    if id(thing) in seen:
        return f"#{seen[id(thing)]}"
    seen[id(thing)] = len(seen)
    if isinstance(thing, np.ndarray):
        return thing.tolist()
    if isinstance(thing, dict):
        return [(picture(key, seen), picture(value, seen)) for key, value in thing.items()]
    if isinstance(thing, set | frozenset):
        return sorted(thing)
    if isinstance(thing, list | tuple | deque):
        return [picture(each, seen) for each in thing]
    names = [*getattr(thing, "__dict__", ()), *getattr(type(thing), "__slots__", ())]
    return [(name, picture(getattr(thing, name), seen)) for name in names if hasattr(thing, name)]


class Pair:
    """One checker that looks once where it can, and one that asks every law; their books are compared as steps end."""

    def __init__(self) -> None:
        self.quick, self.slow = InvariantChecker(), InvariantChecker()

    def emit(self, event: AnyEvent) -> None:
        self.quick.emit(event)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(usual, "BY_CAUSE", {})
            patch.setattr(usual, "ends", lambda _books, _watch, _event: False)
            self.slow.emit(event)
        if isinstance(event, StepCompleted | EngineStarted):
            quick, slow = self.quick._judge, self.slow._judge
            assert quick is not None
            assert slow is not None
            assert picture([quick.books, quick.watch]) == picture([slow.books, slow.watch])
            assert self.quick.checks_by_group == self.slow.checks_by_group


# Too slow: an example is the life of a whole engine.
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(config=st.one_of(configs(), configs(accounting="exact")), work=JOBS)
def test_books_are_the_same_whether_laws_are_asked_together_or_one_by_one(
    config: EngineConfig, work: list[Job]
) -> None:
    run = CoreRun(config, Pair())
    todo = sorted(enumerate(work), key=lambda item: item[1].arrives)
    step = 0
    while todo or run.has_work:
        while todo and todo[0][1].arrives <= step:
            index, job = todo.pop(0)
            with suppress(RequestRefused):
                run.add(f"r{index}", job.prompt(index), job.max_new, ignore_eos=job.ignore_eos, priority=job.priority)
        for index, job in enumerate(work):
            if job.aborted_after is not None and job.arrives + job.aborted_after == step:
                run.abort(f"r{index}")
        run.step(fail=step == 11)
        step += 1
        assert step < MAX_STEPS


def test_most_transitions_of_a_plain_run_are_the_usual_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise nothing is saved, and the test above compares a thing with itself."""
    asked: Counter[bool] = Counter()

    def counted(follow: Any) -> Any:
        def counts(*about: Any) -> bool:
            done = follow(*about)
            asked[done] += 1
            return bool(done)

        return counts

    monkeypatch.setattr(usual, "BY_CAUSE", {cause: counted(follow) for cause, follow in usual.BY_CAUSE.items()})
    monkeypatch.setattr(usual, "ends", counted(usual.ends))
    run = CoreRun(engine_config(), InvariantChecker())
    for number in range(8):
        run.add(f"r{number}", 20 + number, 5)
        run.step()
    while run.has_work:
        run.step()
    assert asked == {True: 32}
