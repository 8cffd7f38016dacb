"""First come, first served. Owns: arrival order, by importance first if asked, and the refresh of waiting prefixes."""

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


def refresh(inputs: OrderInputs) -> None:
    """Renew the stamps of waiting prefixes, now and then."""
    if inputs.kv.enable_radix and inputs.calls_before % REFRESH_EVERY_CALLS == 0:
        for request in reversed(inputs.waiting[:REFRESH_REQUESTS]):
            inputs.kv.tree.touch(request.keys.first(len(request.keys)))


def order(inputs: OrderInputs) -> Ordering:
    """No change of order; with priorities, sort in place by (importance, entry)."""
    refresh(inputs)
    rank = inputs.rank
    if rank is not None:
        inputs.waiting.sort(key=lambda request: (rank(request), request.entry_seq))
    return keep(inputs)
