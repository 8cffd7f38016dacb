"""Faults of the indexed orders. Owns: one method of the index or of a queue over it broken at a time."""

from __future__ import annotations

from typing import Any

import pytest

from engine.scheduler.indexed_queue import IndexedQueue
from engine.scheduler.prefix_index import Entry, PrefixIndex
from engine.scheduler.weight_queue import WeightQueue
from tests.builders import CoreRun
from tests.sabotage.engine_faults import breaks


def document(number: int, tokens: int) -> list[int]:
    """The beginning of one of a few texts."""
    return list(range(50_000 + 1_000 * number, 50_000 + 1_000 * number + tokens))


def cached(run: CoreRun, *beginnings: list[int]) -> None:
    """Bring these into the tree before anything waits."""
    for number, beginning in enumerate(beginnings):
        run.add(f"old{number}", beginning, 1)
    while run.has_work:
        run.step()


def crowd(run: CoreRun, name: str, beginning: list[int], members: int, *, own: int = 40, output: int = 9) -> None:
    """Some who wait, with one beginning and each with tokens of its own."""
    for member in range(members):
        start = 100_000 + 1_000 * len(run.scheduler.state.requests)
        run.add(f"{name}{member}", [*beginning, *range(start, start + own)], output)


@breaks("INV-INDEX-01", "a prefix that became cached, and no request re-keyed")
def insertion_missed(_run: CoreRun, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PrefixIndex, "leaf_inserted", lambda self, leaf: None)


@breaks("INV-INDEX-01", "a prefix that became cached, and only the first request re-keyed")
def insertion_half_told(run: CoreRun, patch: pytest.MonkeyPatch) -> None:
    crowd(run, "c", document(0, 64), 8)
    original = PrefixIndex.leaf_inserted

    def broken(self: Any, leaf: Any) -> None:
        known = set(self._pending)
        original(self, leaf)
        for rid in [rid for rid in self._pending if rid not in known][1:]:
            del self._pending[rid]

    patch.setattr(PrefixIndex, "leaf_inserted", broken)


@breaks("INV-INDEX-01", "an eviction that the index missed")
def eviction_missed(run: CoreRun, patch: pytest.MonkeyPatch) -> None:
    cached(run, document(0, 16), document(1, 64))
    crowd(run, "c", document(0, 16), 1)
    crowd(run, "d", document(1, 64), 9, own=90, output=60)
    patch.setattr(PrefixIndex, "node_evicted", lambda self, node, parent: None)


@breaks("INV-INDEX-01", "a request whose key changed left where it was")
def mover_left(_run: CoreRun, patch: pytest.MonkeyPatch) -> None:
    original = IndexedQueue._move

    def broken(self: Any, movers: list[Entry]) -> None:
        original(self, [entry for entry in movers if entry.is_arrival])

    patch.setattr(IndexedQueue, "_move", broken)


@breaks("INV-INDEX-01", "the least cached first")
def least_cached_first(_run: CoreRun, patch: pytest.MonkeyPatch) -> None:
    original = IndexedQueue._key
    patch.setattr(IndexedQueue, "_key", lambda self, entry: tuple(-part for part in original(self, entry)))


@breaks("INV-INDEX-01", "cold requests that share a head, and nobody put back")
def nobody_put_back(_run: CoreRun, patch: pytest.MonkeyPatch) -> None:
    original = IndexedQueue._key

    def broken(self: Any, entry: Entry) -> tuple[int, ...]:
        entry.is_put_back = False
        return original(self, entry)

    patch.setattr(IndexedQueue, "_key", broken)


@breaks("INV-INDEX-01", "work that counts cached tokens", schedule_policy="shortest-prefill-first")
def whole_length(_run: CoreRun, patch: pytest.MonkeyPatch) -> None:
    def broken(self: Any, entry: Entry) -> tuple[int, ...]:
        request = entry.request
        return (int(entry.is_put_back), request.seq_len, request.entry_seq)

    patch.setattr(IndexedQueue, "_key", broken)


@breaks("INV-INDEX-01", "a request ordered by a match of an earlier pass", schedule_policy="shortest-prefill-first")
def stale_length(_run: CoreRun, patch: pytest.MonkeyPatch) -> None:
    original = PrefixIndex.walk

    def broken(self: Any, entries: list[Entry], page_size: int) -> None:
        before = [entry.request.matched_len for entry in entries]
        original(self, entries, page_size)
        for entry, matched in zip(entries, before, strict=True):
            entry.request.matched_len = matched

    patch.setattr(PrefixIndex, "walk", broken)


@breaks("INV-INDEX-01", "the lighter child first", schedule_policy="dfs-weight")
def lighter_first(_run: CoreRun, patch: pytest.MonkeyPatch) -> None:
    original = WeightQueue._walk

    def broken(self: Any) -> dict[int, int]:
        walked = list(original(self))
        return {node_id: place for place, node_id in enumerate(reversed(walked))}

    patch.setattr(WeightQueue, "_walk", broken)


@breaks("INV-INDEX-01", "homes weighed, and not the requests there", schedule_policy="dfs-weight")
def forgotten_weight(run: CoreRun, patch: pytest.MonkeyPatch) -> None:
    # Six at one node outweigh four at two.
    cached(run, document(0, 32), [*document(1, 32), *document(2, 32)], [*document(1, 32), *document(3, 32)])
    crowd(run, "c", document(0, 32), 6)
    crowd(run, "d", [*document(1, 32), *document(2, 32)], 2)
    crowd(run, "e", [*document(1, 32), *document(3, 32)], 2)
    original = WeightQueue._walk

    def broken(self: Any) -> dict[int, int]:
        # A home is weighed as one request, however many are there.
        homes = self._homes
        thin = {}
        for node_id, home in homes.items():
            thin[node_id] = type(home)(home.node)
            thin[node_id].entries = dict(list(home.entries.items())[:1])
        self._homes = thin
        try:
            return original(self)
        finally:
            self._homes = homes

    patch.setattr(WeightQueue, "_walk", broken)
