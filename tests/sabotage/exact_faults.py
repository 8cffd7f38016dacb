"""Faults of what a preemption gives back under exact accounting. Owns: one wrong amount at a time."""

from __future__ import annotations

from typing import Any, Final

import pytest

from engine.scheduler.ledgers import Budget
from tests.builders import CoreRun
from tests.sabotage.engine_faults import breaks

#: Later requests are more important, and rows are few: nearly every arrival takes the place of somebody.
PREEMPTING: Final[dict[str, object]] = {
    "kv_accounting": "exact",
    "schedule_policy": "fcfs",
    "enable_priority_scheduling": True,
    "enable_priority_preemption": True,
    "priority_preemption_threshold": 0,
    "max_running_requests": 2,
    "num_pages": 48,
}


def _gives_back(run: CoreRun, patch: pytest.MonkeyPatch, *, tokens: int = 0, promised: int = 0) -> None:
    """Each preemption is credited with so much more than it gave back."""
    add, release = run.add, Budget.release
    # No fault, and so no patch: the run without the fault is to have the same priorities.
    run.add = lambda rid, *given, **named: add(rid, *given, **named, priority=int(rid[1:]))

    def more(self: Budget, available: int, promise: float, taken: int = 0) -> Any:
        return release(self, available + tokens, promise + promised, taken)

    patch.setattr(Budget, "release", more)


@breaks("INV-BUDGET-03", "a victim credited with a page that it does not hold", **PREEMPTING)
def too_many_pages(run: CoreRun, patch: pytest.MonkeyPatch) -> None:
    _gives_back(run, patch, tokens=16)


@breaks("INV-BUDGET-04", "a victim credited with a page that it was not promised", **PREEMPTING)
def too_large_a_promise(run: CoreRun, patch: pytest.MonkeyPatch) -> None:
    _gives_back(run, patch, promised=16)
