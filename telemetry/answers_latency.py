"""Answers about latency. Owns: how the latency book becomes `/observe/breakdown`. The caller holds the lock."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from telemetry import latency_book as book
from telemetry.observe import Head, LatencyBreakdown

if TYPE_CHECKING:
    from telemetry.read_model import ReadModel


def breakdown(model: ReadModel, head: Head) -> LatencyBreakdown:
    """Where the time of the window went."""
    now_ns, kept = model.clock.now_ns(), model.book
    slots = kept.slots(now_ns, model.wall_s)
    firsts = kept.firsts(now_ns)
    late: Counter[str] = Counter()
    for slot in slots:
        late.update(slot.late)
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
        tails=tuple(book.tails(firsts)),
    )
