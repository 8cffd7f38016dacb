"""PassState. Owns: what a pass has decided so far, and how each decision is written down."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from engine.request import Request
from engine.scheduler.decision import AdmissionDecision, Guard, Overdraft, Reason, Result
from engine.scheduler.ledgers import Budget
from engine.scheduler.plan import PrefillRow


@dataclass(slots=True)
class PassState:
    """What a pass has decided so far. Mutable only inside the pass."""

    budget: Budget
    passed_over: Callable[[Request], int]
    members: list[PrefillRow] = field(default_factory=list)
    decisions: list[AdmissionDecision] = field(default_factory=list)
    pinned: dict[int, int] = field(default_factory=dict)
    touches: list[tuple[str, int]] = field(default_factory=list)
    guards: list[Guard] = field(default_factory=list)
    unlocked: dict[int, int] = field(default_factory=dict)
    preempted: list[str] = field(default_factory=list)
    considered: dict[str, int] = field(default_factory=dict)
    claimed_pages: int = 0
    continuation_after: str | None = None

    def admitted(  # noqa: PLR0913 - one record, every field named by its caller
        self,
        request: Request,
        *,
        prefix_len: int,
        extend: int,
        is_cut: bool,
        before: Budget,
        reason: Reason,
        result: Result,
        reserved: int,
        is_continuation: bool = False,
        kv_test: tuple[float, float] | None = None,
    ) -> AdmissionDecision:
        """Write down an admission that was charged already; `before` is the budget it was charged to."""
        need, have = kv_test if kv_test is not None else (None, None)
        decision = AdmissionDecision(
            rid=request.rid,
            order=len(self.decisions),
            is_continuation=is_continuation,
            prefix_len=prefix_len,
            candidate_extend=request.seq_len - prefix_len,
            selected_extend=extend,
            is_chunked=is_cut,
            result=result,
            reason=reason,
            before=before.view(),
            after=self.budget.view(),
            reserved_new_tokens=reserved,
            need=need,
            have=have,
            overdrafts=_overdrafts(before, self.budget, is_continuation=is_continuation),
            times_passed_over=self.passed_over(request),
            kv_need=need,
            kv_limit=have,
        )
        self.decisions.append(decision)
        return decision

    def refused(
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
        """Write down a refusal; it costs nothing."""
        view = self.budget.view()
        decision = AdmissionDecision(
            rid=request.rid,
            order=len(self.decisions),
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
            times_passed_over=self.passed_over(request),
            kv_need=kv_test[0] if kv_test else None,
            kv_limit=kv_test[1] if kv_test else None,
        )
        self.decisions.append(decision)
        return decision


def _overdrafts(before: Budget, after: Budget, *, is_continuation: bool) -> tuple[Overdraft, ...]:
    """The names under which this charge took a ledger below zero."""
    names: list[Overdraft] = []
    chunk = after.chunk.remaining
    if after.compute.remaining < 0:
        names.append(Overdraft.FIRST_UNCHUNKED if chunk is None else Overdraft.INPUT_BY_CHUNK)
    if chunk is not None and chunk < 0:
        names.append(Overdraft.CHUNK_PAGE_ROUNDING)
    # A ledger that was below zero before, and that this charge did not touch, is nobody's overdraft.
    total = after.kv.remaining_total < min(0, before.kv.remaining_total)
    if total or after.kv.remaining_current < min(0, before.kv.remaining_current):
        names.append(Overdraft.CONTINUATION if is_continuation else Overdraft.KV_ROUNDING)
    return tuple(names)
