"""Journal-only lines. Owns: what a journal holds beside events. The writer builds them, readers validate them."""

from __future__ import annotations

from typing import Final, Literal

from pydantic import JsonValue

from engine.scheduler.decision import Reason, Result
from telemetry.schema_parts import Part, SourcePart

#: First words of every journal, so that no other JSONL file is taken for one.
FORMAT: Final = "admitscope-journal"


class HeaderRecord(Part):
    """First line of every segment. Holds no key secret: page keys in a journal cannot be turned back into tokens."""

    type: Literal["header"] = "header"
    format: Literal["admitscope-journal"] = FORMAT
    """What this file is."""
    schema_version: int
    """Version of the records; readers refuse a newer one."""
    version: str
    """Version of the engine that wrote it."""
    engine_id: str
    """The engine that wrote it."""
    segment: int
    """0 for the first file of an engine's life; each rotation counts on."""
    first_seq: int
    """`seq` of the first event in this segment."""
    wall_ns: int
    """Unix time at `mono_ns`, nanoseconds: turns every `t_ns` into calendar time."""
    mono_ns: int
    """The engine's clock at the anchor."""
    config: dict[str, JsonValue]
    """The effective configuration."""
    source: SourcePart | None = None
    """Who decided, when it was not this engine."""


class RefusalsFoldedRecord(Part):
    """Refusals that repeat the last written refusal of the same request, counted instead of written.

    The first refusal of a run stands in the journal in full; this line stands for the `count` that followed it.
    """

    type: Literal["refusals_folded"] = "refusals_folded"
    rid: str
    """The request's id."""
    reason: Reason
    """Why it was refused."""
    result: Result
    """The reference's answer."""
    prefix_len: int
    """Tokens found in the cache."""
    candidate_extend: int
    """Tokens the request would like to compute."""
    need: float | None
    """Left side of the test that decided."""
    have: float | None
    """Right side of that test."""
    first_step: int
    """Step of the first one counted."""
    last_step: int
    """Step of the last one counted."""
    first_seq: int
    """`seq` of the first one counted."""
    last_seq: int
    """`seq` of the last one counted."""
    times_passed_over: int
    """As of the last one."""
    stopped_passes: int
    """How many of them ended their pass."""
    count: int
    """How many."""


class CheckpointRecord(Part):
    """Running hash of the core's events, so that a replay can be compared without keeping every event.

    hash  blake2b (16 bytes, hex) over the msgspec JSON of each event but ResponseSent, each followed by a newline,
          before folding, from the engine's first event on
    """

    type: Literal["checkpoint"] = "checkpoint"
    step: int
    """Last step included."""
    seq: int
    """Last event included."""
    events: int
    """How many events the hash covers."""
    hash: str
    """See above."""


class EventsMissingRecord(Part):
    """Events that never reached the journal (dropped by a full queue, or lost with a failing disk)."""

    type: Literal["events_missing"] = "events_missing"
    after_seq: int
    """Last `seq` before the hole."""
    before_seq: int
    """First `seq` after it."""
    missing: int
    """How many are missing."""
