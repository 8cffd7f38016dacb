"""Snapshots of the KV cache. Owns: an immutable picture for audits, pages and dashboards. Built between steps."""

from __future__ import annotations

import msgspec


class NodeView(msgspec.Struct, frozen=True):
    """One radix-tree node. `pages` are its own pages only; `depth_pages` counts the path above and including it."""

    node: int
    parent: int
    pages: tuple[int, ...]
    lock_count: int
    stamp: int
    depth_pages: int
    hits: int


class LeaseView(msgspec.Struct, frozen=True):
    """What one request holds: its row, the deepest node it locks, its page table, how many of those the tree owns."""

    rid: str
    row: int
    node: int
    pages: tuple[int, ...]
    shared_pages: int


class KvSnapshot(msgspec.Struct, frozen=True):
    """The whole pool and tree.

    states   one byte per page: 0 free, 1 private, 2 protected, 3 evictable
    owners   packed little-endian int64 per page: row of a private page, node of a tree page, -1 when free
    free_list  page ids, in the order they would be handed out last
    """

    page_size: int
    num_pages: int
    states: bytes
    owners: bytes
    free_list: tuple[int, ...]
    counts: tuple[int, int, int, int]
    nodes: tuple[NodeView, ...]
    leases: tuple[LeaseView, ...]
    free_rows: tuple[int, ...]


class WaitingView(msgspec.Struct, frozen=True):
    """One waiting request, in queue order."""

    rid: str
    position: int
    prompt_len: int
    output_len: int
    matched_len: int
    num_retractions: int
    times_passed_over: int


class OrderView(msgspec.Struct, frozen=True, kw_only=True):
    """One waiting request as the indexed order has it, and what a match of all its keys says now.

    position             in the queue, from 0
    matched_len          cached tokens by which it was ordered
    put_back             whether the in-batch rule put it back
    node, pages          where the index has its match end
    match_node, match_pages  where it does end; None: inside a node
    path                 dfs-weight: (requests that the last pass found below, rank among siblings) of each node down to
                         its own; empty elsewhere
    """

    rid: str
    position: int
    prompt_len: int
    output_len: int
    entry_seq: int
    matched_len: int
    head32_key: int | None
    put_back: bool
    node: int
    pages: int
    match_node: int | None
    match_pages: int
    path: tuple[tuple[int, int], ...] = ()


class OrderSample(msgspec.Struct, frozen=True):
    """A stretch of the queue under an order that is kept up to date by what changed.

    start       position of the stretch's first request
    next_start  where the next sample is to begin, so that samples reach everyone
    settled     those of the stretch whose place nothing can have changed since the last pass, in queue order
    """

    policy: str
    start: int
    next_start: int
    settled: tuple[OrderView, ...]


class RequestView(msgspec.Struct, frozen=True):
    """One live request."""

    rid: str
    state: str
    prompt_len: int
    output_len: int
    computed_len: int
    max_new_tokens: int
    in_flight: int
    has_lease: bool
    row: int | None


class SchedulerSnapshot(msgspec.Struct, frozen=True):
    """Scheduler state between two steps. `order` is None when the order is not an indexed one.

    leaving  overlap: requests whose last token is under way
    """

    step: int
    waiting: tuple[WaitingView, ...]
    running: tuple[str, ...]
    continuation: str | None
    requests: tuple[RequestView, ...]
    batch_is_full: bool
    new_token_ratio: float
    kv: KvSnapshot
    order: OrderSample | None = None
    leaving: tuple[str, ...] = ()
