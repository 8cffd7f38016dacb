"""Rows. Owns: which rows of which tables an event makes, in the columns of `telemetry.export.parquet_schema`.

A step's row is made when its completion is known, a request's life when it and its response have ended, a stretch of
waiting at most 64 steps after it ended: a timeline keeps the last 256 of a request, and a step closes at most two.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from itertools import chain
from typing import Any, Final

from msgspec.structs import replace

from engine.events import (
    AbortRequested,
    AdmissionDecided,
    AnyEvent,
    EngineStarted,
    LockChanged,
    PagesMoved,
    RequestArrived,
    RequestTransitioned,
    ResponseSent,
    StepCompleted,
    StepPlanned,
)
from engine.request import Cause
from telemetry.export.parquet_schema import TABLES, Table
from telemetry.observe import BLOCKERS
from telemetry.request_timeline import Held, RequestTimeline
from telemetry.schema_journal import EventsMissingRecord, RefusalsFoldedRecord
from telemetry.timeline import TimelineTracker

Row = tuple[Any, ...]
#: What a table's row is handed to: (table, row).
Put = Callable[[str, Row], None]

_TABLE_OF: Final[dict[type[Any], str]] = {
    EngineStarted: "engines",
    RequestArrived: "requests",
    AbortRequested: "aborts",
    RequestTransitioned: "transitions",
    AdmissionDecided: "admissions",
    PagesMoved: "page_moves",
    LockChanged: "locks",
    ResponseSent: "responses",
    RefusalsFoldedRecord: "refusals_folded",
    EventsMissingRecord: "holes",
}
_DRAIN_STEPS: Final = 64
#: Plans whose completion may still come. One step is in flight; more are left only by lost events.
_PLANS_KEPT: Final = 16
_ENDED_KEPT: Final = 4_096


def _readers(table: Table) -> tuple[Callable[[Any], Any], ...]:
    return tuple(column.read for column in table.columns if column.read is not None)


_READERS: Final = {kind: _readers(TABLES[name]) for kind, name in _TABLE_OF.items()}
_DONE_AT: Final = next(at for at, each in enumerate(TABLES["steps"].columns) if each.name == "done_seq") - 2
_PLAN_READERS: Final = _readers(TABLES["steps"])[:_DONE_AT]
_DONE_READERS: Final = _readers(TABLES["steps"])[_DONE_AT:]
_NOT_DONE: Final = (None,) * len(_DONE_READERS)
_NO_TOKEN: Final[Row] = (None, None, None, None)


class RowMaker:
    """Makes the rows of one engine's events and hands them to `put`.

    expects_responses  a server reports the end of each response; lives are written then
    """

    def __init__(self, started: EngineStarted, put: Put, *, expects_responses: bool) -> None:
        self._put = put
        self._engine_id = started.engine_id
        self._wall_minus_mono = started.wall_ns - started.t_ns
        self._expects_responses = expects_responses
        self._timeline = TimelineTracker(self, expects_responses=expects_responses, keep_detail=True)
        self._plans: OrderedDict[int, StepPlanned] = OrderedDict()
        self._ended: OrderedDict[str, RequestTimeline] = OrderedDict()
        self._drained_step = 0
        self._now_ns = started.t_ns

    def wall_ns(self, t_ns: int) -> int:
        """Unix time of an instant of the engine's clock, nanoseconds."""
        return t_ns + self._wall_minus_mono

    def _head(self, t_ns: int) -> Row:
        return (self._engine_id, (t_ns + self._wall_minus_mono) // 1_000)

    def take(self, event: AnyEvent | RefusalsFoldedRecord | EventsMissingRecord) -> None:
        """All rows that `event` makes."""
        if isinstance(event, RefusalsFoldedRecord | EventsMissingRecord):
            self._fact(event, self._now_ns)
            return
        self._now_ns = max(self._now_ns, event.t_ns)
        if isinstance(event, StepPlanned):
            self._planned(event)
        elif isinstance(event, StepCompleted):
            self._completed(event)
        elif isinstance(event, PagesMoved) and event.owners:
            for owner, pages in event.parts():
                self._fact(replace(event, pages=pages, owner=owner, owners=b""), event.t_ns)
        else:
            self._fact(event, event.t_ns)
        if isinstance(event, RequestArrived) and (before := self._ended.pop(event.rid, None)) is not None:
            self._life(before)  # an id used again before its response was reported
        self._timeline.apply(event)
        if isinstance(event, ResponseSent) and (done := self._ended.pop(event.rid, None)) is not None:
            self._life(done)

    def _fact(self, event: Any, t_ns: int) -> None:
        kind = type(event)
        self._put(_TABLE_OF[kind], (*self._head(t_ns), *[read(event) for read in _READERS[kind]]))

    def _planned(self, plan: StepPlanned) -> None:
        self._plans[plan.step] = plan
        if len(self._plans) > _PLANS_KEPT:
            self._step(self._plans.popitem(last=False)[1], None)
        head = (*self._head(plan.t_ns), plan.step, plan.t_ns)
        for victim in plan.retractions:
            row = (victim.rid, victim.cause, victim.output_len, victim.lost_tokens, victim.aborted)
            self._put("retractions", (*head, *row))
        for rid in plan.preempted:
            self._put("retractions", (*head, rid, Cause.PREEMPT.value, None, None, False))
        if plan.step - self._drained_step >= _DRAIN_STEPS:
            self._drained_step = plan.step
            for request in self._timeline.live.values():
                self._drain(request)

    def _completed(self, event: StepCompleted) -> None:
        plan = self._plans.pop(event.step, None)
        if plan is not None:
            self._step(plan, event)

    def _step(self, plan: StepPlanned, event: StepCompleted | None) -> None:
        done = _NOT_DONE if event is None else [read(event) for read in _DONE_READERS]
        self._put("steps", (*self._head(plan.t_ns), *[read(plan) for read in _PLAN_READERS], *done))
        head = (*self._head(plan.t_ns), plan.step, plan.t_ns)
        has_token = event is not None and not event.failed
        outcome = {row.rid: row for row in event.rows} if event is not None else {}
        token_ns = None if event is None else event.times.applied_ns or event.t_ns
        sampled = set(plan.sampling)
        pieces = ((row.rid, "prefill", row.prefix_len, row.extend_len, row.is_last) for row in plan.prefills)
        rows = chain(pieces, ((rid, "decode", None, None, None) for rid in plan.decodes))
        put = self._put
        for place, (rid, role, prefix_len, extend_len, is_last) in enumerate(rows):
            token = outcome.get(rid)
            of_token = _NO_TOKEN
            if token is not None:
                of_token = (token.finish, token.detail, token.new_page_key, token.head32_key)
            put(
                "step_rows",
                (
                    *(*head, rid, place, role, rid in sampled),
                    token_ns if has_token and token is not None else None,
                    *(prefix_len, extend_len, is_last),
                    *of_token,
                ),
            )

    # -- what the timeline tells -----------------------------------------------------------------------------------

    def on_admitted(self, request: RequestTimeline) -> None:
        """Nothing to do: its life tells."""

    def on_first_token(self, request: RequestTimeline) -> None:
        """Nothing to do."""

    def on_ttft(self, request: RequestTimeline) -> None:
        """Nothing to do."""

    def on_gaps(self, gap_ns: int, count: int, *, queued: bool = False) -> None:
        """Nothing to do: `step_rows` has each token."""

    def on_finished(self, request: RequestTimeline) -> None:
        """Keep it until its response has ended, or write its life at once."""
        self._drain(request)
        if not self._expects_responses or request.response_done:
            self._life(request)
            return
        self._ended[request.rid] = request
        if len(self._ended) > _ENDED_KEPT:
            self._life(self._ended.popitem(last=False)[1])

    def _drain(self, request: RequestTimeline) -> None:
        for held in request.held:
            self._wait(request.rid, held)
        request.held.clear()

    def _wait(self, rid: str, held: Held) -> None:
        blocker, reason = BLOCKERS[held.blocker], None if held.reason is None else held.reason.value
        row = (rid, held.start_ns, held.end_ns, blocker, reason, held.who, held.passes)
        self._put("waits", (*self._head(held.end_ns), *row))

    def _life(self, request: RequestTimeline) -> None:
        row = (
            request.rid,
            request.accepted_ns,
            request.enqueued_ns,
            request.admitted_ns,
            request.first_token_ns,
            request.finished_ns,
            request.prompt_len,
            request.output_len,
            request.cached_len,
            len(request.chunks),
            request.num_retractions,
            request.finish,
            request.end_cause,
            request.ttft_ns,
            *request.parts,
            *request.blockers,
            *request.late_blockers,
        )
        self._put("lives", (*self._head(self._now_ns), *row))

    def close(self) -> None:
        """Rows of everything that was still open: steps without completion, lives without an end."""
        for plan in self._plans.values():
            self._step(plan, None)
        self._plans.clear()
        for request in [*self._ended.values(), *self._timeline.live.values()]:
            self._end_wait(request)
            self._drain(request)
            self._life(request)
        self._ended.clear()
        self._timeline.live.clear()

    def _end_wait(self, request: RequestTimeline) -> None:
        """Close the stretch that a request is in when the record ends, so that `waits` and `lives` agree."""
        if request.blocker is None or request.finished_ns is not None:
            return
        start, end = request.blocker_since_ns, self._now_ns
        if end > start:
            target = request.blockers if request.first_token_ns is None else request.late_blockers
            target[request.blocker] += end - start
            request.held.append(Held(start, end, request.blocker, request.reason, None, 0))


def check_width(table: str, row: Row) -> None:
    """Raises ValueError when `row` has another number of values than `table` has columns."""
    if len(row) != len(TABLES[table].columns):
        raise ValueError(f"{table}: {len(row)} values for {len(TABLES[table].columns)} columns")
