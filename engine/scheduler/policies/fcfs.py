"""First come, first served. Owns: the order that changes nothing, and the reference's refresh of waiting prefixes."""

from __future__ import annotations

from typing import Final

from engine.config import Policy
from engine.scheduler.policies.ordering import Ordering, OrderInputs, ordered

#: Every 32nd ordering call the reference matches the first 128 waiting requests, last first, to renew their stamps.
REFRESH_EVERY_CALLS: Final = 32
REFRESH_REQUESTS: Final = 128


def keep(inputs: OrderInputs) -> Ordering:
    """Keep the present order without matching."""
    for request in inputs.waiting:
        request.matched_len = 0
    return ordered(inputs, Policy.FCFS, None)


def order(inputs: OrderInputs) -> Ordering:
    """No change of order; now and then the refresh."""
    if inputs.kv.enable_radix and inputs.calls_before % REFRESH_EVERY_CALLS == 0:
        for request in reversed(inputs.waiting[:REFRESH_REQUESTS]):
            inputs.kv.tree.touch(request.keys.first(len(request.keys)))
    return keep(inputs)
