"""Records. Owns: the union of everything a journal may hold, its decoding, and what schema versions are readable.

One line, one JSON object; its first member `type` says which. Version policy: `engine.events.SCHEMA_VERSION` rises
when a field is added or changes its meaning; a reader takes its own version and older ones, whose missing fields have
defaults then, and refuses newer ones by name. docs/reference/journal.schema.json is this union as JSON Schema.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from pydantic import Field, TypeAdapter, ValidationError

from engine.errors import AdmitscopeError
from engine.events import SCHEMA_VERSION, AnyEvent
from telemetry.schema_events import (
    AbortRequestedRecord,
    AdmissionDecidedRecord,
    EngineStartedRecord,
    LockChangedRecord,
    PagesMovedRecord,
    RequestArrivedRecord,
    RequestTransitionedRecord,
    ResponseSentRecord,
    StepCompletedRecord,
    StepPlannedRecord,
)
from telemetry.schema_journal import CheckpointRecord, EventsMissingRecord, HeaderRecord, RefusalsFoldedRecord

EventUnion = (
    EngineStartedRecord
    | RequestArrivedRecord
    | AbortRequestedRecord
    | RequestTransitionedRecord
    | AdmissionDecidedRecord
    | StepPlannedRecord
    | StepCompletedRecord
    | PagesMovedRecord
    | LockChangedRecord
    | ResponseSentRecord
)
LineUnion = HeaderRecord | RefusalsFoldedRecord | CheckpointRecord | EventsMissingRecord
Record = EventUnion | LineUnion

RECORD: Final[TypeAdapter[Record]] = TypeAdapter(Annotated[Record, Field(discriminator="type")])


#: Of JSON that holds thousands of objects or lists, each within the other.
DEEP: Final = "nested too deeply"
#: Of values in a record's configuration.
NOT_TAKEN: Final = "this version cannot take the recorded configuration"
_MOST_SHOWN: Final = 80


def faults(error: ValidationError) -> str:
    """What is wrong with values, the field of each first, in one line."""
    words = []
    for fault in error.errors(include_url=False)[:4]:
        place, message = ".".join(map(str, fault["loc"])), fault["msg"].removeprefix("Value error, ")
        value = repr(fault["input"])
        got = "" if isinstance(fault["input"], dict) else f"; got {value[:_MOST_SHOWN]}"
        words.append(f"{place}: {message}{got}" if place else message)
    return "; ".join(words)


class RecordError(AdmitscopeError):
    """A line is no record of this format: the message names the fields that are wrong."""


class SchemaTooNew(RecordError):
    """The journal was written by a later version than this reader knows."""

    def __init__(self, version: int) -> None:
        super().__init__(f"schema_version is {version}; this version of admitscope reads up to {SCHEMA_VERSION}")


def decode(line: bytes | str) -> Record:
    """One line as a record. Raises RecordError."""
    try:
        record = RECORD.validate_json(line)
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'line'}: {e['msg']}" for e in error.errors()[:4])
        raise RecordError(wrong) from error
    except RecursionError as error:
        raise RecordError(DEEP) from error
    if isinstance(record, HeaderRecord) and record.schema_version > SCHEMA_VERSION:
        raise SchemaTooNew(record.schema_version)
    return record


def encode(record: Record) -> bytes:
    """The record's line, without the newline. For an event it is what the engine's struct encodes to."""
    return record.model_dump_json().encode()


def record_of(event: AnyEvent) -> EventUnion:
    """The record of a live event. For readers inside the engine's process, never on its thread."""
    record = RECORD.validate_json(msgspec.json.encode(event))
    assert not isinstance(record, LineUnion), "an event became a journal-only line"
    return record
