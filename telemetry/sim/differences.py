"""Differences. Owns: where two runs decide otherwise, step by step, and about whom first."""

from __future__ import annotations

from typing import Final

from engine.scheduler.decision import AdmissionDecision
from engine.scheduler.plan import StepPlan
from telemetry.sim.whatif_result import Choice, DecisionDifference

MOST: Final = 12
_NOTHING: Final = Choice(reason=None, prefix_len=None, selected_extend=None, need=None, have=None)


class Differences:
    """Compares the plans of two runs with the same step number, until MOST steps differ."""

    def __init__(self) -> None:
        self.found: list[DecisionDifference] = []

    @property
    def is_full(self) -> bool:
        return len(self.found) >= MOST

    def compare(self, before: StepPlan | None, after: StepPlan | None) -> None:
        """One step of each; None where a run is over."""
        if self.is_full or (before is None and after is None):
            return
        difference = difference_of(before, after)
        if difference is not None:
            self.found.append(difference)


def difference_of(before: StepPlan | None, after: StepPlan | None) -> DecisionDifference | None:
    """The first difference between two plans; None when they do the same."""
    one, other = _decisions(before), _decisions(after)
    place = _first([_key(each) for each in one], [_key(each) for each in other])
    if place is not None:
        left = one[place] if place < len(one) else None
        right = other[place] if place < len(other) else None
        rid = left.rid if left is not None else right.rid if right is not None else ""
        # Looked at in the other run too, but at another place.
        return _told(before, after, rid, "decision", _of(one, rid), _of(other, rid))
    victims = [[victim.rid for victim in plan.retractions] if plan else [] for plan in (before, after)]
    decodes = [list(plan.decodes) if plan else [] for plan in (before, after)]
    for what, (left_rids, right_rids) in (("retraction", victims), ("decode", decodes)):
        place = _first(left_rids, right_rids)
        if place is not None:
            rid = left_rids[place] if place < len(left_rids) else right_rids[place]
            return _told(before, after, rid, what, None, None)
    if (before.kind if before else None) != (after.kind if after else None):
        return _told(before, after, "", "kind", None, None)
    return None


def _told(
    before: StepPlan | None,
    after: StepPlan | None,
    rid: str,
    what: str,
    left: AdmissionDecision | None,
    right: AdmissionDecision | None,
) -> DecisionDifference:
    some = before or after
    assert some is not None, "one of the runs made a step"
    return DecisionDifference.model_validate(
        {
            "step": some.step,
            "time_before": (before or some).now_ns / 1e9,
            "time_after": (after or some).now_ns / 1e9,
            "rid": rid,
            "what": what,
            "before": _choice(left),
            "after": _choice(right),
            "kind_before": str(before.kind) if before else "",
            "kind_after": str(after.kind) if after else "",
        }
    )


def _decisions(plan: StepPlan | None) -> tuple[AdmissionDecision, ...]:
    return plan.decisions if plan is not None else ()


def _key(decision: AdmissionDecision) -> tuple[str, str, int, int]:
    return decision.rid, decision.reason, decision.prefix_len, decision.selected_extend


def _of(decisions: tuple[AdmissionDecision, ...], rid: str) -> AdmissionDecision | None:
    return next((each for each in decisions if each.rid == rid), None)


def _first(
    one: list[str] | list[tuple[str, str, int, int]], other: list[str] | list[tuple[str, str, int, int]]
) -> int | None:
    """The first place at which two lists differ."""
    for place, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return place
    return None if len(one) == len(other) else min(len(one), len(other))


def _choice(decision: AdmissionDecision | None) -> Choice:
    if decision is None:
        return _NOTHING
    return Choice(
        reason=str(decision.reason),
        prefix_len=decision.prefix_len,
        selected_extend=decision.selected_extend,
        need=decision.need,
        have=decision.have,
    )
