"""Leases: what requests hold, as sets of pages, and what is written in each page, as the prefix it was computed for."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.errors import LawBroken
from engine.kvcache.kv_cache import KvCache, KvLease
from engine.kvcache.page_pool import PageState
from engine.kvcache.radix_cache import Node
from tests.stateful.effort import effort
from tests.stateful.naive_tree import NaiveTree, Prefix, ranks
from tests.stateful.test_radix_cache import Locks, keys_of, prefix_of

PAGES = 20
ROWS = 4
#: Two letters: requests with the same beginning, or the same prompt, are common.
sequences = st.lists(st.integers(0, 1), min_size=1, max_size=7).map(tuple)


class LeaseMachine(RuleBasedStateMachine):
    """`content` says for which prefix the K/V of a page was computed: reading it for another is the fault."""

    def __init__(self) -> None:
        super().__init__()
        self.content: dict[int, Prefix] = {}
        self.sequence: dict[str, Prefix] = {}
        self.computed: dict[str, int] = {}
        self.serial = 0

    @initialize(page_size=st.sampled_from([1, 4]), radix=st.booleans())
    def build(self, page_size: int, radix: bool) -> None:
        self.radix = radix
        self.size = page_size
        self.kv = KvCache(num_pages=PAGES, page_size=page_size, num_rows=ROWS, events=Locks(), enable_radix=radix)
        self.model = NaiveTree()

    def _lease(self, data: st.DataObject) -> KvLease:
        return self.kv.leases[data.draw(st.sampled_from(sorted(self.kv.leases)))]

    def _forget_free(self) -> None:
        for page in self.kv.pool.picture()[2]:
            self.content.pop(page, None)

    @precondition(lambda self: len(self.kv.leases) < ROWS)
    @rule(sequence=sequences)
    def acquire(self, sequence: Prefix) -> None:
        self.serial += 1
        rid = f"r{self.serial}"
        keys = keys_of(sequence[: (len(sequence) * self.size - 1) // self.size])
        pages = self.kv.match(keys).pages
        if self.radix:
            self.kv.tree.touch(keys)
            assert self.model.touch(tuple(keys.tolist())) == pages
        lease = self.kv.acquire(rid, keys[:pages])
        assert (lease.count, lease.shared) == (pages, pages)
        self.model.holds[rid] = sequence[:pages]
        self.sequence[rid], self.computed[rid] = sequence, pages * self.size
        with pytest.raises(LawBroken):
            self.kv.acquire(rid, keys[:0])

    @precondition(lambda self: self.kv.leases)
    @rule(data=st.data(), more=st.integers(1, 9))
    def compute(self, data: st.DataObject, more: int) -> None:
        """Claim room for more tokens, evicting if needed, and write their K/V."""
        lease = self._lease(data)
        sequence = self.sequence[lease.rid]
        end = min(self.computed[lease.rid] + more, len(sequence) * self.size)
        missing = self.kv.pages_ceil(end) - lease.count
        self._evict(missing)
        if missing > self.kv.free_pages:
            return
        assert self.kv.extend(lease, end) == max(0, missing)
        for page in range(self.computed[lease.rid] // self.size, end // self.size):
            self.content[int(lease.pages[page])] = sequence[: page + 1]
        self.computed[lease.rid] = end

    @precondition(lambda self: self.kv.leases)
    @rule(data=st.data(), prompt_pages=st.integers(0, 7))
    def insert(self, data: st.DataObject, prompt_pages: int) -> None:
        lease = self._lease(data)
        keys = self._computed_keys(lease.rid)
        table = lease.pages.tolist()
        self.kv.insert(lease, keys_of(keys), split_at=prompt_pages)
        if self.radix and keys:
            self._model_insert(keys, table, prompt_pages)
            self.model.touch(keys)
            self.model.holds[lease.rid] = keys
            assert lease.shared == len(keys)
            assert prefix_of(lease.node) == keys
        self._forget_free()

    @precondition(lambda self: self.kv.leases)
    @rule(data=st.data(), prompt_pages=st.integers(0, 7), keep=st.booleans())
    def release(self, data: st.DataObject, prompt_pages: int, keep: bool) -> None:
        lease = self._lease(data)
        keys = self._computed_keys(lease.rid)
        table = lease.pages.tolist()
        self.kv.release(lease, keys_of(keys) if keep else None, split_at=prompt_pages)
        if self.radix and keep and keys:
            self._model_insert(keys, table, prompt_pages)
        del self.model.holds[lease.rid]
        with pytest.raises(LawBroken):
            self.kv.release(lease, None)
        self._forget_free()

    @rule(wanted=st.integers(0, PAGES))
    def evict(self, wanted: int) -> None:
        self._evict(wanted)

    def _evict(self, wanted: int) -> None:
        gone = self.model.evict(self.kv.free_pages, wanted)
        assert self.kv.evict_until_free(wanted) == len(gone)
        self._forget_free()

    def _computed_keys(self, rid: str) -> Prefix:
        return self.sequence[rid][: self.computed[rid] // self.size]

    def _model_insert(self, keys: Prefix, table: list[int], prompt_pages: int) -> None:
        self.model.insert(keys, table)
        if 0 < prompt_pages < len(keys):
            self.model.split_at(keys[:prompt_pages])

    @invariant()
    def each_request_reads_its_own_prefix(self) -> None:
        for lease in self.kv.leases.values():
            for index, prefix_len in enumerate(range(1, len(self._computed_keys(lease.rid)) + 1)):
                page = int(lease.pages[index])
                assert self.content.get(page) == self.sequence[lease.rid][:prefix_len]

    @invariant()
    def tree_is_the_model(self) -> None:
        found = {prefix_of(node): node.stamp for node in self.kv.tree.nodes()}
        assert ranks(found) == ranks(self.model.ends)
        for node in self.kv.tree.nodes():
            assert node.pages.tolist() == self.model.node_pages(prefix_of(node))

    @invariant()
    def every_page_has_one_owner(self) -> None:
        states, owners, free_list = self.kv.pool.picture()
        owner_of = np.frombuffer(owners, dtype=np.int64)
        owned: list[int] = list(free_list)
        for lease in self.kv.leases.values():
            private = lease.pages[lease.shared :].tolist()
            owned += private
            assert all((states[p], owner_of[p]) == (PageState.PRIVATE, lease.row) for p in private)
            path: list[int] = []
            node: Node | None = lease.node
            while node is not None:
                path = node.pages.tolist() + path
                node = node.parent
            assert lease.pages[: lease.shared].tolist() == path[: lease.shared]
            assert len(path) == lease.shared
        for cached in self.kv.tree.nodes():
            owned += cached.pages.tolist()
        assert sorted(owned) == list(range(PAGES))

    @invariant()
    def locks_are_the_leases_below(self) -> None:
        below: Counter[int] = Counter()
        for lease in self.kv.leases.values():
            node: Node | None = lease.node
            while node is not None and node.parent is not None:
                below[node.node_id] += 1
                node = node.parent
        assert {n.node_id: n.lock_count for n in self.kv.tree.nodes() if n.lock_count} == dict(below)
        evictable = sum(len(n.pages) for n in self.kv.tree.nodes() if not n.lock_count)
        assert self.kv.evictable_pages == evictable

    @invariant()
    def rows_are_taken_once(self) -> None:
        rows = [lease.row for lease in self.kv.leases.values()]
        assert sorted([*rows, *self.kv.snapshot().free_rows]) == list(range(ROWS))

    def teardown(self) -> None:
        for lease in list(self.kv.leases.values()):
            self.kv.release(lease, None)
        self.kv.evict_until_free(PAGES)
        assert self.kv.pool.counts == (PAGES, 0, 0, 0)
        assert list(self.kv.tree.nodes()) == []
        assert self.kv.free_rows == ROWS


TestLeases = LeaseMachine.TestCase
TestLeases.settings = effort(80)
