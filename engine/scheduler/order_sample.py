"""Order samples. Owns: what the indexed order believes about a stretch of the queue, beside a fresh match of all keys.

For the audit of a live engine: a whole re-match costs what the index saves, a stretch per audit costs nothing much. The
stretches move on through the order and overlap by one, so that each neighbour is compared with the next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from engine.config import Policy
from engine.kvcache.radix_cache import Node, RadixCache
from engine.kvcache.snapshot import OrderSample, OrderView
from engine.request import Request
from engine.scheduler.entry_queue import EntryQueue
from engine.scheduler.prefix_index import Entry

SAMPLE_REQUESTS: Final = 64


def sample_order(
    queue: EntryQueue, waiting: Sequence[Request], tree: RadixCache, *, policy: Policy, start: int
) -> OrderSample:
    """The settled ones among `SAMPLE_REQUESTS` waiting requests from position `start` on. Writes nothing."""
    if start >= len(waiting) or start < 0:
        start = 0
    end = start + SAMPLE_REQUESTS
    weight = queue.weights()
    views = []
    for position, request in enumerate(waiting[start:end], start):
        entry = queue.settled(request.rid)
        if entry is not None:
            views.append(_view(entry, position, tree, weight))
    return OrderSample(policy.value, start, end - 1 if end < len(waiting) else 0, tuple(views))


def _view(entry: Entry, position: int, tree: RadixCache, weight: Callable[[Node], int] | None) -> OrderView:
    request, node = entry.request, entry.node
    assert node is not None, f"settled request {request.rid} is parked nowhere"
    match = tree.match(request.keys.first(len(request.keys)))
    # Passes split nodes where a match ends, so a match that ends inside one was not walked to its end.
    is_whole = not match.path or match.last_pages == len(match.path[-1].keys)
    end = match.path[-1] if match.path else tree.root
    return OrderView(
        rid=request.rid,
        position=position,
        prompt_len=request.prompt_len,
        output_len=request.output_len,
        entry_seq=request.entry_seq,
        matched_len=request.matched_len,
        head32_key=request.head32_key,
        put_back=entry.is_put_back,
        node=node.node_id,
        pages=entry.pages,
        match_node=end.node_id if is_whole else None,
        match_pages=match.pages,
        path=() if weight is None else tuple((weight(step), step.rank) for step in match.path),
    )
