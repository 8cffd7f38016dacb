"""Scheduler. Owns: the order of the phases of a step, and the doors in and out: add, abort, snapshot.

prepare  one writer: last step's chunk enters the tree, lists merge, flags clear, the queue is ordered
plan     pure
commit   one writer
apply    one writer: what the executor brought
complete publishes the times

With overlap, the outcome of a step is applied after the plan of the next one was committed: see `advance.py`.
"""

from __future__ import annotations

import msgspec
import numpy as np

from engine.config import EngineConfig
from engine.errors import LawBroken, RefusalCause, RequestRefused
from engine.events import EventSink, RequestArrived, StepCompleted
from engine.kvcache.kv_cache import KvCache
from engine.kvcache.page_keys import PageKeys
from engine.kvcache.snapshot import RequestView, SchedulerSnapshot, WaitingView
from engine.request import TURNED_AWAY, Cause, FinishReason, Request, RequestState
from engine.scheduler.accounting import ReferenceAccounting
from engine.scheduler.advance import advance_plan
from engine.scheduler.apply import apply_outcome, drop_ended, finish
from engine.scheduler.commit import commit_plan
from engine.scheduler.decision import Guard
from engine.scheduler.delays import shape_of
from engine.scheduler.entry_queue import EntryQueue
from engine.scheduler.exact import ExactAccounting
from engine.scheduler.flight import Flight
from engine.scheduler.order_sample import sample_order
from engine.scheduler.plan import StepKind, StepOutcome, StepPlan, StepTimes
from engine.scheduler.planner import plan_step
from engine.scheduler.policies import OrderInputs
from engine.scheduler.publisher import Publisher
from engine.scheduler.retraction import needed_pages
from engine.scheduler.state import SchedulerState


class Arrival(msgspec.Struct, frozen=True, kw_only=True):
    """A request as the core sees it (an input). `page_keys` is packed little-endian int64, one per full page."""

    rid: str
    prompt_len: int
    max_new_tokens: int
    page_keys: bytes
    head32_key: int | None = None
    ignore_eos: bool = False
    priority: int | None = None
    routing_key: str | None = None
    accepted_ns: int = 0
    trace_id: str = ""
    parent_span_id: str = ""
    trace_sampled: bool = False


class Scheduler:
    """A deterministic state machine. Its inputs are add, abort, outcomes and `now_ns`; it reads nothing else.

    chained_keys   a page's key stands for everything before it too, as PageKeyer makes them; False: compare them all
    """

    def __init__(self, config: EngineConfig, *, num_pages: int, sink: EventSink, chained_keys: bool = False) -> None:
        self.config = config
        self.publisher = Publisher(sink)
        self.kv = KvCache(
            num_pages=num_pages,
            page_size=config.cache.page_size,
            num_rows=config.scheduler.max_running_requests,
            events=self.publisher,
            enable_radix=config.cache.enable_radix,
        )
        accounting = (ExactAccounting if config.scheduler.kv_accounting == "exact" else ReferenceAccounting)(
            page_size=config.cache.page_size, clip_max_new_tokens=config.scheduler.clip_max_new_tokens
        )
        self.state = SchedulerState(
            config.scheduler,
            self.kv,
            accounting,
            chained_keys=chained_keys,
            overlaps=config.executor.overlap,
        )
        self._applied: tuple[Flight, StepOutcome] | None = None

    # -- the doors -------------------------------------------------------------------------------------------------

    def largest_output(self, prompt_len: int) -> int:
        """Most output tokens a prompt of this length may ask of the empty pool."""
        return self.state.accounting.largest_output(prompt_len, self.kv.num_pages * self.kv.page_size)

    def add(self, arrival: Arrival, now_ns: int) -> Request:
        """Queue a request. Raises RequestRefused when its id is live or it can never fit; then nothing is kept."""
        if arrival.rid in self.state.requests:
            raise RequestRefused(RefusalCause.INVALID, f"rid {arrival.rid!r} is the id of a live request", field="rid")
        largest = self.largest_output(arrival.prompt_len)
        if largest < 1:
            pool = self.kv.num_pages * self.kv.page_size
            raise RequestRefused(
                RefusalCause.NEVER_FITS,
                f"a prompt of {arrival.prompt_len} tokens and one output token do not fit the KV pool of {pool} tokens "
                f"(pages of {self.kv.page_size}, {self.state.config.kv_accounting} accounting)",
                field="prompt",
            )
        request = Request(
            rid=arrival.rid,
            prompt_len=arrival.prompt_len,
            max_new_tokens=min(arrival.max_new_tokens, largest),
            keys=PageKeys(np.frombuffer(arrival.page_keys, dtype="<i8").astype(np.int64)),
            head32_key=arrival.head32_key,
            ignore_eos=arrival.ignore_eos,
            priority=arrival.priority,
            routing_key=arrival.routing_key,
        )
        state, publisher = self.state, self.publisher
        state.version += 1
        request.entry_seq = state.next_entry()
        request.processed_at_entry = state.processed_tokens
        state.requests[request.rid] = request
        state.enqueue(request, now_ns)
        publisher.t_ns = now_ns
        publisher.emit(
            RequestArrived(
                *publisher.head(),
                arrival.rid,
                arrival.prompt_len,
                request.max_new_tokens,
                arrival.max_new_tokens,
                arrival.page_keys,
                arrival.head32_key,
                arrival.ignore_eos,
                arrival.priority,
                arrival.routing_key,
                arrival.accepted_ns,
                arrival.trace_id,
                arrival.parent_span_id,
                arrival.trace_sampled,
            )
        )
        publisher.transitioned(request, None, Cause.ARRIVE, row=None)
        return request

    def abort(self, rid: str, now_ns: int, *, detail: str = "", cause: Cause = Cause.ABORT) -> bool | None:
        """End a request early. True: ended now. None: marked, it ends when its step is applied. False: not live.

        A cause of TURNED_AWAY refuses it instead; False then also when it does not wait (any more).
        """
        request = self.state.requests.get(rid)
        refuses = cause in TURNED_AWAY
        if request is None or (refuses and (request.state is not RequestState.WAITING or request.in_flight)):
            return False
        self.state.version += 1
        self.publisher.t_ns = now_ns
        self.publisher.abort_requested(rid, detail, cause)
        if request.in_flight:
            request.abort_requested = True
            return None
        finish(
            self.state,
            request,
            FinishReason.REFUSED if refuses else FinishReason.ABORT,
            self.publisher,
            cause=cause,
            keep=request.state is not RequestState.WAITING,
            detail=detail,
        )
        drop_ended(self.state, [rid])
        return True

    # -- the phases ------------------------------------------------------------------------------------------------

    def prepare(self, now_ns: int) -> None:
        """Rule book section 6, (2) and (3), then the order of section 5. Writes; must precede `plan`."""
        state = self.state
        if state.has_step_to_await:
            raise LawBroken(f"step {state.flights[0].plan.step} is not applied yet")
        state.step += 1
        state.version += 1
        state.evicted_in_step = 0
        self.publisher.step = state.step
        self.publisher.t_ns = now_ns
        if state.chunk_to_insert and state.continuation is not None:
            request = state.continuation
            assert request.lease is not None, f"continuation {request.rid} has no lease"
            self.kv.insert(
                request.lease,
                request.keys.first(request.applied_len // self.kv.page_size),
                split_at=request.prompt_len // self.kv.page_size,
            )
        state.chunk_to_insert = False
        self._merge_last_prefill()
        state.ordering = None
        state.skip_reason = self._skip_reason()
        if state.skip_reason is None:
            inputs = OrderInputs(
                kv=self.kv,
                calls_before=state.order_calls,
                fallback_threshold=state.config.lpm_fallback_threshold,
                processed_tokens=state.processed_tokens,
                keep_record=state.record_order,
                running=state.running,
                random_seed=state.config.random_seed,
                rank=state.importance if state.config.enable_priority_scheduling else None,
            )
            state.ordering = state.waiting.order(inputs)
            state.order_calls += len(state.waiting) > 0  # the reference counts calls with a queue only

    def fits_ahead(self) -> bool:
        """Whether all that run can grow by one token: then a step that is planned ahead pushes nobody back for want of
        memory that the step in flight may be about to free."""
        running = self.state.live_running
        return needed_pages(running, self.kv.page_size) <= self.kv.free_pages + self.kv.evictable_pages

    def is_wanted_ahead(self) -> bool:
        """Whether a step that is planned ahead computes for somebody: not a further piece of a prompt that was given
        up, nor rows of such requests alone. Their ends come with the outcome of the step in flight."""
        state = self.state
        if state.continuation is not None and state.continuation.abort_requested:
            return False
        running = state.live_running
        return not running or any(not request.abort_requested for request in running)

    def plan(self, now_ns: int) -> StepPlan:
        """What the next step does. Pure: reads state, writes nothing."""
        return plan_step(self.state, now_ns)

    def commit(self, plan: StepPlan) -> StepPlan:
        """Apply `plan`; returns the plan in force (an idle one after an allocation miss)."""
        plan = commit_plan(self.state, plan, self.publisher)
        if self.state.config.target_step_ms is not None:
            decodes = (self.state.requests[rid].computed_len + 1 for rid in plan.decodes)
            pieces = ((row.prefix_len, row.extend_len) for row in plan.prefills)
            self.state.flights[-1].shape = shape_of(pieces, decodes)
        if self.state.overlaps:
            advance_plan(self.state, plan, self.publisher)
        return plan

    def apply(self, plan: StepPlan, outcome: StepOutcome) -> None:
        """Write the outcome of `plan`, the oldest in flight. Events carry its step, and `outcome.times.ready_ns`."""
        publisher = self.publisher
        publisher.t_ns = outcome.times.ready_ns
        publisher.step = outcome.step
        self._applied = (apply_outcome(self.state, plan, outcome, publisher), outcome)

    def complete(self, times: StepTimes) -> None:
        """Publish that the applied step is over, with its times."""
        if self._applied is None:
            raise LawBroken("complete without apply")
        (flight, outcome), self._applied = self._applied, None
        state = self.state
        if flight.shape is not None and not outcome.failed:
            # A step that was launched behind another one waited for it.
            began_ns = max(times.launched_ns, state.last_ready_ns) if state.overlaps else times.launched_ns
            state.history.add(flight.shape, times.ready_ns - began_ns)
        state.last_ready_ns = times.ready_ns
        publisher = self.publisher
        publisher.t_ns = times.applied_ns
        publisher.emit(
            StepCompleted(
                *publisher.head(),
                flight.plan.kind,
                outcome.rows,
                times,
                outcome.failed,
                self.kv.pool.counts,
                len(state.waiting),
                len(state.live_running),
            )
        )
        publisher.step = state.step

    # -- inside ----------------------------------------------------------------------------------------------------

    def _merge_last_prefill(self) -> None:
        state = self.state
        if state.last_prefill:
            members = [request for request in state.last_prefill if request is not state.continuation]
            state.shrank = state.shrank or len(members) < len(state.last_prefill)
            if members:
                if not state.running:
                    # The reference's running batch becomes this batch object, whose own flag and count it then has.
                    state.sticky_extend_tokens = state.last_extend_tokens
                    state.full = False
                state.running = state.running + members
            state.last_prefill = []
        if state.shrank:
            state.full = False
            state.shrank = False

    def _skip_reason(self) -> str | None:
        """Rule book section 4.0: why no pass is made, None when one is. May write the full flag, as the reference."""
        state = self.state
        if not state.running or state.config.enable_priority_preemption or not state.accounting.latches_full:
            state.full = False
        if self._decode_turn():
            return "decode_turn"
        if state.continuation is not None:
            return None
        if not state.waiting:
            return "queue_empty"
        rows = min(state.config.max_running_requests - len(state.running), self.kv.free_rows)
        preempts = state.config.enable_priority_preemption
        if state.full:
            return "full_flag"
        if rows <= 0 and not preempts:
            state.full = True
            return "rows"
        return None

    def _decode_turn(self) -> bool:
        """After a step in which decode rows sat out for the continuation, they go first."""
        return self.state.sat_out_last and bool(self.state.running)

    # -- pictures --------------------------------------------------------------------------------------------------

    def snapshot(self, *, order_from: int = 0) -> SchedulerSnapshot:
        """State between two steps as one immutable value; its sample of the order begins at position `order_from`."""
        state = self.state
        waiting = list(state.waiting)
        order = None
        if isinstance(state.waiting, EntryQueue):
            order = sample_order(
                state.waiting, waiting, self.kv.tree, policy=state.config.schedule_policy, start=order_from
            )
        return SchedulerSnapshot(
            step=state.step,
            waiting=tuple(
                WaitingView(
                    r.rid,
                    position,
                    r.prompt_len,
                    r.output_len,
                    r.matched_len,
                    r.num_retractions,
                    state.overtakes.count(r),
                )
                for position, r in enumerate(waiting)
            ),
            running=tuple(request.rid for request in state.live_running),
            continuation=state.continuation.rid if state.continuation is not None else None,
            requests=tuple(
                RequestView(
                    r.rid,
                    r.state.value,
                    r.prompt_len,
                    r.output_len,
                    r.computed_len,
                    r.max_new_tokens,
                    r.in_flight,
                    r.lease is not None,
                    r.lease.row if r.lease is not None else None,
                )
                for r in state.requests.values()
            ),
            batch_is_full=state.full,
            new_token_ratio=state.ratio,
            kv=self.kv.snapshot(),
            order=order,
            leaving=tuple(state.leaving),
        )


__all__ = ["Arrival", "Guard", "Scheduler", "StepKind"]
