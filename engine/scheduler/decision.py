"""Decisions. Owns: the closed reason codes, the results of the reference, one admission decision as a value."""

from __future__ import annotations

from typing import Final

import msgspec

from engine.codes import Code


class Result(Code):
    """What the reference's adder answers; it says what happens to the *next* request."""

    CONTINUE = "CONTINUE"
    NO_TOKEN = "NO_TOKEN"  # noqa: S105 - the reference's word, not a secret
    OTHER = "OTHER"
    LAST = "LAST"
    CONTINUES = "CONTINUES"


class Verdict(Code):
    """What a reason does to the pass."""

    ADMIT = "admit"
    STOP = "stop"
    NEXT = "next"
    FINISH = "finish"
    NOTE = "note"


class Reason(Code):
    """Why a request was admitted or not. Append-only; stable in journals; label values of `admissions_total`."""

    ADMITTED_WHOLE = "admitted_whole"
    ADMITTED_FIRST_CHUNK = "admitted_first_chunk"
    ADMITTED_NEXT_CHUNK = "admitted_next_chunk"
    ADMITTED_LAST_CHUNK = "admitted_last_chunk"
    KV_NOW_EXHAUSTED = "kv_now_exhausted"
    KV_TOTAL_EXHAUSTED = "kv_total_exhausted"
    PREFILL_MAX_REACHED = "prefill_max_reached"
    FULL_FLAG_SET = "full_flag_set"
    DELAYED = "delayed"
    PARKED_BY_GUARD = "parked_by_guard"
    PREEMPTED_FOR = "preempted_for"
    COMPUTE_EXHAUSTED = "compute_exhausted"
    CHUNK_EXHAUSTED = "chunk_exhausted"
    CHUNK_BELOW_PAGE = "chunk_below_page"
    CHUNK_SLOT_TAKEN = "chunk_slot_taken"
    ROWS_EXHAUSTED = "rows_exhausted"
    SHARES_COLD_PREFIX = "shares_cold_prefix"
    NEVER_FITS = "never_fits"
    QUEUE_END = "queue_end"

    @property
    def verdict(self) -> Verdict:
        return VERDICTS[self]


VERDICTS: Final[dict[Reason, Verdict]] = {
    Reason.ADMITTED_WHOLE: Verdict.ADMIT,
    Reason.ADMITTED_FIRST_CHUNK: Verdict.ADMIT,
    Reason.ADMITTED_NEXT_CHUNK: Verdict.ADMIT,
    Reason.ADMITTED_LAST_CHUNK: Verdict.ADMIT,
    Reason.KV_NOW_EXHAUSTED: Verdict.STOP,
    Reason.KV_TOTAL_EXHAUSTED: Verdict.STOP,
    Reason.PREFILL_MAX_REACHED: Verdict.STOP,
    Reason.FULL_FLAG_SET: Verdict.STOP,
    Reason.DELAYED: Verdict.STOP,
    Reason.PARKED_BY_GUARD: Verdict.NEXT,
    Reason.PREEMPTED_FOR: Verdict.NOTE,
    Reason.COMPUTE_EXHAUSTED: Verdict.STOP,
    Reason.CHUNK_EXHAUSTED: Verdict.STOP,
    Reason.CHUNK_BELOW_PAGE: Verdict.STOP,
    Reason.CHUNK_SLOT_TAKEN: Verdict.STOP,
    Reason.ROWS_EXHAUSTED: Verdict.STOP,
    Reason.SHARES_COLD_PREFIX: Verdict.NEXT,
    Reason.NEVER_FITS: Verdict.FINISH,
    Reason.QUEUE_END: Verdict.NOTE,
}

ADMITTED: Final = frozenset(reason for reason, verdict in VERDICTS.items() if verdict is Verdict.ADMIT)


class Overdraft(Code):
    """The named ways in which a ledger may go below zero (`overdrafts_total{kind}`)."""

    FIRST_UNCHUNKED = "first_unchunked"
    INPUT_BY_CHUNK = "input_by_chunk"
    CHUNK_PAGE_ROUNDING = "chunk_page_rounding"
    KV_ROUNDING = "kv_rounding"
    CONTINUATION = "continuation"


class Guard(Code):
    """Where this engine departs from the reference, each counted (`guard_activations_total{guard}`)."""

    CONTINUATION_PARKED = "continuation_parked"
    ALLOC_MISS = "alloc_miss"
    MIXED_SAT_OUT = "mixed_sat_out"
    KV_POOL_EXHAUSTED = "kv_pool_exhausted"
    LAST_PUSHED_BACK = "last_pushed_back"
    SECOND_CUT = "second_cut"
    LONE_REFUSED = "lone_refused"


class LedgerView(msgspec.Struct, frozen=True, gc=False):
    """What is left in each ledger, in tokens. `rem_chunk` is None when chunking is off."""

    rem_input: int
    rem_chunk: int | None
    remaining_total: float
    remaining_current: int

    def state(self) -> Result:
        """Rule book 4a: NO_TOKEN when memory is spent, OTHER when compute or the slice is, else CONTINUE."""
        if self.remaining_total <= 0 or self.remaining_current <= 0:
            return Result.NO_TOKEN
        if self.rem_input <= 0 or (self.rem_chunk is not None and self.rem_chunk <= 0):
            return Result.OTHER
        return Result.CONTINUE


class AdmissionDecision(msgspec.Struct, frozen=True, gc=False):
    """One examination of one request in one pass.

    order          place in the pass, 0 first
    is_continuation  the active chunk (considered first, not matched again)
    need, have     the two sides of the test that decided, in tokens (requests for ROWS_EXHAUSTED); None when
                   no test compared anything
    """

    rid: str
    order: int
    is_continuation: bool
    prefix_len: int
    candidate_extend: int
    selected_extend: int
    is_chunked: bool
    result: Result
    reason: Reason
    before: LedgerView
    after: LedgerView
    reserved_new_tokens: int = 0
    need: float | None = None
    have: float | None = None
    overdrafts: tuple[Overdraft, ...] = ()
    times_passed_over: int = 0
    kv_need: float | None = None
    kv_limit: float | None = None

    @property
    def is_admitted(self) -> bool:
        return self.reason in ADMITTED

    @property
    def extend_end(self) -> int:
        return self.prefix_len + self.selected_extend
