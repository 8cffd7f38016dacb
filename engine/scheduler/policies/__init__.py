"""Orders of the waiting queue. Owns: the one entry point, `order_queue`, and what an ordering returns.

Ordering is the touch phase of a step: policies that match stamp (and may split) tree nodes, as the reference does.
All sorts are stable and in place: the order persists into later passes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from engine.config import Policy
from engine.scheduler.policies import (
    dfs_weight,
    fcfs,
    hrrn,
    lof,
    lpm,
    random_order,
    routing_key,
    shortest_prefill_first,
)
from engine.scheduler.policies.ordering import Ordering, OrderInputs

#: policy -> (does it match the queue against the cache, the sort)
_ORDERS: Final[dict[Policy, tuple[bool, Callable[[OrderInputs], Ordering]]]] = {
    Policy.FCFS: (False, fcfs.order),
    Policy.LPM: (True, lpm.order),
    Policy.DFS_WEIGHT: (True, dfs_weight.order),
    Policy.HRRN: (True, hrrn.order),
    Policy.SHORTEST_PREFILL_FIRST: (True, shortest_prefill_first.order),
    Policy.LOF: (False, lof.order),
    Policy.RANDOM: (False, random_order.order),
    Policy.ROUTING_KEY: (False, routing_key.order),
}


def order_queue(policy: Policy, inputs: OrderInputs) -> Ordering:
    """Order `inputs.waiting` in place by `policy`, or by what it falls back to."""
    matches, order = _ORDERS[policy]
    if matches and not inputs.kv.enable_radix and policy is not Policy.SHORTEST_PREFILL_FIRST:
        return fcfs.order(inputs)
    threshold = inputs.fallback_threshold
    if policy in {Policy.LPM, Policy.HRRN} and threshold is not None and len(inputs.waiting) > threshold:
        return fcfs.keep(inputs)
    return order(inputs)


__all__ = ["OrderInputs", "Ordering", "order_queue"]
