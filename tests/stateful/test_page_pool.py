"""The page pool behaves like a dictionary from page to (state, owner), and refuses what the diagram does not have."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.errors import PageStateError
from engine.kvcache.page_pool import LEGAL_MOVES, NO_OWNER, PagePool, PageState
from tests.stateful.effort import effort

PAGES = 12


class Ledger:
    """A second set of books, kept from the published moves alone."""

    def __init__(self) -> None:
        self.state = dict.fromkeys(range(PAGES), "free")
        self.owner = dict.fromkeys(range(PAGES), "")
        self.told = 0

    def pages_moved(self, pages: bytes, source: str, target: str, owner: str, cause: str, owners: bytes = b"") -> None:
        self.told += 1
        moved = np.frombuffer(pages, dtype=np.int32).tolist()
        labels = [f"r:{row}" for row in np.frombuffer(owners, dtype=np.int32).tolist()] or [owner] * len(moved)
        if owners:
            assert (owner, len(set(labels)) > 1) == ("", True), "one owner is named as such"
        for page, label in zip(moved, labels, strict=True):
            assert self.state[page] == source, f"{cause} of page {page}: published from {source}"
            self.state[page], self.owner[page] = target, label

    def lock_changed(self, node: int, rid: str, delta: int, count: int) -> None:
        raise AssertionError("a pool has no locks")


class PagePoolMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.pool = PagePool(PAGES, self.ledger)
        self.model: dict[int, tuple[PageState, int]] = dict.fromkeys(range(PAGES), (PageState.FREE, NO_OWNER))

    def _in(self, state: PageState) -> list[int]:
        return [page for page, (found, _) in self.model.items() if found is state]

    @rule(claims=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=4))
    def claim(self, claims: list[tuple[int, int]]) -> None:
        """Several rows at once get what they would get one after another: the last freed pages first."""
        free = list(self.pool.picture()[2])
        if sum(count for _, count in claims) > len(free):
            with pytest.raises(PageStateError, match=f"{len(free)} are free"):
                self.pool.claim_each(claims)
            return
        handed = self.pool.claim_each(claims)
        for row, count in claims:
            unpublished = dict(self.ledger.owner)
            pages = next(handed).tolist()
            assert pages == [free.pop() for _ in range(count)]
            assert self.ledger.owner == unpublished | dict.fromkeys(pages, f"r:{row}")
            self.model |= dict.fromkeys(pages, (PageState.PRIVATE, row))

    @rule(claims=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=4, unique_by=lambda each: each[0]))
    def claim_together(self, claims: list[tuple[int, int]]) -> None:
        """The same pages for the same rows, told at once."""
        free, told = list(self.pool.picture()[2]), self.ledger.told
        if sum(count for _, count in claims) > len(free):
            with pytest.raises(PageStateError, match=f"{len(free)} are free"):
                self.pool.claim_together(claims)
            assert self.ledger.told == told
            return
        handed = self.pool.claim_together(claims)
        assert self.ledger.told == told + any(count for _, count in claims)
        for (row, count), pages in zip(claims, handed, strict=True):
            assert pages.tolist() == [free.pop() for _ in range(count)]
            self.model |= dict.fromkeys(pages.tolist(), (PageState.PRIVATE, row))

    @precondition(lambda self: len(self._in(PageState.FREE)) < PAGES)
    @rule(data=st.data(), cause=st.sampled_from([cause for cause in LEGAL_MOVES if cause != "claim"]))
    def legal_move(self, data: st.DataObject, cause: str) -> None:
        source, target = data.draw(st.sampled_from(sorted(LEGAL_MOVES[cause])))
        there = self._in(PageState(source))
        pages = data.draw(st.lists(st.sampled_from(there), unique=True)) if there else []
        owner = NO_OWNER if target == PageState.FREE else data.draw(st.integers(1, 50))
        self._move(pages, PageState(source), PageState(target), owner, cause)
        self.model |= dict.fromkeys(pages, (PageState(target), owner))

    @rule(
        pages=st.lists(st.integers(0, PAGES - 1), min_size=1, unique=True),
        start=st.sampled_from(PageState),
        goal=st.sampled_from(PageState),
        cause=st.sampled_from(sorted(LEGAL_MOVES)),
    )
    def any_move_is_legal_or_changes_nothing(
        self, pages: list[int], start: PageState, goal: PageState, cause: str
    ) -> None:
        legal = (start, goal) in LEGAL_MOVES[cause] and all(self.model[page][0] is start for page in pages)
        if not legal or start is PageState.FREE:
            # FREE pages are taken from the end of the free list, so only `claim` may name them.
            if not legal:
                with pytest.raises(PageStateError):
                    self._move(pages, start, goal, 7, cause)
            return
        owner = NO_OWNER if goal is PageState.FREE else 7
        self._move(pages, start, goal, owner, cause)
        self.model |= dict.fromkeys(pages, (goal, owner))

    def _move(self, pages: list[int], source: PageState, target: PageState, owner: int, cause: str) -> None:
        self.pool.move(np.array(pages, dtype=np.int32), source, target, owner=owner, cause=cause)

    @invariant()
    def books_agree(self) -> None:
        states, owners, free_list = self.pool.picture()
        assert list(states) == [int(state) for state, _ in self.model.values()]
        assert np.frombuffer(owners, dtype=np.int64).tolist() == [owner for _, owner in self.model.values()]
        assert sorted(free_list) == self._in(PageState.FREE)  # no page twice, none lost
        assert self.pool.counts == tuple(len(self._in(state)) for state in PageState)
        assert sum(self.pool.counts) == PAGES
        assert [self.ledger.state[page] for page in range(PAGES)] == [s.name.lower() for s, _ in self.model.values()]
        prefix = {PageState.PRIVATE: "r:", PageState.PROTECTED: "n:", PageState.EVICTABLE: "n:"}
        labels = [f"{prefix[s]}{owner}" if s in prefix else "" for s, owner in self.model.values()]
        assert [self.ledger.owner[page] for page in range(PAGES)] == labels


TestPagePool = PagePoolMachine.TestCase
TestPagePool.settings = effort(60)
