"""PrefillAdder. Owns: the pure selection of one candidate after another against a Budget (rule book section 4).

It reads requests, the cache and values, and has no way to write: what a pass must remember (the budget, the nodes
pinned so far, the members) lives here, and dropping the object is the rollback. Based on the rules of SGLang 0.5.23's
PrefillAdder, with every answer given a reason, need and have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engine.config import Policy, SchedulerConfig
from engine.kvcache.kv_cache import KvCache
from engine.request import Request
from engine.scheduler.accounting import KvAccounting
from engine.scheduler.decision import AdmissionDecision, Guard, LedgerView, Overdraft, Reason, Result
from engine.scheduler.eos_walk import EosWalk
from engine.scheduler.ledgers import Budget, Cost
from engine.scheduler.plan import PrefillRow
from engine.scheduler.preemption import choose_victims


@dataclass(slots=True)
class PassState:
    """What a pass has decided so far. Mutable only inside the pass."""

    budget: Budget
    members: list[PrefillRow] = field(default_factory=list)
    decisions: list[AdmissionDecision] = field(default_factory=list)
    pinned: dict[int, int] = field(default_factory=dict)
    touches: list[tuple[str, int]] = field(default_factory=list)
    guards: list[Guard] = field(default_factory=list)
    unlocked: dict[int, int] = field(default_factory=dict)
    preempted: list[tuple[str, int]] = field(default_factory=list)
    considered: dict[str, int] = field(default_factory=dict)
    claimed_pages: int = 0
    continuation_after: str | None = None
    full: bool = False


class PrefillAdder:
    """One pass. `consider_continuation` first, if there is one, then `consider` per candidate in queue order."""

    def __init__(
        self,
        *,
        config: SchedulerConfig,
        kv: KvCache,
        accounting: KvAccounting,
        budget: Budget,
        running: Sequence[Request],
        ratio: float,
        passed_over: Callable[[Request], int],
    ) -> None:
        self._config = config
        self._kv = kv
        self._accounting = accounting
        self._ratio = ratio
        self._passed_over = passed_over
        self._eos_walk = EosWalk(ratio)
        self._members: list[Request] = []
        #: Who still runs; shrinks when someone is preempted.
        self.running = list(running)
        self.state = PassState(budget)

    # -- the continuation ------------------------------------------------------------------------------------------

    def consider_continuation(self, request: Request, *, cap: int | None) -> AdmissionDecision:
        """Step 3: advance the active chunk, without matching again and without rounding to pages.

        It runs although the memory ledger says no (limit falls back to rem_chunk), unless a guard parks it: no extend
        of 0 or less reaches a model, and no claim that the pool cannot meet is made.
        """
        budget = self.state.budget
        rem_chunk = budget.chunk.remaining
        assert rem_chunk is not None, "a continuation without chunking"
        rest = request.seq_len - request.computed_len
        limit = min(rem_chunk, int(budget.kv.remaining_total))
        if limit <= 0:
            limit = rem_chunk
        if cap is not None:
            limit = min(limit, cap)
        extend = min(rest, limit)
        if self._config.guards:
            pages = self._pages_for(request.computed_len + extend, held=request.lease.count if request.lease else 0)
            room = self.room_pages()
            if extend <= 0 or pages > room:
                self.state.guards.append(Guard.CONTINUATION_PARKED)
                self.state.continuation_after = request.rid
                need, have = (1, rem_chunk) if extend <= 0 else (pages * self._kv.page_size, room * self._kv.page_size)
                return self._refuse(
                    request,
                    request.computed_len,
                    Result.CONTINUES,
                    Reason.PARKED_BY_GUARD,
                    need,
                    have,
                    is_continuation=True,
                )
        is_cut = extend < rest
        self._admit(request, request.computed_len, extend, is_cut=is_cut, pinned=0, depths=())
        if is_cut:
            self.state.continuation_after = request.rid
        return self._admitted(
            request,
            prefix_len=request.computed_len,
            candidate=rest,
            extend=extend,
            is_cut=is_cut,
            before=budget,
            reason=Reason.ADMITTED_NEXT_CHUNK if is_cut else Reason.ADMITTED_LAST_CHUNK,
            result=Result.CONTINUES if is_cut else Result.LAST,
            is_continuation=True,
        )

    # -- a waiting request -----------------------------------------------------------------------------------------

    def consider(self, request: Request) -> AdmissionDecision:
        """Steps 4c to 4h for one waiting request. `result` says what happens to the next one."""
        keys = request.keys.first((request.seq_len - 1) // self._kv.page_size)
        match = self._kv.match(keys)
        prefix_len = match.pages * self._kv.page_size
        candidate = request.seq_len - prefix_len
        self.state.touches.append((request.rid, len(keys)))
        self.state.considered[request.rid] = candidate
        limit = self._config.prefill_max_requests
        if limit is not None and len(self.state.members) >= limit:
            count = len(self.state.members)
            return self._refuse(request, prefix_len, Result.OTHER, Reason.PREFILL_MAX_REACHED, count + 1, limit)

        cost = self._kv.path_cost(match, self.state.pinned, self.state.unlocked)
        pinned_tokens = cost.pages * self._kv.page_size
        budget = self.state.budget
        if request.ignore_eos and not self._kv.enable_radix:
            return self._consider_known_length(request, candidate)
        need = self._accounting.need(request, candidate)
        have = budget.kv.remaining_total - pinned_tokens
        if not need < have:
            return self._refuse(
                request, prefix_len, Result.NO_TOKEN, Reason.KV_TOTAL_EXHAUSTED, need, have, kv_test=(need, have)
            )
        extend, refusal = self._slice(prefix_len, candidate)
        if refusal is not None:
            reason, slice_need, slice_have = refusal
            return self._refuse(request, prefix_len, Result.OTHER, reason, slice_need, slice_have, kv_test=(need, have))
        is_cut = extend < candidate
        if self._config.guards:
            pages = self._pages_for(prefix_len + extend, held=match.pages)
            room = self.room_pages() - cost.pages
            if pages > room:
                self.state.guards.append(Guard.ALLOC_MISS)
                size = self._kv.page_size
                return self._refuse(
                    request,
                    prefix_len,
                    Result.NO_TOKEN,
                    Reason.KV_NOW_EXHAUSTED,
                    pages * size,
                    room * size,
                    kv_test=(need, have),
                )
        self._admit(request, prefix_len, extend, is_cut=is_cut, pinned=pinned_tokens, depths=cost.depths)
        if is_cut:
            self.state.continuation_after = request.rid
        return self._admitted(
            request,
            prefix_len=prefix_len,
            candidate=candidate,
            extend=extend,
            is_cut=is_cut,
            before=budget,
            reason=Reason.ADMITTED_FIRST_CHUNK if is_cut else Reason.ADMITTED_WHOLE,
            result=self.state.budget.state(),
            kv_test=(need, have),
        )

    def refuse_untried(
        self, request: Request, reason: Reason, need: float, have: float, *, prefix_len: int
    ) -> AdmissionDecision:
        """A decision about a request that the pass ended in front of: rows or the full flag, before any match.

        prefix_len  what the ordering matched, 0 when it matched nothing
        """
        return self._refuse(request, prefix_len, Result.OTHER, reason, need, have)

    def preempt_for(self, request: Request, importance: Callable[[Request], int], last_extend: int) -> bool:
        """Release running requests in thought so that `request` may be tried; False when nobody gives way.

        last_extend  tokens that `request` would have computed when it was last considered, 0 if it never was
        """
        budget = self.state.budget
        promised = min(request.max_new_tokens, self._config.clip_max_new_tokens)
        victims = choose_victims(
            self.running,
            urgent_importance=importance(request),
            lacking_tokens=last_extend + promised - budget.kv.remaining_total,
            threshold=self._config.priority_preemption_threshold,
            importance=importance,
            estimate=self._estimate,
        )
        for victim in victims:
            assert victim.lease is not None, f"running request {victim.rid} has no lease"
            gained = self._kv.release_gain(victim.lease, self.state.unlocked, self.state.pinned) * self._kv.page_size
            self.state.budget = self.state.budget.release(gained, self._estimate(victim))
            self.state.preempted.append((victim.rid, len(self.state.touches)))
            self.running.remove(victim)
        return bool(victims)

    # -- inside ----------------------------------------------------------------------------------------------------

    def _estimate(self, request: Request) -> float:
        return self._accounting.running_growth(request, self._ratio)

    def _consider_known_length(self, request: Request, candidate: int) -> AdmissionDecision:
        """Radix off and `ignore_eos`: steps (1) to (3) in place of 4e and 4f."""
        budget, size = self.state.budget, self._kv.page_size
        rounded = -(-candidate // size) * size
        room = min(budget.kv.remaining_current, budget.kv.remaining_total)
        if not rounded + size <= room:
            reason = (
                Reason.KV_NOW_EXHAUSTED
                if budget.kv.remaining_current <= budget.kv.remaining_total
                else Reason.KV_TOTAL_EXHAUSTED
            )
            return self._refuse(request, 0, Result.NO_TOKEN, reason, rounded + size, room)
        shortfall = self._eos_walk.shortfall(
            request,
            [*self.running, *self._members],
            room_tokens=budget.kv.remaining_current,
            paged_need=rounded + size,
        )
        if shortfall is not None:
            return self._refuse(request, 0, Result.NO_TOKEN, Reason.KV_TOTAL_EXHAUSTED, *shortfall)
        rem_chunk = budget.chunk.remaining
        extend = candidate if rem_chunk is None else min(candidate, rem_chunk)
        is_cut = extend < candidate
        self._admit(request, 0, extend, is_cut=is_cut, pinned=0, depths=())
        if is_cut:
            self.state.continuation_after = request.rid
        return self._admitted(
            request,
            prefix_len=0,
            candidate=candidate,
            extend=extend,
            is_cut=is_cut,
            before=budget,
            reason=Reason.ADMITTED_FIRST_CHUNK if is_cut else Reason.ADMITTED_WHOLE,
            result=self.state.budget.state(),
        )

    def _slice(self, prefix_len: int, candidate: int) -> tuple[int, tuple[Reason, int, int] | None]:
        """4f: how much of `candidate` this step may compute, or the reason why none."""
        budget, page_size = self.state.budget, self._kv.page_size
        rounded = -(-candidate // page_size) * page_size
        rem_chunk = budget.chunk.remaining
        if rem_chunk is None:
            if self.state.members and rounded >= budget.compute.remaining:
                return 0, (Reason.COMPUTE_EXHAUSTED, rounded, budget.compute.remaining)
            return candidate, None
        if rounded <= rem_chunk:
            return candidate, None
        end = (prefix_len + rem_chunk // page_size * page_size) // page_size * page_size
        if end - prefix_len <= 0:
            return 0, (Reason.CHUNK_BELOW_PAGE, page_size, rem_chunk)
        if self.state.continuation_after is not None and (
            self._config.guards or self._config.schedule_policy is Policy.SHORTEST_PREFILL_FIRST
        ):
            return 0, (Reason.CHUNK_SLOT_TAKEN, rounded, rem_chunk)
        return end - prefix_len, None

    def _pages_for(self, tokens: int, *, held: int) -> int:
        return max(0, self._kv.pages_ceil(tokens) - held)

    def room_pages(self) -> int:
        """Pages that are free or can be made free after what this pass pinned and claimed."""
        kv = self.state.budget.kv
        return (kv.available_tokens - kv.pinned_tokens) // self._kv.page_size - self.state.claimed_pages

    def _admit(
        self,
        request: Request,
        prefix_len: int,
        extend: int,
        *,
        is_cut: bool,
        pinned: int,
        depths: tuple[tuple[int, int], ...],
    ) -> None:
        cost: Cost = self._accounting.price(request, extend=extend, is_cut=is_cut, pinned_tokens=pinned)
        self.state.budget = self.state.budget.charge(cost)
        self.state.pinned.update(depths)
        held = request.lease.count if request.lease is not None else prefix_len // self._kv.page_size
        self.state.claimed_pages += self._pages_for(prefix_len + extend, held=held)
        self._members.append(request)
        self.state.members.append(PrefillRow(request.rid, prefix_len, extend, not is_cut))

    def _admitted(  # noqa: PLR0913 - one record, every field named by its caller
        self,
        request: Request,
        *,
        prefix_len: int,
        candidate: int,
        extend: int,
        is_cut: bool,
        before: Budget,
        reason: Reason,
        result: Result,
        is_continuation: bool = False,
        kv_test: tuple[float, float] | None = None,
    ) -> AdmissionDecision:
        after = self.state.budget
        decision = AdmissionDecision(
            rid=request.rid,
            order=len(self.state.decisions),
            is_continuation=is_continuation,
            prefix_len=prefix_len,
            candidate_extend=candidate,
            selected_extend=extend,
            is_chunked=is_cut,
            result=result,
            reason=reason,
            before=before.view(),
            after=after.view(),
            reserved_new_tokens=self._accounting.reserved(request, is_cut=is_cut),
            need=kv_test[0] if kv_test else None,
            have=kv_test[1] if kv_test else None,
            overdrafts=self._overdrafts(after, is_continuation=is_continuation),
            times_passed_over=self._passed_over(request),
            kv_need=kv_test[0] if kv_test else None,
            kv_limit=kv_test[1] if kv_test else None,
        )
        self.state.decisions.append(decision)
        return decision

    def _overdrafts(self, after: Budget, *, is_continuation: bool) -> tuple[Overdraft, ...]:
        """The names under which this charge took a ledger below zero."""
        names: list[Overdraft] = []
        chunk = after.chunk.remaining
        if after.compute.remaining < 0:
            names.append(Overdraft.FIRST_UNCHUNKED if chunk is None else Overdraft.INPUT_BY_CHUNK)
        if chunk is not None and chunk < 0:
            names.append(Overdraft.CHUNK_PAGE_ROUNDING)
        if after.kv.remaining_total < 0 or after.kv.remaining_current < 0:
            names.append(Overdraft.CONTINUATION if is_continuation else Overdraft.KV_ROUNDING)
        return tuple(names)

    def _refuse(
        self,
        request: Request,
        prefix_len: int,
        result: Result,
        reason: Reason,
        need: float,
        have: float,
        *,
        is_continuation: bool = False,
        kv_test: tuple[float, float] | None = None,
    ) -> AdmissionDecision:
        view: LedgerView = self.state.budget.view()
        decision = AdmissionDecision(
            rid=request.rid,
            order=len(self.state.decisions),
            is_continuation=is_continuation,
            prefix_len=prefix_len,
            candidate_extend=request.seq_len - prefix_len,
            selected_extend=0,
            is_chunked=False,
            result=result,
            reason=reason,
            before=view,
            after=view,
            need=need,
            have=have,
            times_passed_over=self._passed_over(request),
            kv_need=kv_test[0] if kv_test else None,
            kv_limit=kv_test[1] if kv_test else None,
        )
        self.state.decisions.append(decision)
        return decision
