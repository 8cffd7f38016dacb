"""Answers about timelines. Owns: how one request's timeline becomes an answer's. The caller holds the lock."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from telemetry.blockers import ORDER
from telemetry.observe import BLOCKERS, TTFT_PARTS, ChunkRow, EndedBy, Timeline, WaitSpan
from telemetry.pass_ends import EndShare
from telemetry.request_timeline import RequestTimeline

if TYPE_CHECKING:
    from telemetry.read_model import ReadModel

#: Gaps that a timeline carries, and from which a list row's median is taken.
KEPT_GAPS: Final = 1024


def timeline(model: ReadModel, request: RequestTimeline) -> Timeline:
    chunk_fields = ChunkRow.model_fields
    return Timeline(
        accepted_ns=request.accepted_ns,
        enqueued_ns=request.enqueued_ns,
        admitted_ns=request.admitted_ns,
        first_token_ns=request.first_token_ns,
        first_byte_ns=request.first_byte_ns,
        last_token_ns=request.token_ns[-1] if len(request.token_ns) else None,
        last_byte_ns=request.last_byte_ns,
        finished_ns=request.finished_ns,
        ttft_ns=request.ttft_ns,
        parts_ns=dict(zip(TTFT_PARTS, request.parts, strict=True)),
        blockers_ns={name: ns for name, ns in zip(BLOCKERS, request.blockers, strict=True) if ns},
        order_ns=dict(request.order_ns),
        refused_between_ns=request.refused_between_ns,
        waits=tuple(wait_spans(model, request)),
        chunks=tuple(ChunkRow(**{name: getattr(chunk, name) for name in chunk_fields}) for chunk in request.chunks),
        gaps_ns=tuple(request.gaps_ns()[-KEPT_GAPS:]),
    )


def wait_spans(model: ReadModel, request: RequestTimeline) -> list[WaitSpan]:
    """Stretches of waiting, oldest first; the last may still be open."""
    spans = [
        WaitSpan(
            start_ns=held.start_ns,
            end_ns=held.end_ns,
            blocker=BLOCKERS[held.blocker],
            reason=held.reason,
            who_stopped=held.who,
            passes=held.passes,
            ended_by=_ended_by(held.ends),
        )
        for held in request.held
    ]
    if request.blocker is not None:
        spans.append(_open_span(model, request, request.blocker))
    return spans


def _open_span(model: ReadModel, request: RequestTimeline, blocker: int) -> WaitSpan:
    """The stretch that is not over: up to now, as the request's age is, else one answer would have two waits."""
    watch, reason, who = model.tracker.queue, request.reason, None
    ends: tuple[EndShare, ...] = ()
    last = model.clock.now_ns()
    if blocker == ORDER and watch.last_pass is not None:
        reason, who = watch.last_pass.stopped_by, watch.last_pass.rid
        ends = watch.ends.since(request.ends_before or {}, max(last - request.blocker_since_ns, 0))
    return WaitSpan(
        start_ns=request.blocker_since_ns,
        end_ns=max(last, request.blocker_since_ns),
        blocker=BLOCKERS[blocker],
        reason=reason,
        who_stopped=who,
        passes=watch.passes - request.blocker_passes,
        ended_by=_ended_by(ends),
    )


def held_so_far(model: ReadModel, request: RequestTimeline, now_ns: int) -> tuple[dict[str, int], dict[str, int]]:
    """(wait by blocker, the part under `order` by what ended the passes) up to `now_ns`, each longest first, in ns.

    The stretch that is not over counts; of a request that was not pushed back the first add up to its age.
    """
    spent = [before + late for before, late in zip(request.blockers, request.late_blockers, strict=True)]
    by_end: dict[str, int] = {reason.value: ns for reason, ns in request.order_ns.items()}
    if request.blocker is not None:
        open_ns = max(now_ns - request.blocker_since_ns, 0)
        spent[request.blocker] += open_ns
        if request.blocker == ORDER:
            for share in model.tracker.queue.ends.since(request.ends_before or {}, open_ns):
                by_end[share.reason.value] = by_end.get(share.reason.value, 0) + share.ns
    return _ranked(zip(BLOCKERS, spent, strict=True)), _ranked(by_end.items())


def _ranked(spent: Iterable[tuple[str, int]]) -> dict[str, int]:
    return dict(sorted(((name, ns) for name, ns in spent if ns > 0), key=lambda item: -item[1]))


def _ended_by(shares: tuple[EndShare, ...]) -> tuple[EndedBy, ...]:
    return tuple(EndedBy(reason=one.reason, ns=one.ns, passes=one.passes, steps=one.steps) for one in shares)
