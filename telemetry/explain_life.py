"""A life in words. Owns: the sentences about one recorded request, in order of time, in the language in use.

The wording depends on nothing but the record, so the same journal always tells the same story. Times are told from the
moment the request was accepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from pydantic import BaseModel, ConfigDict

from engine.scheduler.decision import Reason
from telemetry.explain_wait import refused, wait_told
from telemetry.explain_words import (
    amount,
    apart,
    both,
    end_words,
    following,
    ledger_words,
    listed,
    need_have,
    ordinal,
    output_tokens,
    percent_of,
    span,
    tokens,
    wall,
)
from telemetry.life_facts import ChunkFact, Life, ResponseFact, RetractionFact, Wait
from telemetry.words import t, tn

#: Shorter intakes are not told: a request is taken in between two steps.
_TELLING_INTAKE_NS: Final = 10_000_000


class Sentence(BaseModel):
    """One sentence, and when it happened: nanoseconds after acceptance, and the step."""

    model_config = ConfigDict(frozen=True)

    at_ns: int
    step: int | None
    text: str


def told(life: Life) -> tuple[Sentence, ...]:
    """The life in sentences, in order of time."""
    out = [_at(life, life.accepted_ns, None, _arrival(life))]
    # Before the waits: a request is back in the queue at the very moment at which it was retracted.
    out += [
        _at(life, back.at_ns, back.step, _retracted(back, number)) for number, back in enumerate(life.retractions, 1)
    ]
    for wait in life.waits:
        out += [_at(life, *line) for line in wait_told(wait)]
    out += [_at(life, each.at_ns, each.step, _chunk(each, number)) for number, each in enumerate(life.chunks, 1)]
    parked_ns = life.chunks[-1].at_ns if life.chunks else life.accepted_ns
    for each in life.parked:
        began_ns = parked_ns if each.first_ns is None else each.first_ns
        text = t("With its prompt half done: {refused}", refused=refused(each))
        out.append(_at(life, began_ns, each.first_step, text))
    out += _tokens(life)
    if life.abort_asked_ns is not None:
        out.append(_at(life, life.abort_asked_ns, None, t("Someone asked to abort it.")))
    out += _end(life)
    # Stable: what happened in one moment stays in the order above.
    return tuple(sorted(out, key=lambda sentence: sentence.at_ns))


def _at(life: Life, t_ns: int, step: int | None, text: str) -> Sentence:
    return Sentence(at_ns=t_ns - life.accepted_ns, step=step, text=text)


def _arrival(life: Life) -> str:
    said = [_asked(life)]
    if life.waits:  # none when the journal has lost the line that says it entered the queue
        first = life.waits[0]
        said.append(
            tn(
                first.ahead,
                "{n} request was waiting and {running} held KV memory.",
                "{n} requests were waiting and {running} held KV memory.",
                running=first.running,
            )
        )
    if life.times_used > 1:
        said.append(t("This id was used {n} times; this is the last.", n=life.times_used))
    return following(said)


def _asked(life: Life) -> str:
    told = {
        "rid": life.rid,
        "time": wall(life.arrived_wall_ns) if life.arrived_wall_ns > 0 else "",
        "prompt": tokens(life.prompt_len),
        "outputs": output_tokens(life.max_new_tokens),
        "asked": f"{life.requested_new_tokens:,}",
    }
    is_clamped = life.requested_new_tokens != life.max_new_tokens
    if told["time"] and is_clamped:
        return t(
            "Request {rid} arrived at {time}: a prompt of {prompt}, at most {outputs} "
            "(it asked for {asked}; the empty pool holds no more).",
            **told,
        )
    if told["time"]:
        return t("Request {rid} arrived at {time}: a prompt of {prompt}, at most {outputs}.", **told)
    if is_clamped:
        return t(
            "Request {rid} arrived: a prompt of {prompt}, at most {outputs} "
            "(it asked for {asked}; the empty pool holds no more).",
            **told,
        )
    return t("Request {rid} arrived: a prompt of {prompt}, at most {outputs}.", **told)


# -- prefill -------------------------------------------------------------------------------------------------------


def _chunk(chunk: ChunkFact, number: int) -> str:
    test = need_have(chunk.reason, chunk.need, chunk.have)
    said = [
        _piece(chunk, number),
        t("Its future fits ({test}).", test=test) if test else "",
        t("{ledgers}.", ledgers=ledger_words(chunk.before, chunk.after)),
    ]
    if chunk.reserved_new_tokens:
        said.append(t("It was promised {outputs}.", outputs=output_tokens(chunk.reserved_new_tokens)))
    if chunk.overdrafts:
        said.append(t("Overdraft: {names}.", names=listed(chunk.overdrafts)))
    said.append(_step_took(chunk))
    if chunk.step_ns is not None and chunk.behind_ns:
        said.append(t("For {time} of it the step before was still computed.", time=span(chunk.behind_ns)))
    if chunk.failed:
        said.append(t("The step failed."))
    return following(said)


def _piece(chunk: ChunkFact, number: int) -> str:
    told = {
        "step": str(chunk.step),
        "number": str(number),
        "reason": chunk.reason,
        "prefix_len": f"{chunk.prefix_len:,}",
        "extend_len": f"{chunk.extend_len:,}",
        "end": f"{chunk.extend_end:,}",
        "seq_len": f"{chunk.seq_len:,}",
        "cached": tokens(chunk.prefix_len),
    }
    if chunk.reason not in (Reason.ADMITTED_WHOLE, Reason.ADMITTED_FIRST_CHUNK):
        return t(
            "Step {step}: chunk {number}, {reason}: tokens {prefix_len} to {end} of {seq_len} "
            "(prefix_len {prefix_len}, extend_len {extend_len}).",
            **told,
        )
    if chunk.prefix_len:
        return t(
            "Step {step}: chunk {number}, {reason}: tokens {prefix_len} to {end} of {seq_len} "
            "(prefix_len {prefix_len}, extend_len {extend_len}); {cached} found in the cache.",
            **told,
        )
    return t(
        "Step {step}: chunk {number}, {reason}: tokens {prefix_len} to {end} of {seq_len} "
        "(prefix_len {prefix_len}, extend_len {extend_len}); nothing cached.",
        **told,
    )


def _step_took(chunk: ChunkFact) -> str:
    if chunk.step_ns is None:
        return ""
    beside = []
    if chunk.other_prompts:
        beside.append(tn(chunk.other_prompts, "{n} other prompt", "{n} other prompts"))
    if chunk.decode_rows:
        beside.append(tn(chunk.decode_rows, "{n} decode row", "{n} decode rows"))
    if not beside:
        return t("The step took {time}.", time=span(chunk.step_ns))
    return t("The step took {time}, beside {others}.", time=span(chunk.step_ns), others=both(beside))


def _retracted(back: RetractionFact, number: int) -> str:
    return t(
        "Step {step}: retracted ({cause}) for the {ordinal} time: decoding had no page left. "
        "It kept {outputs} and lost the K/V of {lost}.",
        step=back.step,
        cause=back.cause,
        ordinal=ordinal(number),
        outputs=output_tokens(back.output_len),
        lost=tokens(back.lost_tokens),
    )


# -- tokens and the end --------------------------------------------------------------------------------------------


def _apart(waits: Sequence[Wait], pieces: Sequence[ChunkFact]) -> tuple[int, int]:
    """Time in the queue, and in steps that computed a piece. Where steps overlap, a moment counts once: for what began
    first."""
    stretches = [(wait.from_ns, wait.to_ns, 0) for wait in waits]
    stretches += [(piece.at_ns, piece.done_ns, 1) for piece in pieces if piece.done_ns is not None]
    sums, until = [0, 0], 0
    for start, end, kind in sorted(stretches):
        sums[kind] += max(0, end - max(start, until))
        until = max(until, end)
    return sums[0], sums[1]


def _parts(life: Life, first_token_ns: int) -> str:
    """The time to the first token in parts that add up to it, each with its share.

    What is in no queue and in no step that computed a piece of the prompt lies between two pieces.
    """
    ttft = first_token_ns - life.accepted_ns
    waits = [wait for wait in life.waits if wait.to_ns <= first_token_ns]
    pieces = [piece for piece in life.chunks if piece.done_ns is not None and piece.done_ns <= first_token_ns]
    intake = waits[0].from_ns - life.accepted_ns if waits else 0
    queue, computing = _apart(waits, pieces)
    between = ttft - intake - queue - computing

    def part(ns: int) -> dict[str, str]:
        return {"time": span(ns), "share": percent_of(ns, ttft)}

    said = []
    if intake >= _TELLING_INTAKE_NS:
        said.append(t("{time} ({share}) before the queue, until the engine took it in", **part(intake)))
    if queue >= 0:
        said.append(t("{time} ({share}) in the queue", **part(queue)))
    if computing > 0:
        said.append(
            tn(
                len(pieces),
                "{time} ({share}) in the {n} step that computed its prompt",
                "{time} ({share}) in the {n} steps that computed its prompt",
                **part(computing),
            )
        )
    if between > 0:
        said.append(t("{time} ({share}) between these steps", **part(between)))
    return apart(said)


def _tokens(life: Life) -> list[Sentence]:
    if life.first_token_ns is None or life.last_token_ns is None:
        return []
    first = t(
        "Step {step}: first token. TTFT {ttft}: {parts}.",
        step=life.first_token_step,
        ttft=span(life.first_token_ns - life.accepted_ns),
        parts=_parts(life, life.first_token_ns),
    )
    out = [_at(life, life.first_token_ns, life.first_token_step, first)]
    gaps = life.output_len - 1
    if gaps > 0 and life.worst_gap is not None:
        out.append(_at(life, life.last_token_ns, None, _gaps(life, gaps, life.last_token_ns - life.first_token_ns)))
    return out


def _gaps(life: Life, gaps: int, took: int) -> str:
    worst = life.worst_gap
    assert worst is not None, "there are gaps"
    told = {
        "more": tn(gaps, "{n} more token", "{n} more tokens"),
        "time": span(took),
        "average": span(took // gaps),
        "worst": span(worst.ns),
        "step": str(worst.step),
        "kind": worst.kind,
        "prefill": tn(worst.prefill_tokens, "{n} prefill token", "{n} prefill tokens"),
    }
    if worst.prefill_tokens and worst.was_retracted:
        return t(
            "{more} in {time}: TBT {average} on average, {worst} at worst "
            "(step {step}, {kind} with {prefill}, after a retraction).",
            **told,
        )
    if worst.prefill_tokens:
        return t(
            "{more} in {time}: TBT {average} on average, {worst} at worst (step {step}, {kind} with {prefill}).", **told
        )
    if worst.was_retracted:
        return t(
            "{more} in {time}: TBT {average} on average, {worst} at worst (step {step}, {kind}, after a retraction).",
            **told,
        )
    return t("{more} in {time}: TBT {average} on average, {worst} at worst (step {step}, {kind}).", **told)


def _end(life: Life) -> list[Sentence]:
    out = []
    if life.end is None:
        state = t(
            "The record ends at step {step} with the request in state {state}, {tokens} out.",
            step=life.record_ends_step,
            state=life.state,
            tokens=tokens(life.output_len),
        )
        out.append(_at(life, max(life.record_ends_ns, life.arrived_ns), life.record_ends_step, state))
    else:
        out.append(_at(life, life.end.at_ns, life.end.step, end_words(life.end, life.accepted_ns)))
    response = life.response
    if response is not None:
        out.append(_at(life, response.last_byte_ns or life.record_ends_ns, None, _sent(response, life.accepted_ns)))
    return out


def _sent(response: ResponseFact, accepted_ns: int) -> str:
    if response.first_byte_ns is None:
        if response.disconnected:
            return t("Nothing was sent to the client, which had gone.")
        return t("Nothing was sent to the client.")
    told = {"bytes": amount(response.bytes_sent), "first": span(response.first_byte_ns - accepted_ns)}
    if response.disconnected:
        return t("Sent {bytes} bytes to the client, the first after {first}, which had gone.", **told)
    return t("Sent {bytes} bytes to the client, the first after {first}.", **told)
