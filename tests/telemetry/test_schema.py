"""The pydantic records are the engine's structs, field by field, and the published schema is up to date."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path
from typing import Any, get_args

import jsonschema
import msgspec
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from engine.events import SCHEMA_VERSION, AnyEvent, PagesMoved, RequestArrived
from engine.scheduler.decision import LedgerView
from engine.scheduler.plan import OutcomeRow, PassEnd, PrefillRow, Retraction, StepTimes
from telemetry import docs, schema_parts
from telemetry.schema import EventUnion, RecordError, SchemaTooNew, decode, encode, record_of
from telemetry.schema_parts import Part

STRUCTS = {struct.__name__: struct for struct in get_args(AnyEvent)}
RECORDS = {model.model_fields["type"].default: model for model in get_args(EventUnion)}
PARTS = {
    LedgerView: schema_parts.LedgerPart,
    PassEnd: schema_parts.PassEndPart,
    PrefillRow: schema_parts.PrefillPart,
    Retraction: schema_parts.RetractionPart,
    OutcomeRow: schema_parts.OutcomePart,
    StepTimes: schema_parts.TimesPart,
}
REPOSITORY = Path(__file__).resolve().parents[2]


def test_each_event_has_exactly_one_record() -> None:
    assert set(RECORDS) == set(STRUCTS)


@pytest.mark.parametrize("name", sorted(STRUCTS))
def test_record_fields_and_their_order_equal_the_struct(name: str) -> None:
    fields = [field.name for field in msgspec.structs.fields(STRUCTS[name])]
    assert list(RECORDS[name].model_fields) == ["type", *fields]


@pytest.mark.parametrize("struct", PARTS, ids=lambda struct: struct.__name__)
def test_part_fields_and_their_order_equal_the_struct(struct: type[msgspec.Struct]) -> None:
    assert list(PARTS[struct].model_fields) == [field.name for field in msgspec.structs.fields(struct)]


_EVENTS: Any = st.one_of([st.builds(struct) for struct in STRUCTS.values()])


def _finite(value: Any) -> bool:
    """What JSON can carry exactly: the engine writes neither NaN nor infinity."""
    match value:
        case float():
            return math.isfinite(value)
        case dict():
            return all(map(_finite, value.values()))
        case list() | tuple():
            return all(map(_finite, value))
    return True


@settings(max_examples=300, deadline=None)
@given(event=_EVENTS)
def test_any_event_reads_back_as_the_same_json(event: AnyEvent) -> None:
    assume(_finite(msgspec.to_builtins(event)))
    line = msgspec.json.encode(event)
    again = encode(decode(line))
    assert json.loads(again) == json.loads(line)
    assert again[:10] == line[:10]
    assert list(json.loads(again)) == list(json.loads(line))


def test_unknown_fields_wrong_types_and_unknown_kinds_are_refused_by_name() -> None:
    good = {"type": "LockChanged", "seq": 1, "step": 2, "t_ns": 3, "node": 4, "rid": "a", "delta": 1, "count": 1}
    decode(json.dumps(good))
    for change, named in (({"extra": 1}, "extra"), ({"node": "4"}, "node"), ({"type": "Nothing"}, "Nothing")):
        with pytest.raises(RecordError, match=named):
            decode(json.dumps(good | change))
    with pytest.raises(RecordError, match="count"):
        decode(json.dumps({key: value for key, value in good.items() if key != "count"}))
    with pytest.raises(RecordError):
        decode(b'{"type":"LockCh')


def test_records_are_frozen() -> None:
    record = decode('{"type":"LockChanged","seq":1,"step":2,"t_ns":3,"node":4,"rid":"a","delta":1,"count":1}')
    with pytest.raises(ValueError, match="frozen"):
        record.rid = "b"


def test_packed_integers_are_unpacked_on_demand() -> None:
    keys = np.array([-5, 2**62, 0], dtype="<i8")
    arrived = RequestArrived(0, 0, 0, "a", 48, 4, 4, keys.tobytes(), None, False, None, None, 0)
    moved = PagesMoved(1, 0, 0, np.array([7, 255], dtype="<i4").tobytes(), "free", "private", "r:0", "claim")
    record, pages = record_of(arrived), record_of(moved)
    assert record.keys().tolist() == keys.tolist()
    assert pages.page_ids().tolist() == [7, 255]
    assert (pages.owner, pages.owner_rows().tolist()) == ("r:0", [])
    grown = record_of(msgspec.structs.replace(moved, owner="", owners=np.array([3, 300], dtype="<i4").tobytes()))
    assert (grown.owner, grown.owner_rows().tolist()) == ("", [3, 300])


def test_a_move_is_taken_apart_by_its_owners() -> None:
    pages = np.arange(6, dtype="<i4").tobytes()
    moved = PagesMoved(1, 0, 0, pages, "free", "private", "r:4", "claim")
    assert list(moved.parts()) == [("r:4", pages)]
    grown = msgspec.structs.replace(moved, owner="", owners=np.array([9, 9, 2, 9, 0, 0], dtype="<i4").tobytes())
    assert list(grown.parts()) == [("r:9", pages[:8]), ("r:2", pages[8:12]), ("r:9", pages[12:16]), ("r:0", pages[16:])]


def test_a_newer_schema_version_is_refused_by_number(numbered: Any) -> None:
    header = {
        "type": "header",
        "format": "admitscope-journal",
        "schema_version": SCHEMA_VERSION + 1,
        "version": "9",
        "engine_id": "e",
        "segment": 0,
        "first_seq": 0,
        "wall_ns": 0,
        "mono_ns": 0,
        "config": {},
    }
    with pytest.raises(SchemaTooNew, match=f"schema_version is {SCHEMA_VERSION + 1}.*up to {SCHEMA_VERSION}"):
        decode(json.dumps(header))
    decode(json.dumps(header | {"schema_version": SCHEMA_VERSION}))
    with pytest.raises(RecordError, match="format"):
        decode(json.dumps(header | {"format": "something-else", "schema_version": 1}))


@pytest.mark.parametrize("name", ["journal.schema.json", "records.md"])
def test_published_pages_are_up_to_date(name: str) -> None:
    committed = (REPOSITORY / "docs" / "reference" / name).read_text(encoding="utf-8")
    assert committed == docs.pages()[name], "run: python -m telemetry.docs"


def test_recorded_lines_hold_to_the_published_schema() -> None:
    schema = json.loads((REPOSITORY / "docs" / "reference" / "journal.schema.json").read_text(encoding="utf-8"))
    validator = jsonschema.Draft202012Validator(schema)
    with gzip.open(Path(__file__).parent / "data" / "explained.jsonl.gz") as recorded:
        lines = [json.loads(line) for line in recorded]
    seen = {}
    for line in lines[::7] + lines[-1:]:
        validator.validate(line)
        seen[line["type"]] = line
    assert len(seen) > 8
    for line in seen.values():
        assert not validator.is_valid(line | {"surplus": 1})
        assert not validator.is_valid({name: value for name, value in line.items() if name != "step"} | {"step": "1"})


def test_every_part_appears_in_the_reference_page() -> None:
    page = docs.records_page()
    for part in Part.__subclasses__():
        tag = part.model_fields.get("type")
        if part.__module__.startswith("telemetry.schema_") and part.__name__ != "EventRecord":
            assert f"### {tag.default if tag else part.__name__}\n" in page
