"""What ended the passes. Owns: how long, and how often, each reason was what kept a pass from those behind it.

A request under the blocker `order` is held by whatever ended the passes ahead of it: that is the limit to lift. The
sums run on for everybody; a stretch remembers where they stood when it began: a pass costs the same however many wait.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from engine.scheduler.decision import Reason
from engine.scheduler.plan import PassEnd

_SKIPPED: Final = "skipped"


class EndShare(NamedTuple):
    """What one reason had of a stretch: its time, passes that it ended, and steps in which no pass was made for it."""

    reason: Reason
    ns: int
    passes: int
    steps: int


#: Where the sums stood: by reason (ns, passes, steps).
Stand = dict[Reason, tuple[int, int, int]]


class PassEnds:
    """Sums by reason since the engine began. The mark "batch full" counts for the refusal that set it.

    Most steps end as the one before did: what the present reason adds is kept apart until another follows, or is asked
    for.
    """

    __slots__ = ("_ns", "_passes", "_steps", "_sums", "full_by", "reason")

    def __init__(self) -> None:
        self.reason: Reason | None = None
        #: What ended the last pass that looked at anybody, and its step: where the batch is marked full, that did it.
        self.full_by: tuple[Reason, int] | None = None
        self._sums: Stand = {}
        #: Of the present reason, and not in its sum yet.
        self._ns = self._passes = self._steps = 0

    def advance(self, ns: int) -> None:
        """The latest end stood for `ns` more."""
        self._ns += ns

    def passed(self, end: PassEnd, step: int) -> None:
        """`step` was planned, with a pass or without one."""
        is_pass, reason = end.stop != _SKIPPED, end.stopped_by
        if reason is Reason.FULL_FLAG_SET:
            reason = self.full_by[0] if self.full_by is not None else reason
        elif is_pass or reason is Reason.ROWS_EXHAUSTED:
            # A step that has no row for anybody makes no pass, and marks the batch full itself.
            self.full_by = reason, step
        if reason is not self.reason:
            self._settle()
            self.reason = reason
        if is_pass:
            self._passes += 1
        else:
            self._steps += 1

    def stand(self) -> Stand:
        """To be given to `since` later."""
        self._settle()
        return dict(self._sums)

    def since(self, stand: Stand, ns: int) -> tuple[EndShare, ...]:
        """Shares since `stand` of a stretch of `ns`, longest first; their times add up to `ns` exactly."""
        self._settle()
        shares = []
        for reason, sums in self._sums.items():
            at = stand.get(reason, (0, 0, 0))
            if sums != at:
                shares.append(EndShare(reason, sums[0] - at[0], sums[1] - at[1], sums[2] - at[2]))
        shares.sort(key=lambda share: -share.ns)
        # The stretch may end beside the events that move the sums: the reason that has most takes the difference.
        if shares:
            shares[0] = shares[0]._replace(ns=shares[0].ns + ns - sum(share.ns for share in shares))
        return tuple(shares)

    def _settle(self) -> None:
        """What the present reason added joins its sum. Time before the first end is nobody's."""
        if self.reason is not None:
            at = self._sums.get(self.reason, (0, 0, 0))
            self._sums[self.reason] = (at[0] + self._ns, at[1] + self._passes, at[2] + self._steps)
        self._ns = self._passes = self._steps = 0
