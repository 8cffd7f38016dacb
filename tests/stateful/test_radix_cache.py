"""The radix tree against a brute-force model: matches, splits, stamps, locks, eviction order, who owns each page."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.kvcache.page_pool import NO_OWNER, PagePool, PageState
from engine.kvcache.radix_cache import Node, RadixCache
from tests.stateful.effort import effort
from tests.stateful.naive_tree import NaiveTree, Prefix, ranks

PAGES = 24
#: Two letters and up to seven pages: most paths share something.
paths = st.lists(st.integers(0, 1), min_size=1, max_size=7).map(tuple)


def keys_of(prefix: Prefix) -> np.ndarray:
    return np.array(prefix, dtype=np.int64)


def prefix_of(node: Node) -> Prefix:
    """All keys from the root to the end of a node."""
    parts: list[int] = []
    walk: Node | None = node
    while walk is not None and walk.parent is not None:
        parts = walk.keys.tolist() + parts
        walk = walk.parent
    return tuple(parts)


class Locks:
    """Listens: the sum of published lock changes of a node is its lock count."""

    def __init__(self) -> None:
        self.count: dict[int, int] = {}

    def pages_moved(self, pages: bytes, source: str, target: str, owner: str, cause: str, owners: bytes = b"") -> None:
        """The pool's own machine checks these."""

    def lock_changed(self, node: int, rid: str, delta: int, count: int) -> None:
        self.count[node] = count


class RadixCacheMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.listener = Locks()
        self.pool = PagePool(PAGES, self.listener)
        self.tree = RadixCache(self.pool, self.listener)
        self.model = NaiveTree()
        self.serial = 0

    @rule(path=paths)
    def insert(self, path: Prefix) -> None:
        if len(path) > self.pool.count(PageState.FREE):
            return
        pages = self.pool.claim(len(path), row=0)
        node, present = self.tree.insert(keys_of(path), pages, locked_by=None)
        assert present == self.model.insert(path, pages.tolist())
        assert prefix_of(node) == path
        self.pool.move(pages[:present], PageState.PRIVATE, PageState.FREE, owner=NO_OWNER, cause="duplicate")

    @rule(path=paths)
    def match_changes_nothing(self, path: Prefix) -> None:
        before = [(node.node_id, node.stamp, node.lock_count) for node in self.tree.nodes()]
        match = self.tree.match(keys_of(path))
        assert match.pages == self.model.match(path)
        assert sum(len(node.keys) for node in match.path[:-1]) + match.last_pages == match.pages
        assert [(node.node_id, node.stamp, node.lock_count) for node in self.tree.nodes()] == before

    @rule(path=paths)
    def touch(self, path: Prefix) -> None:
        node, pages = self.tree.touch(keys_of(path))
        assert pages == self.model.touch(path)
        assert prefix_of(node) == path[:pages]

    @precondition(lambda self: self.model.pages)
    @rule(data=st.data())
    def split_at(self, data: st.DataObject) -> None:
        prefix = data.draw(st.sampled_from(sorted(self.model.pages)))
        self.tree.split_at(keys_of(prefix))
        self.model.split_at(prefix)

    @precondition(lambda self: self.model.ends)
    @rule(data=st.data())
    def lock(self, data: st.DataObject) -> None:
        end = data.draw(st.sampled_from(sorted(self.model.ends)))
        self.serial += 1
        rid = f"r{self.serial}"
        self.tree.lock(self.tree.find(keys_of(end)), rid)
        self.model.holds[rid] = end

    @precondition(lambda self: self.model.holds)
    @rule(data=st.data())
    def unlock(self, data: st.DataObject) -> None:
        rid = data.draw(st.sampled_from(sorted(self.model.holds)))
        self.tree.unlock(self.tree.find(keys_of(self.model.holds.pop(rid))), rid)

    @rule(wanted=st.integers(0, PAGES + 1))
    def evict(self, wanted: int) -> None:
        free = self.pool.count(PageState.FREE)
        before = len(self.pool.picture()[2])
        evicted = self.tree.evict_until_free(wanted)
        gone = self.model.evict(free, wanted)
        assert evicted == len(gone)
        # The pages freed, leaf by leaf, oldest first; within a leaf the order is the pool's business.
        assert set(self.pool.picture()[2][before:]) == set(gone)

    @invariant()
    def tree_is_the_model(self) -> None:
        found = {prefix_of(node): node for node in self.tree.nodes()}
        assert ranks({end: node.stamp for end, node in found.items()}) == ranks(self.model.ends)
        for end, node in found.items():
            assert node.pages.tolist() == self.model.node_pages(end)
            assert node.lock_count == self.model.locks(end)
            assert self.listener.count.get(node.node_id, node.lock_count) == node.lock_count

    @invariant()
    def every_page_has_one_owner(self) -> None:
        states, owners, free_list = self.pool.picture()
        owner_of = np.frombuffer(owners, dtype=np.int64)
        in_tree: list[int] = []
        for node in self.tree.nodes():
            wanted = PageState.PROTECTED if node.lock_count else PageState.EVICTABLE
            for page in node.pages.tolist():
                assert (states[page], owner_of[page]) == (wanted, node.node_id)
                in_tree.append(page)
        assert sorted([*in_tree, *free_list]) == list(range(PAGES))


TestRadixCache = RadixCacheMachine.TestCase
TestRadixCache.settings = effort(60)
