"""Tables. Owns: every Parquet table and column, generated from the records, with unit and meaning of each column.

A table of facts has the fields of its record: a part within it becomes columns with a prefix, packed pages become a
list, and lists that a table of their own holds become counts. A field added to a record is a column by itself; one with
a new kind of number fails here until its unit is said. Two tables are derived from events: `lives` and `waits`.
"""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, Literal

from telemetry.observe import BLOCKERS, PAGE_STATES, TTFT_PARTS
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
from telemetry.schema_journal import EventsMissingRecord, RefusalsFoldedRecord
from telemetry.schema_parts import OutcomePart, Part, PrefillPart, RetractionPart

if TYPE_CHECKING:
    import pyarrow as pa

#: Rises when a column changes its meaning or goes away; an added column does not raise it.
TABLES_VERSION: Final = 1
Kind = Literal["int64", "float64", "bool", "string", "list<string>", "list<int32>", "list<int64>", "utc"]

#: Columns of tables with many narrow rows are kept longer in memory, or their footers would outgrow them.
_WIDE, _NARROW = 4_096, 32_768

#: Fields that no column holds, and why.
LEFT_OUT: Final = {
    "type": "the table says it",
    "PagesMovedRecord.owners": "a claim for several rows becomes one row for each owner",
}
#: Prefix of the columns that a part becomes.
_PREFIX: Final = {"budget_open": "open_", "budget_close": "close_", "pass_end": "pass_", "times": "", "pages": "pages_"}
_UNITS: Final = (
    ("ns", r"(.*_)?(t|now|wall|mono|start|end)_ns|.*_ns"),
    ("tokens", r".*_len|extend_end|.*_extend|(open_|close_)?re(m|maining)_.*|.*_tokens|.*reserved_new_tokens"),
    ("tokens", r"need|have|page_size|chunk_limit|chunk_size"),
    ("pages", r".*pages(_.*)?|num_page_(keys|ids)"),
    ("bytes", r"bytes_sent"),
    ("requests", r"(done_)?num_(waiting|running|decodes|sampling|preempted|rows|retractions_of_step)|.*not_considered"),
    ("requests", r"mixed_rows|max_running_requests"),
    ("count", r"num_(retractions|prefills)|chunks|times_passed_over|stopped_passes|count|delta|missing|passes|late_.*"),
    ("ratio", r"new_token_ratio"),
    ("number", r"(done_)?seq|(first|last|after|before)_seq|step|(first|last)_step|order|row|node|place|schema_version"),
    ("number", r"priority|head32_key|new_page_key"),
)


@dataclass(frozen=True)
class Column:
    """One column. `read` takes it from an event; None where `telemetry.export.parquet_rows` fills it in."""

    name: str
    kind: Kind
    unit: str
    doc: str
    read: Callable[[Any], Any] | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Table:
    """One table: `group_rows` rows make a row group, and at most as many wait in memory."""

    name: str
    doc: str
    columns: tuple[Column, ...]
    group_rows: int = _WIDE

    def arrow(self) -> pa.Schema:
        """The schema, with unit and meaning in each field's metadata."""
        import pyarrow as pa

        types: dict[str, pa.DataType] = {
            "int64": pa.int64(),
            "float64": pa.float64(),
            "bool": pa.bool_(),
            "string": pa.string(),
            "list<string>": pa.list_(pa.string()),
            "list<int32>": pa.list_(pa.int32()),
            "list<int64>": pa.list_(pa.int64()),
            "utc": pa.timestamp("us", tz="UTC"),
        }
        fields = [
            pa.field(each.name, types[each.kind], metadata={"unit": each.unit, "doc": each.doc})
            for each in self.columns
        ]
        return pa.schema(fields, metadata={"admitscope.table": self.name, "admitscope.version": str(TABLES_VERSION)})


def unit_of(name: str) -> str:
    """Unit of a number by its name. Raises KeyError for a name that says none: add it to `_UNITS`."""
    for unit, pattern in _UNITS:
        if re.fullmatch(pattern, name):
            return unit
    raise KeyError(f"column {name!r} has no unit")


def column(name: str, kind: Kind, doc: str, read: Callable[[Any], Any] | None = None) -> Column:
    """A column whose unit follows from its name; words and flags have none."""
    is_number = kind in {"int64", "float64"}
    lists = {"utc": "UTC", "list<int32>": "page ids", "list<int64>": "page keys"}
    unit = unit_of(name) if is_number else lists.get(kind, "")
    return Column(name, kind, unit, doc, read)


def columns_of(
    record: type[Part], prefix: str = "", path: str = "", leave: frozenset[str] = frozenset()
) -> Iterator[Column]:
    """The columns of a record or part, in the order of its fields. `path` leads to it from the event."""
    for name, info in record.model_fields.items():
        if name in leave or name in LEFT_OUT or f"{record.__name__}.{name}" in LEFT_OUT:
            continue
        kind, doc = _plain(info.annotation), info.description or ""
        if isinstance(kind, type) and issubclass(kind, Part):
            yield from columns_of(kind, prefix + _PREFIX[name], path + name + ".")
        elif name == "pages" and kind is not bytes:
            for at, state in enumerate(PAGE_STATES):
                yield column(f"{prefix}pages_{state}", "int64", f"{state} pages. {doc}", _item(path + name, at))
        elif name == "page_keys":
            yield column("num_page_keys", "int64", "How many full prompt pages.", _packed_count(path + name, 8))
            yield column(
                "page_keys", "list<int64>", "One salted key per full prompt page.", _packed(path + name, "<i8")
            )
        elif kind is bytes:
            yield column("num_page_ids", "int64", "How many pages.", _packed_count(path + name, 4))
            yield column("page_ids", "list<int32>", doc, _packed(path + name, "<i4"))
        elif isinstance(kind, str):
            yield column(prefix + name, typing.cast("Kind", kind), doc, _getter(path + name))
        else:
            yield column(f"{prefix}num_{name}", "int64", f"How many. {doc}", _count(path + name))


def _plain(annotation: Any) -> Any:
    """The kind of a scalar; the class of a part; bytes; or None for a list that is counted."""
    if typing.get_origin(annotation) in {typing.Union, types.UnionType}:
        (annotation,) = [each for each in typing.get_args(annotation) if each is not type(None)]
    if typing.get_origin(annotation) is tuple:
        of = typing.get_args(annotation)[0]
        return "list<string>" if isinstance(of, type) and issubclass(of, StrEnum) else None
    if isinstance(annotation, type):
        if issubclass(annotation, StrEnum | str):
            return "string"
        return {bool: "bool", int: "int64", float: "float64"}.get(annotation, annotation)
    raise TypeError(f"no column for {annotation}")


def _getter(path: str) -> Callable[[Any], Any]:
    if "." not in path:
        return attrgetter(path)
    part, name = path.split(".")

    def read(event: Any) -> Any:
        value = getattr(event, part)
        return None if value is None else getattr(value, name)

    return read


def _item(path: str, at: int) -> Callable[[Any], int]:
    return lambda event: int(getattr(event, path)[at])


def _count(path: str) -> Callable[[Any], int]:
    return lambda event: len(getattr(event, path))


def _packed_count(path: str, width: int) -> Callable[[Any], int]:
    return lambda event: len(getattr(event, path)) // width


def _packed(path: str, dtype: str) -> Callable[[Any], Any]:
    import numpy as np

    return lambda event: np.frombuffer(getattr(event, path), dtype=dtype)


HEAD: Final = (
    column("engine_id", "string", "The engine whose life this is of: part of every key."),
    column("utc", "utc", "Calendar time of the row: of `t_ns`, or of the moment it became known."),
)
_STEP: Final = (
    column("step", "int64", "Step it belongs to."),
    column("t_ns", "int64", "Monotonic nanoseconds."),
)


def _facts(name: str, doc: str, record: type[Part], *, group_rows: int = _WIDE) -> Table:
    leave = frozenset({"engine_id"})
    return Table(name, doc, (*HEAD, *columns_of(record, leave=leave)), group_rows)


def _steps() -> Table:
    done = [
        each if (each.name.endswith("_ns") and each.name != "t_ns") or each.name == "failed" else _renamed(each)
        for each in columns_of(StepCompletedRecord, leave=frozenset({"step", "kind"}))
    ]
    tokens = column(
        "prefill_tokens", "int64", "Sum of extend_len.", lambda event: sum(row.extend_len for row in event.prefills)
    )
    return Table(
        "steps",
        "One row per step: its plan, and its completion (columns from done_seq on, null when it is not recorded).",
        (*HEAD, *columns_of(StepPlannedRecord), tokens, *done),
    )


def _renamed(each: Column) -> Column:
    return Column(f"done_{each.name}", each.kind, each.unit, each.doc, each.read)


def _step_rows() -> Table:
    piece = {each.name: each for each in columns_of(PrefillPart)}
    token = {each.name: each for each in columns_of(OutcomePart)}
    own = (
        column("place", "int64", "Place in the batch, 0 first: prompt pieces, then decode rows."),
        column("role", "string", "prefill | decode"),
        column("is_sampled", "bool", "It yields one token."),
        column("token_ns", "int64", "When its token was applied; null when it has none."),
    )
    of_token = (token[name] for name in ("finish", "detail", "new_page_key", "head32_key"))
    columns = [piece.pop("rid"), *own, *piece.values(), *of_token]
    doc = "One row per request and step: a piece of its prompt, or one decoded token."
    return Table("step_rows", doc, (*HEAD, *_STEP, *map(_unread, columns)), _NARROW)


def _unread(each: Column) -> Column:
    return Column(each.name, each.kind, each.unit, each.doc)


def _retractions() -> Table:
    columns = map(_unread, columns_of(RetractionPart))
    doc = "One row per running request pushed back; cause `preempt` for one that gave way, whose losses are not told."
    return Table("retractions", doc, (*HEAD, *_STEP, *columns))


def _lives() -> Table:
    """Columns in the order in which `telemetry.export.parquet_rows` writes them."""
    return Table(
        "lives",
        "One row per request, written when it has ended and its response too: time to first token cut into parts.",
        (
            *HEAD,
            column("rid", "string", "The request's id."),
            column("accepted_ns", "int64", "When the HTTP layer, or the caller, took it."),
            column("arrived_ns", "int64", "When it came to the queue."),
            column("admitted_ns", "int64", "First admission; null: never."),
            column("first_token_ns", "int64", "First token applied; null: none."),
            column("finished_ns", "int64", "Its end; null: it was open when the record ended."),
            column("prompt_len", "int64", "Tokens of the prompt."),
            column("output_len", "int64", "Output tokens."),
            column("cached_len", "int64", "Prompt tokens found in the cache at the first admission; null: never."),
            column("chunks", "int64", "Pieces its prompt was computed in, again after each retraction."),
            column("num_retractions", "int64", "How often it was pushed back."),
            column("finish", "string", "stop | length | abort | error | refused; null: open"),
            column("end_cause", "string", "The cause of its last transition; null: open"),
            column("ttft_ns", "int64", "Time to first token: the sum of its parts; null: none."),
            *(column(f"ttft_{part}_ns", "int64", f"Part of time to first token: {part}.") for part in TTFT_PARTS),
            *(column(f"held_{name}_ns", "int64", f"Held by {name} before its first token.") for name in BLOCKERS),
            *(column(f"late_held_{name}_ns", "int64", f"Held by {name} after its first token.") for name in BLOCKERS),
        ),
    )


def _waits() -> Table:
    doc = (
        "One row per stretch in which one request had one blocker: in the queue, or between two pieces of its prompt. "
        "Written within 64 steps of its end."
    )
    return Table(
        "waits",
        doc,
        (
            *HEAD,
            column("rid", "string", "The request's id."),
            column("start_ns", "int64", "It began to be held by this."),
            column("end_ns", "int64", "It was not any more."),
            column("blocker", "string", " | ".join(BLOCKERS)),
            column("reason", "string", "Reason code of the refusal; of `order`: what ended the pass; null: none yet."),
            column("who", "string", "Of `order`: the request at which the pass ended."),
            column("passes", "int64", "Prefill passes made in the stretch."),
        ),
    )


TABLES: Final[dict[str, Table]] = {
    table.name: table
    for table in (
        _facts("engines", "One row per engine.", EngineStartedRecord),
        _facts("requests", "One row per request, as it arrived.", RequestArrivedRecord),
        _facts("aborts", "One row per wish to end a request early.", AbortRequestedRecord),
        _facts("transitions", "One row per change of a request's state.", RequestTransitionedRecord),
        _facts("admissions", "One row per examination of a request: the ledgers and why.", AdmissionDecidedRecord),
        _facts(
            "refusals_folded",
            "Refusals that a journal only counts and a replay could not make again; empty for a live engine.",
            RefusalsFoldedRecord,
        ),
        _steps(),
        _step_rows(),
        _retractions(),
        _facts(
            "page_moves",
            "One row per move of pages, and per owner of a claim that serves several requests.",
            PagesMovedRecord,
            group_rows=_NARROW,
        ),
        _facts("locks", "One row per change of a node's lock count.", LockChangedRecord, group_rows=_NARROW),
        _facts("responses", "One row per response, when it was over.", ResponseSentRecord),
        _facts("holes", "One row per stretch of events that were lost.", EventsMissingRecord),
        _lives(),
        _waits(),
    )
}
