"""Shortest prefill first. Owns: least uncached work first, and the cap that its continuation gets.

The cap leaves room in the slice for short prompts behind a long one (rule book section 5, active-chunk cap).
"""

from __future__ import annotations

from collections.abc import Iterable

from engine.config import Policy
from engine.request import Request
from engine.scheduler.policies.ordering import Ordering, OrderInputs, match_queue, ordered


def uncached_work(request: Request) -> int:
    """Tokens still to compute, at least 1."""
    return max(1, request.seq_len - request.matched_len)


def order(inputs: OrderInputs) -> Ordering:
    """Sort in place by (put back, uncached work, entry)."""
    put_back = match_queue(inputs).put_back
    inputs.waiting.sort(
        key=lambda request: (request.rid in put_back, uncached_work(request), request.entry_seq),
    )
    return ordered(inputs, Policy.SHORTEST_PREFILL_FIRST, put_back)


def continuation_cap(waiting: Iterable[Request], *, rest: int, rem_chunk: int, page_size: int) -> int | None:
    """Most tokens the continuation may take so that shorter prompts fit beside it; None: no cap.

    rest       tokens of the continuation still to compute
    rem_chunk  the chunk ledger before it is charged
    """
    if rem_chunk < 2 * page_size:
        return None
    reserved = 0
    for request in waiting:
        work = uncached_work(request)
        charge = -(-work // page_size) * page_size
        if work >= rest or reserved + charge > rem_chunk - page_size:
            break
        reserved += charge
    if reserved == 0:
        return None
    return (rem_chunk - reserved) // page_size * page_size
