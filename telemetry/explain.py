"""Explain. Owns: telling one request's life in plain sentences with numbers.

`explain(journal, rid)` reads a journal once; `told(life)` makes the sentences. The wording depends on nothing but the
record, so the same journal always tells the same story. Times are told from the moment the request was accepted.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, TypeVar

from pydantic import BaseModel, ConfigDict

from engine.errors import AdmitscopeError
from engine.scheduler.decision import Reason
from telemetry.explain_words import (
    REASON_WORDS,
    amount,
    end_words,
    ledger_words,
    need_have,
    percent_of,
    span,
    times,
    wall,
)
from telemetry.journal_reader import JournalReader
from telemetry.life import LifeBuilder
from telemetry.life_facts import ChunkFact, Life, NoPass, NotReached, Refusals, SliceShare, Wait
from telemetry.policy_words import bound_words, rule_words
from telemetry.schema import Record
from telemetry.schema_events import RequestArrivedRecord
from telemetry.short_ids import meant

_NOT_ABOUT_REQUESTS: Final = ("PagesMoved", "LockChanged")
_NAMED: Final = 5
_LISTED: Final = 20
#: Shorter intakes are not told.
_TELLING_INTAKE_NS: Final = 10_000_000
_C = TypeVar("_C", NotReached, NoPass)


class UnknownRequest(AdmitscopeError):
    """The record has no request of this id; the message lists the nearest ids it has."""

    def __init__(self, rid: str, known: Iterable[str]) -> None:
        ids = list(dict.fromkeys(known))
        nearest = difflib.get_close_matches(rid, ids, n=5, cutoff=0.4) or ids[:5]
        has = f"it has {len(ids)} requests, nearest ids: {', '.join(nearest)}" if ids else "it has no request at all"
        super().__init__(f"no request {rid!r} in this record; {has}")
        self.nearest = tuple(nearest)
        self.known = tuple(ids)


class AmbiguousRequest(AdmitscopeError):
    """A shortened id may mean several requests; the message lists them, at most twenty."""

    def __init__(self, rid: str, ids: Sequence[str]) -> None:
        more = f" and {len(ids) - _LISTED} more" if len(ids) > _LISTED else ""
        super().__init__(f"{rid!r} may be {len(ids)} requests: {', '.join(ids[:_LISTED])}{more}")


class Sentence(BaseModel):
    """One sentence, and when it happened: nanoseconds after acceptance, and the step."""

    model_config = ConfigDict(frozen=True)

    at_ns: int
    step: int | None
    text: str


class Explanation(BaseModel):
    """A request's life: the facts and the sentences."""

    model_config = ConfigDict(frozen=True)

    rid: str
    sentences: tuple[Sentence, ...]
    life: Life
    torn: str | None = None

    def text(self) -> str:
        """For a terminal: one sentence a line, each with its time."""
        stamps = [f"{'+' if s.at_ns >= 0 else ''}{span(s.at_ns)}" for s in self.sentences]
        width = max(map(len, stamps))
        lines = [f"{stamp:>{width}}  {s.text}" for stamp, s in zip(stamps, self.sentences, strict=True)]
        if self.torn:
            lines.append(f"The journal ends early: {self.torn}")
        return "\n".join(lines)


def explain(journal: Path, rid: str) -> Explanation:
    """The life of `rid` by the journal at `journal`; a shortened id will do where one request only fits it.

    Raises UnknownRequest, AmbiguousRequest, JournalError.
    """
    reader = JournalReader(journal)
    try:
        explanation = explain_records(reader.records(without=_NOT_ABOUT_REQUESTS), rid)
    except UnknownRequest as error:
        ids = meant(rid, error.known)
        if not ids:
            raise
        if len(ids) > 1:
            raise AmbiguousRequest(rid, ids) from error
        reader = JournalReader(journal)
        explanation = explain_records(reader.records(without=_NOT_ABOUT_REQUESTS), ids[0])
    return explanation.model_copy(update={"torn": str(reader.torn) if reader.torn else None})


def explain_records(records: Iterable[Record], rid: str) -> Explanation:
    """The same from records, wherever they come from."""
    builder, known = LifeBuilder(rid), []
    for record in records:
        if isinstance(record, RequestArrivedRecord):
            known.append(record.rid)
        builder.feed(record)
    life = builder.life()
    if life is None:
        raise UnknownRequest(rid, known)
    return Explanation(rid=rid, sentences=told(life), life=life)


def told(life: Life) -> tuple[Sentence, ...]:
    """The life in sentences, in order of time."""
    out = [_arrival(life)]
    for wait in life.waits:
        out += _waiting(life, wait)
    out += [_chunk(life, chunk, number) for number, chunk in enumerate(life.chunks, 1)]
    out += _parked(life)
    for number, back in enumerate(life.retractions, 1):
        text = (
            f"Step {back.step}: retracted ({back.cause}) for the {_ordinal(number)} time: decoding had no page left. "
            f"It kept {times(back.output_len, 'output token')} and lost the K/V of {times(back.lost_tokens, 'token')}."
        )
        out.append(_at(life, back.at_ns, back.step, text))
    out += _tokens(life)
    if life.abort_asked_ns is not None:
        out.append(_at(life, life.abort_asked_ns, None, "Someone asked to abort it."))
    out += _end(life)
    # Stable: what happened in one moment stays in the order above.
    return tuple(sorted(out, key=lambda sentence: sentence.at_ns))


def _at(life: Life, t_ns: int, step: int | None, text: str) -> Sentence:
    return Sentence(at_ns=t_ns - life.accepted_ns, step=step, text=text)


def _arrival(life: Life) -> Sentence:
    clamped = ""
    if life.requested_new_tokens != life.max_new_tokens:
        clamped = f" (it asked for {life.requested_new_tokens:,}; the empty pool holds no more)"
    again = f" This id was used {life.times_used} times; this is the last." if life.times_used > 1 else ""
    wall_clock = f" at {wall(life.arrived_wall_ns)}" if life.arrived_wall_ns > 0 else ""
    queue = ""
    if life.waits:  # none when the journal has lost the line that says it entered the queue
        first = life.waits[0]
        verb = "was" if first.ahead == 1 else "were"
        queue = f" {times(first.ahead, 'request')} {verb} waiting and {first.running} held KV memory."
    text = (
        f"Request {life.rid} arrived{wall_clock}: a prompt of {times(life.prompt_len, 'token')}, at most "
        f"{times(life.max_new_tokens, 'output token')}{clamped}.{queue}{again}"
    )
    return _at(life, life.accepted_ns, None, text)


# -- the queue -----------------------------------------------------------------------------------------------------


def _waiting(life: Life, wait: Wait) -> list[Sentence]:
    took = span(wait.to_ns - wait.from_ns)
    came = "Waited" if wait.after == "arrive" else f"Back in the queue ({wait.after}), waited"
    if wait.end == "waiting":
        came = "Still waiting when the record ends: so far" if wait.after == "arrive" else f"{came} so far,"
    passes = times(wait.passes, "prefill pass", "prefill passes")
    text = f"{came} {took}, steps {wait.from_step + 1} to {max(wait.to_step, wait.from_step + 1)}, {passes}."
    if wait.to_step == wait.from_step:
        text = f"{came} {took}; no step was planned meanwhile."
    if wait.end == "admitted" and wait.passes == 1 and not wait.no_pass:
        text = f"{came} {took} and was admitted by the first pass, step {wait.to_step}."
    at_ns = wait.to_ns
    details = [
        *(_refused(refusals) for refusals in wait.refusals),
        *(_not_reached(stopped) for stopped in _by_reason(wait.not_reached)),
        *(_no_pass(skipped) for skipped in _by_reason(wait.no_pass)),
    ]
    if wait.slices_taken:
        details.append(_slices(wait.slices_taken))
    if wait.ahead:
        verb = "was" if wait.ahead_admitted == 1 else "were"
        details.append(f"Ahead of it: {times(wait.ahead, 'request')}; {wait.ahead_admitted} {verb} admitted meanwhile.")
    if wait.overtaken_passes:
        details.append(_overtaken(wait))
    return [_at(life, at_ns, wait.to_step, line) for line in (text, *(f"  {detail}" for detail in details))]


def _overtaken(wait: Wait) -> str:
    who = f" by {_names(wait.overtaken_by)}, which came later," if wait.overtaken_by else ""
    rules = " and ".join(rule_words(policy) for policy in wait.overtaken_under)
    by = f", ordered by {rules}" if rules else ""
    passes = times(wait.overtaken_passes, "pass", "passes")
    bounds = bound_words(wait.overtaken_under[-1] if wait.overtaken_under else "")
    return f"Passed over{who} in {passes}{by}. {bounds}"


def _refused(refusals: Refusals) -> str:
    test = need_have(refusals.reason, refusals.need, refusals.have)
    last = f"; at the last one {test}" if test and refusals.count > 1 else f": {test}" if test else ""
    return (
        f"Refused {times(refusals.count, 'time')} ({_steps(refusals.first_step, refusals.last_step)}) by "
        f"{refusals.reason}: {REASON_WORDS[refusals.reason]}{last}."
    )


def _slices(taken: Sequence[SliceShare]) -> str:
    """Who got the prefill budget in its stead: the refusals name only those that did not."""
    named = [f"{share.rid} ({times(share.tokens, 'token')})" for share in taken[:_NAMED]]
    rest = taken[_NAMED:]
    more = f" and {times(len(rest), 'other')} ({times(sum(each.tokens for each in rest), 'token')})" if rest else ""
    return f"The steps that had nothing left for it computed prompts of {', '.join(named)}{more}."


def _by_reason(facts: Iterable[_C]) -> list[list[_C]]:
    """Facts of one reason together, in order of first appearance."""
    groups: dict[Reason, list[_C]] = {}
    for fact in facts:
        groups.setdefault(fact.reason, []).append(fact)
    return list(groups.values())


def _not_reached(stopped: list[NotReached]) -> str:
    reason = stopped[0].reason
    enders = Counter({fact.rid: fact.count for fact in stopped if fact.rid is not None})
    where = f"the pass ended ahead of it, at {_counted(enders)}," if enders else "the pass ended before its turn"
    count = times(sum(fact.count for fact in stopped), "time")
    return f"Not looked at {count} ({_all_steps(stopped)}): {where} by {reason} ({REASON_WORDS[reason]})."


def _no_pass(skipped: list[NoPass]) -> str:
    reason = skipped[0].reason
    text = (
        f"No prefill pass in {times(sum(fact.count for fact in skipped), 'step')} ({_all_steps(skipped)}) by {reason}: "
        f"{REASON_WORDS[reason]}"
    )
    marked = [fact for fact in skipped if fact.set_by is not None and fact.set_by_rid is not None]
    if marked:
        text += f" after refusing {_counted(Counter({str(fact.set_by_rid): fact.count for fact in marked}))}"
        latest = max(marked, key=lambda fact: fact.last_step)
        if latest.set_by is not None:
            test = need_have(latest.set_by.reason, latest.set_by.need, latest.set_by.have)
            why = f": {test}" if test else ""
            text += f"; last {latest.set_by_rid} in step {latest.set_by.last_step} by {latest.set_by.reason}{why}"
    return text + "."


def _counted(counts: Counter[str]) -> str:
    """`r7 (12 times), r9 (3 times) and 4 others (5 times)`, most frequent first."""
    ranked = sorted(counts.items(), key=lambda entry: -entry[1])
    named = [f"{rid} ({times(count, 'time')})" for rid, count in ranked[:_NAMED]]
    rest = ranked[_NAMED:]
    if not rest:
        return ", ".join(named)
    return f"{', '.join(named)} and {times(len(rest), 'other')} ({times(sum(n for _, n in rest), 'time')})"


def _all_steps(facts: Sequence[NotReached | NoPass]) -> str:
    return _steps(min(fact.first_step for fact in facts), max(fact.last_step for fact in facts))


# -- prefill -------------------------------------------------------------------------------------------------------


def _chunk(life: Life, chunk: ChunkFact, number: int) -> Sentence:
    found = ""
    if chunk.reason in (Reason.ADMITTED_WHOLE, Reason.ADMITTED_FIRST_CHUNK):
        found = f"; {times(chunk.prefix_len, 'token')} found in the cache" if chunk.prefix_len else "; nothing cached"
    peers = [
        *([times(chunk.other_prompts, "other prompt")] if chunk.other_prompts else []),
        *([times(chunk.decode_rows, "decode row")] if chunk.decode_rows else []),
    ]
    beside = f", beside {' and '.join(peers)}" if peers else ""
    took = f" The step took {span(chunk.step_ns)}{beside}." if chunk.step_ns is not None else ""
    failed = " The step failed." if chunk.failed else ""
    overdrafts = f" Overdraft: {', '.join(chunk.overdrafts)}." if chunk.overdrafts else ""
    test = need_have(chunk.reason, chunk.need, chunk.have)
    fits = f" Its future fits ({test})." if test else ""
    promised = ""
    if chunk.reserved_new_tokens:
        promised = f" It was promised {times(chunk.reserved_new_tokens, 'output token')}."
    text = (
        f"Step {chunk.step}: chunk {number}, {chunk.reason}: tokens {chunk.prefix_len:,} to {chunk.extend_end:,} of "
        f"{chunk.seq_len:,} (prefix_len {chunk.prefix_len:,}, extend_len {chunk.extend_len:,}){found}.{fits} "
        f"{ledger_words(chunk.before, chunk.after)}.{promised}{overdrafts}{took}{failed}"
    )
    return _at(life, chunk.at_ns, chunk.step, text)


def _parked(life: Life) -> list[Sentence]:
    return [
        _at(
            life,
            life.chunks[-1].at_ns if life.chunks else life.accepted_ns,
            refusals.last_step,
            f"With its prompt half done: {_refused(refusals)}",
        )
        for refusals in life.parked
    ]


# -- tokens and the end --------------------------------------------------------------------------------------------


def _parts(life: Life, first_token_ns: int) -> str:
    """The time to the first token in parts that add up to it, each with its share.

    What is in no queue and in no step that computed a piece of the prompt lies between two pieces.
    """
    ttft = first_token_ns - life.accepted_ns
    waits = [wait for wait in life.waits if wait.to_ns <= first_token_ns]
    pieces = [piece for piece in life.chunks if piece.done_ns is not None and piece.done_ns <= first_token_ns]
    intake = waits[0].from_ns - life.accepted_ns if waits else 0
    queue = sum(wait.to_ns - wait.from_ns for wait in waits)
    computing = sum((piece.done_ns or 0) - piece.at_ns for piece in pieces)
    parts = (
        ("before the queue, until the engine took it in", intake),
        ("in the queue", queue),
        (f"in the {times(len(pieces), 'step')} that computed its prompt", computing),
        ("between these steps", ttft - intake - queue - computing),
    )
    # A request is taken in between two steps: a short intake is not worth a word.
    told = [
        f"{span(ns)} ({percent_of(ns, ttft)}) {where}"
        for at, (where, ns) in enumerate(parts)
        if ns >= (0 if at else _TELLING_INTAKE_NS) and (ns or at == 1)
    ]
    return ", ".join(told)


def _tokens(life: Life) -> list[Sentence]:
    if life.first_token_ns is None or life.last_token_ns is None:
        return []
    ttft = life.first_token_ns - life.accepted_ns
    first = f"Step {life.first_token_step}: first token. TTFT {span(ttft)}: {_parts(life, life.first_token_ns)}."
    out = [_at(life, life.first_token_ns, life.first_token_step, first)]
    gaps = life.output_len - 1
    if gaps > 0 and life.worst_gap is not None:
        took, worst = life.last_token_ns - life.first_token_ns, life.worst_gap
        with_prefill = f" with {times(worst.prefill_tokens, 'prefill token')}" if worst.prefill_tokens else ""
        waited = ", after a retraction" if worst.was_retracted else ""
        more = (
            f"{times(gaps, 'more token')} in {span(took)}: TBT {span(took // gaps)} on average, {span(worst.ns)} at "
            f"worst (step {worst.step}, {worst.kind}{with_prefill}{waited})."
        )
        out.append(_at(life, life.last_token_ns, None, more))
    return out


def _end(life: Life) -> list[Sentence]:
    out = []
    if life.end is None:
        state = f"The record ends at step {life.record_ends_step} with the request in state {life.state}"
        at_ns = max(life.record_ends_ns, life.arrived_ns)
        out.append(_at(life, at_ns, life.record_ends_step, f"{state}, {times(life.output_len, 'token')} out."))
    else:
        out.append(_at(life, life.end.at_ns, life.end.step, end_words(life.end, life.accepted_ns)))
    response = life.response
    if response is not None:
        at_ns = response.last_byte_ns or life.record_ends_ns
        if response.first_byte_ns is None:
            sent = "Nothing was sent to the client"
        else:
            first = span(response.first_byte_ns - life.accepted_ns)
            sent = f"Sent {amount(response.bytes_sent)} bytes to the client, the first after {first}"
        gone = ", which had gone" if response.disconnected else ""
        out.append(_at(life, at_ns, None, f"{sent}{gone}."))
    return out


def _steps(first: int, last: int) -> str:
    return f"step {first}" if first == last else f"steps {first} to {last}"


def _names(rids: tuple[str, ...]) -> str:
    named = ", ".join(rids[:_NAMED])
    return named if len(rids) <= _NAMED else f"{named} and {len(rids) - _NAMED} more"


def _ordinal(number: int) -> str:
    suffix = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{suffix}"
