"""One simulation. Owns: running a scenario to its end or to its fault, and telling which, as plain values."""

from __future__ import annotations

import logging
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import msgspec

from engine.events import EventSink
from engine.executor import failure as failure_log
from invariants import InvariantViolation
from tests.simulation.scenario import Scenario
from tests.simulation.world import Unsound, World

#: Breaks a world on purpose, for as long as the context lasts.
Breaker = Callable[[World], AbstractContextManager[object]]


class Failure(msgspec.Struct, frozen=True):
    """What went wrong. Two runs fail alike when `what` is the same.

    what   the law; or the fault and its kind; or the exception and where it was raised
    """

    what: str
    text: str
    step: int
    rid: str | None = None


class Report(msgspec.Struct, frozen=True):
    """One run. `hash` covers every event; `clock_alarms`: what the laws of time said to a clock that fell.

    cpu_s   what the run took of its process; the only field that another run of the seed does not repeat
    """

    seed: int
    steps: int
    events: int
    accepted: int
    hash: str
    seen: dict[str, int]
    cpu_s: float
    clock_alarms: int = 0
    failure: Failure | None = None


def simulate(
    scenario: Scenario,
    *,
    audit_every: int = 1,
    sink: EventSink | None = None,
    breaker: Breaker | None = None,
    most_steps: int | None = None,
    overlap: bool = False,
) -> Report:
    """Run a scenario, or so many steps of it. Never raises for a fault of the engine: the report tells it."""
    started = time.process_time()
    world = World(scenario, audit_every=audit_every, sink=sink, overlap=overlap)
    failure = None
    with _quiet(), nullcontext() if breaker is None else breaker(world):
        try:
            world.play(most_steps)
        except Exception as error:  # whatever it is, it is the finding
            failure = _told(error, world)
    return Report(
        seed=scenario.seed,
        steps=world.steps,
        events=world.hash.events,
        accepted=world.accepted,
        hash=world.hash.hexdigest(),
        cpu_s=time.process_time() - started,
        seen=dict(Counter(world.seen.result())),
        clock_alarms=world.checker.total_violations if failure is None else 0,
        failure=failure,
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """An executor that fails by order is no news."""
    log = logging.getLogger(failure_log.__name__)
    before = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(before)


def _told(error: Exception, world: World) -> Failure:
    match error:
        case InvariantViolation():
            violation = error.violation
            return Failure(violation.id, str(violation), world.steps, violation.rid)
        case Unsound():
            return Failure(f"unsound: {error.what}", str(error), world.steps, error.rid)
    frames = traceback.extract_tb(error.__traceback__)
    place = f"{frames[-1].name}" if frames else "?"
    last = "".join(traceback.format_exception(error)[-4:])
    return Failure(f"{type(error).__name__} in {place}", f"{error}\n{last}", world.steps, next(iter(world.lives), None))
