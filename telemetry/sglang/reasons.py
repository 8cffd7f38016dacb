"""Reasons. Owns: the reason code, need and have of each answer of SGLang's adder, worked out from facts alone.

The adder answers with one of three words. Why it did follows from the numbers it had, tested in the order in which it
tests them; its memory test is not worked out but taken as it was made. A refusal that no test explains (a load from a
host tier that was declined, a prefill delayer) has no numbers: need and have are then None.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

from engine.scheduler.decision import LedgerView, Reason, Result
from telemetry.sglang.facts import Pass, Tried, Untried

_SPF: Final = "shortest-prefill-first"


class Verdict(NamedTuple):
    """What a record says of one answer."""

    result: Result
    reason: Reason
    need: float | None = None
    have: float | None = None


def verdict_of(tried: Tried, passed: Pass, *, page_size: int) -> Verdict:
    """The verdict on one request that the adder looked at."""
    if tried.is_admitted:
        return _admitted(tried)
    if tried.is_continuation:
        return Verdict(Result.CONTINUES, Reason.KV_NOW_EXHAUSTED)
    if tried.result == "NO_TOKEN":
        return _no_token(tried)
    return _other(tried, passed, page_size)


def _admitted(tried: Tried) -> Verdict:
    is_cut = tried.rest > 0
    if tried.is_continuation:
        reason = Reason.ADMITTED_NEXT_CHUNK if is_cut else Reason.ADMITTED_LAST_CHUNK
        return Verdict(Result.CONTINUES if is_cut else Result.LAST, reason)
    reason = Reason.ADMITTED_FIRST_CHUNK if is_cut else Reason.ADMITTED_WHOLE
    result = Result(tried.result or Result.CONTINUE)
    test = tried.test
    # The test of known lengths is told only when it refuses, as this engine's own records have it.
    if test is None or test.is_known_length:
        return Verdict(result, reason)
    return Verdict(result, reason, test.need, test.have)


def _no_token(tried: Tried) -> Verdict:
    test = tried.test
    if test is None:
        return Verdict(Result.NO_TOKEN, Reason.KV_TOTAL_EXHAUSTED)
    if test.passed:
        # The room is there as sums go: the walk over the ends of all others, or a load from the host, said no.
        reason = Reason.KV_TOTAL_EXHAUSTED if test.is_known_length else Reason.KV_NOW_EXHAUSTED
        return Verdict(Result.NO_TOKEN, reason)
    reason = Reason.KV_NOW_EXHAUSTED if test.limited_by_now else Reason.KV_TOTAL_EXHAUSTED
    return Verdict(Result.NO_TOKEN, reason, test.need, test.have)


def _other(tried: Tried, passed: Pass, page_size: int) -> Verdict:
    before = tried.before
    if passed.prefill_max is not None and tried.batch >= passed.prefill_max:
        return Verdict(Result.OTHER, Reason.PREFILL_MAX_REACHED, tried.batch + 1, passed.prefill_max)
    if tried.test is not None and tried.test.is_known_length:
        return _other_known_length(before)
    charge = -(-tried.candidate // page_size) * page_size
    chunk = before.rem_chunk
    if chunk is None:
        if tried.batch and charge >= before.rem_input:
            return Verdict(Result.OTHER, Reason.COMPUTE_EXHAUSTED, charge, before.rem_input)
        return _unexplained()
    if charge <= chunk:
        return _unexplained()
    if tried.had_continuation and passed.policy == _SPF:
        return Verdict(Result.OTHER, Reason.CHUNK_SLOT_TAKEN, charge, chunk)
    unit = math.lcm(page_size, passed.align or 1)
    length = chunk // page_size * page_size
    if passed.align is not None:
        length = length // passed.align * passed.align
    if (tried.prefix_len + length) // page_size * page_size <= tried.prefix_len:
        return Verdict(Result.OTHER, Reason.CHUNK_BELOW_PAGE, unit, chunk)
    return _unexplained()


def _other_known_length(before: LedgerView) -> Verdict:
    if before.rem_chunk is not None and before.rem_chunk <= 0:
        return Verdict(Result.OTHER, Reason.CHUNK_BELOW_PAGE, 1, before.rem_chunk)
    return _unexplained()


def _unexplained() -> Verdict:
    """Every test that has numbers was passed: what is left are delays, which have none."""
    return Verdict(Result.OTHER, Reason.DELAYED)


class End(NamedTuple):
    """Why a pass ended, and the request at which it did. `untried`: a verdict on a request that nobody tried."""

    stop: str
    reason: Reason
    rid: str | None
    not_considered: int
    untried: Verdict | None = None


_SKIPS: Final = {
    "queue_empty": Reason.QUEUE_END,
    "full_flag": Reason.FULL_FLAG_SET,
    "rows": Reason.ROWS_EXHAUSTED,
    "delayed": Reason.DELAYED,
}


def end_of(passed: Pass, verdicts: list[Verdict]) -> End:
    """The end of a pass. `verdicts`: those on `passed.tried`, in order."""
    if passed.skipped is not None:
        return End("skipped", _SKIPS[passed.skipped], passed.head, passed.waiting)
    looked = [(tried, verdict) for tried, verdict in zip(passed.tried, verdicts, strict=True) if tried.result]
    left = max(0, passed.waiting - len(looked))
    if looked:
        tried, verdict = looked[-1]
        if verdict.result is not Result.CONTINUE:
            reason = spent(tried.after) if tried.is_admitted else verdict.reason
            return End("result", reason, tried.rid, left)
    untried = passed.untried
    if untried is None:
        return End("queue_end", Reason.QUEUE_END, None, left)
    standing = passed.tried[-1].after if passed.tried else passed.opened
    assert standing is not None, "an adder was made, so it had ledgers"
    if standing.state() is Result.OTHER:
        reason = Reason.COMPUTE_EXHAUSTED if standing.rem_input <= 0 else Reason.CHUNK_EXHAUSTED
        return End("budget", reason, untried.rid, left)
    return End("slots", *_no_row(passed, untried), max(0, left - 1), _untried_verdict(passed, untried))


def _no_row(passed: Pass, untried: Untried) -> tuple[Reason, str]:
    return Reason.FULL_FLAG_SET if passed.was_full else Reason.ROWS_EXHAUSTED, untried.rid


def _untried_verdict(passed: Pass, untried: Untried) -> Verdict:
    """On the request in front of which rows, or the flag, ended the pass."""
    if passed.was_full:
        return Verdict(Result.OTHER, Reason.FULL_FLAG_SET, 1, 0)
    batch = sum(tried.is_admitted for tried in passed.tried)
    return Verdict(Result.OTHER, Reason.ROWS_EXHAUSTED, batch + 1, untried.rows)


def spent(left: LedgerView) -> Reason:
    """Which ledger an admission used up."""
    if left.remaining_total <= 0:
        return Reason.KV_TOTAL_EXHAUSTED
    if left.remaining_current <= 0:
        return Reason.KV_NOW_EXHAUSTED
    return Reason.COMPUTE_EXHAUSTED if left.rem_input <= 0 else Reason.CHUNK_EXHAUSTED
