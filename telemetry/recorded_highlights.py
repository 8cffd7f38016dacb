"""Highlights of a recording. Owns: the moment at which most requests wait, and the request whose first token took
longest, found while it is read: at its end, where it opens, nobody waits any more.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.events import AnyEvent, RequestArrived, RequestTransitioned, StepCompleted
from engine.request import RequestState


@dataclass(frozen=True, slots=True)
class Fullest:
    """The first step after which most requests wait."""

    step: int
    waiting: int


@dataclass(frozen=True, slots=True)
class Slowest:
    """The request with the longest time from acceptance to its first token, and the step that made that token."""

    step: int
    rid: str
    ttft_s: float


class HighlightWatch:
    """Hears every event of a record in order. What it found so far may be read from another thread."""

    def __init__(self) -> None:
        self.fullest: Fullest | None = None
        self.slowest: Slowest | None = None
        #: Requests without a token, and when each was accepted.
        self._accepted_ns: dict[str, int] = {}

    def hear(self, event: AnyEvent) -> None:
        """Take one event."""
        if isinstance(event, RequestArrived):
            self._accepted_ns[event.rid] = min(event.accepted_ns or event.t_ns, event.t_ns)
        elif isinstance(event, RequestTransitioned) and event.target is RequestState.FINISHED:
            self._accepted_ns.pop(event.rid, None)
        elif isinstance(event, StepCompleted):
            self._completed(event)

    def _completed(self, event: StepCompleted) -> None:
        if event.num_waiting > (self.fullest.waiting if self.fullest is not None else 0):
            self.fullest = Fullest(event.step, event.num_waiting)
        if not self._accepted_ns:
            return
        for row in event.rows:
            accepted_ns = self._accepted_ns.pop(row.rid, None)
            if accepted_ns is None:
                continue
            ttft_s = (event.t_ns - accepted_ns) / 1e9
            if self.slowest is None or ttft_s > self.slowest.ttft_s:
                self.slowest = Slowest(event.step, row.rid, ttft_s)
