"""Overtakers. Owns: by which rule a later comer went first: the policy of its pass, and what that ordered both by.

Looked for on reading only, in the passes that are kept; the counts are those of `telemetry.overtakes`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from engine.events import AdmissionDecided
from engine.scheduler.decision import ADMITTED
from telemetry.answers_pass import order_key
from telemetry.observe_requests import Overtaker
from telemetry.request_timeline import RequestTimeline

if TYPE_CHECKING:
    from telemetry.read_model import ReadModel

#: Later comers kept of the newest passes, and passes looked through for them.
_KEPT: Final = 32
_PASSES: Final = 128


class Overtakers:
    """The newest admissions of the passes kept, for one answer. Walks them when first asked."""

    def __init__(self, model: ReadModel) -> None:
        self._model = model
        self._newest: list[tuple[int, str, AdmissionDecided]] | None = None

    def of(self, request: RequestTimeline) -> Overtaker | None:
        """The latest admission that went past the waiting `request`; None when none is kept."""
        if self._newest is None:
            self._newest = self._find()
        for entry, policy, event in self._newest:
            if entry > request.enqueued_as:
                key = order_key(self._model, policy)
                return Overtaker(
                    rid=event.rid,
                    step=event.step,
                    policy=policy,
                    order_key=key,
                    key=self._key(key, event, event.rid),
                    own_key=self._key(key, request.decided, request.rid),
                )
        return None

    def _find(self) -> list[tuple[int, str, AdmissionDecided]]:
        found: list[tuple[int, str, AdmissionDecided]] = []
        for at in range(len(self._model.steps) - 1, max(len(self._model.steps) - _PASSES, 0) - 1, -1):
            row = self._model.steps[at]
            members = {piece.rid for piece in row.planned.prefills}
            for event in row.decisions:
                taken = self._model.find(event.rid) if event.reason in ADMITTED and event.rid in members else None
                if taken is not None and not event.is_continuation:
                    found.append((taken.enqueued_as, row.planned.active_policy or "", event))
            if len(found) >= _KEPT:
                break
        return found

    def _key(self, key: str, event: AdmissionDecided | None, rid: str) -> float | None:
        """What `key` says of a request; None when no record has it (nobody looked at it, it is not kept)."""
        request = self._model.find(rid)
        if key == "max_new_tokens":
            return None if request is None else request.max_new_tokens
        if key == "priority":
            return None if request is None else request.priority
        if key == "cached_tokens":
            return None if event is None else event.prefix_len
        if key == "uncached_tokens":
            if event is not None:
                return event.candidate_extend
            return None if request is None else request.prompt_len + request.output_len
        return None
