"""Answers of the read API. Owns: the versioned values that `/observe/*` sends and that dashboards and clients read.

Frozen pydantic models without behaviour. Units are in the names: `_s` seconds (float), `_ns` integer nanoseconds on the
engine's monotonic clock, `_wall_s` seconds since the Unix epoch; lengths and ledgers are tokens unless the name says
pages. Reasons, blockers, states and kinds are the engine's own words, sent as text so that a reader of an older version
still shows a newer word. Readers ignore fields they do not know; a changed meaning raises OBSERVE_VERSION.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from telemetry.observe_base import (
    BLOCKERS,
    OBSERVE_VERSION,
    PAGE_STATES,
    TTFT_PARTS,
    Head,
    KvPages,
    Ledgers,
    Value,
)
from telemetry.observe_kv import PageFact, PoolAnswer, PoolPoint, TreeAnswer, TreeMore, TreePick, TreeRow
from telemetry.observe_lanes import Lane, LanesAnswer, LaneSpan, Stall
from telemetry.observe_latency import FirstToken, LatencyBreakdown, ObjectiveShare, PartsSlot, RecentFirsts, TailShare
from telemetry.observe_laws import (
    EvidenceAnswer,
    EvidenceDetail,
    EvidenceRecord,
    EvidenceRow,
    LastViolation,
    LawRow,
    LawsAnswer,
    StateRow,
)
from telemetry.observe_requests import (
    ChunkRow,
    DecisionRow,
    EndedBy,
    Explanation,
    Overtaker,
    QueueEntry,
    RequestDetail,
    RequestRow,
    RequestsAnswer,
    Stopper,
    Timeline,
    WaitSpan,
)


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
    laws_by_mode       how many laws are off, record and raise; empty from an engine that does not say
    journal            first file of the run's journal, as the engine's own machine names it; null when none is written
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
    violations: dict[str, int] = Field(default_factory=dict)
    laws_by_mode: dict[str, int] = Field(default_factory=dict)
    last_pass_ended_by: str | None = None
    journal: str | None = None


class QueueAnswer(Head):
    """The waiting queue. `total` may exceed the entries sent; `by_blocker` covers the whole queue."""

    entries: tuple[QueueEntry, ...]
    total: int
    by_blocker: dict[str, int]


class QueueMove(Value):
    """Where one waiting request stood before a pass, and where its policy put it.

    before  place by entry to the queue, 0 for the first
    after   place in which the pass looked at it; None when the pass ended before it
    key     what its policy sorts by, in the unit of `PassRow.order_key`; None when that is not in the records
    """

    rid: str
    before: int
    after: int | None = None
    key: float | None = None


class PassRow(Value):
    """One step and the admission pass it made, if it made one.

    kind           idle | extend | mixed | decode
    limits         ledger limits of the pass; budget_open is after decode rows took their share
    mixed_rows     decode rows that ride in this step's prefill
    end            queue_end, result, budget, slots, skipped; None when no pass was made
    end_reason     closed reason code that ended the pass
    end_rid        the request at which it ended
    full_by        where end_reason is full_flag_set: the reason of the refusal that set the flag; None: not known
    full_since     the step of that refusal
    candidates     decisions in the order made
    step_s         whole step once it is applied, from the begin of its plan; None while it runs
    behind_s       part of step_s in which the step before was still computed; 0 where steps do not overlap
    order_key      what the policy sorted by: entry, cached_tokens, uncached_tokens, max_new_tokens, priority; or "",
                   when that is not in the records
    moves          who was looked at, in that order, then the first of the others; `waiting_before` counts all
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
    full_by: str | None = None
    full_since: int | None = None
    not_considered: int = 0
    num_waiting: int = 0
    num_running: int = 0
    evicted_pages: int = 0
    retracted: tuple[str, ...] = ()
    guards: tuple[str, ...] = ()
    new_token_ratio: float = 0.0
    step_s: float | None = None
    behind_s: float = 0.0
    order_key: str = ""
    moves: tuple[QueueMove, ...] = ()
    waiting_before: int = 0


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


class ObserveError(Value):
    """Body of a refused read. `field`, `value` and `limit` name what was wrong with the question."""

    error: str
    field: str | None = None
    value: str | None = None
    limit: str | None = None


__all__ = [
    "BLOCKERS",
    "OBSERVE_VERSION",
    "PAGE_STATES",
    "TTFT_PARTS",
    "ChunkRow",
    "DecisionRow",
    "EndedBy",
    "EngineStatus",
    "EvidenceAnswer",
    "EvidenceDetail",
    "EvidenceRecord",
    "EvidenceRow",
    "Explanation",
    "FirstToken",
    "Head",
    "KvPages",
    "Lane",
    "LaneSpan",
    "LanesAnswer",
    "LastViolation",
    "LatencyAnswer",
    "LatencyBreakdown",
    "LatencyPoint",
    "LawRow",
    "LawsAnswer",
    "Ledgers",
    "ObjectiveShare",
    "ObserveError",
    "Overtaker",
    "PageFact",
    "PageMap",
    "PageOwner",
    "PartsSlot",
    "PassRow",
    "PassesAnswer",
    "PoolAnswer",
    "PoolPoint",
    "QueueAnswer",
    "QueueEntry",
    "QueueMove",
    "RecentFirsts",
    "RequestDetail",
    "RequestRow",
    "RequestsAnswer",
    "Stall",
    "StateRow",
    "Stopper",
    "TailShare",
    "Timeline",
    "TreeAnswer",
    "TreeMore",
    "TreePick",
    "TreeRow",
    "Value",
    "WaitSpan",
]
