"""Longest prefix match. Owns: more cached tokens first, put-back requests last; ties keep the present order."""

from __future__ import annotations

from engine.config import Policy
from engine.scheduler.policies.ordering import Ordering, OrderInputs, match_queue, ordered


def order(inputs: OrderInputs) -> Ordering:
    """Sort in place by (put back, matched tokens falling)."""
    put_back = match_queue(inputs)
    inputs.waiting.sort(key=lambda request: (request.rid in put_back, -request.matched_len))
    return ordered(inputs, Policy.LPM, put_back)
