"""Turning away. Owns: which requests that were accepted, and never admitted, may be refused after all.

Pure: reads the state, writes nothing. Who had work done already (a retracted request waits again) is never among them.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import nlargest

from engine.request import Request
from engine.scheduler.state import SchedulerState


def overdue(state: SchedulerState, now_ns: int, limit_ns: int) -> list[str]:
    """Requests that have waited at least `limit_ns` for their first admission, oldest first.

    Looks at those and at what was retracted before them, not at the queue.
    """
    late = []
    for request in state.by_entry.values():
        if now_ns - request.entered_ns < limit_ns:
            break
        if not request.num_retractions:
            late.append(request.rid)
    return late


def displaceable(state: SchedulerState, priority: int | None, count: int) -> list[str]:
    """`count` waiting requests that give way to a new one of `priority`: the least important first, among equals the
    latest. Empty when fewer than `count` are strictly less important, or priorities are off. Walks the queue.
    """
    if not state.config.enable_priority_scheduling:
        return []
    rank = state.importance_of(priority)
    victims = nlargest(count, _below(state, rank), key=lambda request: (state.importance(request), request.entry_seq))
    return [request.rid for request in victims] if len(victims) == count else []


def _below(state: SchedulerState, rank: int) -> Iterator[Request]:
    for request in state.waiting:
        if not request.num_retractions and state.importance(request) > rank:
            yield request
