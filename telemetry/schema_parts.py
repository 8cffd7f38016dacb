"""Parts of records. Owns: the pydantic base of every record and the small values that records hold.

Twins of the engine's own structs, for readers only: the engine never validates with pydantic. Field names and their
order equal the structs' (a test compares), so a line of a journal is the JSON of either.
"""

from __future__ import annotations

import base64
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, PlainSerializer, WithJsonSchema

from engine.request import FinishReason
from engine.scheduler.decision import Reason

#: Packed integers travel as standard base64; they are unpacked only by who asks (see the methods of the records).
Packed = Annotated[
    bytes,
    PlainSerializer(lambda packed: base64.b64encode(packed).decode("ascii"), return_type=str, when_used="json"),
    WithJsonSchema({"type": "string", "contentEncoding": "base64"}),
]

#: [free, private, protected, evictable]
PageCounts = tuple[int, int, int, int]


class Part(BaseModel):
    """Base of every record and part: strict, frozen, no unknown fields."""

    model_config = ConfigDict(
        strict=True, frozen=True, extra="forbid", val_json_bytes="base64", use_attribute_docstrings=True
    )


class LedgerPart(Part):
    """What is left in each ledger, in tokens."""

    rem_input: int
    """Prefill tokens the step may still compute."""
    rem_chunk: int | None
    """Prefill tokens of this step's slice; null when chunking is off."""
    remaining_total: float
    """KV tokens left when the promised future of running requests is counted."""
    remaining_current: int
    """KV tokens left at this moment."""


class PassEndPart(Part):
    """Why a prefill pass ended."""

    stop: str
    """queue_end | result | budget | slots | skipped"""
    stopped_by: Reason
    """The reason code that ended it."""
    rid: str | None
    """Request at which it ended."""
    not_considered: int
    """Waiting requests that were not examined."""


class PrefillPart(Part):
    """One prompt piece of a step: tokens [prefix_len, prefix_len + extend_len) are computed."""

    rid: str
    """The request's id."""
    prefix_len: int
    """Tokens whose K/V exists already."""
    extend_len: int
    """Tokens this step computes."""
    is_last: bool
    """The prompt ends here, so the step yields the first token."""

    @property
    def extend_end(self) -> int:
        return self.prefix_len + self.extend_len


class RetractionPart(Part):
    """One running request pushed back to the queue."""

    rid: str
    """The request's id."""
    cause: str
    """kv_now | priority | manual"""
    output_len: int
    """Output tokens kept."""
    lost_tokens: int
    """Tokens whose K/V has to be computed or found again."""
    aborted: bool
    """It was the last one and can never fit: it ends instead."""


class OutcomePart(Part):
    """One output token of one request; its value is not recorded."""

    rid: str
    """The request's id."""
    new_page_key: int | None
    """Key of the page this token filled, if it filled one."""
    head32_key: int | None
    """Set when this token completed the first 32 tokens of the sequence."""
    finish: FinishReason | None
    """Set when the request ends with this token."""
    detail: str
    """A word more."""


class TimesPart(Part):
    """Cuts of one step on the engine's monotonic clock, integer nanoseconds, non-decreasing."""

    started_ns: int
    """The step began."""
    plan_from_ns: int
    """Planning began."""
    planned_ns: int
    """The plan stood."""
    committed_ns: int
    """It was committed."""
    launched_ns: int
    """The batch was handed to the executor."""
    ready_ns: int
    """The tokens were there."""
    applied_ns: int
    """The outcome was applied."""


class SourcePart(Part):
    """Another engine, whose decisions a journal holds. It cannot be replayed: `telemetry.sglang` recorded it."""

    name: Literal["sglang"]
    """Who decided."""
    version: str
    """Its version."""
    overlaps: bool
    """Steps are planned before the outcome of the one before is there: `StepCompleted` comes after the next plan."""
    absent: dict[str, str]
    """Record or field that is not told -> why."""
