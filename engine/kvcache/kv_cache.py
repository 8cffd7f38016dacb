"""KvCache. Owns: leases — which request holds which row, lock and pages — and the four verbs that change them.

`acquire`, `extend`, `insert`, `release`. A lease is closed exactly once, by `release`, whether a request finishes, is
retracted or aborted. Page table of a lease, in pages:

    [0, shared)        owned by the tree, locked by this lease
    [shared, count)    private to this request; the last one may be partly filled
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Final

import msgspec
import numpy as np

from engine.errors import LawBroken
from engine.kvcache.page_keys import Keys
from engine.kvcache.page_pool import NO_OWNER, KvEvents, PagePool, Pages, PageState
from engine.kvcache.radix_cache import Match, Node, RadixCache
from engine.kvcache.snapshot import KvSnapshot, LeaseView, NodeView

#: No pins: retraction is decided outside a pass.
NO_PINS: Final[Mapping[int, int]] = MappingProxyType({})


class KvLease:
    """What one request holds. Written by KvCache only."""

    __slots__ = ("_pages", "count", "node", "rid", "row", "shared")

    def __init__(self, rid: str, row: int, node: Node, table: Pages, shared: int) -> None:
        self.rid = rid
        self.row = row
        self.node = node
        self._pages = table
        self.count = shared
        self.shared = shared

    @property
    def pages(self) -> Pages:
        """The page table, read-only by convention."""
        return self._pages[: self.count]

    def append(self, pages: Pages) -> None:
        end = self.count + len(pages)
        if end > len(self._pages):
            grown = np.empty(max(8, 2 * end), dtype=np.int32)
            grown[: self.count] = self.pages
            self._pages = grown
        self._pages[self.count : end] = pages
        self.count = end

    def adopt(self, start: int, pages: Pages) -> None:
        """Point at the tree's pages from `start` on, in place of private copies."""
        self._pages[start : start + len(pages)] = pages


class PathCost(msgspec.Struct, frozen=True, gc=False):
    """Evictable pages a lock on this match would protect, and (node, pages of it held) to remember within the pass."""

    pages: int
    depths: tuple[tuple[int, int], ...]


def _write_path(node: Node, table: Pages) -> None:
    """Fill `table`, as long as the path, with the pages from the root down to `node`."""
    end = len(table)
    while node.parent is not None:
        start = end - len(node.pages)
        table[start:end] = node.pages
        node, end = node.parent, start


class KvCache:
    """Pool, tree, rows and leases of one engine."""

    def __init__(
        self, *, num_pages: int, page_size: int, num_rows: int, events: KvEvents, enable_radix: bool = True
    ) -> None:
        self.page_size = page_size
        self.num_pages = num_pages
        self.enable_radix = enable_radix
        self.pool = PagePool(num_pages, events)
        self.tree = RadixCache(self.pool, events)
        self.leases: dict[str, KvLease] = {}
        self._free_rows = list(range(num_rows - 1, -1, -1))
        #: Test switch: called before an allocation with "prefill" or "decode"; True makes it a miss (FR-03).
        self.allocation_fault: Callable[[str], bool] | None = None

    # -- reading ---------------------------------------------------------------------------------------------------

    @property
    def free_pages(self) -> int:
        return self.pool.count(PageState.FREE)

    @property
    def evictable_pages(self) -> int:
        return self.pool.count(PageState.EVICTABLE)

    @property
    def free_rows(self) -> int:
        return len(self._free_rows)

    def pages_ceil(self, tokens: int) -> int:
        """Pages that `tokens` tokens occupy."""
        return -(-tokens // self.page_size)

    def match(self, keys: Keys) -> Match:
        """Longest cached prefix. Changes nothing."""
        if not self.enable_radix:
            return Match((), 0, 0)
        return self.tree.match(keys)

    def path_cost(self, match: Match, pinned: dict[int, int], unlocked: dict[int, int]) -> PathCost:
        """What a lock on `match` takes out of the evictable pages.

        pinned    node -> pages of it that members of this pass hold
        unlocked  node -> locks dropped in thought (preemption)
        """
        pages, depths = 0, []
        last = len(match.path) - 1
        for index, node in enumerate(match.path):
            depth = match.last_pages if index == last else len(node.keys)
            already = pinned.get(node.node_id, 0)
            if depth > already:
                depths.append((node.node_id, depth))
                if node.lock_count <= unlocked.get(node.node_id, 0):
                    pages += depth - already
        return PathCost(pages, tuple(depths))

    def release_gain(self, lease: KvLease, unlocked: dict[int, int], pinned: Mapping[int, int] = NO_PINS) -> int:
        """Pages that dropping `lease` makes free or evictable, given locks `unlocked` already dropped in thought.

        Adds this lease's locks to `unlocked`, so victims that share a path are counted once. What members of the
        pass hold (`pinned`, node -> pages) stays protected.
        """
        gain = lease.count - lease.shared
        node = lease.node
        while node.parent is not None:
            dropped = unlocked.get(node.node_id, 0) + 1
            unlocked[node.node_id] = dropped
            if dropped == node.lock_count:
                gain += len(node.pages) - pinned.get(node.node_id, 0)
            node = node.parent
        return gain

    # -- the four verbs --------------------------------------------------------------------------------------------

    def acquire(self, rid: str, keys: Keys) -> KvLease:
        """Open a lease on the cached prefix `keys`, whose end is a node boundary: take a row, lock the path."""
        node = self.tree.find(keys) if self.enable_radix else self.tree.root
        return self.acquire_at(rid, node, len(keys))

    def acquire_at(self, rid: str, node: Node, pages: int, *, room: int = 0) -> KvLease:
        """`acquire` on the path of `pages` pages that ends at `node`, with a page table of at least `room` places."""
        if rid in self.leases:
            raise LawBroken(f"request {rid} holds a lease already")
        row = self._free_rows.pop()
        self.tree.lock(node, rid)
        table = np.empty(max(pages, room), dtype=np.int32)
        _write_path(node, table[:pages])
        lease = KvLease(rid, row, node, table, pages)
        self.leases[rid] = lease
        return lease

    def extend(self, lease: KvLease, tokens: int) -> int:
        """Claim pages until the table covers `tokens` tokens. Returns the pages claimed; there must be enough free."""
        held = lease.count
        next(self.extend_each([(lease, tokens)]))
        return lease.count - held

    def extend_each(self, wanted: Sequence[tuple[KvLease, int]]) -> Iterator[None]:
        """`extend` for several leases, (lease, tokens) each, in one pass over the pool.

        The iterator serves one lease after another, so that what the caller publishes meanwhile stands in between.
        """
        for (lease, _), pages in zip(wanted, self.pool.claim_each(self._lacking(wanted)), strict=True):
            lease.append(pages)
            yield

    def extend_together(self, wanted: Sequence[tuple[KvLease, int]]) -> None:
        """`extend` for several leases at once, told as one move of pages."""
        for (lease, _), pages in zip(wanted, self.pool.claim_together(self._lacking(wanted)), strict=True):
            lease.append(pages)

    def _lacking(self, wanted: Sequence[tuple[KvLease, int]]) -> list[tuple[int, int]]:
        """(row, pages that its table lacks) of (lease, tokens)."""
        return [(lease.row, max(0, self.pages_ceil(tokens) - lease.count)) for lease, tokens in wanted]

    def insert(self, lease: KvLease, keys: Keys, *, split_at: int | None = None) -> None:
        """Give the first `len(keys)` pages to the tree and hold them by lock; the request goes on.

        Private copies of pages that the tree has already are freed and the tree's adopted. `split_at` (pages) makes
        the end of the prompt a node boundary.
        """
        if not self.enable_radix or len(keys) == 0:
            return
        node = self._put(lease, keys, locked_by=lease.rid, split_at=split_at)
        self.tree.touch(keys)  # the reference matches again after an insertion, which renews the stamps
        lease.node = node

    def release(self, lease: KvLease, keys: Keys | None, *, split_at: int | None = None) -> None:
        """Close the lease: `keys` (None: nothing) go to the tree unlocked, the rest is freed, row and locks return."""
        if self.leases.pop(lease.rid, None) is not lease:
            raise LawBroken(f"request {lease.rid}: lease closed twice")
        if keys is not None and len(keys) and self.enable_radix:
            self._put(lease, keys, locked_by=None, split_at=split_at)
        rest = lease.pages[lease.shared :]
        self.pool.move(rest, PageState.PRIVATE, PageState.FREE, owner=NO_OWNER, cause="free")
        self.tree.unlock(lease.node, lease.rid)
        self._free_rows.append(lease.row)

    def evict_until_free(self, free_pages: int) -> int:
        """Evict until that many pages are free, or nothing unlocked is left. Returns pages evicted."""
        return self.tree.evict_until_free(free_pages)

    # -- inside ----------------------------------------------------------------------------------------------------

    def _put(self, lease: KvLease, keys: Keys, *, locked_by: str | None, split_at: int | None) -> Node:
        """Insert, free duplicates, adopt the tree's pages. With `locked_by`, the lease's lock moves down to the end."""
        count = len(keys)
        leaf, present = self.tree.insert(keys, lease.pages[:count], locked_by=locked_by)
        if locked_by is not None:
            # The new leaf came with its lock; what lies between it and the node held so far is locked here.
            bottom = leaf.parent if present < count else leaf
            assert bottom is not None
            self.tree.lock(bottom, lease.rid, above=lease.node)
        if present > lease.shared:
            duplicates = lease.pages[lease.shared : present].copy()
            path = np.empty(count, dtype=np.int32)
            _write_path(leaf, path)
            lease.adopt(lease.shared, path[lease.shared : present])
            self.pool.move(duplicates, PageState.PRIVATE, PageState.FREE, owner=NO_OWNER, cause="duplicate")
        lease.shared = max(lease.shared, count)
        if split_at is not None and 0 < split_at < count:
            self.tree.split_at(keys[:split_at])
        return leaf

    # -- pictures --------------------------------------------------------------------------------------------------

    def snapshot(self) -> KvSnapshot:
        """The whole pool and tree as one immutable value."""
        states, owners, free_list = self.pool.picture()
        depth: dict[int, int] = {self.tree.root.node_id: 0}
        nodes: list[NodeView] = []
        for node in self.tree.nodes():
            assert node.parent is not None
            depth[node.node_id] = depth[node.parent.node_id] + len(node.pages)
            nodes.append(
                NodeView(
                    node=node.node_id,
                    parent=node.parent.node_id,
                    pages=tuple(node.pages.tolist()),
                    lock_count=node.lock_count,
                    stamp=node.stamp[0] if isinstance(node.stamp[0], int) else 0,
                    depth_pages=depth[node.node_id],
                    hits=node.hits,
                )
            )
        leases = tuple(
            LeaseView(lease.rid, lease.row, lease.node.node_id, tuple(lease.pages.tolist()), lease.shared)
            for lease in self.leases.values()
        )
        return KvSnapshot(
            page_size=self.page_size,
            num_pages=self.num_pages,
            states=states,
            owners=owners,
            free_list=free_list,
            counts=self.pool.counts,
            nodes=tuple(nodes),
            leases=leases,
            free_rows=tuple(self._free_rows),
        )
