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
    version: str
    config: str
    """The effective configuration, as JSON."""
    model: str
    attention_backend: str
    page_size: int
    """Tokens per page."""
    num_pages: int
    max_running_requests: int
    wall_ns: int
    """Unix time at `t_ns`, nanoseconds."""
    engine_id: str


class RequestArrivedRecord(EventRecord):
    """A request entered the core (an input)."""

    type: Literal["RequestArrived"] = "RequestArrived"
    rid: str
    prompt_len: int
    max_new_tokens: int
    """After the clamp to the pool."""
    requested_new_tokens: int
    """Before the clamp."""
    page_keys: Packed
    """Packed little-endian int64, one salted key per full prompt page."""
    head32_key: int | None
    """Salted key of the first 32 tokens; null when the prompt is shorter."""
    ignore_eos: bool
    priority: int | None
    routing_key: str | None
    accepted_ns: int
    """When the HTTP layer, or the caller, took it."""
    trace_id: str
    parent_span_id: str

    def keys(self) -> NDArray[np.int64]:
        """The page keys, unpacked: int64 [full pages], read-only."""
        return np.frombuffer(self.page_keys, dtype="<i8")


class AbortRequestedRecord(EventRecord):
    """Someone asked to end a request (an input)."""

    type: Literal["AbortRequested"] = "AbortRequested"
    rid: str
    detail: str


class RequestTransitionedRecord(EventRecord):
    """A request changed state."""

    type: Literal["RequestTransitioned"] = "RequestTransitioned"
    rid: str
    source: RequestState | None
    """Null on arrival."""
    target: RequestState
    cause: Cause
    prompt_len: int
    output_len: int
    computed_len: int
    """Tokens whose K/V exists."""
    row: int | None
    num_retractions: int
    cached_len: int
    """Prompt tokens found in the cache at the first admission."""
    detail: str


class AdmissionDecidedRecord(EventRecord):
    """One examination of one request: every ledger before and after, and why."""

    type: Literal["AdmissionDecided"] = "AdmissionDecided"
    rid: str
    order: int
    """Place in the pass, 0 first."""
    is_continuation: bool
    """The unfinished prompt of an earlier step; it goes first."""
    prefix_len: int
    candidate_extend: int
    """Tokens the request would like to compute."""
    selected_extend: int
    """Tokens it was given; 0 when not admitted."""
    extend_end: int
    rem_input_before: int
    rem_input_after: int
    rem_chunk_before: int | None
    rem_chunk_after: int | None
    remaining_total_before: float
    remaining_total_after: float
    remaining_current_before: int
    remaining_current_after: int
    reserved_new_tokens: int
    """Future output promised to it."""
    is_chunked: bool
    """More prompt remains after this piece."""
    result: Result
    """The reference's answer: what happens to the next request."""
    reason: Reason
    need: float | None
    """Left side of the test that decided; null when no test compared anything."""
    have: float | None
    """Right side of that test."""
    stopped_pass: bool
    """This decision ended the pass."""
    times_passed_over: int
    """Later arrivals admitted before it so far."""
    overdrafts: tuple[Overdraft, ...]

    @property
    def is_admitted(self) -> bool:
        return self.reason in ADMITTED


class StepPlannedRecord(EventRecord):
    """A plan was committed. `t_ns` is the `now` it was made with (an input)."""

    type: Literal["StepPlanned"] = "StepPlanned"
    kind: StepKind
    active_policy: str | None
    """Policy in force; null when no pass was made."""
    prefills: tuple[PrefillPart, ...]
    decodes: tuple[str, ...]
    sampling: tuple[str, ...]
    """Requests that yield exactly one token."""
    retractions: tuple[RetractionPart, ...]
    preempted: tuple[str, ...]
    mixed_rows: int
    """Decode rows charged before any prefill."""
    budget_open: LedgerPart | None
    budget_close: LedgerPart | None
    pass_end: PassEndPart | None
    """Null when no pass was made."""
    chunk_limit: int | None
    """Cap on the continuation, set by the policy."""
    continuation: str | None
    """Unfinished prefill after this step."""
    batch_is_full: bool
    new_token_ratio: float
    num_waiting: int
    num_running: int
    waiting_tokens: int
    promised_tokens: float
    evicted_pages: int
    pages: PageCounts
    """[free, private, protected, evictable] after commit."""
    guards: tuple[Guard, ...]
    claim_failed: bool


class StepCompletedRecord(EventRecord):
    """A step was applied. `rows`, `times` and `failed` are inputs."""

    type: Literal["StepCompleted"] = "StepCompleted"
    kind: StepKind
    rows: tuple[OutcomePart, ...]
    times: TimesPart
    failed: bool
    """The executor raised; the requests of the step end with `error`."""
    pages: PageCounts
    """[free, private, protected, evictable] after apply."""
    num_waiting: int
    num_running: int


class PagesMovedRecord(EventRecord):
    """Pages changed state or owner."""

    type: Literal["PagesMoved"] = "PagesMoved"
    pages: Packed
    """Packed little-endian int32 page ids."""
    source: str
    target: str
    owner: str
    """After the move: "r:<row>", "n:<node>" or ""."""
    cause: str

    def page_ids(self) -> NDArray[np.int32]:
        """The page ids, unpacked: int32 [pages], read-only."""
        return np.frombuffer(self.pages, dtype="<i4")


class LockChangedRecord(EventRecord):
    """The lock count of one tree node changed because of `rid`."""

    type: Literal["LockChanged"] = "LockChanged"
    node: int
    rid: str
    delta: int
    count: int


class ResponseSentRecord(EventRecord):
    """What the HTTP layer saw of a response. Not a fact of the core: outside hash and replay."""

    type: Literal["ResponseSent"] = "ResponseSent"
    rid: str
    first_byte_ns: int | None
    last_byte_ns: int | None
    bytes_sent: int
    worst_send_ns: int
    """Longest single write."""
    disconnected: bool
