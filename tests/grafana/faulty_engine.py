"""Servers with one fault each. Owns: what must raise a page, done to the real engine before it serves.

    python -m tests.grafana.faulty_engine serve --fault leak [FLAGS OF admitscope serve]

A fault is a patch of one method; everything else is `admitscope serve`. Faults begin once the engine has made some
steps, so that Prometheus has seen it well.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from engine.executor.base import ForwardBatch, StepResult
from engine.executor.simulated import SimulatedExecutor
from engine.kvcache.page_pool import PagePool, PageState
from engine.llm_engine import LLMEngine, TokenOutput
from invariants.checker import InvariantChecker

#: Steps before a fault begins.
STEPS: Final = 60


def _each_step(then: Callable[[LLMEngine], None]) -> None:
    """`then` runs before each step from number STEPS on."""
    original = LLMEngine.step

    def step(self: LLMEngine) -> list[TokenOutput]:
        if self.steps_done >= STEPS:
            then(self)
        return original(self)

    LLMEngine.step = step


def _once(then: Callable[[LLMEngine], None]) -> Callable[[LLMEngine], None]:
    done: list[bool] = []

    def only(engine: LLMEngine) -> None:
        if not done:
            done.append(True)
            then(engine)

    return only


def violation() -> None:
    """The pool's counter of free pages drifts by one."""

    def drift(engine: LLMEngine) -> None:
        engine.scheduler.kv.pool._counts[PageState.FREE] -= 1

    _each_step(_once(drift))


def leak() -> None:
    """A page falls off the free list into nobody's hands."""

    def drop(engine: LLMEngine) -> None:
        engine.scheduler.kv.pool._free_top -= 1

    _each_step(_once(drop))


def residue() -> None:
    """A request that ends does not give its own pages back."""
    original = PagePool.move
    done: list[bool] = []

    def move(self: PagePool, pages: Any, source: PageState, target: PageState, *, owner: int, cause: str) -> None:
        if cause == "free" and len(pages) and not done:
            done.append(True)
            return
        original(self, pages, source, target, owner=owner, cause=cause)

    PagePool.move = move


def stuck() -> None:
    """A step never comes back."""
    original = SimulatedExecutor.execute

    def execute(self: SimulatedExecutor, batch: ForwardBatch) -> StepResult:
        if batch.step >= STEPS:
            time.sleep(3600)
        return original(self, batch)

    SimulatedExecutor.execute = execute


def claim() -> None:
    """Every allocation misses from now on: the loop turns, and nothing is done."""

    def miss(engine: LLMEngine) -> None:
        engine.scheduler.kv.allocation_fault = lambda _kind: True

    _each_step(_once(miss))


def silence() -> None:
    """The checker fails at everything it is told; the engine is walled off from that."""

    def fail(self: InvariantChecker, *_: Any) -> None:
        raise RuntimeError("the checker is out of order")

    InvariantChecker.feed = fail
    InvariantChecker.audit = fail


FAULTS: Final[dict[str, Callable[[], None]]] = {
    fault.__name__: fault for fault in (violation, leak, residue, stuck, claim, silence)
}


def main(words: Sequence[str]) -> int:
    """Take `--fault NAME` out of the command line, break that, and serve."""
    from telemetry.cli import main as run

    at = list(words).index("--fault")
    FAULTS[words[at + 1]]()
    return run([*words[:at], *words[at + 2 :]])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
