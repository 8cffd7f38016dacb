"""Preemption. Owns: the pure choice of running requests that give way to a more important waiting one.

Rule book section 4, preemption: least important first, then latest entry; each must differ by strictly more than the
threshold; together their decode estimates must cover what the urgent request lacks, else nobody is preempted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engine.request import Request


def choose_victims(
    running: Sequence[Request],
    *,
    urgent_importance: int,
    lacking_tokens: float,
    threshold: int,
    importance: Callable[[Request], int],
    estimate: Callable[[Request], float],
) -> list[Request]:
    """Victims in running order; empty when nobody may, or not enough would, give way.

    lacking_tokens  extend + promised output of the urgent request, less remaining_total
    """
    ranked = sorted(running, key=lambda request: (-importance(request), -request.entry_seq))
    taken: list[Request] = []
    for request in ranked:
        if importance(request) - urgent_importance <= threshold:
            break
        taken.append(request)
        lacking_tokens -= estimate(request)
        if lacking_tokens <= 0:
            break
    if not taken or lacking_tokens > 0:
        return []
    chosen = {request.rid for request in taken}
    return [request for request in running if request.rid in chosen]
