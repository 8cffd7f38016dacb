"""Books of the queue. Owns: who waits since when, whom a pass went past, who was pushed back; from events alone.

Kept beside `Shadow` because nothing here is looked at while requests only decode: it changes when one arrives, is
admitted, is pushed back or ends, and costs nothing for each one that waits.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from typing import Final

from engine.events import RequestArrived, RequestTransitioned
from engine.request import Cause
from invariants.members import ADMIT, FINISHED

#: Entries of admitting passes that are kept before those older than every waiting request are dropped.
PRUNE_AT: Final = 8_192
#: Ended requests that are remembered, to compare what listeners say about them.
REMEMBERED: Final = 1_024
PUSHED_BACK: Final = frozenset({Cause.RETRACT, Cause.PREEMPT})


class Track:
    """One request's way through the queue. Times in nanoseconds, lengths in tokens.

    entry      place in the order of entry to the queue; a request that is pushed back enters anew
    waited_ns  closed stays in the queue, summed
    ways_back  times it was pushed back
    overtaken  times it was passed over in earlier stays
    cached, computed   of its prompt (and kept outputs): found at the last admission, and planned since then
    """

    __slots__ = (
        "admitted_ns",
        "arrived_ns",
        "cached",
        "computed",
        "ended_ns",
        "entered_ns",
        "entry",
        "first_token_ns",
        "overtaken",
        "prompt_len",
        "rid",
        "waited_ns",
        "ways_back",
    )

    def __init__(self, rid: str, prompt_len: int, entry: int, t_ns: int) -> None:
        self.rid = rid
        self.prompt_len = prompt_len
        self.entry = entry
        self.arrived_ns = self.entered_ns = t_ns
        self.admitted_ns: int | None = None
        self.first_token_ns: int | None = None
        self.ended_ns: int | None = None
        self.waited_ns = 0
        self.ways_back = 0
        self.overtaken = 0
        self.cached = 0
        self.computed = 0


class QueueBooks:
    """The queue of one engine life.

    live       every unfinished request
    waiting    those in the queue, in order of entry
    ended      the last REMEMBERED that ended, oldest first
    victims    pushed back since the last plan, in order
    ends       requests that ended since the last plan
    changes    arrivals and transitions so far
    returned   of those that wait, how many were pushed back
    """

    def __init__(self) -> None:
        self.live: dict[str, Track] = {}
        self.waiting: dict[str, Track] = {}
        self.ended: dict[str, Track] = {}
        self.victims: list[tuple[str, Cause]] = []
        self.ends = self.returned = self.changes = 0
        self._entries = 0
        #: For each pass that admitted somebody, the latest entry among them; sorted.
        self._passes: list[int] = []

    def arrive(self, event: RequestArrived) -> None:
        """A new request at the queue's tail."""
        self.changes += 1
        self._entries += 1
        track = Track(event.rid, event.prompt_len, self._entries, event.t_ns)
        self.live[event.rid] = self.waiting[event.rid] = track

    def transition(self, event: RequestTransitioned) -> Track | None:
        """Follow one transition; the request's track, None when it has none."""
        self.changes += 1
        track = self.live.get(event.rid)
        if track is None:
            return None
        if event.cause is ADMIT:
            self.admit(track, event)
        elif event.cause in PUSHED_BACK:
            self._entries += 1
            track.entry, track.entered_ns = self._entries, event.t_ns
            track.ways_back += 1
            self.returned += 1
            self.waiting[event.rid] = track
            self.victims.append((event.rid, event.cause))
        elif event.target is FINISHED:
            self._leave(track, event.t_ns)
            self.end(track, event)
        return track

    def admit(self, track: Track, event: RequestTransitioned) -> None:
        """Out of the queue, admitted."""
        self._leave(track, event.t_ns)
        track.cached, track.computed = event.cached_len, 0
        if track.admitted_ns is None:
            track.admitted_ns = event.t_ns

    def end(self, track: Track, event: RequestTransitioned) -> None:
        """The end of one that is not in the queue."""
        track.ended_ns = event.t_ns
        del self.live[track.rid]
        self.ends += 1
        self.ended[track.rid] = track
        if len(self.ended) > REMEMBERED:
            del self.ended[next(iter(self.ended))]

    def _leave(self, track: Track, t_ns: int) -> None:
        if self.waiting.pop(track.rid, None) is not None:
            track.waited_ns += t_ns - track.entered_ns
            # The pass that takes it is not known yet, and does not pass it over.
            track.overtaken = self.overtakes(track)
            self.returned -= track.ways_back > 0

    def admitted(self, latest_entry: int) -> None:
        """A pass admitted requests, `latest_entry` being the latest of their entries."""
        insort(self._passes, latest_entry)
        if len(self._passes) > PRUNE_AT:
            oldest = next(iter(self.waiting.values())).entry if self.waiting else latest_entry
            del self._passes[: bisect_right(self._passes, oldest)]

    def overtakes(self, track: Track) -> int:
        """Passes that admitted someone who entered after it, in this stay and earlier ones. Right for who waits."""
        return track.overtaken + self.overtakes_in_stay(track)

    def overtakes_in_stay(self, track: Track) -> int:
        """The same since its last entry: never less than for a later entry."""
        return len(self._passes) - bisect_right(self._passes, track.entry)
