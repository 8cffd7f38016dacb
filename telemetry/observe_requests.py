"""Answers about single requests. Owns: what `/observe/queue`, `/observe/requests` and `/observe/explain` say of one."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from telemetry.observe_base import Head, Ledgers, Value
from telemetry.observe_lanes import Lane


class Overtaker(Value):
    """A later comer that was admitted first: by which policy, and what that ordered the two by.

    order_key     see `PassRow.order_key`; "" where no record has it
    key, own_key  of the later comer, and of the request that waits, as of their last examinations; None when not known
    """

    rid: str
    step: int
    policy: str
    order_key: str = ""
    key: float | None = None
    own_key: float | None = None


class Stopper(Value):
    """The request at which the last pass ended, and the test that ended it there.

    reason      code of that test
    blocker     one of BLOCKERS: what `reason` stands for
    need, have  its two sides, as of QueueEntry; None when none compared, and of one that took the last of a budget
    step        of that examination; None where no record has it
    """

    rid: str
    reason: str
    blocker: str
    need: float | None = None
    have: float | None = None
    step: int | None = None


class QueueEntry(Value):
    """One waiting request, why it waits, and the numbers behind it.

    position             0 is the head of the order of the last pass; who no pass has ordered comes last
    matched_len          prefix found cached when it was last examined
    blocker              one of BLOCKERS
    reason               code of its last examination; for blocker `order`, what ended the pass; None before any
    need, have           the two sides of the test that decided (tokens; requests for rows), None when none compared
    who_stopped          the rid whose decision ended the pass, when this request was not reached
    stopper              the same request, with its own need and have; None where the pass ended at nobody, and in a
                         list of the queue behind the first 100
    last_evaluated_step  last step in which it was examined, None when never
    times_passed_over    passes so far that computed prompt of a later comer: what `max_overtakes` bounds
    overtaken_by         later comers that were admitted meanwhile
    overtaker            the latest of them, where its pass is still kept
    passes_waited        passes made while it waited
    held_ns              its wait by blocker, longest first: all of it so far, without the time that it ran
    order_ns             of the blocker `order` among these, by what ended the passes
    """

    rid: str
    position: int
    state: Literal["waiting", "retracted"] = "waiting"
    age_s: float
    prompt_len: int
    output_len: int = 0
    matched_len: int = 0
    blocker: str
    reason: str | None = None
    need: float | None = None
    have: float | None = None
    who_stopped: str | None = None
    stopper: Stopper | None = None
    last_evaluated_step: int | None = None
    times_passed_over: int = 0
    overtaken_by: int = 0
    overtaker: Overtaker | None = None
    passes_waited: int = 0
    num_retractions: int = 0
    priority: int | None = None
    held_ns: dict[str, int] = Field(default_factory=dict)
    order_ns: dict[str, int] = Field(default_factory=dict)


class DecisionRow(Value):
    """One examination of one request in one pass: each ledger before and after, and why. Tokens."""

    rid: str
    step: int
    t_wall_s: float
    order: int
    is_continuation: bool
    prefix_len: int
    candidate_extend: int
    selected_extend: int
    extend_end: int
    before: Ledgers
    after: Ledgers
    reserved_new_tokens: int
    is_chunked: bool
    result: str
    reason: str
    admitted: bool
    need: float | None = None
    have: float | None = None
    stopped_pass: bool = False
    times_passed_over: int = 0
    overdrafts: tuple[str, ...] = ()


class RequestRow(Value):
    """One request in a list: live (finish None) or finished.

    cached_tokens   prompt tokens found in the cache at its first admission
    queue_s         to the first admission (so far, while it waits)
    tbt_p50_s, tbt_max_s  gaps between its tokens
    trace_id        of the request's trace, "" when none
    """

    rid: str
    state: str
    accepted_wall_s: float
    prompt_len: int
    max_new_tokens: int
    cached_tokens: int | None = None
    outputs: int = 0
    queue_s: float | None = None
    ttft_s: float | None = None
    tbt_p50_s: float | None = None
    tbt_max_s: float | None = None
    duration_s: float | None = None
    chunks: int = 0
    retractions: int = 0
    finish: str | None = None
    trace_id: str = ""


class RequestsAnswer(Head):
    """Live requests in arrival order, then the latest finished ones, newest first (at most 500)."""

    live: tuple[RequestRow, ...]
    finished: tuple[RequestRow, ...]


class ChunkRow(Value):
    """One prefill chunk of one request, times in nanoseconds of the engine clock. None: not reached yet."""

    step: int
    prefix_len: int
    extend_len: int
    is_last: bool
    admitted_ns: int
    launched_ns: int | None = None
    ready_ns: int | None = None
    applied_ns: int | None = None
    decode_rows: int = 0


class EndedBy(Value):
    """What one reason had of a stretch under `order`: passes that it ended, and steps without a pass because of it."""

    reason: str
    ns: int
    passes: int = 0
    steps: int = 0


class WaitSpan(Value):
    """A stretch of waiting under one blocker and reason, [start_ns, end_ns); equal answers in a row are one.

    ended_by  of `order`: what ended its passes, longest first; `reason` and `who_stopped` are of the last one only
    """

    start_ns: int
    end_ns: int
    blocker: str
    reason: str | None = None
    who_stopped: str | None = None
    passes: int = 0
    ended_by: tuple[EndedBy, ...] = ()


class Timeline(Value):
    """When everything happened to one request. Nanoseconds of the engine clock; None: not yet, or never.

    parts_ns      TTFT_PARTS; they add up to ttft_ns exactly, once the first byte (with no listener: first token) is out
    blockers_ns   they add up to parts_ns["queue"] + refused_between_ns exactly
    order_ns      blockers_ns["order"] by what ended the passes: the limit to lift
    ttft_ns       accept to first byte written, or to the first token when no stream is known
    gaps_ns       between consecutive tokens, oldest first, the latest 1,024
    """

    accepted_ns: int
    enqueued_ns: int
    admitted_ns: int | None = None
    first_token_ns: int | None = None
    first_byte_ns: int | None = None
    last_token_ns: int | None = None
    last_byte_ns: int | None = None
    finished_ns: int | None = None
    ttft_ns: int | None = None
    parts_ns: dict[str, int]
    blockers_ns: dict[str, int]
    order_ns: dict[str, int] = Field(default_factory=dict)
    refused_between_ns: int = 0
    waits: tuple[WaitSpan, ...] = ()
    chunks: tuple[ChunkRow, ...] = ()
    gaps_ns: tuple[int, ...] = ()


class RequestDetail(Head):
    """Everything known about one request. `queue` only while it waits; `decisions` are the latest 256, oldest first.

    lane  None from an engine that does not say
    """

    request: RequestRow
    queue: QueueEntry | None = None
    timeline: Timeline
    decisions: tuple[DecisionRow, ...]
    decisions_left_out: int = 0
    lane: Lane | None = None


class Explanation(Head):
    """Why a request waits, was late, or ended: plain sentences with numbers, in order of time.

    queue  only while it waits: the same in fields
    named  request ids that stand in them, whole
    """

    rid: str
    sentences: tuple[str, ...]
    queue: QueueEntry | None = None
    named: tuple[str, ...] = ()
