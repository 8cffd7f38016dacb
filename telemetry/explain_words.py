"""Words of explanations. Owns: what each reason means in plain English, and how numbers and times are written."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final

from engine.request import Cause
from engine.scheduler.decision import Reason
from telemetry.life_facts import EndFact
from telemetry.schema_parts import LedgerPart

REASON_WORDS: Final[dict[Reason, str]] = {
    Reason.ADMITTED_WHOLE: "everything uncached fitted",
    Reason.ADMITTED_FIRST_CHUNK: "a first piece fitted",
    Reason.ADMITTED_NEXT_CHUNK: "a further piece fitted",
    Reason.ADMITTED_LAST_CHUNK: "the rest fitted",
    Reason.KV_NOW_EXHAUSTED: "the KV pool had no room for it at that moment",
    Reason.KV_TOTAL_EXHAUSTED: "the KV pool could not hold its future beside what running requests were promised",
    Reason.PREFILL_MAX_REACHED: "the batch held as many prompts as prefill_max_requests allows",
    Reason.FULL_FLAG_SET: "the batch was marked full",
    Reason.DELAYED: "admission was delayed on purpose",
    Reason.PARKED_BY_GUARD: "a guard held it back, since the memory or the slice it needed was not there",
    Reason.PREEMPTED_FOR: "a more important request took its place",
    Reason.COMPUTE_EXHAUSTED: "the step's prefill compute (rem_input) was used up",
    Reason.CHUNK_EXHAUSTED: "the step's prefill slice (rem_chunk) was used up",
    Reason.CHUNK_BELOW_PAGE: "what was left of the prefill slice was less than a page",
    Reason.CHUNK_SLOT_TAKEN: "it would have to be cut, and another prompt was being prefilled in pieces already",
    Reason.ROWS_EXHAUSTED: "as many requests held memory as max_running_requests allows",
    Reason.SHARES_COLD_PREFIX: "an admitted request was computing the same prefix; one step later it is cached",
    Reason.NEVER_FITS: "it is larger than the empty pool",
    Reason.QUEUE_END: "everyone was considered",
}

_END_WORDS: Final[dict[Cause, str]] = {
    Cause.STOP: "Finished: it stopped by itself",
    Cause.LENGTH: "Finished: it reached its largest length",
    Cause.ABORT: "Aborted",
    Cause.ERROR: "Ended by an error",
    Cause.NEVER_FITS: "Refused: it can never fit",
    Cause.KV_POOL_EXHAUSTED: "Ended: it was the last one running and the KV pool had no page left for it",
    Cause.QUEUE_TIMEOUT: "Refused: it waited for its first admission longer than server.queue_timeout_s",
    Cause.DISPLACED: "Refused: the queue was full and a more important request took its place",
}


def span(ns: int) -> str:
    """A duration in the unit that suits it: 345 µs, 12.3 ms, 1.234 s."""
    if abs(ns) < 1_000_000:
        return f"{ns / 1e3:.0f} µs" if ns else "0 s"
    return f"{ns / 1e6:.1f} ms" if abs(ns) < 1_000_000_000 else f"{ns / 1e9:.3f} s"


def wall(unix_ns: int) -> str:
    """Calendar time, UTC, to the millisecond."""
    moment = datetime.fromtimestamp(unix_ns // 1_000_000_000, tz=UTC)
    return f"{moment:%Y-%m-%d %H:%M:%S}.{unix_ns // 1_000_000 % 1000:03d} UTC"


def times(count: int, one: str, many: str | None = None) -> str:
    """`3 tokens`, `1 token`."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def amount(value: float) -> str:
    """Tokens may be fractions, since promises are estimates: at most two decimals, none when whole."""
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.2f}"


def percent_of(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f} %" if whole > 0 else "0 %"


def code_words(code: str) -> str:
    """A code as words: kv_total_exhausted -> KV total exhausted."""
    return code.replace("_", " ").replace("kv ", "KV ")


def counted_test(reason: str | None, need: float, have: float) -> str:
    """The test of a reason that counts requests, not tokens; empty for every other."""
    if reason in {Reason.ROWS_EXHAUSTED, Reason.FULL_FLAG_SET}:
        return f"it needs {_rows(need)}, and max_running_requests leaves {amount(have)}"
    if reason == Reason.PREFILL_MAX_REACHED:
        return f"it would be prompt {amount(need)} of the batch, and prefill_max_requests allows {amount(have)}"
    return ""


def _rows(need: float) -> str:
    """The row that a request lacked, counted with those that its pass had given away."""
    return "1 row" if need == 1 else f"{amount(need)} rows with those admitted before it in the pass"


def need_have(reason: Reason, need: float | None, have: float | None) -> str:
    """The two sides of the test that decided; empty when nothing was compared."""
    if need is None or have is None or reason is Reason.FULL_FLAG_SET:
        return ""
    if reason is Reason.ROWS_EXHAUSTED:
        return f"it needed {_rows(need)}, and max_running_requests left {amount(have)}"
    if reason is Reason.PREFILL_MAX_REACHED:
        return f"it would have been prompt {amount(need)} where {amount(have)} may be"
    return f"need {amount(need)}, have {amount(have)} tokens"


def ledger_words(before: LedgerPart, after: LedgerPart) -> str:
    """Every ledger, before and after."""
    parts = []
    for name in LedgerPart.model_fields:
        left, right = getattr(before, name), getattr(after, name)
        parts.append(f"{name} off" if left is None or right is None else f"{name} {amount(left)} → {amount(right)}")
    return ", ".join(parts)


def end_words(end: EndFact, accepted_ns: int) -> str:
    """How it ended."""
    detail = f" ({end.detail})" if end.detail else ""
    words = _END_WORDS.get(end.cause, f"Ended by {end.cause}")
    after = span(end.at_ns - accepted_ns)
    return f"{words}{detail}, after {times(end.output_len, 'output token')} and {after}."
