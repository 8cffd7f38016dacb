"""RadixCache. Owns: the tree of shared prefixes — nodes, their keys and pages, locks, stamps, eviction order.

Rule book section 6, recency: every match or insert stamps all nodes it walks with one new time; a node entered only
partly is split, its lower part keeps that stamp, the new upper part and any new leaf get a still later one. Whole
leaves are evicted, oldest stamp first, a parent becoming a leaf joining in. Stamps are a counter, never a clock.

A policy that matches the whole queue stamps every waiting path in every pass. Walking them all would cost as much as
the queue is long, so the one listener, the index of waiting prompts, answers what such a walk would have stamped when
an eviction asks (`TreeListener.stamp_of`).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Final, Protocol

import msgspec
import numpy as np

from engine.errors import LawBroken
from engine.kvcache.page_keys import Keys
from engine.kvcache.page_pool import NO_OWNER, KvEvents, PagePool, Pages, PageState

ROOT_ID: Final = 0
_SHORT_KEYS: Final = 512

#: (tick,) of an explicit walk, or (tick of a pass, place of a waiting request before its sort, 0 walked | 1 split).
Stamp = tuple[object, ...]


class Node:
    """A run of pages that share one edge. The root has none and is never locked, stamped or evicted."""

    __slots__ = ("children", "hits", "keys", "lock_count", "node_id", "pages", "parent", "rank", "stamp")

    def __init__(self, node_id: int, parent: Node | None, keys: Keys, pages: Pages, stamp: Stamp) -> None:
        self.node_id = node_id
        self.parent = parent
        #: Order in which siblings were added; a split keeps the place, so the upper part takes over the rank.
        self.rank = node_id
        self.keys = keys
        self.pages = pages
        self.stamp = stamp
        self.children: dict[int, Node] = {}
        self.lock_count = 0
        self.hits = 0


class TreeListener(Protocol):
    """The index of waiting prompts: told when nodes come and go, asked for stamps it keeps implicitly."""

    def leaf_inserted(self, leaf: Node) -> None: ...

    def node_evicted(self, node: Node, parent: Node) -> None: ...

    def stamp_of(self, node: Node) -> Stamp:
        """The latest of `node.stamp` and what waiting requests stamped in the last pass."""
        ...


class Match(msgspec.Struct, frozen=True, gc=False):
    """A read-only match: nodes from below the root, how many pages of the last one are used, pages in all.

    Valid until the next write to the tree.
    """

    path: tuple[Node, ...]
    last_pages: int
    pages: int


def _common(run: Keys, keys: Keys) -> int:
    """Length of the common prefix of a node's keys and as many keys of a path, or fewer where the path ends."""
    count = len(keys)
    if count < len(run):
        run = run[:count]
    if count <= _SHORT_KEYS and run.tobytes() == keys.tobytes():
        return count  # the usual end of a comparison, at a fraction of what arrays take to find it
    differs = run != keys
    first = int(differs.argmax())
    return first if differs[first] else count


class RadixCache:
    """The tree. `match` reads; `touch`, `insert`, `lock`, `unlock` and `evict` write."""

    __slots__ = ("_clock", "_events", "_heap", "_in_heap", "_leaves", "_next_id", "_pool", "listener", "root")

    def __init__(self, pool: PagePool, events: KvEvents) -> None:
        self._pool = pool
        self._events = events
        self._clock = 0
        self._next_id = ROOT_ID + 1
        self.root = Node(ROOT_ID, None, np.empty(0, np.int64), np.empty(0, np.int32), (0,))
        self.listener: TreeListener | None = None
        self._leaves: dict[int, Node] = {}
        # Stamps only grow, so a heap entry may be too old but never too new: it is renewed when it comes up.
        self._heap: list[tuple[Stamp, int]] = []
        self._in_heap: set[int] = set()

    # -- reading ---------------------------------------------------------------------------------------------------

    def match(self, keys: Keys) -> Match:
        """Longest cached prefix of `keys`. Changes nothing."""
        path: list[Node] = []
        node, done, used = self.root, 0, 0
        while done < len(keys):
            child = node.children.get(keys.item(done))
            if child is None:
                break
            used = _common(child.keys, keys[done : done + len(child.keys)])
            path.append(child)
            done += used
            if used < len(child.keys):
                break
            node = child
        return Match(tuple(path), used, done)

    def nodes(self) -> Iterator[Node]:
        """Every node but the root, parents before children, children in the order they were added."""
        stack = list(reversed(self.root.children.values()))
        while stack:
            node = stack.pop()
            yield node
            stack.extend(reversed(node.children.values()))

    # -- writing ---------------------------------------------------------------------------------------------------

    def next_tick(self) -> int:
        """A new point in the order of stamps."""
        return self._tick()

    def touch(self, keys: Keys) -> tuple[Node, int]:
        """Match `keys`, stamping the path and splitting where it ends inside a node. Returns (node, pages matched)."""
        return self.walk(keys, self.root, 0, (self._tick(),), None)

    def walk(self, keys: Keys, node: Node, done: int, stamp: Stamp, split_stamp: Stamp | None) -> tuple[Node, int]:
        """`touch` from `node`, which ends `done` pages into `keys`; a split is stamped later than `stamp`."""
        while done < len(keys):
            child = node.children.get(keys.item(done))
            if child is None:
                break
            child.stamp = stamp
            used = _common(child.keys, keys[done : done + len(child.keys)])
            done += used
            if used < len(child.keys):
                return self._split(child, used, split_stamp), done
            node = child
        return node, done

    def insert(self, keys: Keys, pages: Pages, *, locked_by: str | None) -> tuple[Node, int]:
        """Put a path in the tree; `pages[i]` holds the K/V of `keys[i]`. Returns (last node, pages already there).

        Pages past those already there move from PRIVATE into a new leaf: PROTECTED with one lock when `locked_by`
        names a request that goes on, else EVICTABLE. The caller keeps, or frees, its copies of those already there.
        """
        stamp = (self._tick(),)
        node, done = self.root, 0
        while done < len(keys):
            child = node.children.get(keys.item(done))
            if child is None:
                break
            child.stamp = stamp
            used = _common(child.keys, keys[done : done + len(child.keys)])
            done += used
            node = child
            if used < len(child.keys):
                node = self._split(child, used)
        if done == len(keys):
            return node, done
        leaf = Node(self._new_id(), node, keys[done:].copy(), pages[done:].copy(), (self._tick(),))
        self._leaves.pop(node.node_id, None)
        node.children[int(keys[done])] = leaf
        target = PageState.EVICTABLE
        if locked_by is not None:
            target = PageState.PROTECTED
            leaf.lock_count = 1
        else:
            self._add_leaf(leaf)
        self._pool.move(leaf.pages, PageState.PRIVATE, target, owner=leaf.node_id, cause="insert")
        if locked_by is not None:
            self._events.lock_changed(leaf.node_id, locked_by, 1, 1)
        if self.listener is not None:
            self.listener.leaf_inserted(leaf)
        return leaf, done

    def split_at(self, keys: Keys) -> None:
        """Make the end of `keys`, which must be cached, a node boundary."""
        match = self.match(keys)
        if match.pages != len(keys):
            raise LawBroken(f"split_at: {match.pages} of {len(keys)} pages are cached")
        if match.path and match.last_pages < len(match.path[-1].keys):
            self._split(match.path[-1], match.last_pages)

    def find(self, keys: Keys) -> Node:
        """The node that ends exactly at the end of `keys`. Stamps nothing; raises LawBroken when there is none."""
        match = self.match(keys)
        if match.pages != len(keys) or (match.path and match.last_pages != len(match.path[-1].keys)):
            raise LawBroken(f"no node ends at page {len(keys)}; matched {match.pages}")
        return match.path[-1] if match.path else self.root

    def lock(self, node: Node, rid: str, *, above: Node | None = None) -> None:
        """Add one lock to every node from `node` up to, not including, `above` (default: the root)."""
        stop = above if above is not None else self.root
        while node is not stop:
            if node.parent is None:
                raise LawBroken(f"lock by {rid}: node {stop.node_id} is not an ancestor")
            node.lock_count += 1
            if node.lock_count == 1:
                self._leaves.pop(node.node_id, None)
                self._pool.move(node.pages, PageState.EVICTABLE, PageState.PROTECTED, owner=node.node_id, cause="lock")
            self._events.lock_changed(node.node_id, rid, 1, node.lock_count)
            node = node.parent

    def unlock(self, node: Node, rid: str) -> None:
        """Take one lock off every node from `node` up to the root."""
        while node.parent is not None:
            if node.lock_count <= 0:
                raise LawBroken(f"unlock by {rid}: node {node.node_id} has no lock")
            node.lock_count -= 1
            self._events.lock_changed(node.node_id, rid, -1, node.lock_count)
            if node.lock_count == 0:
                self._pool.move(
                    node.pages, PageState.PROTECTED, PageState.EVICTABLE, owner=node.node_id, cause="unlock"
                )
                if not node.children:
                    self._add_leaf(node)
            node = node.parent

    def evict_until_free(self, free_pages: int) -> int:
        """Evict whole unlocked leaves, oldest stamp first, until that many pages are free or none is left.

        Returns the pages evicted.
        """
        evicted = 0
        heap, leaves, listener = self._heap, self._leaves, self.listener
        while leaves and self._pool.count(PageState.FREE) < free_pages:
            stamp, node_id = heapq.heappop(heap)
            node = leaves.get(node_id)
            if node is None:
                self._in_heap.discard(node_id)
                continue
            now = node.stamp if listener is None else listener.stamp_of(node)
            if now != stamp:
                heapq.heappush(heap, (now, node_id))
                continue
            self._in_heap.discard(node_id)
            evicted += self._evict_leaf(node)
        return evicted

    # -- inside ----------------------------------------------------------------------------------------------------

    def _evict_leaf(self, node: Node) -> int:
        parent = node.parent
        assert parent is not None, f"evict: node {node.node_id} is not in the tree"
        assert node.lock_count == 0, f"evict: node {node.node_id} has {node.lock_count} locks"
        assert not node.children, f"evict: node {node.node_id} is no leaf"
        del self._leaves[node.node_id]
        self._pool.move(node.pages, PageState.EVICTABLE, PageState.FREE, owner=NO_OWNER, cause="evict")
        del parent.children[int(node.keys[0])]
        if self.listener is not None:
            self.listener.node_evicted(node, parent)
        if not parent.children and parent.lock_count == 0 and parent.parent is not None:
            self._add_leaf(parent)
        return len(node.pages)

    def _add_leaf(self, node: Node) -> None:
        self._leaves[node.node_id] = node
        if node.node_id not in self._in_heap:
            self._in_heap.add(node.node_id)
            heapq.heappush(self._heap, (node.stamp, node.node_id))

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    def _new_id(self) -> int:
        node_id = self._next_id
        self._next_id += 1
        return node_id

    def _split(self, node: Node, pages: int, stamp: Stamp | None = None) -> Node:
        """Cut `node` after its first `pages` pages. `node` stays the lower part; returns the new upper part.

        The holders of the lower part hold the upper part too, so its lock count is copied, without a LockChanged:
        the PagesMoved with cause `split` tells it.
        """
        parent = node.parent
        assert parent is not None, "split of the root"
        assert 0 < pages < len(node.keys), f"split of node {node.node_id} ({len(node.keys)} pages) at {pages}"
        upper = Node(self._new_id(), parent, node.keys[:pages], node.pages[:pages], stamp or (self._tick(),))
        upper.lock_count = node.lock_count
        upper.hits = node.hits
        upper.rank = node.rank
        upper.children[int(node.keys[pages])] = node
        parent.children[int(node.keys[0])] = upper  # replaces in place: the order of children is kept
        node.parent, node.keys, node.pages = upper, node.keys[pages:], node.pages[pages:]
        state = PageState.PROTECTED if upper.lock_count else PageState.EVICTABLE
        self._pool.move(upper.pages, state, state, owner=upper.node_id, cause="split")
        return upper
