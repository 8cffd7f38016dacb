"""Answers of the read API. Owns: the versioned values that `/observe/*` sends and that dashboards and clients read.

Frozen pydantic models without behaviour. Units are in the names: `_s` seconds (float), `_ns` integer nanoseconds on the
engine's monotonic clock, `_wall_s` seconds since the Unix epoch; lengths and ledgers are tokens unless the name says
pages. Reasons, blockers, states and kinds are the engine's own words, sent as text so that a reader of an older version
still shows a newer word. Readers ignore fields they do not know; a changed meaning raises OBSERVE_VERSION.
"""

from __future__ import annotations

from typing import Final, Literal

from pydantic import BaseModel, ConfigDict

OBSERVE_VERSION: Final = 1

#: Page states in the order of their byte in `PageMap.states_b64`.
PAGE_STATES: Final = ("free", "private", "protected", "evictable")

#: Why a waiting request waits; exactly one at every moment.
BLOCKERS: Final = (
    *("compute", "chunk", "kv_now", "kv_total", "rows", "chunk_slot"),
    *("order", "cold_prefix", "engine_busy", "delay", "prefill_max"),
)

#: The parts that time to first token is cut into, in the order they first occur.
TTFT_PARTS: Final = ("intake", "queue", "prepare", "chunk_forward", "commit", "between_chunks", "emit")


class Value(BaseModel):
    """Base of every value here."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


class Head(Value):
    """What every answer begins with.

    observe_seq  rises with every event of the engine: while it is the same, only ages differ between answers
    step         last step of the engine that this answer includes
    t_ns         engine clock of the last event included
    """

    observe_version: int = OBSERVE_VERSION
    engine_id: str
    observe_seq: int
    step: int
    t_ns: int
    t_wall_s: float


class Ledgers(Value):
    """What is left (or allowed) in each ledger. None: no such limit, or no pass yet."""

    rem_input: float | None = None
    rem_chunk: float | None = None
    remaining_total: float | None = None
    remaining_current: float | None = None
    rows: int | None = None


class KvPages(Value):
    """Pages of the pool by state; the four add up to `capacity`."""

    free: int = 0
    private: int = 0
    protected: int = 0
    evictable: int = 0
    capacity: int = 0


class EngineStatus(Head):
    """One look at the engine.

    heartbeat_age_s    since the loop last turned, by the server's clock when it answered
    requests           live requests by state: waiting, prefill, decode, retracted, emitting
    running            requests that hold K/V memory (prefill + decode)
    promised_tokens    reserved for the future output of running requests
    tokens_per_s       output tokens over the last `rate_window_s` seconds
    prefill_tokens_per_s  computed prompt tokens over the same window
    last_pass_ended_by  what ended the last pass before everybody was considered: the cause behind the blocker `order`
    violations         by law id, only those above zero; `invariants_checked`: whether a checker runs at all
    """

    version: str
    model: str
    attention_backend: str
    policy: str | None = None
    uptime_s: float
    heartbeat_age_s: float
    steps_total: int
    last_step_kind: str | None = None
    last_step_s: float | None = None
    waiting: int
    running: int
    requests: dict[str, int]
    waiting_by_blocker: dict[str, int]
    waiting_tokens: int
    waiting_oldest_s: float
    kv_pages: KvPages
    page_size: int
    limits: Ledgers
    remaining: Ledgers
    new_token_ratio: float
    promised_tokens: float
    tokens_per_s: float
    prefill_tokens_per_s: float
    rate_window_s: float
    requests_received: int
    requests_finished: dict[str, int]
    requests_rejected: dict[str, int]
    prompt_tokens_computed: int
    prompt_tokens_cached: int
    generation_tokens: int
    retractions: int
    evicted_pages: int
    invariants_checked: bool = False
    violations_total: int = 0
    violations: dict[str, int] = {}
    last_pass_ended_by: str | None = None


class QueueEntry(Value):
    """One waiting request, why it waits, and the numbers behind it.

    position             0 is the head of the order of the last pass; who no pass has ordered comes last
    matched_len          prefix found cached when it was last examined
    blocker              one of BLOCKERS
    reason               code of its last examination; for blocker `order`, what ended the pass; None before any
    need, have           the two sides of the test that decided (tokens; requests for rows), None when none compared
    who_stopped          the rid whose decision ended the pass, when this request was not reached
    last_evaluated_step  last step in which it was examined, None when never
    passes_waited        passes made while it waited
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
    last_evaluated_step: int | None = None
    times_passed_over: int = 0
    passes_waited: int = 0
    num_retractions: int = 0
    priority: int | None = None


class QueueAnswer(Head):
    """The waiting queue. `total` may exceed the entries sent; `by_blocker` covers the whole queue."""

    entries: tuple[QueueEntry, ...]
    total: int
    by_blocker: dict[str, int]


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


class PassRow(Value):
    """One step and the admission pass it made, if it made one.

    kind           idle | extend | mixed | decode
    limits         ledger limits of the pass; budget_open is after decode rows took their share
    mixed_rows     decode rows that ride in this step's prefill
    end            queue_end, result, budget, slots, skipped; None when no pass was made
    end_reason     closed reason code that ended the pass
    end_rid        the request at which it ended
    candidates     decisions in the order made
    step_s         whole step once it is applied; None while it runs
    """

    step: int
    t_wall_s: float
    kind: str
    policy: str | None = None
    limits: Ledgers = Ledgers()
    budget_open: Ledgers | None = None
    budget_close: Ledgers | None = None
    mixed_rows: int = 0
    prefill_tokens: int = 0
    decode_rows: int = 0
    candidates: tuple[DecisionRow, ...] = ()
    end: str | None = None
    end_reason: str | None = None
    end_rid: str | None = None
    not_considered: int = 0
    num_waiting: int = 0
    num_running: int = 0
    evicted_pages: int = 0
    retracted: tuple[str, ...] = ()
    guards: tuple[str, ...] = ()
    new_token_ratio: float = 0.0
    step_s: float | None = None


class PassesAnswer(Head):
    """The last passes, oldest first. A row with `end` None is a step without a pass."""

    passes: tuple[PassRow, ...]


class LatencyPoint(Value):
    """Latency over one slot of `LatencyAnswer.slot_s` seconds that ends at `t_wall_s`. None: nothing was observed."""

    t_wall_s: float
    ttft_count: int = 0
    ttft_p50_s: float | None = None
    ttft_p99_s: float | None = None
    tbt_count: int = 0
    tbt_p50_s: float | None = None
    tbt_p99_s: float | None = None
    tokens_per_s: float = 0.0
    prefill_tokens_per_s: float = 0.0
    waiting: int = 0
    running: int = 0
    steps: int = 0


class LatencyAnswer(Head):
    """Latency over time, oldest first, at most 600 points. Quantiles are exact up to the slot's sample bound."""

    slot_s: float
    points: tuple[LatencyPoint, ...]


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


class WaitSpan(Value):
    """A stretch of waiting under one blocker and reason, [start_ns, end_ns); equal answers in a row are one."""

    start_ns: int
    end_ns: int
    blocker: str
    reason: str | None = None
    who_stopped: str | None = None
    passes: int = 0


class Timeline(Value):
    """When everything happened to one request. Nanoseconds of the engine clock; None: not yet, or never.

    parts_ns      TTFT_PARTS; they add up to ttft_ns exactly, once the first byte (with no listener: first token) is out
    blockers_ns   they add up to parts_ns["queue"] + refused_between_ns exactly
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
    refused_between_ns: int = 0
    waits: tuple[WaitSpan, ...] = ()
    chunks: tuple[ChunkRow, ...] = ()
    gaps_ns: tuple[int, ...] = ()


class RequestDetail(Head):
    """Everything known about one request. `queue` only while it waits; `decisions` are the latest 256, oldest first."""

    request: RequestRow
    queue: QueueEntry | None = None
    timeline: Timeline
    decisions: tuple[DecisionRow, ...]
    decisions_left_out: int = 0


class PageOwner(Value):
    """Who holds pages.

    kind   request (private pages of a running request) | node (a shared prefix in the tree)
    label  the rid, or "node <id>"
    lock_count  requests that hold the node now; 1 for a request's private pages
    holders     rids that lock the node
    """

    owner: str
    kind: Literal["request", "node"]
    label: str
    pages: int
    state: str
    lock_count: int = 0
    holders: tuple[str, ...] = ()


class PageMap(Head):
    """The K/V pool, page by page.

    states_b64   base64 of one byte per page: index into PAGE_STATES
    owners_b64   base64 of little-endian uint16 per page: index into `owners` plus 1; 0 free, 65535 not listed
    owners       largest first, at most 1,000; `owners_total` counts all
    """

    page_size: int
    num_pages: int
    counts: KvPages
    states_b64: str
    owners_b64: str
    owners: tuple[PageOwner, ...]
    owners_total: int


class Explanation(Head):
    """Why a request waits, was late, or ended: plain sentences with numbers, in order of time."""

    rid: str
    sentences: tuple[str, ...]


class ObserveError(Value):
    """Body of a refused read. `field`, `value` and `limit` name what was wrong with the question."""

    error: str
    field: str | None = None
    value: str | None = None
    limit: str | None = None
