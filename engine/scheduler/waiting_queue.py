"""WaitingQueue. Owns: the waiting requests in their present order, and how often each was passed over.

Two queues with one face. `PlainQueue` walks and sorts everything, as the reference does: it serves the policies whose
keys move by themselves, and is the oracle for `IndexedQueue` (engine/scheduler/indexed_queue.py), which only looks at
what changed.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterable, Iterator
from typing import Final, Protocol

from engine.config import Policy
from engine.request import Request, RequestState
from engine.scheduler.policies import Ordering, OrderInputs, order_queue

#: Overtakes kept before those that can matter to nobody are dropped.
_PRUNE_AT: Final = 4096


class WaitingQueue(Protocol):
    """Requests in WAITING, in an order that persists from pass to pass."""

    def add(self, request: Request) -> None:
        """Append at the tail."""
        ...

    def remove(self, rids: Iterable[str]) -> None:
        """Take out those that are in; others are ignored."""
        ...

    def order(self, inputs: OrderInputs) -> Ordering:
        """Order by the policy: the touch phase."""
        ...

    def __iter__(self) -> Iterator[Request]: ...

    def __len__(self) -> int: ...


class PlainQueue:
    """A list, matched and sorted whole in every pass."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._requests: list[Request] = []

    def add(self, request: Request) -> None:
        self._requests.append(request)

    def remove(self, rids: Iterable[str]) -> None:
        gone = set(rids)
        self._requests = [request for request in self._requests if request.rid not in gone]

    def order(self, inputs: OrderInputs) -> Ordering:
        inputs.waiting = self._requests
        return order_queue(self._policy, inputs)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def __len__(self) -> int:
        return len(self._requests)


class Overtakes:
    """How often each waiting request was passed over: passes that admitted someone who entered after it.

    One number per admitting pass, the latest entry it admitted. A request was passed over by exactly those that exceed
    its own entry, since passes before it entered could only admit earlier ones. So nothing is counted per request.
    """

    def __init__(self) -> None:
        self._latest: list[int] = []

    def admitted(self, latest_entry: int, waiting: WaitingQueue) -> None:
        """A pass admitted requests, the last to enter among them being `latest_entry`."""
        insort(self._latest, latest_entry)
        if len(self._latest) > _PRUNE_AT:
            oldest = min((request.entry_seq for request in waiting), default=latest_entry)
            del self._latest[: bisect_right(self._latest, oldest)]

    def count(self, request: Request) -> int:
        """Times `request` was passed over while it waited, before its retractions too."""
        if request.state is not RequestState.WAITING:
            return request.times_passed_over
        return self._so_far(request)

    def settle(self, request: Request) -> None:
        """`request` leaves the queue, before `admitted` hears of the pass that takes it: nobody passes it any more."""
        request.times_passed_over = self._so_far(request)

    def in_this_stay(self, request: Request) -> int:
        """Times since `request`, which waits, entered the queue. Never less than for a later entry."""
        return len(self._latest) - bisect_right(self._latest, request.entry_seq)

    def _so_far(self, request: Request) -> int:
        return request.times_passed_over + self.in_this_stay(request)
