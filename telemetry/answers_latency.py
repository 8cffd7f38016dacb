"""Answers about latency. Owns: how the latency book becomes `/observe/breakdown`. The caller holds the lock."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from typing import TYPE_CHECKING, Final, TypeVar

from telemetry import latency_book as book
from telemetry.observe import Head, LatencyBreakdown, RecentFirsts, TailShare

if TYPE_CHECKING:
    from telemetry.read_model import ReadModel


#: What counts as just now, in nanoseconds.
RECENT_NS: Final = 60_000_000_000

_T = TypeVar("_T", TailShare, RecentFirsts)


def breakdown(model: ReadModel, head: Head) -> LatencyBreakdown:
    """Where the time of the window went."""
    now_ns, kept = model.clock.now_ns(), model.book
    slots = kept.slots(now_ns, model.wall_s)
    firsts = kept.firsts(now_ns)
    late: Counter[str] = Counter()
    for slot in slots:
        late.update(slot.late)
    waits = _waits_ns(model, now_ns)
    recent = book.recent(firsts, now_ns - RECENT_NS).model_copy(update={"window_s": RECENT_NS / 1e9})
    return LatencyBreakdown(
        **head.model_dump(),
        slot_s=book.SLOT_NS / 1e9,
        window_s=book.WINDOW_NS / 1e9,
        slots=tuple(slots),
        ttft_objective_s=kept.objectives.ttft_ns / 1e9,
        gap_objective_s=kept.objectives.gap_ns / 1e9,
        gap_bounds_s=tuple(bound / 1e9 for bound in book.GAP_BOUNDS_NS),
        gap_counts=tuple(kept.histogram(now_ns)),
        gaps=sum(slot.gaps for slot in slots),
        late=dict(late),
        firsts=tuple(book.first_token(first, model.wall_s(first.at_ns)) for first in book.sample(firsts)),
        firsts_total=len(firsts),
        deciles=tuple(book.deciles(firsts, kept.objectives.ttft_ns)),
        tails=tuple(_with_waiting(tail, tail.ttft_s, waits) for tail in book.tails(firsts)),
        recent=_with_waiting(recent, recent.p99_s, waits),
    )


def _waits_ns(model: ReadModel, now_ns: int) -> list[int]:
    """How long each live request without a first token has waited for it, shortest first; all of them."""
    live = model.tracker.live.values()
    return sorted(now_ns - request.accepted_ns for request in live if request.first_token_ns is None)


def _with_waiting(told: _T, seconds: float | None, waits: list[int]) -> _T:
    """`told` with the number of those that have waited longer than `seconds`."""
    longer = 0 if seconds is None else len(waits) - bisect_right(waits, round(seconds * 1e9))
    return told.model_copy(update={"waiting_longer": longer})
