"""A server that has faults on purpose and says all it can. Owns: what the canary test runs as a process of its own.

Logs at DEBUG. The executor fails once, with token ids in its message, and one event breaks a law, so that evidence is
written. Everything else is `admitscope serve`.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

from engine.events import ResponseSent
from engine.executor.base import ForwardBatch, StepResult
from engine.llm_engine import LLMEngine

FAILING_CALL = 8


def failing(execute: Any) -> Any:
    """`execute` that raises once, quoting what it was given."""
    calls = 0

    def wrapped(self: Any, batch: ForwardBatch) -> StepResult:
        nonlocal calls
        calls += 1
        if calls == FAILING_CALL:
            raise ValueError(f"cannot embed {batch.token_ids.tolist()}")
        result: StepResult = execute(self, batch)
        return result

    return wrapped


def breaking(record_response: Any) -> Any:
    """`record_response` that once publishes an event from the past before it."""
    done = False

    def wrapped(self: LLMEngine, *arguments: Any) -> None:
        nonlocal done
        if not done:
            done = True
            self.scheduler.publisher.emit(ResponseSent(0, 0, 0, "r", None, None, 0, 0, False))
        record_response(self, *arguments)

    return wrapped


def main() -> int:
    logging.basicConfig(level=logging.DEBUG)
    from engine.executor.simulated import SimulatedExecutor
    from engine.executor.torch_executor import TorchExecutor
    from telemetry.cli import main as run

    for executor in (SimulatedExecutor, TorchExecutor):
        executor.execute = failing(executor.execute)
    LLMEngine.record_response = breaking(LLMEngine.record_response)
    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
