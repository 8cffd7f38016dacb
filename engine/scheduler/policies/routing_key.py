"""Routing key. Owns: requests whose key is running first, the commonest key ahead; the others after, by key.

Rule book section 5. Keys group requests that share an adapter, tenant or session; nothing running has one: no change.
"""

from __future__ import annotations

from collections import Counter

from engine.config import Policy
from engine.request import Request
from engine.scheduler.policies.ordering import Ordering, OrderInputs, ordered


def order(inputs: OrderInputs) -> Ordering:
    """Sort in place by (is its key running, count falling, key); an absent key is the empty string."""
    counts = Counter(request.routing_key or "" for request in inputs.running if request.routing_key)
    if counts:

        def place(request: Request) -> tuple[bool, int, str]:
            key = request.routing_key or ""
            return (key not in counts, -counts[key], key)

        inputs.waiting.sort(key=place)
    for request in inputs.waiting:
        request.matched_len = 0
    return ordered(inputs, Policy.ROUTING_KEY, None)
