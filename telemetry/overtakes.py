"""Overtakes. Owns: how often a waiting request was passed over, told on demand from the entries of those admitted.

Two counts, of which nothing is kept per waiting request:

* passes: those that computed prompt of a request that entered later. That is `times_passed_over` of a decision, and
  what `max_overtakes` bounds; one long prompt of a later comer counts in each of its pieces.
* requests: later comers that were admitted meanwhile.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right, insort
from typing import Final, NamedTuple

#: Entries kept before those that can matter to nobody are dropped.
_PRUNE_AT: Final = 4096


class Overtaken(NamedTuple):
    """Passes that went past a request, and later comers that they admitted."""

    passes: int = 0
    requests: int = 0

    def plus(self, other: Overtaken) -> Overtaken:
        if other is NOT_OVERTAKEN:
            return self
        return Overtaken(self.passes + other.passes, self.requests + other.requests)


#: What most requests have when they are admitted.
NOT_OVERTAKEN: Final = Overtaken()


class OvertakeBook:
    """Per pass the latest entry that it computed, and every entry that was admitted; both sorted."""

    def __init__(self) -> None:
        self._passes: array[int] = array("q")
        self._requests: array[int] = array("q")
        self._prune_at = _PRUNE_AT

    def passed(self, latest: int, admitted: list[int], oldest_waiting: int) -> None:
        """A pass computed requests, `latest` the last to enter among them, and took `admitted` out of the queue."""
        insort(self._passes, latest)
        for entry in admitted:
            insort(self._requests, entry)
        if len(self._requests) + len(self._passes) > self._prune_at:
            for kept in (self._passes, self._requests):
                del kept[: bisect_right(kept, oldest_waiting)]
            # Somebody who waits for long keeps what came after: then the next look is worth it at twice the length.
            self._prune_at = max(_PRUNE_AT, 2 * (len(self._requests) + len(self._passes)))

    def since(self, entry: int) -> Overtaken:
        """What overtook the waiting request with this entry, in its present stay."""
        passes, requests = self._passes, self._requests
        # Both rise, and mostly nobody came after: then the last ones say so.
        if (not passes or passes[-1] <= entry) and (not requests or requests[-1] <= entry):
            return NOT_OVERTAKEN
        return Overtaken(len(passes) - bisect_right(passes, entry), len(requests) - bisect_right(requests, entry))
