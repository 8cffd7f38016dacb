"""What a span tree needs beside a timeline. Owns: stays in the queue, push-backs and claims of one request."""

from __future__ import annotations

from engine.request import Cause


class Stay:
    """One stay in the waiting queue. `leave_ns` is None while it lasts; an end in the queue is a leave too.

    cause        how it came there: arrive, retract or preempt
    tokens_lost  computed tokens that were given up for it; None when the records do not tell (a preemption)
    """

    __slots__ = ("cause", "enter_ns", "leave_ns", "tokens_lost")

    def __init__(self, enter_ns: int, cause: Cause) -> None:
        self.enter_ns = enter_ns
        self.leave_ns: int | None = None
        self.cause = cause
        self.tokens_lost: int | None = None


class TraceFacts:
    """Of one request, from its arrival on.

    parent_span_id   of the caller, None without one
    caller_sampled   the caller's `traceparent` asked for this trace to be kept
    claimed          pages claimed by step
    violations       (time, law, expected, found) of laws that broke for it
    """

    __slots__ = ("caller_sampled", "claimed", "parent_span_id", "stays", "trace_id", "violations")

    def __init__(self, trace_id: int, parent_span_id: int | None, *, caller_sampled: bool) -> None:
        self.trace_id = trace_id
        self.parent_span_id = parent_span_id
        self.caller_sampled = caller_sampled
        self.stays: list[Stay] = []
        self.claimed: dict[int, int] = {}
        self.violations: list[tuple[int, str, str, str]] = []

    def enter(self, t_ns: int, cause: Cause) -> None:
        """It came (back) to the queue."""
        self.stays.append(Stay(t_ns, cause))

    def leave(self, t_ns: int) -> None:
        """It left the queue, admitted or ended."""
        if self.stays and self.stays[-1].leave_ns is None:
            self.stays[-1].leave_ns = t_ns
