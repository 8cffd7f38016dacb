"""Random. Owns: a shuffle per pass that anyone can repeat: by a hash of (seed, pass, rid)."""

from __future__ import annotations

from hashlib import blake2b

from engine.config import Policy
from engine.scheduler.policies.ordering import Ordering, OrderInputs, ordered


def order(inputs: OrderInputs) -> Ordering:
    """Sort in place by the hash."""

    def draw(rid: str) -> bytes:
        return blake2b(f"{inputs.random_seed}:{inputs.calls_before}:{rid}".encode(), digest_size=8).digest()

    inputs.waiting.sort(key=lambda request: draw(request.rid))
    for request in inputs.waiting:
        request.matched_len = 0
    return ordered(inputs, Policy.RANDOM, None)
