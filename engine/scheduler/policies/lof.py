"""Longest output first. Owns: larger `max_new_tokens` first, by importance first if asked; ties keep their order."""

from __future__ import annotations

from engine.config import Policy
from engine.scheduler.policies.fcfs import refresh
from engine.scheduler.policies.ordering import Ordering, OrderInputs, ordered


def order(inputs: OrderInputs) -> Ordering:
    """Sort in place by (importance, output limit falling)."""
    refresh(inputs)
    rank = inputs.rank
    inputs.waiting.sort(key=lambda request: (rank(request) if rank is not None else 0, -request.max_new_tokens))
    for request in inputs.waiting:
        request.matched_len = 0
    return ordered(inputs, Policy.LOF, None)
