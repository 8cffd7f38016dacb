"""Metrics. Owns: the numbers behind `/metrics`, counted by one thread and read by anyone.

`MetricsSink` keeps every number in flat lists of ints that only the thread which feeds it writes, and publishes copies
of them, by one reference, after each event that closes something; so a reader sees whole events and takes no lock.
Beside a live engine that thread is a worker (`telemetry.shared_sink`), which publishes after each batch of events
instead, and `caught_up` waits for it. What threads of the front end count lies in a list of its own behind a lock. What
others count (checker, sinks) is asked for at scrape time, by `telemetry.exposition`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

from engine.clock import Clock
from engine.config import EngineConfig
from engine.events import (
    AdmissionDecided,
    AnyEvent,
    EngineStarted,
    PagesMoved,
    RequestArrived,
    RequestTransitioned,
    ResponseSent,
    StepCompleted,
    StepPlanned,
)
from engine.scheduler.decision import ADMITTED
from engine.scheduler.plan import StepKind
from invariants.members import FINISHED, WAITING
from telemetry.exemplars import Exemplars
from telemetry.metric_books import StepCells, cuts_of
from telemetry.metric_catalog import KV_STATES, LEDGERS, NS, PHASES, POSITION_OF, LiveState
from telemetry.observe import BLOCKERS
from telemetry.request_metrics import RequestMetrics
from telemetry.stalls import StepLog
from telemetry.timeline import TimelineTracker

#: Width of a page id in PagesMoved.
PAGE_ID_BYTES: Final = 4


#: Plans whose completion is awaited: at most two are in flight, more only where completions were lost on the way here.
_MOST_PLANS: Final = 4


class MetricsSink(RequestMetrics):
    """Counts events. One thread feeds it; `snapshot` and the front end's hooks are for any thread.

    in_batches         publish at `flush` only, which whoever feeds it calls after each batch
    clock              the engine's, for ages at scrape time
    expects_responses  a server reports first bytes; see `TimelineTracker`
    late_ns            a token that comes later than this after the one before it is late, and gets a cause
    ttft_ns            so is a first token, for exemplars
    exemplars          takes traces that stand for observations; None when there are no traces
    """

    def __init__(
        self,
        *,
        clock: Clock,
        expects_responses: bool = False,
        late_ns: int = 250_000_000,
        ttft_ns: int = 1_000_000_000,
        exemplars: Exemplars | None = None,
        in_batches: bool = False,
    ) -> None:
        super().__init__(expects_responses=expects_responses, late_ns=late_ns, ttft_ns=ttft_ns, exemplars=exemplars)
        self.clock = clock
        self.build: dict[str, str] | None = None
        self._page_size, self._max_rows = 1, 0
        self._wall_offset_ns = self._last_applied_ns = self._last_ready_ns = 0
        self._idle_since_ns: int | None = None
        self._begin()
        self._busy_before = False
        self._admitted_step = -1
        self._positions: list[int] = []
        self._passed_over = 0
        self._in_batches = in_batches
        self._due_ns: int | None = None
        #: Since a step last told the count of all pages, in which every move before it is.
        self._moves: list[PagesMoved] = []
        self._published = self._books.copy()
        #: Waits until what was emitted before is counted; False when that takes too long. Set by whoever feeds this
        #: from a thread of its own; whoever feeds it directly is never behind.
        self.catch_up: Callable[[], bool] = lambda: True
        #: Whether an event never came here: then nothing that is counted can be held against other books.
        self.has_gaps = False
        self._next_seq = 0
        at = self._books.at
        # First cells of families that every step writes; label values follow in the catalogue's order.
        self._phase_cell = at["step_phase_seconds_total", PHASES[0]]
        self._left_cell = at["ledger_remaining_tokens", LEDGERS[0]]
        self._pages_cell = at["kv_pages", KV_STATES[0]]
        self._page_cells = {state: at["kv_pages", state] for state in KV_STATES}
        self._blocker_cell = at["waiting_by_blocker", BLOCKERS[0]]
        self._waited_cell = at["waiting_request_seconds_total", BLOCKERS[0]]
        self._state_cell = at["requests", LiveState.WAITING]
        families = ("steps_total", "step_seconds", "step_tokens", "step_requests")
        self._step_cells = {kind: StepCells(*(at[name, kind] for name in families)) for kind in StepKind}
        self._plan_cell = at["plan_seconds", ""]
        self._tokens_cell = at["generation_tokens_total", ""]
        self._heartbeat_cell = at["heartbeat_timestamp_seconds", ""]
        self._ratio_cell = at["new_token_ratio", ""]
        self._promised_cell = at["promised_pages", ""]
        self._waiting_tokens_cell = at["waiting_tokens", ""]
        # And of those that every request writes.
        self._reason_cells = {value: cell for (name, value), cell in at.items() if name == "admissions_total"}
        self._computed_cell, self._cached_cell = (at["selected_tokens_total", kind] for kind in ("computed", "cached"))
        self._chunk_cell = at["chunk_tokens", ""]
        self._position_cells = {reason: at["chunk_forward_seconds", value] for reason, value in POSITION_OF.items()}
        self._passed_cell = at["times_passed_over_max", ""]
        self._end_cells = {value: cell for (name, value), cell in at.items() if name == "pass_ends_total"}
        self._left_out_cell, self._idle_cell = at["not_considered_total", ""], at["idle_seconds_total", ""]
        self._outside_cells = at["step_phase_seconds_total", "idle"], at["step_phase_seconds_total", "publish"]
        self._handlers: dict[type, Callable[[Any], None]] = {
            EngineStarted: self._started,
            RequestArrived: self._arrived,
            RequestTransitioned: self._transitioned,
            AdmissionDecided: self._decided,
            StepPlanned: self._planned,
            StepCompleted: self._completed,
            PagesMoved: self._moves.append if in_batches else self._moved,
            ResponseSent: self._responded,
        }
        #: When the oldest waiting request came, None when nobody waits. Read by scrapes.
        self.oldest_waiting_ns: int | None = None

    def _begin(self, *, overlaps: bool = False) -> None:
        """Before the first step of an engine."""
        self._overlaps = overlaps
        #: In flight, with where the pieces of each plan are counted: one step, or two where steps overlap.
        self._plans: dict[int, tuple[StepPlanned, list[int]]] = {}

    @property
    def at(self) -> dict[tuple[str, str], int]:
        """Cell of each (family, label value) in `snapshot`."""
        return self._books.at

    @property
    def refused_increments(self) -> int:
        """Increments below zero that were dropped: each is a fault of this code or of an event."""
        return self._books.refused + self.front_end.refused

    @property
    def timeline(self) -> TimelineTracker:
        return self._timeline

    @property
    def idle_since_ns(self) -> int | None:
        return self._idle_since_ns

    def snapshot(self) -> tuple[int, ...]:
        """Every number that events tell, as of the last closed event or batch."""
        often, seldom = self._published
        return often + seldom

    def emit(self, event: AnyEvent) -> None:
        """Count one event."""
        self.feed((event,))

    def feed(self, events: Iterable[AnyEvent]) -> None:
        """Count several. Raises what one of them raises."""
        handlers = self._handlers
        for event in events:
            seq = event.seq
            if seq != self._next_seq:
                self.has_gaps |= seq > self._next_seq
            self._next_seq = seq + 1
            handle = handlers.get(type(event))
            if handle is not None:
                handle(event)

    def _responded(self, event: ResponseSent) -> None:
        self._timeline.responded(event)
        self._publish(event.t_ns)

    def _set(self, name: str, value: int, label: str = "") -> None:
        self._books.cells[self._books.at[name, label]] = value

    def _started(self, event: EngineStarted) -> None:
        self.has_gaps = False
        self._page_size = event.page_size
        self._max_rows = event.max_running_requests
        self._wall_offset_ns = event.wall_ns - event.t_ns
        if self.exemplars is not None:
            self.exemplars.wall_offset_ns = self._wall_offset_ns
        self._last_applied_ns = event.t_ns
        self._idle_since_ns = event.t_ns
        self.build = {
            "version": event.version,
            "model": event.model,
            "attention_backend": event.attention_backend,
            "page_size": str(event.page_size),
        }
        config = EngineConfig.model_validate_json(event.config)
        scheduler = config.scheduler
        self._begin(overlaps=config.executor.overlap)
        self._steps_made = StepLog(scheduler.chunked_prefill_size)
        pool = event.num_pages * event.page_size
        limits = (scheduler.max_prefill_tokens, scheduler.chunked_prefill_size or 0, pool, pool, self._max_rows)
        for ledger, limit in zip(LEDGERS, limits, strict=True):
            self._set("ledger_limit_tokens", limit, ledger)
        self._move()
        self._set("kv_pages_capacity", event.num_pages)
        self._set("kv_pages", event.num_pages, "free")
        self._set("new_token_ratio", round(scheduler.initial_new_token_ratio * NS))
        self._publish(event.t_ns)

    def _arrived(self, event: RequestArrived) -> None:
        self._timeline.arrived(event)
        if self._idle_since_ns is not None:
            self._books.cells[self._idle_cell] += max(event.t_ns - self._idle_since_ns, 0)
            self._idle_since_ns = None
        self._add_waiting_tokens(event.prompt_len)
        self._publish(event.t_ns)

    def _add_waiting_tokens(self, tokens: int) -> None:
        self._books.cells[self._waiting_tokens_cell] += tokens

    def _transitioned(self, event: RequestTransitioned) -> None:
        if event.target is FINISHED and event.source is WAITING:
            # It leaves between two steps, and the next plan may be long in coming. It leaves with what it entered with:
            # where steps overlap that may count a token that failed to come.
            waited = self._timeline.live.get(event.rid)
            self._add_waiting_tokens(-event.prompt_len - (event if waited is None else waited).output_len)
        self._timeline.transitioned(event)
        if event.target is FINISHED:
            if not self._timeline.is_closing:  # else the end of the step publishes
                self._publish(event.t_ns)
        elif self._overlaps:
            self._publish(event.t_ns)  # the end of its step comes after the next plan

    def _decided(self, event: AdmissionDecided) -> None:
        self._timeline.decided(event)
        books = self._books
        books.cells[self._reason_cells[event.reason]] += 1
        for overdraft in event.overdrafts:
            self._add("overdrafts_total", 1, overdraft)
        if event.reason not in ADMITTED:
            self._passed_over = max(self._passed_over, event.times_passed_over)
            return
        self._admitted_step = event.step
        books.add(self._computed_cell, event.selected_extend)
        if not event.is_continuation:
            books.add(self._cached_cell, event.prefix_len)
        books.observe(self._chunk_cell, event.selected_extend)
        self._positions.append(self._position_cells[event.reason])
        clipped = event.candidate_extend - event.selected_extend
        if clipped > 0:
            # Only the chunk ledger cuts: a request that another ledger cannot hold is refused, not cut.
            self._add("clipped_tokens_total", clipped, "chunk")

    def _planned(self, event: StepPlanned) -> None:
        self._timeline.planned(event)
        positions, self._positions = self._positions, []
        self._plans[event.step] = event, [] if event.claim_failed else positions
        if len(self._plans) > _MOST_PLANS:
            del self._plans[next(iter(self._plans))]
        if event.pass_end is not None:
            self._books.cells[self._passed_cell], self._passed_over = self._passed_over, 0
            self._books.cells[self._end_cells[event.pass_end.stopped_by]] += 1
            self._books.add(self._left_out_cell, event.pass_end.not_considered)
        if event.budget_close is not None:
            left, at = event.budget_close, self._left_cell
            self._books.cells[at : at + len(LEDGERS)] = (
                left.rem_input,
                left.rem_chunk or 0,
                left.remaining_current,
                round(left.remaining_total),
                max(self._max_rows - event.num_running, 0),
            )
        for retraction in event.retractions:
            if retraction.aborted:
                continue  # an end, not a way back to the queue
            self._add("retractions_total", 1, retraction.cause)
            self._add("retracted_tokens_total", retraction.output_len, "output")
            self._add("retracted_tokens_total", max(retraction.lost_tokens - retraction.output_len, 0), "prompt")
        if event.preempted:
            self._add("retractions_total", len(event.preempted), "priority")
        for guard in event.guards:
            self._add("guard_activations_total", 1, guard)
        if event.claim_failed:
            self._add("kv_claim_failures_total", 1, "prefill" if self._admitted_step == event.step else "decode")
        if event.evicted_pages:
            self._add("kv_pages_evicted_total", event.evicted_pages)
        cells = self._books.cells
        cells[self._ratio_cell] = round(event.new_token_ratio * NS)
        cells[self._promised_cell] = round(1000 * event.promised_tokens / self._page_size)
        cells[self._waiting_tokens_cell] = event.waiting_tokens
        self._pages(event.pages)
        if self._overlaps:
            self._publish(event.t_ns)

    def _moved(self, event: PagesMoved) -> None:
        """An abort between two steps moves pages too, and the next step may be long in coming."""
        count, cells = len(event.pages) // PAGE_ID_BYTES, self._books.cells
        cells[self._page_cells[event.source]] -= count
        cells[self._page_cells[event.target]] += count

    def _move(self) -> None:
        """Count the moves that wait."""
        while self._moves:
            self._moved(self._moves.pop())

    def _pages(self, pages: tuple[int, int, int, int]) -> None:
        self._books.cells[self._pages_cell : self._pages_cell + len(KV_STATES)] = pages
        self._moves.clear()

    def _completed(self, event: StepCompleted) -> None:
        plan, positions = self._plans.pop(event.step, (None, []))
        self._note_step(event, plan, positions)
        self._timeline.completed(event)
        times, books = event.times, self._books
        cell = self._step_cells[event.kind]
        books.cells[cell.steps] += 1
        books.observe(cell.seconds, times.applied_ns - times.started_ns)
        books.observe(self._plan_cell, times.planned_ns - times.plan_from_ns)
        self._phases(event)
        if plan is not None:
            tokens = len(plan.decodes)
            for row in plan.prefills:
                tokens += row.extend_len
            books.observe(cell.tokens, tokens)
            books.observe(cell.requests, len(plan.prefills) + len(plan.decodes))
        if not event.failed:
            books.cells[self._tokens_cell] += len(event.rows)
        self._pages(event.pages)
        books.cells[self._heartbeat_cell] = event.t_ns + self._wall_offset_ns
        for rid, t_ns in self.front_end.take_first_bytes(event.t_ns if self._in_batches else None):
            self._timeline.first_byte(rid, t_ns)
        self._publish(event.t_ns)

    def _note_step(self, event: StepCompleted, plan: StepPlanned | None, positions: list[int]) -> None:
        """What the timeline's news about this step will be judged by, and how long its pieces took."""
        times = event.times
        self._applied_ns = times.applied_ns or event.t_ns
        if plan is not None:
            self._steps_made.add(plan, event)
        # A step that was launched behind another one began when that was ready.
        began_ns = max(times.launched_ns, self._last_ready_ns) if self._overlaps else times.launched_ns
        self._last_ready_ns = times.ready_ns
        for position in () if event.failed else positions:
            self._books.observe(position, times.ready_ns - began_ns)

    def _phases(self, event: StepCompleted) -> None:
        times, cells = event.times, self._books.cells
        # Where steps overlap, what the host did while the one before was computed was charged with its forward.
        start = max(times.started_ns, self._last_applied_ns) if self._overlaps else times.started_ns
        self._books.charge(self._phase_cell, start, cuts_of(times), overlaps=self._overlaps)
        outside = times.started_ns - self._last_applied_ns
        if outside > 0:
            # Between two steps: handing outputs over while there is work, waiting for work otherwise.
            cells[self._outside_cells[self._busy_before]] += outside
        self._last_applied_ns = times.applied_ns
        self._busy_before = bool(event.num_waiting or event.num_running)

    def _publish(self, t_ns: int) -> None:
        """Bring gauges and integrals up to date and let readers have them."""
        timeline, cells = self._timeline, self._books.cells
        if not timeline.queue.waiting:
            cells[self._waiting_tokens_cell] = cells[self._passed_cell] = 0
        if not timeline.live:
            cells[self._promised_cell] = 0
            if self._idle_since_ns is None:
                self._idle_since_ns = t_ns
        if self._in_batches:
            self._due_ns = t_ns
            return
        self._show(t_ns)

    def flush(self) -> None:
        """Let readers have what was counted since the last time."""
        due_ns, self._due_ns = self._due_ns, None
        if due_ns is not None:
            self._show(due_ns)

    def _show(self, t_ns: int) -> None:
        self._move()
        timeline, cells = self._timeline, self._books.cells
        queue = timeline.queue
        queue.advance(t_ns)
        at = self._blocker_cell
        cells[at : at + len(BLOCKERS)] = queue.counts
        at = self._waited_cell
        cells[at : at + len(BLOCKERS)] = queue.waited_ns
        waiting = len(queue.waiting)
        at = self._state_cell
        cells[at : at + len(LiveState)] = (
            waiting - queue.retracted,
            timeline.prefilling,
            timeline.decoding,
            queue.retracted,
            len(timeline.emitting),
        )
        self.oldest_waiting_ns = queue.oldest_ns()
        self._published = self._books.copy()
