"""PassState. Owns: what a pass has decided so far, and how each decision is written down."""

from __future__ import annotations

from collections.abc import Callable

from engine.request import Request
from engine.scheduler.decision import AdmissionDecision, Guard, LedgerView, Overdraft, Reason, Result
from engine.scheduler.ledgers import Budget
from engine.scheduler.plan import PrefillRow


class PassState:
    """What a pass has decided so far. Mutable only inside the pass.

    left      what `budget` leaves in each ledger: the record that decisions carry
    standing  what rule 4a says of it
    """

    __slots__ = (
        "_budget",
        "claimed_pages",
        "considered",
        "continuation_after",
        "decisions",
        "guards",
        "left",
        "members",
        "passed_over",
        "pinned",
        "preempted",
        "standing",
        "touches",
        "unlocked",
    )

    def __init__(self, budget: Budget, passed_over: Callable[[Request], int]) -> None:
        self.budget = budget
        self.passed_over = passed_over
        self.members: list[PrefillRow] = []
        self.decisions: list[AdmissionDecision] = []
        self.pinned: dict[int, int] = {}
        self.touches: list[tuple[str, int]] = []
        self.guards: list[Guard] = []
        self.unlocked: dict[int, int] = {}
        self.preempted: list[str] = []
        self.considered: dict[str, int] = {}
        self.claimed_pages = 0
        self.continuation_after: str | None = None

    @property
    def budget(self) -> Budget:
        return self._budget

    @budget.setter
    def budget(self, budget: Budget) -> None:
        self._budget = budget
        self.left: LedgerView = budget.view()
        self.standing: Result = self.left.state()

    def admitted(  # noqa: PLR0913 - one record, every field named by its caller
        self,
        request: Request,
        *,
        prefix_len: int,
        extend: int,
        is_cut: bool,
        before: LedgerView,
        reason: Reason,
        result: Result,
        reserved: int,
        is_continuation: bool = False,
        kv_test: tuple[float, float] | None = None,
    ) -> AdmissionDecision:
        """Write down an admission that was charged already; `before` is what was left until then."""
        need, have = kv_test if kv_test is not None else (None, None)
        decision = AdmissionDecision(
            request.rid,
            len(self.decisions),
            is_continuation,
            prefix_len,
            request.seq_len - prefix_len,
            extend,
            is_cut,
            result,
            reason,
            before,
            self.left,
            reserved,
            need,
            have,
            overdrafts(before, self.left, is_continuation=is_continuation),
            self.passed_over(request),
            need,
            have,
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
            before=self.left,
            after=self.left,
            need=need,
            have=have,
            times_passed_over=self.passed_over(request),
            kv_need=kv_test[0] if kv_test else None,
            kv_limit=kv_test[1] if kv_test else None,
        )
        self.decisions.append(decision)
        return decision


def overdrafts(before: LedgerView, after: LedgerView, *, is_continuation: bool) -> tuple[Overdraft, ...]:
    """The names under which this charge took a ledger below zero."""
    chunk, total, current = after.rem_chunk, after.remaining_total, after.remaining_current
    if after.rem_input >= 0 and total >= 0 and current >= 0 and (chunk is None or chunk >= 0):
        return ()
    names: list[Overdraft] = []
    if after.rem_input < 0:
        names.append(Overdraft.FIRST_UNCHUNKED if chunk is None else Overdraft.INPUT_BY_CHUNK)
    if chunk is not None and chunk < 0:
        names.append(Overdraft.CHUNK_PAGE_ROUNDING)
    # A ledger that was below zero before, and that this charge did not touch, is nobody's overdraft.
    if total < min(0, before.remaining_total) or current < min(0, before.remaining_current):
        names.append(Overdraft.CONTINUATION if is_continuation else Overdraft.KV_ROUNDING)
    return tuple(names)
