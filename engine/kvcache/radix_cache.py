"""RadixCache. Owns: the tree of shared prefixes — nodes, their keys and pages, locks, stamps, eviction order.

Rule book section 6, recency: every match or insert stamps all nodes it walks with one new time; a node entered only
partly is split, its lower part keeps that stamp, the new upper part and any new leaf get a still later one. Whole
leaves are evicted, oldest stamp first, a parent becoming a leaf joining in. Stamps are a counter, never a clock.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np

from engine.errors import LawBroken
from engine.kvcache.page_keys import Keys
from engine.kvcache.page_pool import NO_OWNER, KvEvents, PagePool, Pages, PageState

ROOT_ID: Final = 0


class Node:
    """A run of pages that share one edge. The root has none and is never locked, stamped or evicted."""

    __slots__ = ("children", "hits", "keys", "lock_count", "node_id", "pages", "parent", "stamp")

    def __init__(self, node_id: int, parent: Node | None, keys: Keys, pages: Pages, stamp: int) -> None:
        self.node_id = node_id
        self.parent = parent
        self.keys = keys
        self.pages = pages
        self.stamp = stamp
        self.children: dict[int, Node] = {}
        self.lock_count = 0
        self.hits = 0


class Match(NamedTuple):
    """A read-only match: nodes from below the root, how many pages of the last one are used, pages in all.

    Valid until the next write to the tree.
    """

    path: tuple[Node, ...]
    last_pages: int
    pages: int


def _common(left: Keys, right: Keys) -> int:
    """Length of the common prefix of two key arrays."""
    count = min(len(left), len(right))
    if count == 0:
        return 0
    differs = left[:count] != right[:count]
    first = int(differs.argmax())
    return first if differs[first] else count


class RadixCache:
    """The tree. `match` reads; `touch`, `insert`, `lock`, `unlock` and `evict` write."""

    __slots__ = ("_clock", "_events", "_leaves", "_next_id", "_pool", "root")

    def __init__(self, pool: PagePool, events: KvEvents) -> None:
        self._pool = pool
        self._events = events
        self._clock = 0
        self._next_id = ROOT_ID + 1
        self.root = Node(ROOT_ID, None, np.empty(0, np.int64), np.empty(0, np.int32), 0)
        self._leaves: dict[int, Node] = {}

    # -- reading ---------------------------------------------------------------------------------------------------

    def match(self, keys: Keys) -> Match:
        """Longest cached prefix of `keys`. Changes nothing."""
        path: list[Node] = []
        node, done, used = self.root, 0, 0
        while done < len(keys):
            child = node.children.get(int(keys[done]))
            if child is None:
                break
            used = _common(child.keys, keys[done:])
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

    def touch(self, keys: Keys) -> tuple[Node, int]:
        """Match `keys`, stamping the path and splitting where it ends inside a node. Returns (node, pages matched)."""
        stamp = self._tick()
        node, done = self.root, 0
        while done < len(keys):
            child = node.children.get(int(keys[done]))
            if child is None:
                break
            child.stamp = stamp
            used = _common(child.keys, keys[done:])
            done += used
            if used < len(child.keys):
                return self._split(child, used), done
            node = child
        return node, done

    def insert(self, keys: Keys, pages: Pages, *, locked_by: str | None) -> tuple[Node, int]:
        """Put a path in the tree; `pages[i]` holds the K/V of `keys[i]`. Returns (last node, pages already there).

        Pages past those already there move from PRIVATE into a new leaf: PROTECTED with one lock when `locked_by`
        names a request that goes on, else EVICTABLE. The caller keeps, or frees, its copies of those already there.
        """
        stamp = self._tick()
        node, done = self.root, 0
        while done < len(keys):
            child = node.children.get(int(keys[done]))
            if child is None:
                break
            child.stamp = stamp
            used = _common(child.keys, keys[done:])
            done += used
            node = child
            if used < len(child.keys):
                node = self._split(child, used)
        if done == len(keys):
            return node, done
        leaf = Node(self._new_id(), node, keys[done:].copy(), pages[done:].copy(), self._tick())
        self._leaves.pop(node.node_id, None)
        node.children[int(keys[done])] = leaf
        target = PageState.EVICTABLE
        if locked_by is not None:
            target = PageState.PROTECTED
            leaf.lock_count = 1
        else:
            self._leaves[leaf.node_id] = leaf
        self._pool.move(leaf.pages, PageState.PRIVATE, target, owner=leaf.node_id, cause="insert")
        if locked_by is not None:
            self._events.lock_changed(leaf.node_id, locked_by, 1, 1)
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
                    self._leaves[node.node_id] = node
            node = node.parent

    def evict_until_free(self, free_pages: int) -> int:
        """Evict whole unlocked leaves, oldest stamp first, until that many pages are free or none is left.

        Returns the pages evicted.
        """
        evicted = 0
        if self._pool.count(PageState.FREE) >= free_pages or not self._leaves:
            return 0
        heap = [(node.stamp, node.node_id) for node in self._leaves.values()]
        heapq.heapify(heap)
        while heap and self._pool.count(PageState.FREE) < free_pages:
            _, node_id = heapq.heappop(heap)
            node = self._leaves.pop(node_id)
            parent = node.parent
            assert parent is not None, f"evict: node {node_id} is not in the tree"
            assert node.lock_count == 0, f"evict: node {node_id} has {node.lock_count} locks"
            assert not node.children, f"evict: node {node_id} is no leaf"
            self._pool.move(node.pages, PageState.EVICTABLE, PageState.FREE, owner=NO_OWNER, cause="evict")
            evicted += len(node.pages)
            del parent.children[int(node.keys[0])]
            if not parent.children and parent.lock_count == 0 and parent.parent is not None:
                self._leaves[parent.node_id] = parent
                heapq.heappush(heap, (parent.stamp, parent.node_id))
        return evicted

    # -- inside ----------------------------------------------------------------------------------------------------

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    def _new_id(self) -> int:
        node_id = self._next_id
        self._next_id += 1
        return node_id

    def _split(self, node: Node, pages: int) -> Node:
        """Cut `node` after its first `pages` pages. `node` stays the lower part; returns the new upper part.

        The holders of the lower part hold the upper part too, so its lock count is copied, without a LockChanged:
        the PagesMoved with cause `split` tells it.
        """
        parent = node.parent
        assert parent is not None, "split of the root"
        assert 0 < pages < len(node.keys), f"split of node {node.node_id} ({len(node.keys)} pages) at {pages}"
        upper = Node(self._new_id(), parent, node.keys[:pages], node.pages[:pages], self._tick())
        upper.lock_count = node.lock_count
        upper.hits = node.hits
        upper.children[int(node.keys[pages])] = node
        parent.children[int(node.keys[0])] = upper  # replaces in place: the order of children is kept
        node.parent, node.keys, node.pages = upper, node.keys[pages:], node.pages[pages:]
        state = PageState.PROTECTED if upper.lock_count else PageState.EVICTABLE
        self._pool.move(upper.pages, state, state, owner=upper.node_id, cause="split")
        return upper
