"""Answers about lanes. Owns: how one request's timeline becomes spans on a lane. The caller holds the lock."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from engine.request import RequestState
from telemetry.answers_timeline import wait_spans
from telemetry.observe import Head, Lane, LanesAnswer, LaneSpan, Stall
from telemetry.request_timeline import RequestTimeline

if TYPE_CHECKING:
    from telemetry.read_model import ReadModel

#: Spans, and late tokens, of one lane: a picture has no room for more.
MAX_SPANS: Final = 64
MAX_STALLS: Final = 64
#: Late tokens are looked for among so many of the latest.
_SEEN_GAPS: Final = 4096

_Stretch = tuple[int, int]


def lanes(model: ReadModel, head: Head, n: int) -> LanesAnswer:
    """The latest `n` arrivals, in order of arrival."""
    known = {**model.finished, **model.tracker.live}
    latest = sorted(known.values(), key=lambda request: (request.accepted_ns, request.enqueued_ns))[-n:]
    return LanesAnswer(**head.model_dump(), lanes=tuple(lane(model, request) for request in latest), total=len(known))


def lane(model: ReadModel, request: RequestTimeline) -> Lane:
    """One request as a lane."""
    model.tracker.settle_tokens(request)
    end_ns = _end_ns(model, request)
    spans = sorted(_spans(model, request, end_ns), key=lambda span: span.start_ns)
    left_out = max(len(spans) - MAX_SPANS, 0)
    if left_out:
        longest = sorted(spans, key=lambda span: span.start_ns - span.end_ns)[:MAX_SPANS]
        spans = sorted(longest, key=lambda span: span.start_ns)
    return Lane(
        rid=request.rid,
        state=request.state,
        accepted_ns=request.accepted_ns,
        end_ns=end_ns,
        accepted_wall_s=model.wall_s(request.accepted_ns),
        prompt_len=request.prompt_len,
        cached_tokens=request.cached_len,
        outputs=len(request.token_ns),
        finish=request.finish,
        first_token_ns=request.first_token_ns,
        retracted_ns=tuple(request.retracted_ns),
        spans=tuple(spans),
        spans_left_out=left_out,
        stalls=stalls(model, request),
    )


def stalls(model: ReadModel, request: RequestTimeline) -> tuple[Stall, ...]:
    """Late tokens of a request whose times are settled, the latest MAX_STALLS."""
    late_ns, found = model.book.objectives.gap_ns, []
    for start, end in itertools.pairwise(request.token_ns[-_SEEN_GAPS:]):
        if end - start > late_ns:
            cause = model.book.cause(start, end)
            if cause is not None:
                found.append(Stall(start_ns=start, end_ns=end, cause=cause))
    return tuple(found[-MAX_STALLS:])


def _end_ns(model: ReadModel, request: RequestTimeline) -> int:
    if request.finished_ns is not None:
        # The token that ended it is applied after the state changed.
        return max(request.finished_ns, request.token_ns[-1] if len(request.token_ns) else 0)
    return max(model.last.t_ns if model.last is not None else 0, request.cursor_ns)


def _spans(model: ReadModel, request: RequestTimeline, end_ns: int) -> Iterable[LaneSpan]:
    if request.enqueued_ns > request.accepted_ns:
        yield LaneSpan(kind="intake", start_ns=request.accepted_ns, end_ns=request.enqueued_ns)
    busy: list[_Stretch] = []
    for wait in wait_spans(model, request):
        if wait.end_ns > wait.start_ns:
            busy.append((wait.start_ns, wait.end_ns))
            yield LaneSpan(
                kind="waiting",
                start_ns=wait.start_ns,
                end_ns=wait.end_ns,
                blocker=wait.blocker,
                reason=wait.reason,
                who=wait.who_stopped,
                passes=wait.passes,
            )
    chunks = []
    for chunk in request.chunks:
        stop = chunk.applied_ns or chunk.ready_ns or end_ns
        chunks.append((chunk.admitted_ns, max(stop, chunk.admitted_ns)))
        # Where steps overlap, a piece is planned while the one before it is computed: its span begins after that.
        for start, end in _without((chunk.admitted_ns, stop), [*busy, *chunks[:-1]]):
            yield LaneSpan(
                kind="chunk",
                start_ns=start,
                end_ns=end,
                step=chunk.step,
                tokens=chunk.extend_len,
                decode_rows=chunk.decode_rows,
            )
    busy += chunks
    first = request.first_token_ns
    until = end_ns if first is None else first
    for before, after in itertools.pairwise([*chunks, (until, until)]):
        if request.state is RequestState.FINISHED and first is None and after == (until, until):
            continue
        for start, end in _without((before[1], min(after[0], until)), busy):
            yield LaneSpan(kind="between", start_ns=start, end_ns=end)
    if first is not None:
        for start, end in _without((first, end_ns), busy):
            yield LaneSpan(kind="decode", start_ns=start, end_ns=end)


def _without(stretch: _Stretch, busy: Iterable[_Stretch]) -> Iterable[_Stretch]:
    """What is left of `stretch` when all of `busy` is cut out of it, in order."""
    at, end = stretch
    for start, stop in sorted(busy):
        if stop <= at or start >= end:
            continue
        if start > at:
            yield at, start
        at = max(at, stop)
    if at < end:
        yield at, end
