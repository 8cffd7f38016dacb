"""The latency book. Owns: where the time of first tokens and of gaps went in the last ten minutes, in bounded memory.

A histogram and sums per slot, and one short entry for each of the latest first tokens: readers get aggregates and a
sample, however many requests there were.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

from engine.events import StepCompleted, StepPlanned
from telemetry.observe_base import BLOCKERS, TTFT_PARTS
from telemetry.observe_latency import FirstToken, ObjectiveShare, PartsSlot, RecentFirsts, TailShare
from telemetry.request_timeline import EMIT, QUEUE, RequestTimeline
from telemetry.stalls import STALL_CAUSES, StepLog

SLOT_NS: Final = 5_000_000_000
SLOTS: Final = 120
WINDOW_NS: Final = SLOT_NS * SLOTS
#: First tokens that are ranked, and sent at most.
KEPT_FIRSTS: Final = 4096
SENT_FIRSTS: Final = 1000
#: Late gaps that requests can be told the cause of.
KEPT_LATE: Final = 8192
_STEPS: Final = (1, 1.5, 2, 3, 5, 7)
#: Upper bounds of gaps in nanoseconds: six to each power of ten, from 0.1 ms to 100 s.
GAP_BOUNDS_NS: Final = (*(round(step * 10**power) for power in range(5, 11) for step in _STEPS), 10**11)
TAILS: Final = (0.0, 0.9, 0.99)
DECILES: Final = 10


class Objectives(NamedTuple):
    """What counts as late, in nanoseconds: a first token, and a token after the one before it."""

    ttft_ns: int = 1_000_000_000
    gap_ns: int = 250_000_000


class First(NamedTuple):
    """One first token. parts, blockers, order_ns: as in `RequestTimeline`."""

    at_ns: int
    rid: str
    prompt_len: int
    cached_len: int
    ttft_ns: int
    parts: tuple[int, ...]
    blockers: tuple[int, ...]
    refused_between_ns: int
    order_ns: tuple[tuple[str, int], ...] = ()


class _Slot:
    __slots__ = ("at", "blockers", "buckets", "count", "gaps", "late", "order_ns", "parts", "refused_ns", "ttft_ns")

    def __init__(self, at: int) -> None:
        self.at = at
        self.count = 0
        self.ttft_ns = 0
        self.parts = [0] * len(TTFT_PARTS)
        self.blockers = [0] * len(BLOCKERS)
        self.order_ns: Counter[str] = Counter()
        self.refused_ns = 0
        self.gaps = 0
        self.buckets: Counter[int] = Counter()
        self.late: Counter[str] = Counter()

    def answer(self, wall_s: float) -> PartsSlot:
        return PartsSlot(
            t_wall_s=wall_s,
            count=self.count,
            ttft_ns=self.ttft_ns,
            parts_ns=_named(TTFT_PARTS, self.parts),
            blockers_ns=_named(BLOCKERS, self.blockers),
            order_ns=dict(self.order_ns),
            refused_between_ns=self.refused_ns,
            gaps=self.gaps,
            late=dict(self.late),
        )


class LatencyBook:
    """Fed by the read model, in order of time."""

    def __init__(self, objectives: Objectives) -> None:
        self.objectives = objectives
        self._slots: deque[_Slot] = deque(maxlen=SLOTS)
        self._firsts: OrderedDict[int, First] = OrderedDict()
        #: Of those whose first byte is still to come: number in `_firsts` and slot, by rid.
        self._unsent: dict[str, tuple[int, _Slot]] = {}
        self._told = 0
        self._late: OrderedDict[tuple[int, int], str] = OrderedDict()
        self._steps = StepLog()

    def started(self, chunk_size: int | None) -> None:
        """An engine began; `chunk_size` is its chunked_prefill_size."""
        self._steps = StepLog(chunk_size)

    def stepped(self, plan: StepPlanned, event: StepCompleted) -> None:
        """A step was applied; told before its tokens are."""
        self._steps.add(plan, event)

    def first_token(self, request: RequestTimeline) -> None:
        """`request` has its first token: it counts from now on, whether its response streams or ends much later."""
        at_ns = request.first_token_ns
        assert at_ns is not None, "announced without a time"
        first = First(
            at_ns,
            request.rid,
            request.prompt_len,
            request.cached_len or 0,
            at_ns - request.accepted_ns,
            tuple(request.parts),
            tuple(request.blockers),
            request.refused_between_ns,
            tuple(request.order_ns.items()),
        )
        slot = self._slot(at_ns)
        self._unsent[first.rid] = (self.keep(first), slot)
        slot.count += 1
        slot.ttft_ns += first.ttft_ns
        slot.refused_ns += first.refused_between_ns
        if first.order_ns:
            slot.order_ns.update(dict(first.order_ns))
        for into, times in ((slot.parts, first.parts), (slot.blockers, first.blockers)):
            for at, spent in enumerate(times):
                if spent:
                    into[at] += spent

    def keep(self, first: First) -> int:
        """Rank `first` with the latest KEPT_FIRSTS; returns its number."""
        self._told += 1
        self._firsts[self._told] = first
        if len(self._firsts) > KEPT_FIRSTS:
            number, oldest = self._firsts.popitem(last=False)
            if self._unsent.get(oldest.rid, (0, None))[0] == number:
                del self._unsent[oldest.rid]
        return self._told

    def sent(self, request: RequestTimeline) -> None:
        """TTFT of `request` is final: `emit`, which ends at the first byte, joins the parts told before."""
        number, slot = self._unsent.pop(request.rid, (0, None))
        emit_ns = request.parts[EMIT]
        if slot is None or not emit_ns:
            return
        first = self._firsts[number]
        self._firsts[number] = first._replace(ttft_ns=first.ttft_ns + emit_ns, parts=tuple(request.parts))
        slot.ttft_ns += emit_ns
        slot.parts[EMIT] += emit_ns

    def gaps(self, end_ns: int, gap_ns: int, count: int, *, queued: bool) -> None:
        """`count` requests waited `gap_ns` for the token that was applied at `end_ns`."""
        slot = self._slot(end_ns)
        slot.gaps += count
        slot.buckets[bisect_left(GAP_BOUNDS_NS, gap_ns)] += count
        if gap_ns <= self.objectives.gap_ns:
            return
        cause = STALL_CAUSES[self._steps.cause(end_ns - gap_ns, end_ns, queued=queued)]
        slot.late[cause] += count
        self._late[end_ns - gap_ns, end_ns] = cause
        if len(self._late) > KEPT_LATE:
            self._late.popitem(last=False)

    def cause(self, start_ns: int, end_ns: int) -> str | None:
        """Why the token at `end_ns` came late; None when it did not, or was too long ago."""
        return self._late.get((start_ns, end_ns))

    # -- reading -----------------------------------------------------------------------------------------------------

    def slots(self, now_ns: int, wall_s: Callable[[int], float]) -> list[PartsSlot]:
        """Slots of the window before `now_ns` in which something happened, oldest first."""
        return [slot.answer(wall_s((slot.at + 1) * SLOT_NS)) for slot in self._recent(now_ns)]

    def histogram(self, now_ns: int) -> list[int]:
        """Gaps of the window by bucket of GAP_BOUNDS_NS; the last is above all of them."""
        counts = [0] * (len(GAP_BOUNDS_NS) + 1)
        for slot in self._recent(now_ns):
            for bucket, count in slot.buckets.items():
                counts[bucket] += count
        return counts

    def firsts(self, now_ns: int) -> list[First]:
        """The latest first tokens of the window, oldest first."""
        return [first for first in self._firsts.values() if first.at_ns > now_ns - WINDOW_NS]

    def _recent(self, now_ns: int) -> Iterable[_Slot]:
        since = now_ns // SLOT_NS - SLOTS
        return (slot for slot in self._slots if slot.at > since)

    def _slot(self, t_ns: int) -> _Slot:
        at = t_ns // SLOT_NS
        if not self._slots or at > self._slots[-1].at:
            self._slots.append(_Slot(at))
        return self._slots[-1]


def sample(firsts: Sequence[First], most: int = SENT_FIRSTS) -> list[First]:
    """At most `most` of `firsts` in order of time, evenly thinned; the slowest hundredth stays whole."""
    if len(firsts) <= most:
        return list(firsts)
    ranked = sorted(range(len(firsts)), key=lambda at: firsts[at].ttft_ns)
    kept = set(ranked[_rank(0.99, len(ranked)) :])
    room = most - len(kept)
    others = [at for at in range(len(firsts)) if at not in kept]
    kept.update(others[place * len(others) // room] for place in range(room))
    return [firsts[at] for at in sorted(kept)]


def first_token(first: First, wall_s: float) -> FirstToken:
    """One first token as an answer."""
    part = max(range(len(first.parts)), key=first.parts.__getitem__)
    held = max(range(len(first.blockers)), key=first.blockers.__getitem__) if part == QUEUE else None
    return FirstToken(
        rid=first.rid,
        t_wall_s=wall_s,
        prompt_len=first.prompt_len,
        cached_tokens=first.cached_len,
        ttft_s=first.ttft_ns / 1e9,
        part=TTFT_PARTS[part],
        blocker=None if held is None else BLOCKERS[held],
    )


def deciles(firsts: Sequence[First], objective_ns: int) -> list[ObjectiveShare]:
    """Shares within the objective by prompt length: at most ten groups of about equal size, equal lengths together."""
    ranked = sorted(firsts, key=lambda first: first.prompt_len)
    groups: list[list[First]] = []
    tenth = -1
    for at, first in enumerate(ranked):
        its = at * DECILES // len(ranked)
        if its > tenth and not (groups and groups[-1][-1].prompt_len == first.prompt_len):
            groups.append([])
            tenth = its
        groups[-1].append(first)
    return [
        ObjectiveShare(
            prompt_from=group[0].prompt_len,
            prompt_to=group[-1].prompt_len,
            count=len(group),
            within=sum(first.ttft_ns <= objective_ns for first in group),
        )
        for group in groups
    ]


def tails(firsts: Sequence[First]) -> list[TailShare]:
    """The parts of all, and of those at or above each quantile."""
    ranked = sorted(firsts, key=lambda first: first.ttft_ns)
    return [_tail(q, ranked[_rank(q, len(ranked)) :]) for q in TAILS] if ranked else []


def recent(firsts: Sequence[First], since_ns: int) -> RecentFirsts:
    """Those after `since_ns` alone; `window_s` and who still waits are the caller's to say."""
    ranked = sorted((first for first in firsts if first.at_ns > since_ns), key=lambda first: first.ttft_ns)
    if not ranked:
        return RecentFirsts(window_s=0.0)
    whole = sum(first.ttft_ns for first in ranked)
    return RecentFirsts(
        window_s=0.0,
        count=len(ranked),
        p50_s=ranked[_rank(0.5, len(ranked))].ttft_ns / 1e9,
        p99_s=ranked[_rank(0.99, len(ranked))].ttft_ns / 1e9,
        queue_share=sum(first.parts[QUEUE] for first in ranked) / whole if whole else None,
    )


def _rank(q: float, count: int) -> int:
    """Place of the quantile `q` among `count` ranked values: the smallest that a share of `q` does not exceed."""
    return max(math.ceil(q * count) - 1, 0)


def _tail(q: float, slowest: Sequence[First]) -> TailShare:
    order_ns: Counter[str] = Counter()
    for first in slowest:
        order_ns.update(dict(first.order_ns))
    return TailShare(
        q=q,
        ttft_s=slowest[0].ttft_ns / 1e9,
        count=len(slowest),
        ttft_ns=sum(first.ttft_ns for first in slowest),
        parts_ns=_named(TTFT_PARTS, [sum(spent) for spent in zip(*(f.parts for f in slowest), strict=True)]),
        blockers_ns=_named(BLOCKERS, [sum(spent) for spent in zip(*(f.blockers for f in slowest), strict=True)]),
        order_ns=dict(order_ns.most_common()),
        refused_between_ns=sum(first.refused_between_ns for first in slowest),
    )


def _named(names: Sequence[str], values: Sequence[int]) -> dict[str, int]:
    return {name: value for name, value in zip(names, values, strict=True) if value}
