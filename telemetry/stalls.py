"""Late tokens. Owns: which steps lay between two tokens of a request, and so why the second was late.

Every nanosecond of a gap is charged to one cause; the largest share names it. A gap is the same for all requests that
decoded in the same two steps, so it is judged once per step, not once per request.

    queue_position   the request was pushed back and waited in the queue
    mixed_sat_out    steps ran in which the running requests did not decode: prefill alone, or rows that sat out
    long_prefill     its own step also computed pieces of prompts: at least half a chunk
    chunk_overhead   the same, with less than half: the step was long though its piece was small
    kernel           decode alone
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from itertools import islice
from typing import Final, NamedTuple

from engine.events import StepCompleted, StepPlanned
from engine.scheduler.plan import StepKind

QUEUE_POSITION, CHUNK_OVERHEAD, LONG_PREFILL, MIXED_SAT_OUT, KERNEL = range(5)
STALL_CAUSES: Final = ("queue_position", "chunk_overhead", "long_prefill", "mixed_sat_out", "kernel")
#: Steps kept; a longer gap is judged by the latest of its steps.
KEPT_STEPS: Final = 512


class _Step(NamedTuple):
    applied_ns: int
    cause: int


class StepLog:
    """The last steps of one engine, each with the cause that its time stands for.

    chunk_size  chunked_prefill_size; None when chunking is off
    """

    def __init__(self, chunk_size: int | None = None) -> None:
        self._chunk_size = chunk_size
        self._steps: deque[_Step] = deque(maxlen=KEPT_STEPS)

    def add(self, plan: StepPlanned, event: StepCompleted) -> None:
        """One step was applied."""
        self._steps.append(
            _Step(event.times.applied_ns or event.t_ns, step_cause(plan, plan.chunk_size or self._chunk_size))
        )

    def cause(self, start_ns: int, end_ns: int, *, queued: bool) -> int:
        """Why the token at `end_ns` came so long after the one at `start_ns`: an index into STALL_CAUSES.

        queued  the request was in the waiting queue in between
        """
        if queued:
            return QUEUE_POSITION
        ends = [step.applied_ns for step in self._steps]
        shares = [0] * len(STALL_CAUSES)
        before = start_ns
        for step in islice(self._steps, bisect_right(ends, start_ns), None):
            shares[step.cause] += min(step.applied_ns, end_ns) - before
            before = min(step.applied_ns, end_ns)
            if step.applied_ns >= end_ns:
                break
        return max(range(len(shares)), key=shares.__getitem__) if any(shares) else KERNEL


def step_cause(plan: StepPlanned, chunk_size: int | None) -> int:
    """What the time of a step means to a request that waits for its next token."""
    if plan.kind is StepKind.EXTEND:
        return MIXED_SAT_OUT
    if plan.kind is not StepKind.MIXED:
        return KERNEL
    tokens = sum(row.extend_len for row in plan.prefills)
    return LONG_PREFILL if chunk_size is None or 2 * tokens >= chunk_size else CHUNK_OVERHEAD
