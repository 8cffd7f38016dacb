"""Tail sampling. Owns: which finished requests are worth a trace, and how many may leave per second.

The decision falls at the end of a request, when everything about it is known; until then nothing is built, so what is
not kept has cost nothing but its timeline.
"""

from __future__ import annotations

from typing import Final

from engine.request import FinishReason
from telemetry.request_timeline import RequestTimeline
from telemetry.spans.draft import derived_id
from telemetry.spans.stays import TraceFacts

MANY_CHUNKS: Final = 8
_RATIO_STEPS: Final = 1 << 32
#: Ends that are always worth a trace. None: it was open when the engine was shut down.
_ENDS: Final[dict[FinishReason | None, str]] = {
    None: "shutdown",
    FinishReason.ERROR: "error",
    FinishReason.ABORT: "abort",
    FinishReason.REFUSED: "refused",
}


#: What `KeepRule.why` may say, in the order in which it asks.
KEPT_BECAUSE: Final[dict[str, str]] = {
    "violation": "A law broke for it.",
    "shutdown": "It was open when the engine was shut down.",
    "error": "It ended with an error.",
    "abort": "It was aborted, or its client went away.",
    "refused": "It was turned away from the queue.",
    "caller": "Its caller's `traceparent` has the sampled flag.",
    "retracted": "It was pushed back to the queue.",
    "ttft": "Its first token came later than `traces.ttft_objective_s`.",
    "gap": "Two of its tokens were further apart than `traces.gap_objective_s`.",
    "chunks": "Its prompt was computed in many chunks.",
    "ratio": "Drawn by its trace id.",
}


class KeepRule:
    """Why the trace of a request is kept.

    sample_ratio  share of ordinary requests that are kept, chosen by trace id: all parts of one trace agree
    ttft_ns       a later first token keeps the trace
    gap_ns        so does a longer gap between two tokens
    """

    def __init__(self, *, sample_ratio: float, ttft_ns: int, gap_ns: int) -> None:
        self._below = int(sample_ratio * _RATIO_STEPS)
        self._ttft_ns = ttft_ns
        self._gap_ns = gap_ns

    def is_drawn(self, trace_id: int) -> bool:
        """Whether the ratio alone keeps it: known from the start."""
        return derived_id("keep", trace_id, size=4) < self._below

    def why(self, request: RequestTimeline, facts: TraceFacts) -> str | None:
        """The first reason that applies; None when the trace is not kept."""
        if facts.violations:
            return "violation"
        if request.finish in _ENDS:
            return _ENDS[request.finish]
        if facts.caller_sampled:
            return "caller"
        if request.num_retractions:
            return "retracted"
        if request.ttft_ns is not None and request.ttft_ns > self._ttft_ns:
            return "ttft"
        if request.worst_gap_ns() > self._gap_ns:
            return "gap"
        if len(request.chunks) > MANY_CHUNKS:
            return "chunks"
        return "ratio" if self.is_drawn(facts.trace_id) else None


class TokenBucket:
    """At most `per_second` on average, with a burst of as many."""

    def __init__(self, per_second: float) -> None:
        self._per_second = per_second
        self._tokens = max(1.0, per_second)
        self._at_ns = 0

    def take(self, now_ns: int) -> bool:
        """One token at `now_ns`, which never falls by much; False when there is none."""
        if self._at_ns:
            earned = max(0, now_ns - self._at_ns) / 1e9 * self._per_second
            self._tokens = min(max(1.0, self._per_second), self._tokens + earned)
        self._at_ns = max(now_ns, self._at_ns)
        if self._tokens < 1.0:
            return False
        self._tokens -= 1.0
        return True
