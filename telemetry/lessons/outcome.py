"""Outcomes. Owns: what became of each request of a lesson, from events, and how two runs of it differ."""

from __future__ import annotations

from typing import Final

import msgspec

from engine.events import AnyEvent, RequestArrived, RequestTransitioned, StepPlanned
from engine.request import Cause, RequestState
from telemetry.lessons.moment import Moment


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """One request. Steps are those of the lesson; None: it did not come to that.

    cached, computed   prompt tokens found in the tree and computed, over all its admissions
    """

    rid: str
    arrived: int
    admitted: int | None = None
    first_token: int | None = None
    finished: int | None = None
    cached: int = 0
    computed: int = 0
    outputs: int = 0
    retractions: int = 0


#: Fields of an outcome that two runs are compared by, as a person reads them.
COMPARED: Final = ("admitted", "first_token", "finished", "cached", "computed", "retractions")


class OutcomeBook:
    """Outcomes by request, kept up to date by the events of a run."""

    def __init__(self) -> None:
        self._of: dict[str, Outcome] = {}

    def see(self, event: AnyEvent, step: int) -> None:
        """Take an event over. `step` is the lesson's. Requests that ran before step 1 are left out."""
        if isinstance(event, RequestArrived):
            # Who comes before a step comes while the one before is the last that was made.
            self._of[event.rid] = Outcome(rid=event.rid, arrived=step + 1)
        elif isinstance(event, StepPlanned):
            for row in event.prefills:
                self._add(row.rid, computed=row.extend_len)
        elif isinstance(event, RequestTransitioned):
            self._transitioned(event, step)

    def _transitioned(self, event: RequestTransitioned, step: int) -> None:
        if event.rid not in self._of or event.cause is Cause.ARRIVE:
            return
        found = self._of[event.rid]
        if event.cause is Cause.ADMIT:
            self._add(event.rid, cached=event.cached_len)
            self._set(event.rid, admitted=found.admitted or step)
        if event.output_len and found.first_token is None:
            self._set(event.rid, first_token=step)
        if event.target is RequestState.FINISHED:
            self._set(event.rid, finished=step)
        self._set(event.rid, outputs=event.output_len, retractions=event.num_retractions)

    def _add(self, rid: str, *, cached: int = 0, computed: int = 0) -> None:
        if rid in self._of:
            found = self._of[rid]
            self._set(rid, cached=found.cached + cached, computed=found.computed + computed)

    def _set(self, rid: str, **values: int | None) -> None:
        self._of[rid] = msgspec.structs.replace(self._of[rid], **values)

    def all(self) -> tuple[Outcome, ...]:
        """In the order of arrival."""
        return tuple(self._of.values())


class Change(msgspec.Struct, frozen=True):
    """One figure of one request, in two runs."""

    rid: str
    field: str
    before: int | None
    after: int | None


class Comparison(msgspec.Struct, frozen=True):
    """How two runs of a lesson differ.

    first     the first decision that differs, in both runs; None on a side that has none left. Both None: no difference
    """

    changes: tuple[Change, ...]
    first: tuple[Moment | None, Moment | None]

    @property
    def is_same(self) -> bool:
        return self.first == (None, None) and not self.changes


def compare(
    before: tuple[tuple[Moment, ...], tuple[Outcome, ...]], after: tuple[tuple[Moment, ...], tuple[Outcome, ...]]
) -> Comparison:
    """Compare (moments, outcomes) of two runs of one lesson."""
    then = {outcome.rid: outcome for outcome in before[1]}
    changes = [
        Change(now.rid, field, getattr(then[now.rid], field), getattr(now, field))
        for now in after[1]
        if now.rid in then
        for field in COMPARED
        if getattr(then[now.rid], field) != getattr(now, field)
    ]
    return Comparison(tuple(changes), _first_difference(before[0], after[0]))


def _first_difference(before: tuple[Moment, ...], after: tuple[Moment, ...]) -> tuple[Moment | None, Moment | None]:
    ours = [moment for moment in before if moment.decided]
    theirs = [moment for moment in after if moment.decided]
    for one, other in zip(ours, theirs, strict=False):
        if _key(one) != _key(other):
            return one, other
    shorter = min(len(ours), len(theirs))
    return (
        ours[shorter] if len(ours) > shorter else None,
        theirs[shorter] if len(theirs) > shorter else None,
    )


def _key(moment: Moment) -> tuple[object, ...]:
    return moment.step, moment.kind, moment.rid, moment.decided
