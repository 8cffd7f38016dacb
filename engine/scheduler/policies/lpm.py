"""Longest prefix match. Owns: more cached tokens first; put-back requests last, all alike; ties keep their order."""

from __future__ import annotations

from engine.config import Policy
from engine.scheduler.policies.ordering import Ordering, OrderInputs, match_queue, ordered


def order(inputs: OrderInputs) -> Ordering:
    """Sort in place by matched tokens, falling; what is put back comes after, in its present order."""
    put_back = match_queue(inputs).put_back
    inputs.waiting.sort(key=lambda request: (1, 0) if request.rid in put_back else (0, -request.matched_len))
    return ordered(inputs, Policy.LPM, put_back)
