"""Retraction. Owns: the pure choice of victims when the running requests cannot all grow by one token.

Rule book section 6: fewest outputs first, then longest prompt, then latest in the batch; at least one; until the rest
fit or one remains. After each victim unlocked entries are evicted until 20 tokens per remaining request are free.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from engine.kvcache.kv_cache import KvCache
from engine.request import Request
from engine.scheduler.plan import Retraction

#: Decode steps of room the reference wants per remaining request after a retraction.
RETRACT_DECODE_STEPS: Final = 20


class DecodeFit(NamedTuple):
    """Pages the next decode step of some requests needs, and pages that are free or can be made free."""

    needed_pages: int
    room_pages: int

    @property
    def fits(self) -> bool:
        return self.needed_pages <= self.room_pages


def needed_pages(running: Sequence[Request], page_size: int) -> int:
    """One page for each row whose KV length is a whole number of pages."""
    return sum(1 for request in running if request.computed_len % page_size == 0)


class RetractionPlan(NamedTuple):
    """Victims in order, who stays (in the ranked order, which the running list then keeps), and the new ratio."""

    victims: tuple[Retraction, ...]
    staying: tuple[Request, ...]
    ratio: float


def plan_retraction(
    running: Sequence[Request], kv: KvCache, *, guarded: bool, continuation_waits: bool
) -> RetractionPlan:
    """Choose victims. Call it only when the decode step does not fit.

    If even the last request does not fit the reference ends it. Guarded, it is pushed back instead when a
    half-prefilled prompt holds the memory it lacks.
    """
    ranked = sorted(
        range(len(running)), key=lambda index: (running[index].output_len, -running[index].prompt_len), reverse=True
    )
    room = kv.free_pages + kv.evictable_pages
    unlocked: dict[int, int] = {}
    victims: list[Retraction] = []

    def push_back(index: int, *, aborted: bool = False) -> int:
        request = running[index]
        assert request.lease is not None, f"running request {request.rid} has no lease"
        victims.append(Retraction(request.rid, "kv_now", request.output_len, request.computed_len, aborted=aborted))
        return kv.release_gain(request.lease, unlocked)

    while len(ranked) > 1:
        room += push_back(ranked.pop())
        if needed_pages([running[index] for index in ranked], kv.page_size) <= room:
            break
    if needed_pages([running[index] for index in ranked], kv.page_size) > room:
        push_back(ranked.pop(), aborted=not (guarded and continuation_waits))
    staying = tuple(running[index] for index in ranked)
    outputs = sum(request.output_len for request in staying)
    limits = sum(request.max_new_tokens for request in staying)
    ratio = min(1.0, (outputs + RETRACT_DECODE_STEPS * len(staying)) / (limits + 1))
    return RetractionPlan(tuple(victims), staying, ratio)
