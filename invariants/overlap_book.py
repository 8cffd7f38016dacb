"""Steps that overlap, in the second books. Owns: plans in flight, their void rows, who left ahead of his last token.

Only for an engine whose configuration says that its steps overlap. Its books count tokens with the plan that samples
them, as the engine does; what of that is still under way is worked out from the plans in flight.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from engine.events import RequestTransitioned, StepPlanned
from engine.request import LATE_ENDS
from invariants.members import FINISHED, WAITING
from invariants.running_book import ShadowRequest

#: Plans without an outcome before the next plan.
MOST_IN_FLIGHT = 1


class Flown(NamedTuple):
    """One plan without its outcome.

    members  everybody whose rows it computes
    void     of them, those that ended since by the outcome of the step before
    """

    plan: StepPlanned
    members: frozenset[str]
    void: set[str]

    def wanted(self, rids: tuple[str, ...]) -> tuple[str, ...]:
        """`rids` without void ones."""
        return tuple([rid for rid in rids if rid not in self.void]) if self.void else rids


class OverlapBook:
    """What is in flight.

    flights  oldest first
    spent    decoding requests with as many outputs, under way ones included, as they may have
    left     how many were ever spent
    awaited  members of the last plan whose piece has not moved them on yet
    """

    def __init__(self) -> None:
        self.flights: deque[Flown] = deque()
        self.spent: dict[str, ShadowRequest] = {}
        self.left = 0
        self.awaited: set[str] = set()
        #: rid -> the step whose outcome has to bring the end that was asked for
        self._due_by: dict[str, int] = {}

    @property
    def is_inside_a_step(self) -> bool:
        """Whether more is in flight than may be between two calls, or a plan's pieces have not moved their requests."""
        return len(self.flights) > MOST_IN_FLIGHT or bool(self.awaited)

    def begin(self, event: StepPlanned) -> None:
        """A plan is in flight from now on."""
        pieces = [row.rid for row in event.prefills]
        self.flights.append(Flown(event, frozenset([*pieces, *event.decodes]), set()))
        self.awaited.update(pieces)

    def is_of_outcome(self, step: int) -> bool:
        """Whether an event of `step` may be of the outcome that is applied next."""
        return bool(self.flights) and self.flights[0].plan.step == step

    def under_way(self, rid: str, event_step: int, *, is_failed: bool = False) -> tuple[int, int]:
        """(outputs, tokens) of a request that its books hold and no outcome has brought, as of an event of that step.

        The step that is applied counts as brought, unless it failed.
        """
        applied = event_step if self.is_of_outcome(event_step) and not is_failed else -1
        outputs = tokens = 0
        for flown in self.flights:
            if flown.plan.step <= applied or rid not in flown.members or rid in flown.void:
                continue
            outputs += rid in flown.plan.sampling
            pieces = [row.extend_len for row in flown.plan.prefills if row.rid == rid]
            tokens += pieces[0] if pieces else 1
        return outputs, tokens

    def may_end_late(self, event: RequestTransitioned) -> bool:
        """Whether a request that waits may be ended by a token: one that was under way when it was pushed back."""
        return (
            (event.source, event.target) == (WAITING, FINISHED)
            and event.cause in LATE_ENDS
            and self.is_of_outcome(event.step)
            and event.rid in self.flights[0].wanted(self.flights[0].plan.sampling)
        )

    def follow_end(self, event: RequestTransitioned) -> None:
        """A request ended: its rows in steps that are not the one applied are void."""
        applied = event.step if self.is_of_outcome(event.step) else -1
        for flown in self.flights:
            if flown.plan.step > applied and event.rid in flown.members:
                flown.void.add(event.rid)
        self.spent.pop(event.rid, None)
        self._due_by.pop(event.rid, None)

    def follow_piece(self, request: ShadowRequest) -> bool:
        """A piece moved its request on. True when it has no further token to come."""
        self.awaited.discard(request.rid)
        return request.outputs >= request.max_new

    def spend(self, request: ShadowRequest) -> None:
        """Nothing more is planned for a request."""
        self.spent[request.rid] = request
        self.left += 1

    def abort(self, rid: str) -> None:
        """An end was asked for: at once, or with the oldest outcome that the request has a row in."""
        holding = [flown.plan.step for flown in self.flights if rid in flown.members and rid not in flown.void]
        self._due_by[rid] = min(holding, default=-1)

    def overdue(self, rids: list[str], step: int) -> list[str]:
        """Of those whose end was asked for, those that the outcome of `step` had to end."""
        return [rid for rid in rids if self._due_by.get(rid, -1) <= step]

    def in_flight(self, rid: str) -> int:
        """Steps in flight that compute rows for a request."""
        return sum(rid in flown.members and rid not in flown.void for flown in self.flights)
