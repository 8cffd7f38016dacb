"""Phases. Owns: in which order an event reaches a timeline and who follows it.

What a listener needs of an event lies on both sides of what its timeline makes of it: a trace learns of a stay in the
queue before the timeline may end the request, a plan is shown as the timeline left the queue. So a listener names what
comes before and what comes after, and whoever feeds it, alone or with others of the same timeline, goes by that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from telemetry.timeline import HANDLERS, TimelineTracker

Handler = Callable[[Any], None]


class Phases(NamedTuple):
    """What one listener does with an event of a type, before and after its timeline has taken it."""

    before: Mapping[type, Handler]
    after: Mapping[type, Handler]


def handlers_of(tracker: TimelineTracker, phases: Phases) -> dict[type, tuple[Handler, ...]]:
    """What takes an event of a type, in order, where `tracker` serves one listener."""
    return {kind: tuple(call for _, call in calls) for kind, calls in calls_of(tracker, (phases,)).items()}


def calls_of(tracker: TimelineTracker, several: Sequence[Phases]) -> dict[type, tuple[tuple[int, Handler], ...]]:
    """The same for several listeners: each call with the place of whose it is, -1 for the timeline itself."""
    plan: dict[type, list[tuple[int, Handler]]] = {}
    for place, phases in enumerate(several):
        for kind, handle in phases.before.items():
            plan.setdefault(kind, []).append((place, handle))
    for kind, apply in HANDLERS.items():
        plan.setdefault(kind, []).append((-1, partial(apply, tracker)))
    for place, phases in enumerate(several):
        for kind, handle in phases.after.items():
            plan.setdefault(kind, []).append((place, handle))
    return {kind: tuple(calls) for kind, calls in plan.items()}
