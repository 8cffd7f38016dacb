"""Events. Owns: the closed union of facts the engine publishes, and the sink protocol.

The engine knows no listener. Every event has `seq` (its place in this engine's life), `step` and `t_ns` (monotonic
nanoseconds). All but `ResponseSent` follow from the inputs of the core, so a replay must reproduce them byte for byte.
Built by position on the engine thread; readers validate with `telemetry.schema`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from itertools import groupby
from typing import Protocol

import msgspec

from engine.request import Cause, RequestState
from engine.scheduler.decision import Guard, LedgerView, Overdraft, Reason, Result
from engine.scheduler.plan import OutcomeRow, PassEnd, PrefillRow, Retraction, StepKind, StepTimes

#: Raised when a field is added or its meaning changes; old journals stay readable.
SCHEMA_VERSION = 3


class Event(msgspec.Struct, frozen=True, tag_field="type", gc=False):
    """Common head of every event."""

    seq: int
    step: int
    t_ns: int


class EngineStarted(Event, frozen=True, tag=True):
    """First event of an engine's life. `config` is the JSON of the effective configuration."""

    schema_version: int
    version: str
    config: str
    model: str
    attention_backend: str
    page_size: int
    num_pages: int
    max_running_requests: int
    wall_ns: int
    engine_id: str


class RequestArrived(Event, frozen=True, tag=True):
    """A request entered the core (an input). `page_keys` is packed little-endian int64, one per full prompt page.

    accepted_ns          when the HTTP layer (or caller) took it
    trace_sampled        the caller asked for its trace to be kept
    requested_new_tokens before the clamp to the pool; `max_new_tokens` is after it
    """

    rid: str
    prompt_len: int
    max_new_tokens: int
    requested_new_tokens: int
    page_keys: bytes
    head32_key: int | None
    ignore_eos: bool
    priority: int | None
    routing_key: str | None
    accepted_ns: int
    trace_id: str = ""
    parent_span_id: str = ""
    trace_sampled: bool = False


class AbortRequested(Event, frozen=True, tag=True):
    """A request is to end early (an input): someone asked, or it is turned away from the queue, which `cause` says."""

    rid: str
    detail: str = ""
    cause: Cause = Cause.ABORT


class RequestTransitioned(Event, frozen=True, tag=True):
    """A request changed state. `source` is None on arrival."""

    rid: str
    source: RequestState | None
    target: RequestState
    cause: Cause
    prompt_len: int
    output_len: int
    computed_len: int
    row: int | None
    num_retractions: int = 0
    cached_len: int = 0
    detail: str = ""


class AdmissionDecided(Event, frozen=True, tag=True):
    """One examination of one request: every ledger before and after, and why. Units are tokens.

    stopped_pass  this decision ended the pass
    """

    rid: str
    order: int
    is_continuation: bool
    prefix_len: int
    candidate_extend: int
    selected_extend: int
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
    is_chunked: bool
    result: Result
    reason: Reason
    need: float | None
    have: float | None
    stopped_pass: bool
    times_passed_over: int
    overdrafts: tuple[Overdraft, ...] = ()


class StepPlanned(Event, frozen=True, tag=True):
    """A plan was committed. `t_ns` is the `now` it was made with (an input).

    pages      [free, private, protected, evictable] after commit
    chunk_size, predicted_step_ns   the slice that the dynamic chunk chose, and the time it expects; None when off
    budget_open, budget_close   the ledgers after the decode rows were charged, and when the pass ended
    """

    kind: StepKind
    active_policy: str | None
    prefills: tuple[PrefillRow, ...]
    decodes: tuple[str, ...]
    sampling: tuple[str, ...]
    retractions: tuple[Retraction, ...]
    preempted: tuple[str, ...]
    mixed_rows: int
    budget_open: LedgerView | None
    budget_close: LedgerView | None
    pass_end: PassEnd | None
    chunk_limit: int | None
    continuation: str | None
    batch_is_full: bool
    new_token_ratio: float
    num_waiting: int
    num_running: int
    waiting_tokens: int
    promised_tokens: float
    evicted_pages: int
    pages: tuple[int, int, int, int]
    guards: tuple[Guard, ...] = ()
    claim_failed: bool = False
    chunk_size: int | None = None
    predicted_step_ns: int | None = None


class StepCompleted(Event, frozen=True, tag=True):
    """A step was applied. `rows` are the outcome (an input); `times` cut the step (an input). Where steps overlap it
    comes after the next plan; like the ends that it brings, it has the number of its own step.

    pages  [free, private, protected, evictable] after apply
    """

    kind: StepKind
    rows: tuple[OutcomeRow, ...]
    times: StepTimes
    failed: bool
    pages: tuple[int, int, int, int]
    num_waiting: int
    num_running: int


class PagesMoved(Event, frozen=True, tag=True):
    """Pages changed state or owner. The only way either changes.

    pages   packed little-endian int32 page ids
    source, target   free | private | protected | evictable
    owner   after the move: "r:<row>" for PRIVATE, "n:<node>" for tree pages, "" for FREE; "" with `owners`
    cause   claim | insert | duplicate | lock | unlock | split | evict | free
    owners  packed little-endian int32 rows, one for each page, when one claim serves several rows; empty otherwise
    """

    pages: bytes
    source: str
    target: str
    owner: str
    cause: str
    owners: bytes = b""

    def parts(self) -> Iterator[tuple[str, bytes]]:
        """(owner, packed pages) of each owner, in the order of the pages."""
        if not self.owners:
            yield self.owner, self.pages
            return
        end = 0
        for row, its in groupby(struct.unpack(f"<{len(self.owners) // 4}i", self.owners)):
            start, end = end, end + 4 * sum(1 for _ in its)
            yield f"r:{row}", self.pages[start:end]


class LockChanged(Event, frozen=True, tag=True):
    """The lock count of one tree node changed because of `rid`."""

    node: int
    rid: str
    delta: int
    count: int


class ResponseSent(Event, frozen=True, tag=True):
    """What the HTTP layer saw of a response; not a fact of the core, so not replayed.

    first_byte_ns, last_byte_ns  None when nothing was written
    worst_send_ns                longest single write
    """

    rid: str
    first_byte_ns: int | None
    last_byte_ns: int | None
    bytes_sent: int
    worst_send_ns: int
    disconnected: bool


AnyEvent = (
    EngineStarted
    | RequestArrived
    | AbortRequested
    | RequestTransitioned
    | AdmissionDecided
    | StepPlanned
    | StepCompleted
    | PagesMoved
    | LockChanged
    | ResponseSent
)


class EventSink(Protocol):
    """Anything that listens. `emit` runs on the engine thread: it must be quick and must not block."""

    def emit(self, event: AnyEvent) -> None: ...


class NullSink:
    """Listens to nothing."""

    def emit(self, event: AnyEvent) -> None:
        """Drop it."""


class RecordingSink:
    """Keeps everything: the fake for tests."""

    def __init__(self) -> None:
        self.events: list[AnyEvent] = []

    def emit(self, event: AnyEvent) -> None:
        self.events.append(event)


class FanOut:
    """Hands each event to several sinks, in order. Isolation of failing sinks is `telemetry`'s business."""

    def __init__(self, sinks: tuple[EventSink, ...]) -> None:
        self._sinks = sinks

    def emit(self, event: AnyEvent) -> None:
        for sink in self._sinks:
            sink.emit(event)
