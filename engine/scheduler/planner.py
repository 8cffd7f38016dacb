"""Planner. Owns: one step's plan, made by reading state only (rule book sections 4 and 6).

retract or decode  <-  nothing admitted  <-  prefill pass: open budget · continuation · candidates  ->  mixed test
"""

from __future__ import annotations

import msgspec

from engine.config import Policy
from engine.request import Request
from engine.scheduler.accounting import cut_units, promised_growth
from engine.scheduler.decision import Guard, Reason, Result
from engine.scheduler.delays import ChunkChoice, choose_chunk, delay_of
from engine.scheduler.ledgers import Budget, ChunkLedger, ComputeLedger, KvLedger
from engine.scheduler.plan import PassEnd, StepKind, StepPlan
from engine.scheduler.policies.shortest_prefill_first import continuation_cap
from engine.scheduler.prefill_adder import PrefillAdder
from engine.scheduler.retraction import needed_pages, plan_retraction
from engine.scheduler.state import SchedulerState

_SKIP_REASONS = {
    "queue_empty": Reason.QUEUE_END,
    "full_flag": Reason.FULL_FLAG_SET,
    "rows": Reason.ROWS_EXHAUSTED,
    "decode_turn": Reason.CHUNK_EXHAUSTED,
}


def plan_step(state: SchedulerState, now_ns: int) -> StepPlan:
    """What the next step does. Writes nothing: the same state and `now_ns` give the same plan."""
    skip = state.skip_reason
    growth = promised_growth(state.accounting, state.running, state.ratio)
    if state.continuation is not None:
        growth += state.accounting.continuation_promise(state.continuation)
    if skip is not None:
        first = next(iter(state.waiting), None)
        head = first.rid if first is not None else None
        end = PassEnd("skipped", _SKIP_REASONS[skip], head, len(state.waiting))
        return _without_prefill(
            state, now_ns, StepFacts(pass_end=end, growth=growth, full=state.full, delayed_passes=state.delayed_passes)
        )
    return _Pass(state, now_ns, growth).run()


class StepFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a pass found out and every kind of plan carries."""

    pass_end: PassEnd
    growth: float
    full: bool
    adder: PrefillAdder | None = None
    budget_open: Budget | None = None
    chunk_limit: int | None = None
    mixed: int = 0
    guards: tuple[Guard, ...] = ()
    delayed_passes: int = 0
    choice: ChunkChoice | None = None


def _common(state: SchedulerState, now_ns: int, kind: StepKind, facts: StepFacts) -> dict[str, object]:
    """Fields that every plan fills alike."""
    fields: dict[str, object] = {
        "step": state.step,
        "now_ns": now_ns,
        "state_version": state.version,
        "kind": kind,
        "pass_end": facts.pass_end,
        "continuation_after": state.continuation.rid if state.continuation is not None else None,
        "full_after": facts.full,
        "ratio": state.ratio,
        "ratio_after": state.ratio,
        "promised_tokens": facts.growth,
        "guards": facts.guards,
        "delayed_passes": facts.delayed_passes,
    }
    if facts.choice is not None:
        fields |= {"chunk_size": facts.choice.chunk_tokens, "predicted_step_ns": facts.choice.predicted_ns}
    if facts.adder is not None and facts.budget_open is not None:
        passed = facts.adder.state
        fields |= {
            "decisions": tuple(passed.decisions),
            "touches": tuple(passed.touches),
            "considered": tuple(passed.considered.items()),
            "chunk_limit": facts.chunk_limit,
            "budget_open": facts.budget_open.view(),
            "budget_close": passed.left,
            "mixed_rows": facts.mixed,
            "guards": facts.guards + tuple(passed.guards),
        }
    ordering = state.ordering
    if ordering is not None:
        fields |= {
            "order": ordering.order,
            "matched": ordering.matched,
            "deprioritized": ordering.deprioritized,
            "active_policy": ordering.active_policy.value,
        }
    return fields


def _plan(fields: dict[str, object], **more: object) -> StepPlan:
    return StepPlan(**(fields | more))  # type: ignore[arg-type]  # field names and types are those of StepPlan


def _without_prefill(state: SchedulerState, now_ns: int, facts: StepFacts) -> StepPlan:
    """Step 5: decode, retract when it does not fit, or idle."""
    running = state.running
    if not running:
        fields = _common(state, now_ns, StepKind.IDLE, facts)
        nothing_left = not state.waiting and state.continuation is None and not state.leaving
        ratio = state.config.initial_new_token_ratio if nothing_left else state.ratio
        return _plan(fields, ratio_after=ratio)
    fields = _common(state, now_ns, StepKind.DECODE, facts)
    room = state.kv.free_pages + state.kv.evictable_pages
    if needed_pages(running, state.kv.page_size) <= room:
        ratio = max(state.ratio - state.config.new_token_ratio_decay, state.config.min_new_token_ratio)
        rids = tuple(request.rid for request in running)
        return _plan(fields, decodes=rids, sampling=rids, ratio_after=ratio)
    retraction = plan_retraction(
        running,
        state.kv,
        guarded=state.config.guards,
        continuation_waits=state.continuation is not None or bool(state.leaving),
    )
    rids = tuple(request.rid for request in retraction.staying)
    guards = facts.guards + (tuple(facts.adder.state.guards) if facts.adder is not None else ())
    if not rids:
        aborted = retraction.victims[-1].aborted
        guards += (Guard.KV_POOL_EXHAUSTED if aborted else Guard.LAST_PUSHED_BACK,)
    return _plan(
        fields,
        kind=StepKind.DECODE if rids else StepKind.IDLE,
        decodes=rids,
        sampling=rids,
        retractions=retraction.victims,
        ratio_after=retraction.ratio if rids else state.ratio,
        full_after=False,
        guards=guards,
    )


def _chunk_of(state: SchedulerState) -> ChunkChoice:
    """The slice of this step: as configured, or what past steps say meets the target time."""
    config = state.config
    most = config.chunked_prefill_size
    if most is None or config.target_step_ms is None:
        return ChunkChoice(most, None)
    riding = state.running if config.enable_mixed_chunk else []
    context = sum(request.computed_len + 1 for request in riding)
    front = state.continuation or next(iter(state.waiting), None)
    if front is not None:
        context += front.computed_len if front is state.continuation else front.matched_len
    return choose_chunk(
        state.history.fit(),
        target_ns=int(config.target_step_ms * 1e6),
        most=most,
        riding=len(riding),
        context_tokens=context,
        unit=cut_units(state.accounting, page_size=state.kv.page_size, align=config.truncation_align_size).first,
    )


def _open_budget(state: SchedulerState, chunk: int | None, mixed: int, promised: float) -> Budget:
    """The ledgers of a pass once `mixed` decode rows are charged to each."""
    available = (state.kv.free_pages + state.kv.evictable_pages) * state.kv.page_size
    opening = state.accounting.opening(state.running if mixed else (), promised)
    return Budget(
        ComputeLedger(state.config.max_prefill_tokens, mixed),
        ChunkLedger(chunk, mixed),
        KvLedger(available, 0, opening.current, opening.total),
    )


def _rows_fill_the_slice(state: SchedulerState, budget: Budget) -> bool:
    """Whether decode rows leave less than the smallest possible piece of a prompt that could have one."""
    piece = state.accounting.slice_of(budget)
    align = state.config.truncation_align_size
    unit = cut_units(state.accounting, page_size=state.kv.page_size, align=align).later
    someone = state.continuation is not None or (unit > 1 and len(state.waiting) > 0)
    return someone and piece is not None and piece.tokens < unit


class _Pass:
    """One prefill pass over the ordered queue."""

    def __init__(self, state: SchedulerState, now_ns: int, growth: float) -> None:
        self._state = state
        self._now_ns = now_ns
        self._growth = growth
        config = state.config
        self._choice = _chunk_of(state)
        chunk = self._choice.chunk_tokens
        mixed = len(state.running) if config.enable_mixed_chunk and chunk is not None else 0
        self._open = _open_budget(state, chunk, mixed, growth)
        self._sits_out = mixed > 0 and config.guards and _rows_fill_the_slice(state, self._open)
        if self._sits_out:
            # Beside the decode rows not even the smallest piece fits: prompts get this step, the decodes the next.
            mixed = 0
            self._open = _open_budget(state, chunk, mixed, growth)
        self._mixed = mixed
        self._full = state.full
        self._delayed_passes = 0
        self._adder = PrefillAdder(
            config=config,
            kv=state.kv,
            accounting=state.accounting,
            budget=self._open,
            running=state.running,
            ratio=state.ratio,
            passed_over=state.overtakes.count,
            riding=mixed > 0,
            stuck=state.stuck,
        )

    def run(self) -> StepPlan:
        chunk_limit = self._continue()
        end = self._candidates()
        facts = StepFacts(
            pass_end=end,
            growth=self._growth,
            full=self._full,
            adder=self._adder,
            budget_open=self._open,
            chunk_limit=chunk_limit,
            mixed=self._mixed,
            guards=(Guard.MIXED_SAT_OUT,) if self._sits_out and self._adder.state.members else (),
            delayed_passes=self._delayed_passes,
            choice=self._choice if self._state.config.target_step_ms is not None else None,
        )
        if not self._adder.state.members:
            return _without_prefill(self._state, self._now_ns, facts)
        return self._with_prefill(facts)

    def _continue(self) -> int | None:
        """Step 3. Returns the cap on the continuation, None when there is no cap or no continuation."""
        request = self._state.continuation
        if request is None:
            return None
        cap = None
        rem_chunk = self._open.chunk.remaining
        ordering = self._state.ordering
        if ordering is not None and ordering.active_policy is Policy.SHORTEST_PREFILL_FIRST and rem_chunk is not None:
            cap = continuation_cap(
                self._state.waiting,
                rest=request.seq_len - request.computed_len,
                rem_chunk=rem_chunk,
                page_size=self._state.kv.page_size,
            )
        self._adder.consider_continuation(request, cap=cap)
        return cap

    def _candidates(self) -> PassEnd:
        """Step 4: each waiting request in order, until something stops the pass."""
        state, adder = self._state, self._adder
        passed, preempts = adder.state, state.config.enable_priority_preemption
        if passed.decisions and not passed.decisions[-1].is_admitted:
            # A parked continuation keeps its place: admitting others would take the memory it waits for.
            return self._end("result", passed.decisions[-1].reason, state.continuation, 0)
        delayed = self._delay()
        if delayed is not None:
            return delayed
        rows = self._rows()
        for index, request in enumerate(state.candidates(self._now_ns)):
            members = len(passed.members)
            if self._full and not preempts:
                adder.refuse_untried(request, Reason.FULL_FLAG_SET, 1, 0, prefix_len=self._matched(request))
                return self._end("slots", Reason.FULL_FLAG_SET, request, index)
            if passed.standing is Result.OTHER:
                spent = passed.left.rem_input <= 0
                return self._end(
                    "budget", Reason.COMPUTE_EXHAUSTED if spent else Reason.CHUNK_EXHAUSTED, request, index
                )
            if members >= rows:
                self._full = True
            if self._full and not (
                preempts and adder.preempt_for(request, state.importance, request.last_candidate_extend)
            ):
                prefix_len = self._matched(request)
                adder.refuse_untried(request, Reason.ROWS_EXHAUSTED, members + 1, rows, prefix_len=prefix_len)
                return self._end("slots", Reason.ROWS_EXHAUSTED, request, index)
            decision = adder.consider(request)
            if preempts:
                decision = adder.preempt_for_memory(request, state.importance) or decision
                rows = self._rows()
            if decision.result is Result.CONTINUE:
                continue
            reason = decision.reason
            if decision.result is Result.NO_TOKEN:
                self._full = bool(passed.members or adder.running)
            if decision.is_admitted:
                reason = self._spent_reason()
            return self._end("result", reason, request, index + 1 if decision.is_admitted else index)
        return self._end("queue_end", Reason.QUEUE_END, None, len(state.waiting))

    def _rows(self) -> int:
        """Members that this pass may have: its continuation has its row already, whoever is preempted gives one."""
        state, adder = self._state, self._adder
        held = 1 if state.continuation is not None else 0
        return min(
            state.config.max_running_requests - len(adder.running),
            state.kv.free_rows + held + len(adder.state.preempted),
        )

    def _delay(self) -> PassEnd | None:
        """The end of the pass in front of the first new prompt, when a delayer says so."""
        state = self._state
        running = len(state.running)
        delay = delay_of(
            state.config,
            waiting=len(state.waiting),
            running=running,
            free_rows=min(state.config.max_running_requests - running, state.kv.free_rows),
            passes=state.delayed_passes,
        )
        if delay is None:
            return None
        self._delayed_passes = delay.passes
        head = next(iter(state.candidates(self._now_ns)))
        self._adder.refuse_untried(head, Reason.DELAYED, delay.need, delay.have, prefix_len=self._matched(head))
        return self._end("result", Reason.DELAYED, head, 0)

    def _matched(self, request: Request) -> int:
        """What the ordering of this pass matched of a request, in whole pages and less than all of it."""
        ordering, page_size = self._state.ordering, self._state.kv.page_size
        is_matched = ordering is not None and ordering.deprioritized is not None
        return request.matched_len // page_size * page_size if is_matched else 0

    def _spent_reason(self) -> Reason:
        """Which ledger an admission used up."""
        left = self._adder.state.left
        if left.remaining_total <= 0:
            return Reason.KV_TOTAL_EXHAUSTED
        if left.remaining_current <= 0:
            return Reason.KV_NOW_EXHAUSTED
        if left.rem_input <= 0:
            return Reason.COMPUTE_EXHAUSTED
        return Reason.CHUNK_EXHAUSTED

    def _end(self, stop: str, reason: Reason, request: Request | None, considered: int) -> PassEnd:
        left = len(self._state.waiting) - considered
        if request is not None and stop in {"result", "slots"} and not self._adder.state.decisions[-1].is_admitted:
            left -= 1 if request is not self._state.continuation else 0
        return PassEnd(stop, reason, request.rid if request is not None else None, max(0, left))

    def _with_prefill(self, facts: StepFacts) -> StepPlan:
        """Steps 5 and 6: the batch, and whether the running requests ride along."""
        state, passed = self._state, self._adder.state
        running = self._adder.running
        sampling = [row.rid for row in passed.members if row.is_last]
        decodes: tuple[str, ...] = ()
        tested = False
        if self._mixed and running:
            tested = True
            if needed_pages(running, state.kv.page_size) <= self._adder.room_pages():
                decodes = tuple(request.rid for request in running)
        fields = _common(state, self._now_ns, StepKind.MIXED if decodes else StepKind.EXTEND, facts)
        return _plan(
            fields,
            prefills=tuple(passed.members),
            decodes=decodes,
            sampling=(*sampling, *decodes),
            mixed_tested=tested,
            continuation_after=passed.continuation_after,
            preempted=tuple(passed.preempted),
        )
