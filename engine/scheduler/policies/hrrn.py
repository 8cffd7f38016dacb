"""Highest response ratio next. Owns: waited / uncached, where waiting is counted in tokens the engine processed.

Rule book section 5. The counter moves every step, so keys cannot be kept: the queue is sorted per pass.
"""

from __future__ import annotations

from engine.config import Policy
from engine.request import Request
from engine.scheduler.policies.ordering import Ordering, OrderInputs, match_queue, ordered


def response_ratio(request: Request, processed_tokens: int) -> float:
    """Tokens processed since entry, per uncached prompt token; infinite when nothing is left to compute."""
    waited = max(0, processed_tokens - request.processed_at_entry)
    uncached = max(0, request.prompt_len - request.matched_len)
    return waited / uncached if uncached else float("inf")


def order(inputs: OrderInputs) -> Ordering:
    """Sort in place by (put back, ratio falling, rid as a string); among the put back the ratio does not count."""
    put_back = match_queue(inputs).put_back
    inputs.waiting.sort(
        key=lambda request: (
            request.rid in put_back,
            0.0 if request.rid in put_back else -response_ratio(request, inputs.processed_tokens),
            request.rid,
        )
    )
    return ordered(inputs, Policy.HRRN, put_back)
