"""The span sink's own account. Owns: what was closed and what became of it, as the reading that the checker compares.

The sink works on a thread of its own and nobody else looks into it: a reading is asked for, and made between events.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from typing import Final

from invariants.span_laws import SpanReading, SpanTimes, TreeReading
from telemetry.spans.draft import SpanDraft

#: Closed requests, and kept trees, that one reading can name.
CLOSED_KEPT: Final = 8_192
TREES_KEPT: Final = 64
KEPT, REFUSED, NOT_CHOSEN = "kept", "refused", "not_chosen"


class SpanLedger:
    """Of one engine life.

    wanted  a reading was asked for; set from any thread
    """

    def __init__(self) -> None:
        self.wanted = False
        #: Number of the event that comes next when none is missing. -1: the first may have any.
        self.next_seq = -1
        #: Whether every event came: where one is missing, so may the end of any request.
        self._is_whole = True
        self._closed: list[str] = []
        self._total = 0
        self._decisions = {KEPT: 0, REFUSED: 0, NOT_CHOSEN: 0}
        self._trees: deque[tuple[str, int, list[SpanDraft]]] = deque(maxlen=TREES_KEPT)

    def hear(self, seq: int) -> None:
        """Event `seq` was taken. Whoever sees that it is `next_seq` may as well raise that by one."""
        if self.next_seq not in {-1, seq}:
            self._is_whole = False
        self.next_seq = seq + 1

    def miss(self) -> None:
        """An event did not come through whole."""
        self._is_whole = False

    def close(self, rid: str) -> None:
        """The trace of a request is closed; what becomes of it is told next."""
        self._total += 1
        if len(self._closed) <= CLOSED_KEPT:
            self._closed.append(rid)

    def decide(self, decision: str) -> None:
        """What became of a closed trace."""
        self._decisions[decision] += 1

    def keep(self, rid: str, enqueued_ns: int, spans: list[SpanDraft]) -> None:
        """The tree of a closed trace that leaves."""
        self._trees.append((rid, enqueued_ns, spans))
        self.decide(KEPT)

    def reading(self, open_rids: Collection[str], awaiting: Collection[str]) -> SpanReading | None:
        """Everything since the last one. None when events were lost on the way here, or failed: nothing compares.

        open_rids  requests with a draft
        awaiting   those of them that ended
        """
        self.wanted = False
        closed, self._closed = self._closed, []
        trees = tuple(
            TreeReading(
                rid,
                enqueued_ns,
                tuple(
                    [
                        SpanTimes(draft.name, draft.span_id, draft.parent_id, draft.start_ns, draft.end_ns)
                        for draft in spans
                    ]
                ),
            )
            for rid, enqueued_ns, spans in self._trees
        )
        self._trees.clear()
        if self.next_seq == -1 or not self._is_whole:
            return None
        ended = frozenset(awaiting)
        return SpanReading(
            seq=self.next_seq - 1,
            drafts=frozenset(open_rids) - ended,
            awaiting=ended,
            closed=None if len(closed) > CLOSED_KEPT else tuple(closed),
            decisions=dict(self._decisions),
            total=self._total,
            trees=trees,
        )
