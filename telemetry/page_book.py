"""The page book. Owns: state, owner and age of every K/V page as the events tell it, and the picture of it.

Packed arrays: an event costs as much as the pages it moves, at any page size.
"""

from __future__ import annotations

import base64
import struct
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from engine.events import LockChanged, PagesMoved, RequestTransitioned
from engine.request import RequestState
from telemetry.observe import PAGE_STATES, KvPages, PageOwner
from telemetry.tree_book import TreeBook

_CODE: Final = {name: code for code, name in enumerate(PAGE_STATES)}
_PRIVATE: Final = _CODE["private"]
_FREE: Final = _CODE["free"]
#: Owners that a picture lists; the pages of smaller ones are shown without an owner.
LISTED: Final = 1000
_NOT_LISTED: Final = 65_535
#: So many pages are moved one by one, because each operation on arrays costs as much as some pages do.
_FEW: Final = 16
_IDS: Final = tuple(struct.Struct(f"<{count}i") for count in range(_FEW + 1))
_ID_BYTES: Final = 4
#: Moves of which the change of the lock itself says more.
_RELOCKED: Final = frozenset({"lock", "unlock"})


class PageBook:
    """States and owners of `num_pages` pages. An owner is a number: 2 x row of a request, 2 x node + 1.

    tree   the shape of the radix tree, which follows from the same events
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._states = np.zeros(num_pages, dtype=np.uint8)
        self._owners = np.full(num_pages, -1, dtype=np.int64)
        self._taken_ns = np.zeros(num_pages, dtype=np.int64)
        self._taken_step = np.zeros(num_pages, dtype=np.int64)
        self._look_at_pages()
        self.tree = TreeBook()
        self._locks: dict[int, dict[str, int]] = {}
        self._rid_of_row: dict[int, str] = {}

    def _look_at_pages(self) -> None:
        """The same memory again, for the few pages that most events move."""
        self._state_of, self._owner_of = self._states.data, self._owners.data
        self._ns_of, self._step_of = self._taken_ns.data, self._taken_step.data

    def __getstate__(self) -> dict[str, Any]:
        """What a kept state holds of a book: no second look at the same memory."""
        return {name: value for name, value in self.__dict__.items() if not isinstance(value, memoryview)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._look_at_pages()

    def moved(self, event: PagesMoved) -> None:
        """Take over a move. `split` gives the pages above a cut a new node, with the locks of the old one."""
        count = len(event.pages) // _ID_BYTES
        if not count:
            return
        if count > _FEW:
            self._many_moved(event, count)
            return
        pages = _IDS[count].unpack(event.pages)
        states, owners = self._state_of, self._owner_of
        if event.source == "free":
            ns_of, step_of, t_ns, step = self._ns_of, self._step_of, event.t_ns, event.step
            for page in pages:
                ns_of[page], step_of[page] = t_ns, step
        if event.owners:
            self.tree.settle()
            for page, row in zip(pages, _IDS[count].unpack(event.owners), strict=True):
                states[page], owners[page] = _PRIVATE, 2 * row
            return
        owner, code = _owner(event.owner), _CODE[event.target]
        if event.cause not in _RELOCKED:
            self._shape(event, count, owners[pages[0]], owner)
        for page in pages:
            states[page], owners[page] = code, owner

    def _many_moved(self, event: PagesMoved, count: int) -> None:
        pages: NDArray[np.int32] = np.frombuffer(event.pages, dtype="<i4")
        if event.source == "free":
            self._taken_ns[pages], self._taken_step[pages] = event.t_ns, event.step
        if event.owners:
            rows: NDArray[np.int32] = np.frombuffer(event.owners, dtype="<i4")
            self._states[pages] = _PRIVATE
            self._owners[pages] = 2 * rows.astype(np.int64)
            self.tree.settle()
            return
        owner = _owner(event.owner)
        if event.cause not in _RELOCKED:
            self._shape(event, count, int(self._owners[pages[0]]), owner)
        self._states[pages] = _CODE[event.target]
        self._owners[pages] = owner

    def _shape(self, event: PagesMoved, count: int, before: int, owner: int) -> None:
        """What the move says of the tree; before it is made. `before`: whose the first page was."""
        tree, cause = self.tree, event.cause
        # After a loss of events a row may seem to hold a node's page: its number is no node's, least of all the root's.
        node = before // 2 if before % 2 else -1
        if cause == "insert":
            rid = self._rid_of_row.get(before // 2, "")
            tree.inserted(owner // 2, rid, count, t_ns=event.t_ns, step=event.step)
        elif cause == "duplicate":
            tree.duplicate(self._rid_of_row.get(before // 2, ""), count)
        elif cause == "split":
            if before in self._locks:
                self._locks[owner] = dict(self._locks[before])
            tree.split(node, owner // 2, count, t_ns=event.t_ns, step=event.step)
        elif cause == "evict":
            self._locks.pop(before, None)
            tree.evicted(node)
        else:
            tree.settle()

    def lock_changed(self, event: LockChanged) -> None:
        """One lock more or less on a node by one request."""
        self.tree.locked(event)
        owner, rid = 2 * event.node + 1, event.rid
        holders = self._locks.get(owner)
        if holders is None:
            holders = self._locks[owner] = {}
        locks = holders.get(rid, 0) + event.delta
        if locks > 0:
            holders[rid] = locks
        else:
            holders.pop(rid, None)

    def transitioned(self, event: RequestTransitioned) -> None:
        """Learn which request a row belongs to."""
        self.tree.transitioned(event)
        if event.row is not None and event.target is RequestState.PREFILL:
            self._rid_of_row[event.row] = event.rid

    def counts(self) -> KvPages:
        """Pages by state, counted afresh."""
        free, private, protected, evictable = np.bincount(self._states, minlength=len(PAGE_STATES)).tolist()
        return KvPages(free=free, private=private, protected=protected, evictable=evictable, capacity=self.num_pages)

    def holders(self, node: int) -> dict[str, int]:
        """Requests that lock a node, and how often."""
        return self._locks.get(2 * node + 1, {})

    def locked_nodes(self) -> dict[int, dict[str, int]]:
        """Nodes with a lock."""
        return {owner // 2: holders for owner, holders in self._locks.items() if holders}

    def page(self, page: int) -> tuple[str, PageOwner | None, int | None, int, int]:
        """(state, owner, its node, when it was taken from the free ones: engine clock and step) of one page."""
        owner = int(self._owners[page])
        state, taken = PAGE_STATES[self._states[page]], (int(self._taken_ns[page]), int(self._taken_step[page]))
        if owner < 0:
            return state, None, None, *taken
        held = int(np.count_nonzero(self._owners == owner))
        return state, self._owner_row(owner, held), owner // 2 if owner % 2 else None, *taken

    def bitmap(self, nodes: set[int]) -> bytes:
        """One bit for each page, most significant first: whether it belongs to one of `nodes`."""
        wanted = np.array([2 * node + 1 for node in nodes], dtype=np.int64)
        return np.packbits(np.isin(self._owners, wanted)).tobytes()

    def owners(self) -> list[PageOwner]:
        """Who holds pages, largest first."""
        return [self._owner_row(owner, held) for owner, held in self._ranked()]

    def _ranked(self) -> list[tuple[int, int]]:
        owners, held = np.unique(self._owners[self._owners >= 0], return_counts=True)
        pairs: list[tuple[int, int]] = list(zip(owners.tolist(), held.tolist(), strict=True))
        return sorted(pairs, key=lambda item: (-item[1], item[0]))

    def _owner_row(self, owner: int, held: int) -> PageOwner:
        number, is_node = divmod(owner, 2)
        if not is_node:
            rid = self._rid_of_row.get(number, "")
            label = rid or f"row {number}"
            return PageOwner(
                owner=f"r:{number}",
                kind="request",
                label=label,
                pages=held,
                state="private",
                lock_count=1,
                holders=(rid,) if rid else (),
            )
        holders = self._locks.get(owner, {})
        return PageOwner(
            owner=f"n:{number}",
            kind="node",
            label=f"node {number}",
            pages=held,
            state="protected" if holders else "evictable",
            lock_count=sum(holders.values()),
            holders=tuple(holders),
        )

    def packed(self) -> tuple[str, str, tuple[PageOwner, ...], int]:
        """(states, owners) in base64, the owners listed, and how many there are: see `observe.PageMap`."""
        ranked = self._ranked()
        listed = ranked[:LISTED]
        index: NDArray[np.uint16] = np.full(self.num_pages, _NOT_LISTED, dtype="<u2")
        index[self._states == _FREE] = 0
        if listed:
            ids = np.array([owner for owner, _ in listed], dtype=np.int64)
            order = np.argsort(ids)
            at = np.searchsorted(ids[order], self._owners)
            at[at == len(ids)] = 0
            place = order[at]
            found = ids[place] == self._owners
            index[found] = place[found] + 1
        states = base64.b64encode(self._states.tobytes()).decode()
        rows = tuple(self._owner_row(owner, held) for owner, held in listed)
        return states, base64.b64encode(index.tobytes()).decode(), rows, len(ranked)


def _owner(text: str) -> int:
    return 2 * int(text[2:]) + (text[0] == "n") if text else -1
