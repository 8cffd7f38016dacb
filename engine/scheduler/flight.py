"""Flight. Owns: one step between its commit and its outcome."""

from __future__ import annotations

from engine.scheduler.delays import StepShape
from engine.scheduler.plan import StepPlan


class Flight:
    """A committed plan whose outcome is awaited.

    void   members that ended since, by the outcome of the step before: their rows are computed for nobody. Remembered
           here and not with the request, since its id may be used again while the step is in flight
    shape  what it computes, where step times are learned from
    """

    __slots__ = ("plan", "shape", "void")

    def __init__(self, plan: StepPlan) -> None:
        self.plan = plan
        self.void: set[str] = set()
        self.shape: StepShape | None = None

    def wanted(self, rids: tuple[str, ...]) -> tuple[str, ...]:
        """`rids` without those whose rows are void."""
        return tuple([rid for rid in rids if rid not in self.void]) if self.void else rids
