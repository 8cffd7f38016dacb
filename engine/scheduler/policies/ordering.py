"""What policies share. Owns: inputs and answer of an ordering, the matching walk, the in-batch rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import msgspec

from engine.config import Policy
from engine.kvcache.kv_cache import KvCache
from engine.kvcache.radix_cache import Node
from engine.request import Request

#: In-batch rule (rule book section 5): requests with at most this many cached tokens are compared among each other.
COLD_LIMIT_TOKENS: Final = 32


class OrderInputs(msgspec.Struct):
    """What a policy may read: the queue (sorted in place), the cache (stamped), how often it was asked before.

    processed_tokens  HRRN's counter
    rank              importance of a request, smaller first; None when priority scheduling is off
    running           the running list, for routing-key
    keep_record       fill the answer's tuples, which cost a walk of the queue
    """

    kv: KvCache
    calls_before: int
    waiting: list[Request] = msgspec.field(default_factory=list)
    fallback_threshold: int | None = None
    processed_tokens: int = 0
    rank: Callable[[Request], int] | None = None
    keep_record: bool = True
    running: Sequence[Request] = ()
    random_seed: int = 0


class Ordering(msgspec.Struct, frozen=True):
    """How the queue stands now. `deprioritized` is None when no matching took place."""

    active_policy: Policy
    order: tuple[str, ...]
    matched: tuple[int, ...]
    deprioritized: tuple[str, ...] | None


class QueueMatch(NamedTuple):
    """The rids that the in-batch rule puts back, and the tree node where each request's match ends."""

    put_back: set[str]
    nodes: dict[str, Node]


def match_queue(inputs: OrderInputs) -> QueueMatch:
    """Match every waiting request in present order and set `matched_len`.

    A request with few cached tokens is put back when an earlier such request of this pass shares its first 32 tokens:
    one hash per request and a set per pass decide it, no side tree (the rule only reorders).
    """
    seen_heads: set[int] = set()
    put_back: set[str] = set()
    nodes: dict[str, Node] = {}
    page_size = inputs.kv.page_size
    for request in inputs.waiting:
        nodes[request.rid], pages = inputs.kv.tree.touch(request.keys.first(len(request.keys)))
        matched = pages * page_size
        request.matched_len = min(matched, request.seq_len - 1)
        if matched <= COLD_LIMIT_TOKENS and request.head32_key is not None:
            if request.head32_key in seen_heads:
                put_back.add(request.rid)
            else:
                seen_heads.add(request.head32_key)
    return QueueMatch(put_back, nodes)


def ordered(inputs: OrderInputs, policy: Policy, put_back: set[str] | None) -> Ordering:
    """The answer for the queue as it stands."""
    return Ordering(
        active_policy=policy,
        order=tuple(request.rid for request in inputs.waiting),
        matched=tuple(request.matched_len for request in inputs.waiting),
        deprioritized=None if put_back is None else tuple(sorted(put_back)),
    )
