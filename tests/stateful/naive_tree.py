"""A prefix cache without a tree. Owns: the brute-force model that the radix tree is compared with.

It keeps a dictionary from every cached prefix (a tuple of page keys) to its page, and the prefixes at which a node ends
with their stamps. Nothing is shared with the real one: matching, splitting, locking and eviction order are recomputed
from these by looking at all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Prefix = tuple[int, ...]


def ranks(stamps: Mapping[Prefix, Any]) -> dict[Prefix, int]:
    """Stamps matter by their order only: each one's place among the distinct ones, oldest first."""
    places = {stamp: place for place, stamp in enumerate(sorted(set(stamps.values())))}
    return {prefix: places[stamp] for prefix, stamp in stamps.items()}


class NaiveTree:
    """pages: cached prefix -> page; ends: node end -> stamp; holds: holder -> locked prefix, which is a node end."""

    def __init__(self) -> None:
        self.pages: dict[Prefix, int] = {}
        self.ends: dict[Prefix, int] = {}
        self.holds: dict[str, Prefix] = {}
        self._clock = 0

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    def match(self, keys: Prefix) -> int:
        """Pages of the longest cached prefix."""
        return max((n for n in range(1, len(keys) + 1) if keys[:n] in self.pages), default=0)

    def touch(self, keys: Prefix) -> int:
        """Stamp the nodes that the match walks, split the last one where it ends inside. Returns the pages matched."""
        stamp = self._tick()
        matched = self.match(keys)
        for end in self.ends:
            if len(end) <= matched and end == keys[: len(end)]:
                self.ends[end] = stamp
        self._split(keys[:matched], stamp)
        return matched

    def _split(self, at: Prefix, lower_stamp: int | None) -> None:
        """Make `at` a node end. `lower_stamp`: what the part below keeps when it was entered (None: its own)."""
        if not at or at in self.ends:
            return
        below = min((end for end in self.ends if end[: len(at)] == at), key=len)
        if lower_stamp is not None:
            self.ends[below] = lower_stamp
        self.ends[at] = self._tick()

    def split_at(self, at: Prefix) -> None:
        """A node boundary without a stamp for what lies below."""
        self._split(at, None)

    def insert(self, keys: Prefix, pages: list[int]) -> int:
        """Add a path; returns how many of its pages were there already."""
        present = self.touch(keys)
        if present < len(keys):
            for n in range(present + 1, len(keys) + 1):
                self.pages[keys[:n]] = pages[n - 1]
            self.ends[keys] = self._tick()
        return present

    def locks(self, end: Prefix) -> int:
        """Holders at or below a node."""
        return sum(held[: len(end)] == end for held in self.holds.values())

    def node_pages(self, end: Prefix) -> list[int]:
        """Pages of the node that ends at `end`: those after the end of its parent."""
        parent = max(
            (len(other) for other in self.ends if len(other) < len(end) and end[: len(other)] == other), default=0
        )
        return [self.pages[end[:n]] for n in range(parent + 1, len(end) + 1)]

    def is_evictable(self, prefix: Prefix) -> bool:
        """Whether nobody holds the node that this prefix lies in."""
        return not any(held[: len(prefix)] == prefix for held in self.holds.values())

    def evict(self, free: int, wanted: int) -> list[int]:
        """Pages in the order they go: whole unlocked leaves, oldest stamp first, until `wanted` are free."""
        gone: list[int] = []
        while free + len(gone) < wanted:
            leaves = [
                end
                for end in self.ends
                if self.locks(end) == 0 and not any(len(o) > len(end) and o[: len(end)] == end for o in self.ends)
            ]
            if not leaves:
                break
            oldest = min(leaves, key=lambda end: self.ends[end])
            pages = self.node_pages(oldest)
            for n in range(len(oldest) - len(pages) + 1, len(oldest) + 1):
                del self.pages[oldest[:n]]
            del self.ends[oldest]
            gone += pages
        return gone
