"""Faults of steps that overlap. Owns: what lags handled wrongly, one thing at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from engine.events import AnyEvent, StepCompleted, StepPlanned
from engine.request import Request
from engine.scheduler import advance
from engine.scheduler.plan import OutcomeRow
from tests.builders import CoreRun
from tests.sabotage.engine_faults import breaks
from tests.sabotage.life_faults import early_free
from tests.sabotage.scenario import FAULTS, Edit, Fault


def void_row_told() -> Edit:
    """The first outcome that leaves out a row of its plan has it all the same."""
    plans: deque[StepPlanned] = deque()

    def edit(event: AnyEvent) -> Sequence[AnyEvent]:
        if isinstance(event, StepPlanned):
            plans.append(event)
        if not isinstance(event, StepCompleted):
            return (event,)
        sampled, told = plans.popleft().sampling, {row.rid: row for row in event.rows}
        if event.failed or len(told) == len(sampled):
            return (event,)
        return (replace(event, rows=tuple(told.get(rid, OutcomeRow(rid)) for rid in sampled)),)

    return edit


FAULTS.append(Fault("INV-STEP-01", "the token of a void row told", edit=void_row_told, settings={"overlap": True}))


@breaks("INV-PAGE-04", "a page in the tree before its step was applied", overlap=True)
def unapplied_in_the_tree(_run: CoreRun, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Request, "applied_len", property(lambda self: self.computed_len))


@breaks("INV-STEP-03", "a step planned for a token beyond the last", overlap=True)
def beyond_the_last(_run: CoreRun, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(advance, "_let_leave", lambda _state, _plan: None)


@breaks("INV-STEP-03", "one with his last token under way is planned for again", overlap=True)
def stays_in_the_list(_run: CoreRun, patch: pytest.MonkeyPatch) -> None:
    original = advance._let_leave

    def broken(state: Any, plan: Any) -> None:
        running = list(state.running)
        original(state, plan)
        state.running = running

    patch.setattr(advance, "_let_leave", broken)


breaks("INV-STEP-01", "an end at once of a request with a row in flight", overlap=True)(early_free)
