"""Answers. Owns: how the read model's state becomes the values of `telemetry.observe`. The caller holds the lock."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from engine.scheduler.decision import Reason
from telemetry.answers_lanes import lane
from telemetry.answers_pass import decision, ledgers, limits
from telemetry.answers_timeline import KEPT_GAPS, held_so_far, timeline
from telemetry.blockers import ENGINE_BUSY, OF_REASON, ORDER
from telemetry.latency_ring import SLOT_NS, quantile
from telemetry.live_explain import ids_named, sentences
from telemetry.live_explain_now import SliceGiven
from telemetry.metric_catalog import LiveState
from telemetry.observe import (
    BLOCKERS,
    EngineStatus,
    Explanation,
    Head,
    LatencyAnswer,
    Ledgers,
    PageMap,
    QueueAnswer,
    QueueEntry,
    RequestDetail,
    RequestRow,
    RequestsAnswer,
    Stopper,
)
from telemetry.overtakers import Overtakers
from telemetry.request_timeline import RequestTimeline
from telemetry.words import Lang, speaking

if TYPE_CHECKING:
    from telemetry.read_model import ReadModel

RATE_WINDOW_S: Final = 10
#: Entries of a queue that say what the one ahead of them lacks: more than anybody reads.
WITH_STOPPER: Final = 100


class _Test(NamedTuple):
    """The two sides of a test, in tokens or requests, and the step of it. None: nothing was compared, or looked at."""

    need: float | None
    have: float | None
    step: int | None


def _head(head: Head) -> dict[str, Any]:
    return head.model_dump()


def status(model: ReadModel, head: Head) -> EngineStatus:
    """One look at the engine."""
    started, tracker, now = model.started, model.tracker, model.clock.now_ns()
    assert started is not None, "the head was made"
    queue = tracker.queue
    row = model.steps[-1] if model.steps else None
    plan = row.planned if row is not None else None
    done = next((step.completed for step in reversed(model.steps) if step.completed is not None), None)
    running = tracker.prefilling + tracker.decoding
    beat = model.heartbeat() if model.heartbeat is not None else head.t_ns
    oldest = queue.oldest_ns()
    tokens, prefill = model.ring.rates(now, RATE_WINDOW_S)
    last_pass = next((s.planned for s in reversed(model.steps) if s.planned.budget_close is not None), None)
    remaining = ledgers(last_pass.budget_close) if last_pass is not None else None
    end = last_pass.pass_end if last_pass is not None else None
    rows_left = max(model.config.scheduler.max_running_requests - running, 0)
    violations = {k: v for k, v in model.checker.violations_by_id.items() if v} if model.checker is not None else {}
    return EngineStatus(
        **_head(head),
        last_pass_ended_by=end.stopped_by if end is not None and end.stopped_by is not Reason.QUEUE_END else None,
        version=started.version,
        journal=model.journal,
        model=started.model,
        attention_backend=started.attention_backend,
        policy=model.config.scheduler.schedule_policy,
        uptime_s=(now - started.t_ns) / 1e9,
        heartbeat_age_s=max(now - beat, 0) / 1e9,
        steps_total=model.totals["steps"],
        last_step_kind=done.kind if done is not None else None,
        last_step_s=(done.times.applied_ns - done.times.started_ns) / 1e9 if done is not None else None,
        waiting=len(queue.waiting),
        running=running,
        requests={
            LiveState.WAITING: len(queue.waiting) - queue.retracted,
            LiveState.PREFILL: tracker.prefilling,
            LiveState.DECODE: tracker.decoding,
            LiveState.RETRACTED: queue.retracted,
            LiveState.EMITTING: len(tracker.emitting),
        },
        waiting_by_blocker=dict(zip(BLOCKERS, queue.counts, strict=True)),
        waiting_tokens=_waiting_tokens(model),
        waiting_oldest_s=max(now - oldest, 0) / 1e9 if oldest is not None else 0.0,
        kv_pages=model.pages.counts(),
        page_size=started.page_size,
        limits=limits(model),
        remaining=(remaining or Ledgers()).model_copy(update={"rows": rows_left}),
        new_token_ratio=plan.new_token_ratio if plan is not None else 0.0,
        promised_tokens=plan.promised_tokens if plan is not None and running else 0.0,
        tokens_per_s=tokens,
        prefill_tokens_per_s=prefill,
        rate_window_s=RATE_WINDOW_S,
        requests_received=model.totals["received"],
        requests_finished={reason.value: count for reason, count in model.finish_counts.items()},
        requests_rejected={cause: count for cause, count in model.rejected().items() if count},
        prompt_tokens_computed=model.totals["prompt_computed"],
        prompt_tokens_cached=model.totals["prompt_cached"],
        generation_tokens=model.totals["generation_tokens"],
        retractions=model.totals["retractions"],
        evicted_pages=model.totals["evicted_pages"],
        invariants_checked=model.checker is not None,
        laws_by_mode=dict(model.checker.laws_by_mode) if model.checker is not None else {},
        violations_total=sum(violations.values()),
        violations=violations,
    )


def _waiting_tokens(model: ReadModel) -> int:
    return sum(request.prompt_len + request.output_len for request in model.tracker.queue.waiting.values())


def queue(model: ReadModel, head: Head, limit: int) -> QueueAnswer:
    """The waiting queue, in the order of the last pass as far as it went."""
    watch = model.tracker.queue
    overtakers = Overtakers(model)
    stopper = _stopper(model)
    # Who ended the pass is the same for all, and named by each: its numbers would make a long answer a third longer.
    entries = [
        _queue_entry(model, request, at, overtakers, stopper, tells=at < WITH_STOPPER)
        for at, request in enumerate(watch.in_order()[:limit])
    ]
    by_blocker = {name: count for name, count in zip(BLOCKERS, watch.counts, strict=True) if count}
    return QueueAnswer(**_head(head), entries=tuple(entries), total=len(watch.waiting), by_blocker=by_blocker)


def _queue_entry(
    model: ReadModel,
    request: RequestTimeline,
    position: int,
    overtakers: Overtakers,
    stopper: Stopper | None,
    *,
    tells: bool = True,
) -> QueueEntry:
    """`stopper`: who ended the last pass; with `tells`, its numbers are in the entry of one that waits behind it."""
    watch, decided = model.tracker.queue, request.decided
    overtaken = watch.overtaken(request)
    assert request.blocker is not None, "a waiting request always has a blocker"
    reason, behind = request.reason, None
    if request.blocker == ORDER and watch.last_pass is not None:
        # Its own test was one of an earlier pass, if any.
        test = _Test(None, None, decided.step if decided is not None else None)
        reason, behind = watch.last_pass.stopped_by, stopper
    else:
        test = _test(model, request, reason)
    state: Literal["waiting", "retracted"] = "retracted" if request.is_retracted else "waiting"
    now_ns = model.clock.now_ns()
    held_ns, order_ns = held_so_far(model, request, now_ns)
    return QueueEntry(
        rid=request.rid,
        position=position,
        state=state,
        age_s=max(now_ns - request.enqueued_ns, 0) / 1e9,
        prompt_len=request.prompt_len,
        output_len=request.output_len,
        matched_len=request.matched_len,
        blocker=BLOCKERS[request.blocker],
        reason=None if request.blocker == ENGINE_BUSY else reason,
        need=test.need,
        have=test.have,
        who_stopped=behind.rid if behind is not None else None,
        stopper=behind if tells else None,
        last_evaluated_step=test.step,
        times_passed_over=overtaken.passes,
        overtaken_by=overtaken.requests,
        overtaker=overtakers.of(request) if overtaken.requests else None,
        passes_waited=watch.passes - request.pass_at_entry,
        num_retractions=request.num_retractions,
        priority=request.priority,
        held_ns=held_ns,
        order_ns=order_ns,
    )


def _test(model: ReadModel, request: RequestTimeline, reason: Reason | None) -> _Test:
    """The test of the last pass that refused `request` by `reason`."""
    decided = request.decided
    if decided is not None and decided.reason == reason:
        return _Test(decided.need, decided.have, decided.step)
    if reason in {Reason.ROWS_EXHAUSTED, Reason.FULL_FLAG_SET}:
        # A pass that was skipped for want of a row examined nobody; whoever is first lacks the one it needs.
        return _Test(1, 0, model.tracker.queue.last_pass_step)
    return _Test(None, None, decided.step if decided is not None else None)


def _stopper(model: ReadModel) -> Stopper | None:
    """Who ended the last pass, with its own numbers; None where nobody did."""
    end = model.tracker.queue.last_pass
    if end is None or end.rid is None:
        return None
    found = model.find(end.rid)
    test = _test(model, found, end.stopped_by) if found is not None else _Test(None, None, None)
    blocker = BLOCKERS[OF_REASON.get(end.stopped_by, ORDER)]
    return Stopper(rid=end.rid, reason=end.stopped_by, blocker=blocker, need=test.need, have=test.have, step=test.step)


def latency(model: ReadModel, head: Head) -> LatencyAnswer:
    """Latency over time."""
    points = model.ring.points(model.clock.now_ns(), model.wall_s)
    return LatencyAnswer(**_head(head), slot_s=SLOT_NS / 1e9, points=tuple(points))


def requests(model: ReadModel, head: Head, limit: int) -> RequestsAnswer:
    """Live requests in order of arrival, finished ones newest first."""
    live = list(model.tracker.live.values())[:limit]
    finished = list(model.finished.values())[: -limit - 1 : -1]
    return RequestsAnswer(
        **_head(head),
        live=tuple(_request_row(model, request) for request in live),
        finished=tuple(_request_row(model, request) for request in finished),
    )


def _request_row(model: ReadModel, request: RequestTimeline) -> RequestRow:
    model.tracker.settle_tokens(request)
    gaps = request.gaps_ns()
    now = model.clock.now_ns()
    ttft = request.ttft_ns
    if ttft is None and request.first_token_ns is not None:
        ttft = request.first_token_ns - request.accepted_ns
    queue_ns = request.queue_ns
    if queue_ns is None:
        queue_ns = max((request.finished_ns or now) - request.enqueued_ns, 0)
    median = quantile(Counter(gaps[-KEPT_GAPS:]), 0.5)
    state = LiveState.RETRACTED if request.is_retracted else request.state
    if request.rid in model.tracker.emitting:
        state = LiveState.EMITTING
    return RequestRow(
        rid=request.rid,
        state=state,
        accepted_wall_s=model.wall_s(request.accepted_ns),
        prompt_len=request.prompt_len,
        max_new_tokens=request.max_new_tokens,
        cached_tokens=request.cached_len,
        outputs=len(request.token_ns),
        queue_s=queue_ns / 1e9,
        ttft_s=ttft / 1e9 if ttft is not None else None,
        tbt_p50_s=median / 1e9 if median is not None else None,
        tbt_max_s=max(gaps) / 1e9 if gaps else None,
        duration_s=((request.finished_ns or now) - request.accepted_ns) / 1e9,
        chunks=len(request.chunks),
        retractions=request.num_retractions,
        finish=request.finish,
        trace_id=request.trace_id,
    )


def request(model: ReadModel, head: Head, rid: str) -> RequestDetail | None:
    """Everything kept about one request; None when it is not live and not among the last finished."""
    found = model.find(rid)
    if found is None:
        return None
    waiting = model.tracker.queue.in_order() if rid in model.tracker.queue.waiting else []
    overtakers = Overtakers(model)
    entry = next(
        (_queue_entry(model, r, at, overtakers, _stopper(model)) for at, r in enumerate(waiting) if r is found), None
    )
    return RequestDetail(
        **_head(head),
        request=_request_row(model, found),
        queue=entry,
        timeline=timeline(model, found),
        decisions=tuple(decision(model, event) for event in found.decisions),
        decisions_left_out=found.decisions_left_out,
        lane=lane(model, found),
    )


def page_map(model: ReadModel, head: Head) -> PageMap:
    """The pool, page by page."""
    states, owners, rows, total = model.pages.packed()
    return PageMap(
        **_head(head),
        page_size=model.config.cache.page_size,
        num_pages=model.pages.num_pages,
        counts=model.pages.counts(),
        states_b64=states,
        owners_b64=owners,
        owners=rows,
        owners_total=total,
    )


def explain(model: ReadModel, head: Head, rid: str, lang: Lang) -> Explanation | None:
    """Sentences about one request, in `lang`."""
    detail = request(model, head, rid)
    if detail is None:
        return None
    before = model.tracker.queue.in_order()[: detail.queue.position] if detail.queue is not None else ()
    ahead = tuple(each.rid for each in before)
    with speaking(lang):
        slices = _slices(model)
        said, named = sentences(detail, ahead, slices), ids_named(detail, ahead, slices)
        return Explanation(**_head(head), rid=rid, sentences=said, queue=detail.queue, named=named)


def _slices(model: ReadModel) -> tuple[SliceGiven, ...]:
    """What the last pass computed of prompts."""
    decisions = model.steps[-1].decisions if model.steps else ()
    given = (SliceGiven(one.rid, one.selected_extend, one.candidate_extend) for one in decisions)
    return tuple(one for one in given if one.tokens)
