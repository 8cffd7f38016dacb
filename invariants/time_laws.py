"""Laws of time. Owns: INV-TIME-01 and 02 - the cuts of a step, and one request's life, in exact integer nanoseconds.

The second law is about what a listener says: it hands over plain times and parts (`LifeReading`), which are compared
with each other and with the instants of the events.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple

from engine.events import RequestArrived, StepCompleted
from invariants.queue_books import QueueBooks, Track
from invariants.violation import Report


class LifeReading(NamedTuple):
    """One request as a listener has it. Nanoseconds of the engine's clock; None: not yet, or never.

    ttft_ns     accepted to first token or byte, once it is final
    ttft_parts  what `ttft_ns` is made of
    wait_parts  its time in the queue, cut up by what held it; in any order
    waited_to_ns  of one that waits: up to when `wait_parts` reach
    between_ns  of `wait_parts`, what fell between two pieces of its prompt instead of in the queue
    """

    rid: str
    accepted_ns: int
    enqueued_ns: int
    admitted_ns: int | None
    first_token_ns: int | None
    finished_ns: int | None
    ttft_ns: int | None
    ttft_parts: tuple[int, ...]
    wait_parts: tuple[int, ...]
    waited_to_ns: int | None = None
    between_ns: int = 0


class TimeLaws:
    """The laws, and when the last step was launched and ended. `overlaps`: a step may begin before the last one ended,
    but not before it was launched, and it is ready after that one was applied."""

    def __init__(self, *, overlaps: bool = False) -> None:
        self._overlaps = overlaps
        self._launched_ns = 0
        self._applied_ns = 0

    def on_arrival(self, event: RequestArrived, report: Report) -> None:
        """Nobody is accepted after he came to the queue."""
        if event.accepted_ns > event.t_ns:
            report("INV-TIME-01", f"accepted at {event.t_ns} or before", f"{event.accepted_ns}", rid=event.rid)

    def on_completed(self, event: StepCompleted, report: Report) -> None:
        """The cuts of a step are in order, it ended now, and began when the step before had ended."""
        times = event.times
        before = self._applied_ns
        if self._overlaps:
            before, self._launched_ns = self._launched_ns, times.launched_ns
            self._is_behind(times.ready_ns, report)
        if (
            before
            <= times.started_ns
            <= times.plan_from_ns
            <= times.planned_ns
            <= times.committed_ns
            <= times.launched_ns
            <= times.ready_ns
            <= times.applied_ns
            == event.t_ns
        ):
            self._applied_ns = event.t_ns
            return
        cuts = (
            times.started_ns,
            times.plan_from_ns,
            times.planned_ns,
            times.committed_ns,
            times.launched_ns,
            times.ready_ns,
            times.applied_ns,
        )
        self._applied_ns = times.applied_ns
        what = "was launched" if self._overlaps else "ended"
        report(
            "INV-TIME-01",
            f"cuts that do not fall, from {before}, when the last step {what}, to {event.t_ns}",
            f"{cuts}",
        )

    def _is_behind(self, ready_ns: int, report: Report) -> None:
        if ready_ns < self._applied_ns:
            report("INV-TIME-01", f"ready at {self._applied_ns}, when the last step ended, or later", f"{ready_ns}")


def on_lives(queue: QueueBooks, lives: Iterable[LifeReading], report: Report) -> int:
    """What a listener says about some requests, live or just ended. Returns how many were checked."""
    count = 0
    for life in lives:
        count += 1
        _in_order(life, report)
        _adds_up(life, report)
        track = queue.live.get(life.rid) or queue.ended.get(life.rid)
        if track is not None and track.arrived_ns == life.enqueued_ns:  # else an id used again, or before our time
            _as_told(track, life, report)
    return count


def _in_order(life: LifeReading, report: Report) -> None:
    instants = [
        ("accepted", life.accepted_ns),
        ("enqueued", life.enqueued_ns),
        ("admitted", life.admitted_ns),
        ("first token", life.first_token_ns),
        ("finished", life.finished_ns),
    ]
    known = [(name, at) for name, at in instants if at is not None]
    for (before, left), (after, right) in pairwise(known):
        if right < left:
            report("INV-TIME-02", f"{after} at or after {before}, {left} ns", f"{right} ns", rid=life.rid)


def _adds_up(life: LifeReading, report: Report) -> None:
    parts = (*life.ttft_parts, *life.wait_parts, life.between_ns)
    if min(parts, default=0) < 0:
        report("INV-TIME-02", "no interval below 0", f"{min(parts)} ns", rid=life.rid)
    if life.ttft_ns is not None and sum(life.ttft_parts) != life.ttft_ns:
        report(
            "INV-TIME-02",
            f"parts that add up to {life.ttft_ns} ns to the first token",
            f"{sum(life.ttft_parts)} ns",
            rid=life.rid,
        )


def _as_told(track: Track, life: LifeReading, report: Report) -> None:
    """The instants and the waits of the events. The end may be told as late as the end of its step."""
    for name, due, found in (
        ("admitted", track.admitted_ns, life.admitted_ns),
        ("first token", track.first_token_ns, life.first_token_ns),
    ):
        if due != found:
            report("INV-TIME-02", f"{name} at {due}, from events", f"{found}", rid=life.rid)
    if (track.ended_ns is None) != (life.finished_ns is None):
        report("INV-TIME-02", f"ended at {track.ended_ns}, from events", f"{life.finished_ns}", rid=life.rid)
    due = track.waited_ns + life.between_ns
    if life.waited_to_ns is not None:
        due += life.waited_to_ns - track.entered_ns
    if sum(life.wait_parts) != due:
        report("INV-TIME-02", f"{due} ns in the queue, from events", f"{sum(life.wait_parts)} ns", rid=life.rid)
