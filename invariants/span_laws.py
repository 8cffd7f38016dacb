"""Laws of spans. Owns: INV-SPAN-01 and 02 - every request has one span tree, closed once, and its times fit each other.

Whoever builds spans does so on a thread of its own and may lag behind, so a reading says up to which event it goes, and
the book is brought to just that event: it keeps what came since as marks, and follows them when somebody asks.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from engine.events import RequestArrived, RequestTransitioned, ResponseSent
from invariants.queue_books import QueueBooks
from invariants.violation import Report

#: Marks that wait for a reading; as many events as a listener's queue holds.
MARKS: Final = 65_536
#: Ended requests whose response was never reported, of which the book remembers the latest.
AWAITED: Final = 8_192
_SHOWN: Final = 8
_BEGAN, _ENDED, _RESPONDED = range(3)


class SpanTimes(NamedTuple):
    """One span. Nanoseconds of the engine's clock."""

    name: str
    span_id: int
    parent_id: int | None
    start_ns: int
    end_ns: int


class TreeReading(NamedTuple):
    """The spans of one closed request, root first. `enqueued_ns` says which life of its id it was."""

    rid: str
    enqueued_ns: int
    spans: tuple[SpanTimes, ...]


class SpanReading(NamedTuple):
    """What whoever builds spans has once it took event `seq`, and what it did since its last reading.

    drafts     open, of requests that have not ended
    awaiting   open, of requests that ended and whose response is on its way
    closed     requests whose spans were closed, in order; None: too many to be kept
    decisions  all closed so far, by what became of them: kept, refused by the rate, or not chosen
    total      all closed so far
    trees      some of those that were kept
    """

    seq: int
    drafts: frozenset[str]
    awaiting: frozenset[str]
    closed: tuple[str, ...] | None
    decisions: Mapping[str, int]
    total: int
    trees: tuple[TreeReading, ...] = ()


class SpanBook:
    """Who lives, and who ended and has not been answered, as of one event; and the marks since."""

    def __init__(self) -> None:
        self._marks: deque[tuple[int, int, str]] = deque()
        self._live: set[str] = set()
        self._answered: set[str] = set()
        self._awaited: dict[str, None] = {}
        #: Ends since the last reading; None: too many, or nobody ever asked.
        self._ends: list[str] | None = []
        self._seq = -1
        self._awaiting: frozenset[str] = frozenset()
        self._total = 0
        #: Drafts that were wrong at the last reading, which are told once.
        self._odd: frozenset[str] = frozenset()

    # -- events ----------------------------------------------------------------------------------------------------

    def on_arrival(self, event: RequestArrived) -> None:
        """A new request."""
        self._mark((event.seq, _BEGAN, event.rid))

    def on_end(self, event: RequestTransitioned) -> None:
        """A request ended."""
        self._mark((event.seq, _ENDED, event.rid))

    def on_response(self, event: ResponseSent) -> None:
        """A response ended, before or after its request."""
        self._mark((event.seq, _RESPONDED, event.rid))

    def _mark(self, mark: tuple[int, int, str]) -> None:
        marks = self._marks
        marks.append(mark)
        if len(marks) > MARKS:
            self._follow(marks.popleft())
            self._ends = None

    def _follow(self, mark: tuple[int, int, str]) -> None:
        self._seq, what, rid = mark
        if what == _BEGAN:
            self._live.add(rid)
            self._awaited.pop(rid, None)
            self._answered.discard(rid)
        elif what == _ENDED:
            self._live.discard(rid)
            if self._ends is not None:
                self._ends.append(rid)
            if rid in self._answered:
                self._answered.remove(rid)
                return
            self._awaited[rid] = None
            if len(self._awaited) > AWAITED:
                del self._awaited[next(iter(self._awaited))]
        elif rid in self._live:
            self._answered.add(rid)
        else:
            self._awaited.pop(rid, None)

    # -- readings --------------------------------------------------------------------------------------------------

    def on_reading(self, queue: QueueBooks, reading: SpanReading, report: Report) -> bool:
        """Compare a reading with the book as of its event. False when it is older than the book can tell."""
        marks = self._marks
        if reading.seq < self._seq:
            self._ends = None  # what it tells of ends is gone
            return False
        while marks and marks[0][0] <= reading.seq:
            self._follow(marks.popleft())
        self._drafts(reading, report)
        self._closings(reading, report)
        for tree in reading.trees:
            _tree(queue, tree, report)
        self._ends, self._awaiting, self._total = [], reading.awaiting, reading.total
        return True

    def _drafts(self, reading: SpanReading, report: Report) -> None:
        """Open drafts are those of live requests and of those whose response is on its way."""
        left = (reading.drafts - self._live) | (reading.awaiting - self._awaited.keys())
        missing = self._live - reading.drafts
        for rids, due, found in (
            (left, "no open span of a request whose end was told", "still open"),
            (missing, "an open span of each live request", "none"),
        ):
            if not rids <= self._odd:
                new = sorted(rids - self._odd)
                report("INV-SPAN-01", due, f"{found}: {new[:_SHOWN]} at event {reading.seq}", rid=new[0])
        self._odd = frozenset(left | missing)

    def _closings(self, reading: SpanReading, report: Report) -> None:
        """Each end is closed once, or waits for its response; each closing has its decision."""
        decided = sum(reading.decisions.values())
        if decided != reading.total:
            report("INV-SPAN-01", f"a decision for each of {reading.total} closed traces", f"{decided}")
        if reading.closed is None or self._ends is None:
            return
        if reading.total - self._total != len(reading.closed):
            report("INV-SPAN-01", f"{len(reading.closed)} more closed than {self._total}", f"{reading.total} in all")
        due = Counter(self._ends) + Counter(self._awaiting)
        found = Counter(reading.closed) + Counter(reading.awaiting)
        if due == found:
            return
        for rids, words in ((found - due, "closed more often than it ended"), (due - found, "ended, never closed")):
            if rids:
                odd = sorted(rids)
                report("INV-SPAN-01", "one closed trace for each end", f"{words}: {odd[:_SHOWN]}", rid=odd[0])


def _tree(queue: QueueBooks, tree: TreeReading, report: Report) -> None:
    """No span ends before it starts, children lie within their parents, and the root covers the request's life."""
    spans = {span.span_id: span for span in tree.spans}
    if len(spans) < len(tree.spans):
        report("INV-SPAN-02", f"{len(tree.spans)} spans with ids of their own", f"{len(spans)} ids", rid=tree.rid)
    root = tree.spans[0]
    for span in _wrong_way(tree.spans):
        report(
            "INV-SPAN-02",
            f"{span.name} ending at {span.start_ns} ns or later, where it starts",
            f"{span.end_ns} ns",
            rid=tree.rid,
        )
    for span in tree.spans[1:]:
        parent = None if span.parent_id is None else spans.get(span.parent_id)
        if parent is None:
            report("INV-SPAN-02", f"a parent of {span.name} in its tree", f"{span.parent_id}", rid=tree.rid)
        elif span.start_ns < parent.start_ns or span.end_ns > parent.end_ns:
            report(
                "INV-SPAN-02",
                f"{span.name} within {parent.name}, {parent.start_ns} to {parent.end_ns} ns",
                f"{span.start_ns} to {span.end_ns} ns",
                rid=tree.rid,
            )
    track = queue.live.get(tree.rid) or queue.ended.get(tree.rid)
    if track is None or track.arrived_ns != tree.enqueued_ns:  # an id used again, or too long ago
        return
    ended_ns = track.arrived_ns if track.ended_ns is None else track.ended_ns
    if root.start_ns > track.arrived_ns or root.end_ns < ended_ns:
        report(
            "INV-SPAN-02",
            f"a root from {track.arrived_ns} ns or before to {ended_ns} ns or after, from events",
            f"{root.start_ns} to {root.end_ns} ns",
            rid=tree.rid,
        )


def _wrong_way(spans: Iterable[SpanTimes]) -> list[SpanTimes]:
    return [span for span in spans if span.end_ns < span.start_ns]
