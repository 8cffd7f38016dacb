"""The walk for requests that ignore EOS without a prefix tree. Owns: the exact-length memory test of the reference.

Rule book section 4, "radix off and ignore_eos": output lengths are known, so the adder walks all requests by tokens
left and asks whether memory suffices until each of them ends and gives back what it holds.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from engine.request import Request

#: Tokens kept aside per request in the walk.
RESERVE_TOKENS: Final = 1


class _Entry(NamedTuple):
    left_tokens: float
    held_tokens: int


class EosWalk:
    """The list of (tokens left, tokens held) of one pass. Pure: belongs to the pass, and is dropped with it."""

    def __init__(self, ratio: float) -> None:
        self._ratio = ratio
        self._entries: list[_Entry] | None = None

    def shortfall(
        self, request: Request, others: Iterable[Request], *, room_tokens: int, paged_need: int
    ) -> tuple[float, float] | None:
        """(need, have) of the first place where memory runs out if `request` is admitted; None when it never does.

        others       the running requests and the batch so far, read only the first time
        room_tokens  remaining_current before this request
        paged_need   its extend, rounded up to pages
        """
        entry = self._entry(request)
        if self._entries is None:
            self._entries = [found for r in others if (found := self._entry(r)) is not None]
            if entry is not None:
                self._entries.insert(0, entry)
            self._entries.sort(key=lambda item: item.left_tokens)
        elif entry is not None:
            self._insert(entry)
        freed = 0
        for index, item in enumerate(self._entries):
            rows = len(self._entries) - index
            free = room_tokens - paged_need + freed - item.left_tokens * rows
            if free <= RESERVE_TOKENS * rows:
                return item.left_tokens * rows + RESERVE_TOKENS * rows, room_tokens - paged_need + freed
            freed += item.held_tokens
        return None

    def _entry(self, request: Request) -> _Entry | None:
        ratio = 1.0 if request.ignore_eos else self._ratio
        left = request.max_new_tokens * ratio - request.output_len
        return _Entry(left, request.seq_len) if left > 0 else None

    def _insert(self, entry: _Entry) -> None:
        """Before the first entry with at least as much left; when there is none, before the *last* one (a quirk)."""
        entries = self._entries
        assert entries is not None
        place = next((i for i, item in enumerate(entries) if item.left_tokens >= entry.left_tokens), None)
        if place is None:
            place = max(0, len(entries) - 1)
        entries.insert(place, entry)
