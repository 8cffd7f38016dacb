"""The second books of the pages. Owns: state and owner of every page as events tell them, and the counts by both.

State and owner are one number, the tag, so that a move looks at one array and writes one. Most moves take pages whose
ids follow each other; those are compared and written as bytes, whatever their number.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from operator import mul
from struct import Struct
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

STATE_NAMES: Final = ("free", "private", "protected", "evictable")
STATE_CODES: Final = {name: code for code, name in enumerate(STATE_NAMES)}
FREE, PRIVATE, PROTECTED, EVICTABLE = range(4)
NO_OWNER: Final = -1
#: Owner rules of a move. Rows and nodes are numbered apart, so OTHER_KIND compares nothing.
OTHER_KIND, KEEPS, CHANGES = 0, 1, 2

_FIRST_ID: Final = Struct("<I").unpack_from
#: Up to so many pages are followed one by one, which is quicker than numpy; beyond it together.
FEW: Final = 32
#: Number of pages -> how to unpack them, unsigned: an id below 0 is far beyond the pool.
_UNPACK: Final = tuple(Struct(f"<{count}I").unpack for count in range(FEW + 1))
_WIDTH: Final = 8
#: Groups of rows that grew in one step and are remembered.
KEPT_ROWS: Final = 64


def tag_of(state: int, owner: int) -> int:
    """One number for a state and an owner; `tag & 3` and `tag >> 2` give them back."""
    return owner << 2 | state


def packed(tag: int) -> bytes:
    """A tag as it lies in the array."""
    return tag.to_bytes(_WIDTH, sys.byteorder, signed=True)


FREE_TAG: Final = tag_of(FREE, NO_OWNER)
_FREE_PACKED: Final = packed(FREE_TAG)


class _Growth(NamedTuple):
    """Rows that one claim of many pages serves: as a set, the packed tags of its pages, and the pages of every row.

    amounts  int64 [num_rows]
    """

    rows: frozenset[int]
    fill: bytes
    amounts: NDArray[np.int64]


class PageBook:
    """Pages of one pool, all free at first.

    tags    int64 [num_pages]
    counts  pages by state
    """

    __slots__ = (
        "_bytes",
        "_claimed",
        "_growths",
        "_ids",
        "_odd_rows",
        "_private",
        "_private_view",
        "_row_of",
        "_view",
        "counts",
        "num_pages",
        "num_rows",
        "tags",
    )

    def __init__(self, num_pages: int, num_rows: int) -> None:
        self.num_pages, self.num_rows = num_pages, num_rows
        self._bytes = bytearray(_FREE_PACKED * num_pages)
        self.tags: NDArray[np.int64] = np.frombuffer(self._bytes, dtype=np.int64)
        self._view = memoryview(self._bytes).cast("q")
        #: All page ids in order, as events pack them: a run of pages is a slice of it.
        self._ids = np.arange(num_pages, dtype="<i4").tobytes()
        self.counts = [num_pages, 0, 0, 0]
        self._private = np.zeros(num_rows, dtype=np.int64)
        self._private_view = self._private.data
        #: The same of rows that there are none of: only a fault names them.
        self._odd_rows: dict[int, int] = {}
        #: Pages claimed in the open commit, as the events had them.
        self._claimed: list[bytes] = []
        #: Packed rows of claims that served several -> what there is to write.
        self._growths: dict[bytes, _Growth] = {}
        self._row_of = {f"r:{row}": row for row in range(num_rows)}

    def private_pages(self, row: int) -> int:
        """Private pages of a row."""
        return self._private_view[row] if 0 <= row < self.num_rows else self._odd_rows.get(row, 0)

    @property
    def states(self) -> NDArray[np.int64]:
        """State of every page: int64 [num_pages], a copy."""
        return self.tags & 3

    @property
    def owners(self) -> NDArray[np.int64]:
        """Owner of every page: int64 [num_pages], a copy."""
        return self.tags >> 2

    def set_all(self, states: NDArray[np.integer], owners: NDArray[np.integer]) -> None:
        """Take over a whole picture: int [num_pages] each."""
        self.tags[:] = owners.astype(np.int64) << 2 | states
        self.recount()

    def tag_at(self, pages: bytes) -> int | None:
        """Tag of the first of `pages`; None when there is no such page."""
        page: int = _FIRST_ID(pages)[0]
        return self._view[page] if page < self.num_pages else None

    # -- moves that are as they should be --------------------------------------------------------------------------

    def follow(self, pages: bytes, source: int, tag: int, rule: int) -> int | None:
        """Give `pages` (packed int32, at least one) the tag, if all have one tag that the move may start from.

        Returns the owner before. None, and nothing is changed, when a page is elsewhere, named twice or not there, or
        when they had several owners; `judge` then says what is wrong.
        """
        view, count = self._view, len(pages) // 4
        first: int = _FIRST_ID(pages)[0]
        if first >= self.num_pages:
            return None
        before = view[first]
        owner = before >> 2
        if before & 3 != source or (rule and (owner == tag >> 2) != (rule == KEEPS)):
            return None
        if count == 1:
            view[first] = tag
        elif pages == self._ids[4 * first : 4 * (first + count)]:
            start, end = _WIDTH * first, _WIDTH * (first + count)
            if self._bytes[start:end] != packed(before) * count:
                return None
            self._bytes[start:end] = packed(tag) * count
        elif count <= FEW:
            ids = self._few(pages, count, before)
            if ids is None:
                return None
            for page in ids:
                view[page] = tag
        else:
            at = self._distinct(pages, before)
            if at is None:
                return None
            self.tags[at] = tag
        target, counts = tag & 3, self.counts
        counts[source] -= count
        counts[target] += count
        if target == PRIVATE:
            self._add_private(tag >> 2, count)
        elif source == PRIVATE:
            self._add_private(owner, -count)
        return owner

    def follow_claims(self, labels: tuple[str, ...], pieces: list[bytes]) -> list[int] | None:
        """Free pages go to rows: owner label and packed int32 page ids of each claim. Returns the rows.

        None, and nothing is changed, when anything is odd: the claims are then to be judged one by one.
        """
        row_of = self._row_of
        rows = [row_of[label] for label in labels if label in row_of]
        if len(rows) != len(labels) or len(set(rows)) < len(rows):
            return None
        if len(pieces) == 1:
            count, left = divmod(len(pieces[0]), 4)
            if 0 < count <= FEW and not left:
                return rows if self._take_few(pieces[0], rows * count) else None
        joined, sizes = b"".join(pieces), [len(pages) // 4 for pages in pieces]
        if 0 in sizes or len(joined) != 4 * sum(sizes):
            return None
        if len(joined) <= 4 * FEW:
            each = [row for row, size in zip(rows, sizes, strict=True) for _ in range(size)]
            return rows if self._take_few(joined, each) else None
        tags = [packed(tag_of(PRIVATE, row)) for row in rows]
        if not self._take_free(joined, b"".join(map(mul, tags, sizes))):
            return None
        for row, size in zip(rows, sizes, strict=True):
            self._private_view[row] += size
        return rows

    def follow_growth(self, pages: bytes, owners: bytes) -> Collection[int] | None:
        """Free pages go to rows: packed int32 page ids, and the row of each. Returns the rows.

        None, and nothing is changed, when anything is odd: `judge` then says what.
        """
        if not owners or len(pages) != len(owners) or len(owners) % 4:
            return None
        count = len(owners) // 4
        if count <= FEW:
            rows = _UNPACK[count](owners)
            return rows if max(rows) < self.num_rows and self._take_few(pages, rows) else None
        growth = self._growths.get(owners) or self._growth_of(owners)
        if growth is None or not self._take_free(pages, growth.fill):
            return None
        self._private += growth.amounts
        return growth.rows

    def _growth_of(self, owners: bytes) -> _Growth | None:
        """What decode steps name again and again, every `page_size` steps; None when there is no such row."""
        rows = np.frombuffer(owners, dtype="<i4").astype(np.int64)
        if rows.min() < 0 or rows.max() >= self.num_rows:
            return None
        amounts = np.bincount(rows, minlength=self.num_rows)
        growth = _Growth(frozenset(rows.tolist()), (rows << 2 | PRIVATE).tobytes(), amounts)
        if len(self._growths) >= KEPT_ROWS:
            self._growths.clear()
        self._growths[owners] = growth
        return growth

    def _take_free(self, pages: bytes, fill: bytes) -> bool:
        """Give free pages, packed int32, the packed tags `fill`. False, and nothing is changed, if one is not free."""
        count = len(pages) // 4
        first: int = _FIRST_ID(pages)[0]
        if pages == self._ids[4 * first : 4 * (first + count)]:
            start, end = _WIDTH * first, _WIDTH * (first + count)
            if self._bytes[start:end] != _FREE_PACKED * count:
                return False
            self._bytes[start:end] = fill
        else:
            at = self._distinct(pages, FREE_TAG)
            if at is None:
                return False
            self.tags[at] = np.frombuffer(fill, dtype=np.int64)
        self.counts[FREE] -= count
        self.counts[PRIVATE] += count
        self._claimed.append(pages)
        return True

    def _take_few(self, pages: bytes, rows: Sequence[int]) -> bool:
        """Give at most FEW free pages, packed int32, to the row of each. False, and nothing is changed, if one is not
        free."""
        ids = self._few(pages, len(rows), FREE_TAG)
        if ids is None:
            return False
        view, private = self._view, self._private_view
        for page, row in zip(ids, rows, strict=True):
            view[page] = row << 2 | PRIVATE
            private[row] += 1
        self.counts[FREE] -= len(ids)
        self.counts[PRIVATE] += len(ids)
        self._claimed.append(pages)
        return True

    def _few(self, pages: bytes, count: int, tag: int) -> tuple[int, ...] | None:
        """Ids of at most FEW `pages` if all of them have this tag and none is named twice, else None."""
        ids, view = _UNPACK[count](pages), self._view
        try:
            for page in ids:
                if view[page] != tag:
                    return None
        except IndexError:
            return None
        return ids if len(set(ids)) == count else None

    def _distinct(self, pages: bytes, tag: int) -> NDArray[np.intp] | None:
        """Indices of `pages` if all of them have this tag and none is named twice, else None."""
        at = np.frombuffer(pages, dtype="<u4").astype(np.intp)  # unsigned: an id below 0 is far beyond the pool
        try:
            found = self.tags[at]
        except IndexError:
            return None
        if np.count_nonzero(found != tag):
            return None
        marks = np.arange(len(at))
        self.tags[at] = marks  # of a page named twice, one mark is lost
        if np.count_nonzero(self.tags[at] != marks):
            self.tags[at] = tag
            return None
        return at

    # -- moves that may be wrong -----------------------------------------------------------------------------------

    def judge(
        self, pages: NDArray[np.int64], source: int, tag: int | NDArray[np.int64], rule: int
    ) -> tuple[list[int], int]:
        """Give `pages`, all of them of the pool, the tag, one for all or one for each.

        Returns those that were elsewhere, and the owner that the first had.
        """
        before = self.tags[pages]
        owners, owner = before >> 2, tag >> 2
        bad = before & 3 != source
        if rule:
            bad |= (owners == owner) != (rule == KEEPS)
        if rule != KEEPS and source != EVICTABLE:
            bad |= owners != owners[0]
        again = np.ones(len(pages), dtype=bool)
        again[np.unique(pages, return_index=True)[1]] = False
        bad |= again
        self.tags[pages] = tag
        return pages[bad].tolist(), int(owners[0])

    def count_move(self, count: int, source: int, tag: int, old_owner: int) -> None:
        """Counters of a move that was what it said."""
        target = tag & 3
        self.counts[source] -= count
        self.counts[target] += count
        if target == PRIVATE:
            self._add_private(tag >> 2, count)
        elif source == PRIVATE:
            self._add_private(old_owner, -count)

    def _add_private(self, row: int, count: int) -> None:
        if 0 <= row < self.num_rows:
            self._private_view[row] += count
        else:
            self._odd_rows[row] = self._odd_rows.get(row, 0) + count

    def recount(self) -> None:
        """Rebuild the counters from the tags: after a move that was not what it said."""
        self.counts = [int(count) for count in np.bincount(self.tags & 3, minlength=4)]
        self._private[:] = 0
        self._odd_rows.clear()
        rows, sizes = np.unique(self.owners[self.states == PRIVATE], return_counts=True)
        for row, size in zip(rows.tolist(), sizes.tolist(), strict=True):
            self._add_private(row, size)

    # -- the open commit -------------------------------------------------------------------------------------------

    def remember_claim(self, pages: bytes) -> None:
        """`pages` were claimed in the open commit."""
        self._claimed.append(pages)

    def claimed_now(self, pages: bytes) -> list[int]:
        """Those of `pages` that were claimed in the open commit."""
        if not self._claimed:
            return []
        moved, claimed = (np.frombuffer(packed, dtype="<i4") for packed in (pages, b"".join(self._claimed)))
        return [int(page) for page in moved[np.isin(moved, claimed)]]

    def close_commit(self) -> None:
        """The commit is over."""
        self._claimed.clear()
