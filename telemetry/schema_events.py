"""Event records. Owns: one pydantic model per event of `engine.events`, for readers.

`seq` is the place in this engine's life, `step` the step it belongs to, `t_ns` integer nanoseconds on the engine's
monotonic clock. Lengths and ledgers are tokens unless a name says pages.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from engine.request import Cause, RequestState
from engine.scheduler.decision import ADMITTED, Guard, Overdraft, Reason, Result
from engine.scheduler.plan import StepKind
from telemetry.schema_parts import (
    LedgerPart,
    OutcomePart,
    Packed,
    PageCounts,
    Part,
    PassEndPart,
    PrefillPart,
    RetractionPart,
    TimesPart,
)


class EventRecord(Part):
    """Common head."""

    type: str
    seq: int
    """Place in this engine's life, from 0, without holes."""
    step: int
    """Step it belongs to."""
    t_ns: int
    """Monotonic nanoseconds."""


class EngineStartedRecord(EventRecord):
    """First event of an engine's life."""

    type: Literal["EngineStarted"] = "EngineStarted"
    schema_version: int
    """Version of the records."""
    version: str
    """Version of the engine."""
    config: str
    """The effective configuration, as JSON."""
    model: str
    """Name of the model."""
    attention_backend: str
    """What computes attention."""
    page_size: int
    """Tokens per page."""
    num_pages: int
    """Pages of the KV pool."""
    max_running_requests: int
    """Requests that may hold KV memory at once."""
    wall_ns: int
    """Unix time at `t_ns`, nanoseconds."""
    engine_id: str
    """Made up anew for each engine."""


class RequestArrivedRecord(EventRecord):
    """A request entered the core (an input)."""

    type: Literal["RequestArrived"] = "RequestArrived"
    rid: str
    """The request's id."""
    prompt_len: int
    """Tokens of the prompt."""
    max_new_tokens: int
    """After the clamp to the pool."""
    requested_new_tokens: int
    """Before the clamp."""
    page_keys: Packed
    """Packed little-endian int64, one salted key per full prompt page."""
    head32_key: int | None
    """Salted key of the first 32 tokens; null when the prompt is shorter."""
    ignore_eos: bool
    """The end token does not end it."""
    priority: int | None
    """As the caller gave it."""
    routing_key: str | None
    """As the caller gave it."""
    accepted_ns: int
    """When the HTTP layer, or the caller, took it."""
    trace_id: str
    """W3C trace id of the caller; empty when it sent none."""
    parent_span_id: str
    """The caller's span."""
    trace_sampled: bool = False
    """The caller's sampled flag: it asked for this trace to be kept."""

    def keys(self) -> NDArray[np.int64]:
        """The page keys, unpacked: int64 [full pages], read-only."""
        return np.frombuffer(self.page_keys, dtype="<i8")


class AbortRequestedRecord(EventRecord):
    """A request is to end early (an input)."""

    type: Literal["AbortRequested"] = "AbortRequested"
    rid: str
    """The request's id."""
    detail: str
    """A word more, from a closed list or the caller."""
    cause: Cause = Cause.ABORT
    """`abort`: someone asked. `queue_timeout`, `displaced`: it was turned away from the queue."""


class RequestTransitionedRecord(EventRecord):
    """A request changed state."""

    type: Literal["RequestTransitioned"] = "RequestTransitioned"
    rid: str
    """The request's id."""
    source: RequestState | None
    """Null on arrival."""
    target: RequestState
    """The state after."""
    cause: Cause
    """Why it changed."""
    prompt_len: int
    """Tokens of the prompt."""
    output_len: int
    """Output tokens so far."""
    computed_len: int
    """Tokens whose K/V exists."""
    row: int | None
    """Row taken by an admission, or given back by an end or a retraction."""
    num_retractions: int
    """How often it was pushed back so far."""
    cached_len: int
    """Prompt tokens found in the cache at the first admission."""
    detail: str
    """A word more, from a closed list or the caller."""


class AdmissionDecidedRecord(EventRecord):
    """One examination of one request: every ledger before and after, and why."""

    type: Literal["AdmissionDecided"] = "AdmissionDecided"
    rid: str
    """The request's id."""
    order: int
    """Place in the pass, 0 first."""
    is_continuation: bool
    """The unfinished prompt of an earlier step; it goes first."""
    prefix_len: int
    """Tokens whose K/V exists already."""
    candidate_extend: int
    """Tokens the request would like to compute."""
    selected_extend: int
    """Tokens it was given; 0 when not admitted."""
    extend_end: int
    """prefix_len + selected_extend."""
    rem_input_before: int
    """Prefill compute of the step that was left."""
    rem_input_after: int
    """The same after this decision."""
    rem_chunk_before: int | None
    """Prefill slice of the step that was left; null when chunking is off."""
    rem_chunk_after: int | None
    """The same after this decision."""
    remaining_total_before: float
    """KV tokens left when the promised future of running requests is counted."""
    remaining_total_after: float
    """The same after this decision."""
    remaining_current_before: int
    """KV tokens left at this moment."""
    remaining_current_after: int
    """The same after this decision."""
    reserved_new_tokens: int
    """Future output promised to it."""
    is_chunked: bool
    """More prompt remains after this piece."""
    result: Result
    """The reference's answer: what happens to the next request."""
    reason: Reason
    """Why it was admitted or not."""
    need: float | None
    """Left side of the test that decided; null when no test compared anything."""
    have: float | None
    """Right side of that test."""
    stopped_pass: bool
    """This decision ended the pass."""
    times_passed_over: int
    """Passes so far that computed prompt of a later arrival while it waited; what `max_overtakes` bounds."""
    overdrafts: tuple[Overdraft, ...]
    """Named ways in which this charge took a ledger below zero."""

    @property
    def is_admitted(self) -> bool:
        return self.reason in ADMITTED


class StepPlannedRecord(EventRecord):
    """A plan was committed. `t_ns` is the `now` it was made with (an input)."""

    type: Literal["StepPlanned"] = "StepPlanned"
    kind: StepKind
    """What the step computes."""
    active_policy: str | None
    """Policy in force; null when no pass was made."""
    prefills: tuple[PrefillPart, ...]
    """Prompt pieces, in batch order."""
    decodes: tuple[str, ...]
    """Requests that decode one token."""
    sampling: tuple[str, ...]
    """Requests that yield exactly one token."""
    retractions: tuple[RetractionPart, ...]
    """Running requests pushed back."""
    preempted: tuple[str, ...]
    """Running requests that gave way to more important ones."""
    mixed_rows: int
    """Decode rows charged before any prefill."""
    budget_open: LedgerPart | None
    """Ledgers when the pass began."""
    budget_close: LedgerPart | None
    """Ledgers when it ended."""
    pass_end: PassEndPart | None
    """Null when no pass was made."""
    chunk_limit: int | None
    """Cap on the continuation, set by the policy."""
    continuation: str | None
    """Unfinished prefill after this step."""
    batch_is_full: bool
    """The reference's full flag after this step."""
    new_token_ratio: float
    """Share of running requests' remaining output that is promised, after this step."""
    num_waiting: int
    """Requests in the queue."""
    num_running: int
    """Requests that decode next."""
    waiting_tokens: int
    """Prompt and kept output tokens in the queue."""
    promised_tokens: float
    """Growth promised to running requests."""
    evicted_pages: int
    """Cached pages given up in this step."""
    pages: PageCounts
    """[free, private, protected, evictable] after commit."""
    guards: tuple[Guard, ...]
    """Guards that acted."""
    claim_failed: bool
    """The allocation missed; nothing of the plan happened."""
    chunk_size: int | None = None
    """Slice that the dynamic chunk chose, decode rows included; null when it is off."""
    predicted_step_ns: int | None = None
    """Time that it expects of this step; null when it is off or has too few steps to go by."""


class StepCompletedRecord(EventRecord):
    """A step was applied; with overlap after the next plan, under its own number. `rows`, `times`, `failed`: inputs."""

    type: Literal["StepCompleted"] = "StepCompleted"
    kind: StepKind
    """What the step computes."""
    rows: tuple[OutcomePart, ...]
    """One for each sampled token; none for a request that ended by the outcome of the step before."""
    times: TimesPart
    """Cuts of the step."""
    failed: bool
    """The executor raised; the requests of the step end with `error`."""
    pages: PageCounts
    """[free, private, protected, evictable] after apply."""
    num_waiting: int
    """Requests in the queue."""
    num_running: int
    """Requests that decode next."""


class PagesMovedRecord(EventRecord):
    """Pages changed state or owner."""

    type: Literal["PagesMoved"] = "PagesMoved"
    pages: Packed
    """Packed little-endian int32 page ids."""
    source: str
    """free | private | protected | evictable"""
    target: str
    """free | private | protected | evictable"""
    owner: str
    """After the move: "r:<row>", "n:<node>" or ""; "" as well when `owners` says it."""
    cause: str
    """claim | insert | duplicate | lock | unlock | split | evict | free"""
    owners: Packed = b""
    """Packed little-endian int32 rows, one for each page, when one claim serves several rows; else empty."""

    def page_ids(self) -> NDArray[np.int32]:
        """The page ids, unpacked: int32 [pages], read-only."""
        return np.frombuffer(self.pages, dtype="<i4")

    def owner_rows(self) -> NDArray[np.int32]:
        """`owners`, unpacked: int32 [pages], or [0] when `owner` is the one of all pages; read-only."""
        return np.frombuffer(self.owners, dtype="<i4")


class LockChangedRecord(EventRecord):
    """The lock count of one tree node changed because of `rid`."""

    type: Literal["LockChanged"] = "LockChanged"
    node: int
    """The tree node."""
    rid: str
    """The request's id."""
    delta: int
    """Change of its lock count."""
    count: int
    """Its lock count after."""


class ResponseSentRecord(EventRecord):
    """What the HTTP layer saw of a response. Not a fact of the core: outside hash and replay."""

    type: Literal["ResponseSent"] = "ResponseSent"
    rid: str
    """The request's id."""
    first_byte_ns: int | None
    """Null when nothing was written."""
    last_byte_ns: int | None
    """Null when nothing was written."""
    bytes_sent: int
    """Bytes of the body."""
    worst_send_ns: int
    """Longest single write."""
    disconnected: bool
    """The client had gone."""
