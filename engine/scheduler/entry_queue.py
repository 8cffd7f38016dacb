"""EntryQueue. Owns: what the two indexed orders share — who waits, who just arrived, and who is settled.

A request is *settled* when nothing since the last pass can have changed where it stands: it is no arrival, its match is
not to be walked again, and its standing does not hang on someone who left. For a settled request the order promises the
place that a full match would give it (INV-INDEX-01).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable

from engine.kvcache.radix_cache import Node, RadixCache
from engine.request import Request
from engine.scheduler.prefix_index import Entry, Place, PrefixIndex


class EntryQueue(ABC):
    """Entries by request, and the index that says where each one's match ends."""

    def __init__(self, tree: RadixCache, standing: Callable[[Entry], Place], *, chained_keys: bool) -> None:
        self._tree = tree
        self._index = PrefixIndex(tree, standing, chained_keys=chained_keys)
        self._entries: dict[str, Entry] = {}
        self._arrivals: dict[str, Entry] = {}

    def add(self, request: Request) -> None:
        """Append at the tail."""
        entry = Entry(request)
        self._entries[request.rid] = entry
        self._arrivals[request.rid] = entry

    def remove(self, rids: Iterable[str]) -> None:
        """Take out those that are in; others are ignored."""
        for rid in rids:
            entry = self._entries.pop(rid, None)
            if entry is None:
                continue
            self._index.leave(entry)
            self._leave_order(entry, is_arrival=self._arrivals.pop(rid, None) is not None)

    def __len__(self) -> int:
        return len(self._entries)

    # -- for audits ------------------------------------------------------------------------------------------------

    def settled(self, rid: str) -> Entry | None:
        """The entry of a waiting request whose place cannot have changed since the last pass, else None."""
        entry = self._entries.get(rid)
        if entry is None or entry.is_arrival or self._index.is_pending(rid) or not self._stands(entry):
            return None
        return entry

    def weights(self) -> Callable[[Node], int] | None:
        """How many requests the last pass found in the subtree of a node, counted anew; None: no order by weight."""
        return None

    # -- each order's own ------------------------------------------------------------------------------------------

    @abstractmethod
    def _leave_order(self, entry: Entry, *, is_arrival: bool) -> None:
        """Take an entry that leaves out of the order."""

    def _stands(self, entry: Entry) -> bool:  # noqa: ARG002 - subclasses look at it
        """Whether the entry's standing hangs on nobody who left or moved since the last pass."""
        return True
