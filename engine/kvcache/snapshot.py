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
    """Scheduler state between two steps."""

    step: int
    waiting: tuple[WaitingView, ...]
    running: tuple[str, ...]
    continuation: str | None
    requests: tuple[RequestView, ...]
    batch_is_full: bool
    new_token_ratio: float
    kv: KvSnapshot
