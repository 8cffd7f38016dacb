"""IndexedQueue. Owns: the order of lpm and shortest-prefill-first, kept up to date by what changed, not recomputed.

Equal, request by request and eviction by eviction, to matching and stably sorting the whole queue in every pass:

  match   each request is parked at the tree node where its match ends (`PrefixIndex`); only arrivals, and requests
          whose node was evicted or got a fitting child, are walked again
  order   a sorted list of (key, label, rid). A request whose key changes moves; in a stable sort one that moves back
          enters the front of its new group, one that moves forward, or arrives, the back; movers keep their order
  put back  the first of the cold requests that share 32 tokens keeps its place; one group per head
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Final

from engine.config import Policy
from engine.kvcache.radix_cache import RadixCache
from engine.request import Request
from engine.scheduler.entry_queue import EntryQueue
from engine.scheduler.policies import Ordering, OrderInputs
from engine.scheduler.policies.ordering import COLD_LIMIT_TOKENS
from engine.scheduler.prefix_index import STOOD, Entry

#: Above this share of the queue moving at once, sorting anew is cheaper than moving one by one.
_REBUILD_SHARE: Final = 8
_LAST: Final = (1, 0)
_KEPT_KEYS: Final = 4096


class _ColdGroup:
    """Requests with few cached tokens whose first 32 tokens are equal. `first` stands foremost; None: to be found."""

    __slots__ = ("first", "members")

    def __init__(self) -> None:
        self.members: dict[str, Entry] = {}
        self.first: Entry | None = None


class IndexedQueue(EntryQueue):
    """The waiting queue under lpm or shortest-prefill-first."""

    def __init__(self, policy: Policy, tree: RadixCache, *, chained_keys: bool = False) -> None:
        assert policy in {Policy.LPM, Policy.SHORTEST_PREFILL_FIRST}, f"not an order by static keys: {policy}"
        super().__init__(tree, lambda entry: (0, entry.key, entry.label), chained_keys=chained_keys)
        self._policy = policy
        self._order: list[tuple[tuple[int, ...], int, str]] = []
        self._cold: dict[int, _ColdGroup] = {}
        self._headless: dict[int, None] = {}
        self._displaced: dict[str, Entry] = {}
        self._labels = 0
        self._keys: dict[int, tuple[int, int]] = {}

    # -- the queue -------------------------------------------------------------------------------------------------

    def _leave_order(self, entry: Entry, *, is_arrival: bool) -> None:
        self._leave_cold(entry)
        if not is_arrival:
            del self._order[bisect_left(self._order, (entry.key, entry.label))]

    def _stands(self, entry: Entry) -> bool:
        return entry.cold_head not in self._headless and entry.rid not in self._displaced

    def __iter__(self) -> Iterator[Request]:
        for _, _, rid in self._order:
            yield self._entries[rid].request
        for entry in self._arrivals.values():
            yield entry.request

    # -- one pass --------------------------------------------------------------------------------------------------

    def order(self, inputs: OrderInputs) -> Ordering:
        threshold = inputs.fallback_threshold
        if self._policy is Policy.LPM and threshold is not None and len(self) > threshold:
            return self._unmatched(inputs)
        walked = self._index.begin_pass() + list(self._arrivals.values())
        self._index.walk(walked, inputs.kv.page_size)
        self._move(self._rekey(walked, COLD_LIMIT_TOKENS // inputs.kv.page_size))
        if not inputs.keep_record:
            return Ordering(self._policy, (), (), ())
        return self._record()

    def _join_cold(self, entry: Entry) -> None:
        head = entry.request.head32_key
        assert head is not None
        entry.cold_head = head
        group = self._cold.setdefault(head, _ColdGroup())
        group.members[entry.rid] = entry
        first = group.first
        if first is None:
            self._headless[head] = None
        # Arrivals are last of all; only one that fell back among the cold can come before the first.
        elif not entry.is_arrival and self._index.place_of(entry) < self._index.place_of(first):
            group.first = entry
            self._displaced[first.rid] = first

    def _leave_cold(self, entry: Entry) -> None:
        head = entry.cold_head
        if head is None:
            return
        entry.cold_head = None
        group = self._cold[head]
        del group.members[entry.rid]
        if not group.members:
            del self._cold[head]
            self._headless.pop(head, None)
        elif group.first is entry:
            group.first = None
            self._headless[head] = None

    def _rekey(self, walked: list[Entry], cold_pages: int) -> list[Entry]:
        """Decide who is put back; returns who must move, each with its place so far and its key to come.

        cold_pages  most pages that a request may match and still be cold
        """
        movers: list[Entry] = []
        cold: list[Entry] = []
        for entry in walked:
            if entry.pages > cold_pages or entry.request.head32_key is None:
                if entry.cold_head is not None:
                    self._leave_cold(entry)
                self._set_key(entry, movers, put_back=False)
            else:
                if entry.cold_head is None:
                    self._join_cold(entry)
                cold.append(entry)
        others = {rid: entry for rid, entry in self._displaced.items() if rid in self._entries}
        for head in self._headless:
            group = self._cold[head]
            group.first = min(group.members.values(), key=self._index.place_of)
            others[group.first.rid] = group.first
        self._headless.clear()
        self._displaced.clear()
        if others:
            for entry in walked:
                others.pop(entry.rid, None)
            for entry in others.values():
                self._index.remember_place(entry)
        for entry in (*cold, *others.values()):
            cold_head = entry.cold_head
            put_back = cold_head is not None and self._cold[cold_head].first is not entry
            self._set_key(entry, movers, put_back=put_back)
        return movers

    def _set_key(self, entry: Entry, movers: list[Entry], *, put_back: bool) -> None:
        entry.is_put_back = put_back
        key = self._key(entry)
        if entry.is_arrival or entry.key != key:
            entry.key_to_come = key
            movers.append(entry)

    def _key(self, entry: Entry) -> tuple[int, ...]:
        matched = entry.matched
        if self._policy is Policy.LPM:
            if entry.is_put_back:
                return _LAST
            # Most of a queue matches the same few lengths, so their keys are kept.
            if len(self._keys) > _KEPT_KEYS:
                self._keys.clear()
            return self._keys.get(matched) or self._keys.setdefault(matched, (0, -matched))
        work = entry.seq_len - matched
        return (1 if entry.is_put_back else 0, work if work > 1 else 1, entry.entry_seq)

    def _move(self, movers: list[Entry]) -> None:
        """Put movers where a stable sort would: see the top of the file."""
        if not movers:
            return
        order = self._order
        back: list[Entry] = []
        forward: list[Entry] = []
        arrived: list[Entry] = []
        rebuild = len(movers) * _REBUILD_SHARE > len(order)
        if rebuild:
            gone = {entry.rid for entry in movers}
            order = self._order = [item for item in order if item[2] not in gone]
        for entry in movers:
            if entry.is_arrival:
                arrived.append(entry)
                continue
            if not rebuild:
                del order[bisect_left(order, (entry.key, entry.label))]
            (back if entry.key_to_come > entry.key else forward).append(entry)
        back.sort(key=STOOD, reverse=True)
        forward.sort(key=STOOD)
        arrived.sort(key=STOOD)
        label = -self._labels
        for entry in back:
            label -= 1
            entry.label = label
        label = -label
        for entry in (*forward, *arrived):
            label += 1
            entry.label = label
        self._labels = label
        for entry in movers:
            key = entry.key = entry.key_to_come
            entry.is_arrival = False
            item = (key, entry.label, entry.rid)
            if rebuild:
                order.append(item)
            else:
                insort(order, item)
        if rebuild:
            order.sort()
        self._arrivals.clear()

    def _unmatched(self, inputs: OrderInputs) -> Ordering:
        """Beyond the reference's threshold: the present order, no matching."""
        rids = tuple(request.rid for request in self) if inputs.keep_record else ()
        return Ordering(Policy.FCFS, rids, (0,) * len(rids), None)

    def _record(self) -> Ordering:
        requests = list(self)
        return Ordering(
            active_policy=self._policy,
            order=tuple(request.rid for request in requests),
            matched=tuple(request.matched_len for request in requests),
            deprioritized=tuple(sorted(rid for rid, entry in self._entries.items() if entry.is_put_back)),
        )
