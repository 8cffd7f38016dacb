"""Words of explanations. Owns: what each reason means, how numbers and times are written, how clauses stand together.

All of it in the language in use (`telemetry.words`).
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from functools import reduce
from typing import Final

from engine.request import Cause
from engine.scheduler.decision import Reason
from telemetry.life_facts import EndFact
from telemetry.schema_parts import LedgerPart
from telemetry.words import ENGLISH, mark, spoken, t, tn

REASON_WORDS: Final[dict[Reason, str]] = {
    Reason.ADMITTED_WHOLE: mark("everything uncached fitted"),
    Reason.ADMITTED_FIRST_CHUNK: mark("a first piece fitted"),
    Reason.ADMITTED_NEXT_CHUNK: mark("a further piece fitted"),
    Reason.ADMITTED_LAST_CHUNK: mark("the rest fitted"),
    Reason.KV_NOW_EXHAUSTED: mark("the KV pool had no room for it at that moment"),
    Reason.KV_TOTAL_EXHAUSTED: mark("the KV pool could not hold its future beside what running requests were promised"),
    Reason.PREFILL_MAX_REACHED: mark("the batch held as many prompts as prefill_max_requests allows"),
    Reason.FULL_FLAG_SET: mark("the batch was marked full"),
    Reason.DELAYED: mark("admission was delayed on purpose"),
    Reason.PARKED_BY_GUARD: mark("a guard held it back, since the memory or the slice it needed was not there"),
    Reason.PREEMPTED_FOR: mark("a more important request took its place"),
    Reason.COMPUTE_EXHAUSTED: mark("the step's prefill compute (rem_input) was used up"),
    Reason.CHUNK_EXHAUSTED: mark("the step's prefill slice (rem_chunk) was used up"),
    Reason.CHUNK_BELOW_PAGE: mark("what was left of the prefill slice was less than a page"),
    Reason.CHUNK_SLOT_TAKEN: mark("it would have to be cut, and another prompt was being prefilled in pieces already"),
    Reason.ROWS_EXHAUSTED: mark("as many requests held memory as max_running_requests allows"),
    Reason.SHARES_COLD_PREFIX: mark("an admitted request was computing the same prefix; one step later it is cached"),
    Reason.NEVER_FITS: mark("it is larger than the empty pool"),
    Reason.QUEUE_END: mark("everyone was considered"),
}

_END_WORDS: Final[dict[Cause, str]] = {
    Cause.STOP: mark("Finished: it stopped by itself"),
    Cause.LENGTH: mark("Finished: it reached its limit of output tokens (max_tokens)"),
    Cause.ABORT: mark("Aborted"),
    Cause.ERROR: mark("Ended by an error"),
    Cause.NEVER_FITS: mark("Refused: it can never fit"),
    Cause.KV_POOL_EXHAUSTED: mark("Ended: it was the last one running and the KV pool had no page left for it"),
    Cause.QUEUE_TIMEOUT: mark("Refused: it waited for its first admission longer than server.queue_timeout_s"),
    Cause.DISPLACED: mark("Refused: the queue was full and a more important request took its place"),
}


# -- numbers and times ---------------------------------------------------------------------------------------------


def span(ns: int) -> str:
    """A duration in the unit that suits it: 345 µs, 12.3 ms, 1.234 s."""
    if abs(ns) < 1_000_000:
        return f"{ns / 1e3:.0f} µs" if ns else "0 s"
    return f"{ns / 1e6:.1f} ms" if abs(ns) < 1_000_000_000 else f"{ns / 1e9:.3f} s"


def wall(unix_ns: int) -> str:
    """Calendar time, UTC, to the millisecond."""
    moment = datetime.fromtimestamp(unix_ns // 1_000_000_000, tz=UTC)
    return f"{moment:%Y-%m-%d %H:%M:%S}.{unix_ns // 1_000_000 % 1000:03d} UTC"


def amount(value: float) -> str:
    """Tokens may be fractions, since promises are estimates: at most two decimals, none when whole."""
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.2f}"


def percent_of(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f} %" if whole > 0 else "0 %"


def is_telling(part: int, whole: int) -> bool:
    """Whether `percent_of` would say more of it than 0 %."""
    return 200 * part > whole


def other(rest: int, whole: int) -> tuple[str, ...]:
    """What the parts told leave of a whole, so that they add up to it; nothing where that would be 0 %."""
    return (
        (t("other {time} ({share})", time=span(rest), share=percent_of(rest, whole)),)
        if is_telling(rest, whole)
        else ()
    )


def times(count: int, one: str, many: str | None = None) -> str:
    """`3 tokens`, `1 token`: English, for tables and heads that are English only."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


# -- counts --------------------------------------------------------------------------------------------------------


def tokens(count: int) -> str:
    return tn(count, "{n} token", "{n} tokens")


def output_tokens(count: int) -> str:
    return tn(count, "{n} output token", "{n} output tokens")


def requests(count: int) -> str:
    return tn(count, "{n} request", "{n} requests")


def passes(count: int) -> str:
    return tn(count, "{n} pass", "{n} passes")


def steps(count: int) -> str:
    return tn(count, "{n} step", "{n} steps")


def in_steps(count: int, first: int, last: int) -> str:
    """`step 7`; `3 steps (7 to 9)`: so many of those from the first to the last."""
    if first == last:
        return t("step {step}", step=first)
    return t("{steps} ({first} to {last})", steps=steps(count), first=first, last=last)


def ordinal(number: int) -> str:
    """`1st`, `12th`."""
    last_digit = 0 if number % 100 in (11, 12, 13) else number % 10
    match last_digit:
        case 1:
            return t("{n}st", n=number)
        case 2:
            return t("{n}nd", n=number)
        case 3:
            return t("{n}rd", n=number)
        case _:
            return t("{n}th", n=number)


# -- names, clauses and sentences, one after another ---------------------------------------------------------------


def listed(names: Iterable[str]) -> str:
    """`r7, r9`."""
    return reduce(lambda before, name: t("{names}, {name}", names=before, name=name), names)


def first_few(names: Iterable[str], most: int) -> str:
    """`r7, r9 and 3 more`."""
    found = list(names)
    named = listed(found[:most])
    return named if len(found) <= most else t("{names} and {n} more", names=named, n=f"{len(found) - most:,}")


def apart(parts: Iterable[str]) -> str:
    """`3.4 ms in the queue, 1.0 ms preparing its steps`: what is longer than a name."""
    found = list(parts)
    return reduce(lambda before, part: t("{parts}, {part}", parts=before, part=part), found) if found else ""


def clauses(said: Iterable[str]) -> str:
    """Clauses of one sentence that could each stand alone."""
    return reduce(lambda before, clause: t("{said}; {clause}", said=before, clause=clause), said)


def both(names: Iterable[str]) -> str:
    return reduce(lambda first, second: t("{first} and {second}", first=first, second=second), names)


def following(sentences: Iterable[str]) -> str:
    """Sentences in one line."""
    return reduce(lambda said, after: t("{said} {after}", said=said, after=after), filter(None, sentences))


# -- what was tested -----------------------------------------------------------------------------------------------


def code_words(code: str) -> str:
    """A code as words: kv_total_exhausted -> KV total exhausted. Codes are English: other languages have them as is."""
    return code.replace("_", " ").replace("kv ", "KV ") if spoken() == ENGLISH else code


def counted_test(reason: str | None, need: float, have: float) -> str:
    """The test of a reason that counts requests, not tokens; empty for every other."""
    if reason in {Reason.ROWS_EXHAUSTED, Reason.FULL_FLAG_SET}:
        if need == 1:
            return t("it needs 1 row, and max_running_requests leaves {have}", have=amount(have))
        return t(
            "it needs {need} rows with those admitted before it in the pass, and max_running_requests leaves {have}",
            need=amount(need),
            have=amount(have),
        )
    if reason == Reason.PREFILL_MAX_REACHED:
        return t(
            "it would be prompt {need} of the batch, and prefill_max_requests allows {have}",
            need=amount(need),
            have=amount(have),
        )
    return ""


def need_have(reason: Reason, need: float | None, have: float | None) -> str:
    """The two sides of the test that decided; empty when nothing was compared."""
    if need is None or have is None or reason is Reason.FULL_FLAG_SET:
        return ""
    if reason is Reason.ROWS_EXHAUSTED and need == 1:
        return t("it needed 1 row, and max_running_requests left {have}", have=amount(have))
    if reason is Reason.ROWS_EXHAUSTED:
        return t(
            "it needed {need} rows with those admitted before it in the pass, and max_running_requests left {have}",
            need=amount(need),
            have=amount(have),
        )
    if reason is Reason.PREFILL_MAX_REACHED:
        return t("it would have been prompt {need} where {have} may be", need=amount(need), have=amount(have))
    return t("need {need}, have {have} tokens", need=amount(need), have=amount(have))


def ledger_words(before: LedgerPart, after: LedgerPart) -> str:
    """Every ledger, before and after."""
    parts = []
    for name in LedgerPart.model_fields:
        left, right = getattr(before, name), getattr(after, name)
        if left is None or right is None:
            parts.append(t("{ledger} off", ledger=name))
        else:
            parts.append(t("{ledger} {before} → {after}", ledger=name, before=amount(left), after=amount(right)))
    return apart(parts)


def end_words(end: EndFact, accepted_ns: int) -> str:
    """How it ended."""
    words = _END_WORDS.get(end.cause)
    how = t(words) if words is not None else t("Ended by {cause}", cause=end.cause)
    told = {"how": how, "outputs": output_tokens(end.output_len), "time": span(end.at_ns - accepted_ns)}
    if end.detail:
        return t("{how} ({detail}), after {outputs} and {time}.", detail=end.detail, **told)
    return t("{how}, after {outputs} and {time}.", **told)
