"""The made-up engine about latency and lanes. The real book makes the aggregates; only its input is made up."""

from __future__ import annotations

from typing import TYPE_CHECKING

from telemetry import latency_book as book
from telemetry import observe as o

if TYPE_CHECKING:
    from fake_engine import FakeEngine
    from toy_scheduler import Req

GAP_OBJECTIVE_S = 0.06
TTFT_OBJECTIVE_S = 1.0


def _known(engine: FakeEngine) -> list[Req]:
    return sorted((*engine.finished, *engine.running, *engine.waiting), key=lambda req: req.came)


def _first(engine: FakeEngine, req: Req) -> book.First:
    spent = engine.parts(req)[1]
    parts = tuple(spent.get(name, 0) for name in o.TTFT_PARTS)
    blockers = tuple(spent["queue"] if name == _blocker(req) else 0 for name in o.BLOCKERS)
    return book.First(engine._ns(req.first), req.rid, req.prompt, req.prefix, sum(parts), parts, blockers, 0)


def _blocker(req: Req) -> str:
    """One that stays the same for a request, whatever it ended with."""
    return o.BLOCKERS[sum(map(ord, req.rid)) % 4]


def breakdown(engine: FakeEngine) -> o.LatencyBreakdown:
    told = book.LatencyBook(book.Objectives(round(TTFT_OBJECTIVE_S * 1e9), round(GAP_OBJECTIVE_S * 1e9)))
    seen = [req for req in _known(engine) if req.first][-250:]
    firsts = sorted((_first(engine, req) for req in seen), key=lambda first: first.at_ns)
    slots: dict[int, list[book.First]] = {}
    for first in firsts:
        slots.setdefault(first.at_ns // book.SLOT_NS, []).append(first)
    for req in sorted(seen, key=lambda req: req.came):
        for gap in req.gaps:
            told.gaps(engine._ns(req.first), round(gap * 1e9), 1, queued=False)
    now = engine._ns(engine.now)
    late = sum(slot.late.get("kernel", 0) for slot in told.slots(now, float))
    return o.LatencyBreakdown(
        **engine.head(),
        slot_s=book.SLOT_NS / 1e9,
        window_s=book.WINDOW_NS / 1e9,
        slots=tuple(_slot(engine, at, group) for at, group in sorted(slots.items())),
        ttft_objective_s=TTFT_OBJECTIVE_S,
        gap_objective_s=GAP_OBJECTIVE_S,
        gap_bounds_s=tuple(bound / 1e9 for bound in book.GAP_BOUNDS_NS),
        gap_counts=tuple(told.histogram(now)),
        gaps=sum(told.histogram(now)),
        late={"long_prefill": late - late // 3, "kernel": late // 3} if late > 2 else {},
        firsts=tuple(book.first_token(first, engine.start + first.at_ns / 1e9) for first in book.sample(firsts)),
        firsts_total=len(firsts),
        deciles=tuple(book.deciles(firsts, round(TTFT_OBJECTIVE_S * 1e9))),
        tails=tuple(book.tails(firsts)),
    )


def _slot(engine: FakeEngine, at: int, firsts: list[book.First]) -> o.PartsSlot:
    tail = book.tails(firsts)[0]
    return o.PartsSlot(
        t_wall_s=engine.start + (at + 1) * book.SLOT_NS / 1e9,
        count=tail.count,
        ttft_ns=tail.ttft_ns,
        parts_ns=tail.parts_ns,
        blockers_ns=tail.blockers_ns,
    )


def lane(engine: FakeEngine, req: Req) -> o.Lane:
    came, now = engine._ns(req.came), engine._ns(req.ended or engine.now)
    admitted = engine._ns(req.admitted) if req.admitted else now
    spans = [o.LaneSpan(kind="waiting", start_ns=came, end_ns=admitted, blocker=_blocker(req), reason=req.reason)]
    at = admitted
    for chunk in req.chunks:
        if chunk.admitted_ns > at:
            spans.append(o.LaneSpan(kind="between", start_ns=at, end_ns=chunk.admitted_ns))
        at = chunk.applied_ns
        spans.append(
            o.LaneSpan(kind="chunk", start_ns=chunk.admitted_ns, end_ns=at, step=chunk.step, tokens=chunk.extend_len)
        )
    stalls = []
    if req.first:
        spans.append(o.LaneSpan(kind="decode", start_ns=at, end_ns=max(now, at + 1)))
        token = engine._ns(req.first)
        for gap in req.gaps:
            if gap > GAP_OBJECTIVE_S:
                stalls.append(o.Stall(start_ns=token, end_ns=token + round(gap * 1e9), cause="long_prefill"))
            token += round(gap * 1e9)
    return o.Lane(
        rid=req.rid,
        state=req.state,
        accepted_ns=came,
        end_ns=max(now, at),
        accepted_wall_s=req.came,
        prompt_len=req.prompt,
        cached_tokens=req.prefix if req.admitted else None,
        outputs=req.outputs,
        finish=req.finish,
        first_token_ns=engine._ns(req.first) if req.first else None,
        spans=tuple(span for span in spans if span.end_ns > span.start_ns),
        stalls=tuple(stalls[-64:]),
    )


def lanes(engine: FakeEngine, n: int) -> o.LanesAnswer:
    known = _known(engine)
    return o.LanesAnswer(**engine.head(), lanes=tuple(lane(engine, req) for req in known[-n:]), total=len(known))
