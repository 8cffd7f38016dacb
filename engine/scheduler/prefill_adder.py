"""PrefillAdder. Owns: the pure selection of one candidate after another against a Budget (rule book section 4).

It reads requests, the cache and values, and has no way to write: what a pass must remember (the budget, the nodes
pinned so far, the members) lives here, and dropping the object is the rollback. Based on the rules of SGLang 0.5.23's
PrefillAdder, with every answer given a reason, need and have. What an admission costs is the accounting's business.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engine.config import Policy, SchedulerConfig
from engine.kvcache.kv_cache import KvCache, PathCost
from engine.request import Request
from engine.scheduler.accounting import KvAccounting, Refusal, cut_units
from engine.scheduler.decision import AdmissionDecision, Guard, Reason, Result
from engine.scheduler.eos_walk import EosWalk
from engine.scheduler.ledgers import Budget
from engine.scheduler.pass_state import PassState
from engine.scheduler.plan import PrefillRow
from engine.scheduler.preemption import choose_victims

_NO_PINS = PathCost(0, ())


class PrefillAdder:
    """One pass. `consider_continuation` first, if there is one, then `consider` per candidate in queue order.

    riding  whether the running requests join the step with a token each
    stuck   whether the step before this one did nothing although somebody waited
    """

    def __init__(  # noqa: PLR0913 - everything that a pass may read, named once
        self,
        *,
        config: SchedulerConfig,
        kv: KvCache,
        accounting: KvAccounting,
        budget: Budget,
        running: Sequence[Request],
        ratio: float,
        passed_over: Callable[[Request], int],
        riding: bool = False,
        stuck: bool = False,
    ) -> None:
        self._config = config
        self._kv = kv
        self._accounting = accounting
        self._ratio = ratio
        self._riding = riding
        self._stuck = stuck
        self._eos_walk = EosWalk(ratio)
        self._members: list[Request] = []
        self._units = cut_units(accounting, page_size=kv.page_size, align=config.truncation_align_size)
        #: Who still runs; shrinks when someone is preempted.
        self.running = list(running)
        self.state = PassState(budget, passed_over)

    # -- the continuation ------------------------------------------------------------------------------------------

    def consider_continuation(self, request: Request, *, cap: int | None) -> AdmissionDecision:
        """Step 3: advance the active chunk, without matching again.

        Refused, it is parked: it keeps its place and its memory and waits. A guard parks it where the reference would
        compute 0 tokens or less, or claim pages that the pool does not have.
        """
        before = self.state.left
        extend = self._accounting.continue_by(request, self.state.budget, cap=cap, unit=self._units.later)
        if self._config.guards and not isinstance(extend, Refusal):
            extend = self._guarded(request, extend)
        if isinstance(extend, Refusal):
            self.state.continuation_after = request.rid
            return self.state.refused(
                request,
                request.computed_len,
                Result.CONTINUES,
                extend.reason,
                extend.need,
                extend.have,
                is_continuation=True,
            )
        is_cut = request.computed_len + extend < request.seq_len
        pages = self._pages_for(request, request.computed_len, extend)
        self._admit(request, request.computed_len, extend, is_cut=is_cut, pins=_NO_PINS, pages=pages)
        return self.state.admitted(
            request,
            prefix_len=request.computed_len,
            extend=extend,
            is_cut=is_cut,
            before=before,
            reason=Reason.ADMITTED_NEXT_CHUNK if is_cut else Reason.ADMITTED_LAST_CHUNK,
            result=Result.CONTINUES if is_cut else Result.LAST,
            reserved=self._accounting.reserved(request, is_cut=is_cut),
            is_continuation=True,
        )

    def _guarded(self, request: Request, extend: int) -> int | Refusal:
        """The same extend, unless a guard has to park the continuation."""
        pages, room = self._pages_for(request, request.computed_len, extend), self.room_pages()
        if extend > 0 and pages <= room:
            return extend
        self.state.guards.append(Guard.CONTINUATION_PARKED)
        if extend <= 0:
            return Refusal(Reason.PARKED_BY_GUARD, 1, self.state.budget.chunk.remaining or 0)
        size = self._kv.page_size
        return Refusal(Reason.PARKED_BY_GUARD, pages * size, room * size)

    # -- a waiting request -----------------------------------------------------------------------------------------

    def consider(self, request: Request) -> AdmissionDecision:
        """Steps 4c to 4h for one waiting request. `result` says what happens to the next one."""
        state, size, seq_len = self.state, self._kv.page_size, request.seq_len
        keys = request.keys.first((seq_len - 1) // size)
        match = self._kv.match(keys)
        prefix_len = match.pages * size
        state.touches.append((request.rid, len(keys)))
        state.considered[request.rid] = seq_len - prefix_len
        limit = self._config.prefill_max_requests
        if limit is not None and len(state.members) >= limit:
            count = len(state.members)
            return state.refused(request, prefix_len, Result.OTHER, Reason.PREFILL_MAX_REACHED, count + 1, limit)
        if request.ignore_eos and not self._kv.enable_radix and self._accounting.walks_known_lengths:
            return self._consider_known_length(request)
        pins = self._kv.path_cost(match, state.pinned, state.unlocked)
        need = self._accounting.need(request, prefix_len)
        have = state.left.remaining_total - pins.pages * size
        if not self._accounting.fits(need, have):
            reason = Reason.KV_TOTAL_EXHAUSTED
            return state.refused(request, prefix_len, Result.NO_TOKEN, reason, need, have, kv_test=(need, have))
        extend = self._slice(prefix_len, seq_len - prefix_len)
        if isinstance(extend, Refusal):
            return state.refused(request, prefix_len, Result.OTHER, *extend, kv_test=(need, have))
        pages = self._pages_for(request, prefix_len, extend)
        if self._config.guards:
            room = self.room_pages() - pins.pages
            if pages > room:
                state.guards.append(Guard.ALLOC_MISS)
                sides = (pages * size, room * size)
                reason = Reason.KV_NOW_EXHAUSTED
                return state.refused(request, prefix_len, Result.NO_TOKEN, reason, *sides, kv_test=(need, have))
        return self._take(request, prefix_len, extend, pins=pins, pages=pages, kv_test=(need, have))

    def refuse_untried(
        self, request: Request, reason: Reason, need: float, have: float, *, prefix_len: int
    ) -> AdmissionDecision:
        """A decision about a request that the pass ended in front of, before any match: rows, full flag, a delay.

        prefix_len  what the ordering matched, 0 when it matched nothing
        """
        return self.state.refused(request, prefix_len, Result.OTHER, reason, need, have)

    def preempt_for(self, request: Request, importance: Callable[[Request], int], last_extend: int) -> bool:
        """Release running requests in thought so that `request` may be tried; False when nobody gives way.

        last_extend  tokens that `request` would have computed when it was last considered, 0 if it never was
        """
        state, size = self.state, self._kv.page_size
        prefix_len = self._kv.match(request.keys.first((request.seq_len - 1) // size)).pages * size
        victims = choose_victims(
            self.running,
            urgent_importance=importance(request),
            lacking_tokens=self._accounting.lacking(request, prefix_len, state.budget, last_extend=last_extend),
            threshold=self._config.priority_preemption_threshold,
            importance=importance,
            estimate=self._gives_back(),
        )
        for victim in victims:
            assert victim.lease is not None, f"running request {victim.rid} has no lease"
            gained = self._kv.release_gain(victim.lease, state.unlocked, state.pinned) * size
            promised = self._accounting.running_growth(victim, self._ratio)
            taken = self._accounting.opening([victim], promised).current if self._accounting.counts_held_pages() else 0
            state.budget = state.budget.release(gained, promised, taken if self._riding else 0)
            state.preempted.append(victim.rid)
            self.running.remove(victim)
        return bool(victims)

    def preempt_for_memory(self, request: Request, importance: Callable[[Request], int]) -> AdmissionDecision | None:
        """After `request` was refused for K/V memory: admit it by releasing running requests. None: that does not help,
        and nothing has changed.

        The refusal stays in the record: it says what was lacking; who gave way stands in the plan.
        """
        state, refused = self.state, self.state.decisions[-1]
        if refused.is_admitted or refused.result is not Result.NO_TOKEN or not self._accounting.preempts_for_memory:
            return None
        before = (state.budget, list(self.running), dict(state.unlocked), list(state.preempted), list(state.guards))
        refusals = len(state.decisions)
        touch = state.touches.pop()
        if self.preempt_for(request, importance, state.considered[request.rid]):
            again = self.consider(request)
            if again.is_admitted:
                return again
            # Whoever it takes, it would not get in: nobody gives way for nothing.
            del state.decisions[refusals:]
            state.touches.pop()
        state.budget, self.running, state.unlocked, state.preempted, state.guards = before
        state.touches.append(touch)
        return None

    def _gives_back(self) -> Callable[[Request], float]:
        """What a victim gives back: its promise and, where the accounting counts them, pages. In the order asked."""
        unlocked = dict(self.state.unlocked)

        def estimate(victim: Request) -> float:
            promised = self._accounting.running_growth(victim, self._ratio)
            if not self._accounting.counts_held_pages():
                return promised
            assert victim.lease is not None, f"running request {victim.rid} has no lease"
            pages = self._kv.release_gain(victim.lease, unlocked, self.state.pinned)
            return promised + pages * self._kv.page_size

        return estimate

    # -- inside ----------------------------------------------------------------------------------------------------

    def _consider_known_length(self, request: Request) -> AdmissionDecision:
        """Radix off and `ignore_eos`: steps (1) to (3) in place of 4e and 4f."""
        budget, size = self.state.budget, self._kv.page_size
        candidate = request.seq_len
        paged = -(-candidate // size) * size + size
        current, total = budget.kv.remaining_current, budget.kv.remaining_total
        refusal: tuple[Reason, float, float] | None = None
        if not paged <= min(current, total):
            reason = Reason.KV_NOW_EXHAUSTED if current <= total else Reason.KV_TOTAL_EXHAUSTED
            refusal = (reason, paged, min(current, total))
        else:
            others = [*self.running, *self._members]
            shortfall = self._eos_walk.shortfall(request, others, room_tokens=current, paged_need=paged)
            if shortfall is not None:
                refusal = (Reason.KV_TOTAL_EXHAUSTED, *shortfall)
        if refusal is not None and not self._alone_with_room(request):
            return self.state.refused(request, 0, Result.NO_TOKEN, *refusal)
        rem_chunk = budget.chunk.remaining
        extend = candidate if rem_chunk is None else min(candidate, rem_chunk)
        if extend < candidate and self._config.truncation_align_size is not None:
            extend = extend // self._units.first * self._units.first
            if extend <= 0:
                sides = (self._units.first, rem_chunk or 0)
                return self.state.refused(request, 0, Result.OTHER, Reason.CHUNK_BELOW_PAGE, *sides)
        if extend <= 0:
            # A pass goes on past a spent slice while K/V memory is what stops it; a preemption may then free that.
            return self.state.refused(request, 0, Result.OTHER, Reason.CHUNK_BELOW_PAGE, 1, extend)
        if extend < candidate and self._slot_taken():
            sides = (candidate, rem_chunk or 0)
            return self.state.refused(request, 0, Result.OTHER, Reason.CHUNK_SLOT_TAKEN, *sides)
        return self._take(request, 0, extend, pins=_NO_PINS, pages=self._pages_for(request, 0, extend))

    def _alone_with_room(self, request: Request) -> bool:
        """A guard: where nobody else holds memory, a second refusal of what was accepted would be one for ever."""
        alone = not (self.running or self._members or self.state.continuation_after)
        if not (self._config.guards and self._stuck and alone):
            return False
        if request.prompt_len + request.max_new_tokens > self.room_pages() * self._kv.page_size:
            return False
        self.state.guards.append(Guard.LONE_REFUSED)
        return True

    def _slice(self, prefix_len: int, candidate: int) -> int | Refusal:
        """4f: how much of `candidate` this step may compute, or the reason why none."""
        budget = self.state.budget
        charge = self._accounting.rounded(candidate)
        piece = self._accounting.slice_of(budget)
        if piece is None:
            if self.state.members and self._accounting.refused_unchunked(charge, budget):
                return Refusal(Reason.COMPUTE_EXHAUSTED, charge, budget.compute.remaining)
            return candidate
        if charge <= piece.tokens:
            return candidate
        page = self._kv.page_size
        length = piece.tokens // self._units.first * self._units.first
        extend = (prefix_len + length) // page * page - prefix_len
        if extend <= 0:
            return Refusal(piece.bound_by, self._units.first, piece.tokens)
        if self._slot_taken():
            return Refusal(Reason.CHUNK_SLOT_TAKEN, charge, piece.tokens)
        return extend

    def _slot_taken(self) -> bool:
        """Whether another cut is impossible because one request is half-prefilled already."""
        if self.state.continuation_after is None:
            return False
        if self._config.schedule_policy is Policy.SHORTEST_PREFILL_FIRST:
            return True
        if self._config.guards:
            self.state.guards.append(Guard.SECOND_CUT)
        return self._config.guards

    def _pages_for(self, request: Request, prefix_len: int, extend: int) -> int:
        """Pages that computing this piece claims."""
        held = request.lease.count if request.lease is not None else prefix_len // self._kv.page_size
        return max(0, self._kv.pages_ceil(prefix_len + extend) - held)

    def room_pages(self) -> int:
        """Pages that are free or can be made free after what this pass pinned and claimed."""
        kv = self.state.budget.kv
        return (kv.available_tokens - kv.pinned_tokens) // self._kv.page_size - self.state.claimed_pages

    def _take(
        self,
        request: Request,
        prefix_len: int,
        extend: int,
        *,
        pins: PathCost,
        pages: int,
        kv_test: tuple[float, float] | None = None,
    ) -> AdmissionDecision:
        """Admit a waiting request, whole or cut. `pages`: what this piece claims."""
        before = self.state.left
        is_cut = prefix_len + extend < request.seq_len
        self._admit(request, prefix_len, extend, is_cut=is_cut, pins=pins, pages=pages)
        return self.state.admitted(
            request,
            prefix_len=prefix_len,
            extend=extend,
            is_cut=is_cut,
            before=before,
            reason=Reason.ADMITTED_FIRST_CHUNK if is_cut else Reason.ADMITTED_WHOLE,
            result=self.state.standing,
            reserved=self._accounting.reserved(request, is_cut=is_cut),
            kv_test=kv_test,
        )

    def _admit(
        self, request: Request, prefix_len: int, extend: int, *, is_cut: bool, pins: PathCost, pages: int
    ) -> None:
        """Charge it, pin its prefix, count its claim."""
        state = self.state
        cost = self._accounting.price(
            request,
            prefix_len=prefix_len,
            extend=extend,
            is_cut=is_cut,
            pinned_tokens=pins.pages * self._kv.page_size,
        )
        state.budget = state.budget.charge(cost)
        state.pinned.update(pins.depths)
        state.claimed_pages += pages
        self._members.append(request)
        state.members.append(PrefillRow(request.rid, prefix_len, extend, not is_cut))
        if is_cut:
            state.continuation_after = request.rid
