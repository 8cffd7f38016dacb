"""PagePool. Owns: which state and which owner every page has. Nothing else writes these arrays.

           claim                 insert, request goes on
   FREE ──────────► PRIVATE ─────────────────────────────► PROTECTED
    ▲ ▲                │ │                                   │   ▲
    │ └── free ────────┘ │ insert, request ends   unlock last│   │lock first
    │                    └────────────────────────────┐      ▼   │
    └───────────────── evict ──────────────────────── EVICTABLE ─┘

Pages travel as packed int32 arrays: at page size 1 there is no object per page.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import IntEnum
from itertools import accumulate
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from engine.errors import PageStateError

Pages = NDArray[np.int32]
NO_OWNER: Final = -1


class PageState(IntEnum):
    """FREE: nobody's. PRIVATE: one request's. PROTECTED / EVICTABLE: the tree's, with and without a lock."""

    FREE = 0
    PRIVATE = 1
    PROTECTED = 2
    EVICTABLE = 3

    __hash__ = int.__hash__  # that of Enum is a Python function, and every move looks its states up


STATE_NAMES: Final = ("free", "private", "protected", "evictable")
_FREE: Final = int(PageState.FREE)
#: state -> what its owner is: a row, or a tree node.
_OWNER_KINDS: Final = ("", "r:", "n:", "n:")

#: cause -> the (source, target) pairs it may connect. `split` changes the owner only.
LEGAL_MOVES: Final[dict[str, frozenset[tuple[int, int]]]] = {
    "claim": frozenset({(PageState.FREE, PageState.PRIVATE)}),
    "insert": frozenset({(PageState.PRIVATE, PageState.PROTECTED), (PageState.PRIVATE, PageState.EVICTABLE)}),
    "duplicate": frozenset({(PageState.PRIVATE, PageState.FREE)}),
    "free": frozenset({(PageState.PRIVATE, PageState.FREE)}),
    "lock": frozenset({(PageState.EVICTABLE, PageState.PROTECTED)}),
    "unlock": frozenset({(PageState.PROTECTED, PageState.EVICTABLE)}),
    "split": frozenset({(PageState.PROTECTED, PageState.PROTECTED), (PageState.EVICTABLE, PageState.EVICTABLE)}),
    "evict": frozenset({(PageState.EVICTABLE, PageState.FREE)}),
}


class KvEvents(Protocol):
    """Who is told when pages move or locks change (one listener, given at construction)."""

    def pages_moved(
        self, pages: bytes, source: str, target: str, owner: str, cause: str, owners: bytes = b""
    ) -> None: ...

    def lock_changed(self, node: int, rid: str, delta: int, count: int) -> None: ...


class PagePool:
    """`num_pages` pages, all FREE at first. `move` is the only way a page changes state or owner."""

    __slots__ = ("_counts", "_events", "_free", "_free_top", "_owners", "_states", "num_pages")

    def __init__(self, num_pages: int, events: KvEvents) -> None:
        self.num_pages = num_pages
        self._events = events
        self._states = np.zeros(num_pages, dtype=np.uint8)
        self._owners = np.full(num_pages, NO_OWNER, dtype=np.int64)
        self._free = np.arange(num_pages - 1, -1, -1, dtype=np.int32)
        self._free_top = num_pages
        self._counts = [num_pages, 0, 0, 0]

    def count(self, state: PageState) -> int:
        """Pages in `state`, from the running counters."""
        return self._counts[state]

    @property
    def counts(self) -> tuple[int, int, int, int]:
        """(free, private, protected, evictable); their sum is `num_pages`."""
        free, private, protected, evictable = self._counts
        return free, private, protected, evictable

    def claim(self, num_pages: int, *, row: int) -> Pages:
        """Take free pages for the request in `row`. Raises PageStateError when there are too few."""
        return next(self.claim_each([(row, num_pages)]))

    def claim_each(self, claims: Sequence[tuple[int, int]]) -> Iterator[Pages]:
        """Take free pages for several rows, (row, number of pages) each, in one pass over the arrays.

        All pages are taken at once; a row's claim is published when the iterator hands out its pages. Raises
        PageStateError, before anything changes, when there are too few.
        """
        return self._hand_out(self._take(claims), claims)

    def claim_together(self, claims: Sequence[tuple[int, int]]) -> list[Pages]:
        """`claim_each`, published as one move before it returns: nothing stands between the claims of the rows."""
        pages = self._take(claims)
        rows = {row for row, count in claims if count}
        if len(rows) == 1:
            self._publish(pages, PageState.FREE, PageState.PRIVATE, rows.pop(), "claim")
        elif rows:
            owners = self._owners[pages.astype(np.intp)].astype("<i4").tobytes()
            self._events.pages_moved(pages.tobytes(), "free", "private", "", "claim", owners)
        ends = list(accumulate(count for _, count in claims))
        return [pages[end - count : end] for end, (_, count) in zip(ends, claims, strict=True)]

    def _take(self, claims: Sequence[tuple[int, int]]) -> Pages:
        """The pages of several claims, one row's after the other's; not published."""
        total = sum(count for _, count in claims)
        if total > self._free_top:
            rows = ", ".join(str(row) for row, _ in claims)
            raise PageStateError(f"claim of {total} pages for rows {rows}: {self._free_top} are free")
        pages = self._free[self._free_top - total : self._free_top][::-1].copy()
        if total:
            owners = np.repeat([row for row, _ in claims], [count for _, count in claims])
            self._write(pages, PageState.FREE, PageState.PRIVATE, owners, cause="claim")
        return pages

    def _hand_out(self, pages: Pages, claims: Sequence[tuple[int, int]]) -> Iterator[Pages]:
        start = 0
        for row, count in claims:
            part = pages[start : start + count]
            start += count
            if count:
                self._publish(part, PageState.FREE, PageState.PRIVATE, row, "claim")
            yield part

    def move(self, pages: Pages, source: PageState, target: PageState, *, owner: int, cause: str) -> None:
        """Move `pages` from `source` to `target`; `owner` is a row for PRIVATE, a node for tree states, -1 for FREE.

        Raises PageStateError, before anything changes, when a page is elsewhere or the move is not in the diagram.
        """
        if len(pages):
            self._write(pages, source, target, owner, cause=cause)
            self._publish(pages, source, target, owner, cause)

    def _write(
        self, pages: Pages, source: PageState, target: PageState, owner: int | NDArray[np.int64], *, cause: str
    ) -> None:
        """The move in the arrays; `owner` is one for all pages, or one for each."""
        if (source, target) not in LEGAL_MOVES[cause]:
            raise PageStateError(f"{cause}: no move {source.name} -> {target.name}")
        # Plain integers from here on: NumPy takes microseconds to find out what an IntEnum is.
        left, entered, count = int(source), int(target), len(pages)
        at = pages.astype(np.intp)  # what indexing would convert to, three times over
        if self._states[at].tobytes() != bytes((left,)) * count:
            wrong = [int(page) for page in pages if self._states[page] != left][:8]
            raise PageStateError(f"{cause}: pages {wrong} are not {source.name}")
        if left == _FREE:
            self._free_top -= count
        elif entered == _FREE:
            self._free[self._free_top : self._free_top + count] = pages[::-1]
            self._free_top += count
        self._states[at] = entered
        self._owners[at] = owner
        self._counts[left] -= count
        self._counts[entered] += count

    def _publish(self, pages: Pages, source: PageState, target: PageState, owner: int, cause: str) -> None:
        kind = _OWNER_KINDS[target]
        label = f"{kind}{owner}" if kind else ""
        self._events.pages_moved(pages.tobytes(), STATE_NAMES[source], STATE_NAMES[target], label, cause)

    def picture(self) -> tuple[bytes, bytes, tuple[int, ...]]:
        """(states, owners, free list) as immutable values, for snapshots."""
        return self._states.tobytes(), self._owners.tobytes(), tuple(self._free[: self._free_top].tolist())
