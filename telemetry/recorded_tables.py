"""Tables as a recording. Owns: every event of an engine, read back from the Parquet tables that it was exported to.

Tables hold each field of each event but two lists' order: what a step retracts is in the order of the rows, and a claim
for several requests, one row for each, becomes one event again. So every view of a journal shows tables too. What they
lack is said in notes: events that never reached them, refusals that were only counted, an hour that was never finished.
"""

from __future__ import annotations

import contextlib
import heapq
import struct
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, ClassVar, Final

import msgspec
from pydantic import ValidationError

from engine.events import (
    AbortRequested,
    AdmissionDecided,
    AnyEvent,
    EngineStarted,
    Event,
    LockChanged,
    PagesMoved,
    RequestArrived,
    RequestTransitioned,
    ResponseSent,
    StepCompleted,
    StepPlanned,
)
from engine.scheduler.decision import LedgerView
from engine.scheduler.plan import OutcomeRow, PassEnd, PrefillRow, Retraction, StepTimes
from telemetry.export.parquet_schema import TABLES
from telemetry.export.source import Enough
from telemetry.journal import JournalError
from telemetry.observe import PAGE_STATES
from telemetry.schema import faults
from telemetry.schema_journal import RefusalsFoldedRecord
from telemetry.sim.table_checks import EventOrder
from telemetry.sim.tables import Row, TableRecording, is_tables

__all__ = ["Extent", "TableEvents", "is_tables", "refuse_one_table"]

#: Tables whose rows are one event each.
_FACTS: Final[dict[str, type[Event]]] = {
    "requests": RequestArrived,
    "aborts": AbortRequested,
    "transitions": RequestTransitioned,
    "admissions": AdmissionDecided,
    "locks": LockChanged,
    "responses": ResponseSent,
}
#: Derived from events, or made for the eye: nothing is read back from them.
_NOT_READ: Final = frozenset({"lives", "waits", "num_page_keys", "num_page_ids", "utc"})
_FOLD: Final = tuple(name for name in RefusalsFoldedRecord.model_fields if name != "type")
_ENGINE: Final = tuple(each.name for each in TABLES["engines"].columns if each.name not in _NOT_READ)


def refuse_one_table(path: Path) -> None:
    """Raise JournalError for a single Parquet file: a table alone is no recording."""
    if path.suffix == ".parquet":
        raise JournalError(f"{path}: one table of several: give the folder of all of them, {path.parent.parent}")


@dataclass(frozen=True, slots=True)
class Extent:
    """How long the recording is, nanoseconds of the engine's clock, and whether a server told of responses."""

    start_ns: int
    end_ns: int
    has_responses: bool


class TableEvents(TableRecording):
    """All events of the engine that started last in `folder`. Raises JournalError for what is no table of ours."""

    columns: ClassVar = {
        name: tuple(each.name for each in table.columns if each.name not in _NOT_READ)
        for name, table in TABLES.items()
        if name not in _NOT_READ
    }
    #: Which may be null follows from the events: a number that has to be one fails there, with file and row.
    may_be_null: ClassVar = frozenset(each.name for table in TABLES.values() for each in table.columns)

    def extent(self) -> Extent:
        """How far the tables go, by their steps."""
        start = int(self._started["t_ns"])
        ends = [row["done_t_ns"] or row["t_ns"] for _, row in self._table("steps")]
        return Extent(start, max([start, *ends]), bool(self._count("responses")))

    def all_events(self, *, memory: bool = True) -> Iterator[AnyEvent]:
        """Every event in order of `seq`; without `memory`, those about pages and locks are not read."""
        yield EngineStarted(**{name: self._started[name] for name in _ENGINE})
        facts = {table: kind for table, kind in _FACTS.items() if memory or kind is not LockChanged}
        streams = [self._facts_of(table, kind) for table, kind in facts.items()]
        streams += [self._plans(), self._completions(), *([self._moves()] if memory else [])]
        order = EventOrder(self.path, self._row_of_request, has_holes=bool(self._count("holes")))
        for _, event in heapq.merge(*streams, key=lambda pair: pair[0]):
            order.look(event)
            yield event

    def folds(self) -> Iterator[RefusalsFoldedRecord]:
        """Refusals that are only counted, in the order of the last one of each count."""
        for where, row in self._table("refusals_folded"):
            try:
                yield RefusalsFoldedRecord.model_validate({name: row[name] for name in _FOLD}, strict=False)
            except ValidationError as error:
                raise JournalError(f"{where}: {faults(error)}") from error

    def tell(self, hear: Callable[[AnyEvent], None]) -> list[str]:
        """Hand every event to `hear`, until it raises Enough; returns what the tables lack."""
        with contextlib.suppress(Enough):
            for event in self.all_events():
                hear(event)
        return self.lacks()

    def need(self, table: str, why: str) -> None:
        """Raise JournalError where there is no file of `table`; `why` says what cannot be told then."""
        if not self._of_engine(table):
            raise JournalError(f"{self.path}: no file of {table}: {why}; export the journal anew")

    def lacks(self) -> list[str]:
        """What these tables cannot show, in sentences."""
        notes = list(self.notes)
        missing = sum(row["missing"] for _, row in self._table("holes"))
        if missing:
            notes.append(f"{missing} events never reached the tables")
        counted = sum(row["count"] for _, row in self._table("refusals_folded"))
        if counted:
            notes.append(
                f"{counted} refusals are only counted in refusals_folded: waiting under them counts as `order`"
            )
        absent = [name for name in self.columns if not self._of_engine(name)]
        if absent:
            notes.append(f"no file of {', '.join(absent)}: what they tell is not shown")
        unfinished = sorted({file.parent.name for file in self.path.glob(f"*/.*{self._engine_id}*.part")})
        if unfinished:
            notes.append(f"an hour was never finished: {', '.join(unfinished)} end in .part files, which are not read")
        return notes

    # -- one event a row -----------------------------------------------------------------------------------------------

    def _facts_of(self, table: str, kind: type[Event]) -> Iterator[tuple[int, AnyEvent]]:
        for where, row in self._table(table):
            event = _made(where, kind, row)
            yield event.seq, event

    def _moves(self) -> Iterator[tuple[int, AnyEvent]]:
        for seq, rows in groupby(self._table("page_moves"), key=lambda pair: pair[1]["seq"]):
            parts = list(rows)
            where, row = parts[0]
            row = {("pages" if name == "page_ids" else name): value for name, value in row.items()}
            if len(parts) > 1:
                try:
                    owners = [
                        struct.pack("<i", int(part["owner"].removeprefix("r:"))) * (len(part["page_ids"]) // 4)
                        for _, part in parts
                    ]
                except (ValueError, struct.error) as error:
                    raise JournalError(f"{where}: owner: rows of one claim have a row each: {error}") from error
                pages = b"".join(part["page_ids"] for _, part in parts)
                row |= {"pages": pages, "owner": "", "owners": b"".join(owners)}
            yield seq, _made(where, PagesMoved, row)

    # -- steps ---------------------------------------------------------------------------------------------------------

    def _plans(self) -> Iterator[tuple[int, AnyEvent]]:
        retracted: dict[int, list[Row]] = defaultdict(list)
        for _, row in self._table("retractions"):
            retracted[row["step"]].append(row)
        for where, row, rows in self._with_rows():
            lost = [each for each in retracted.get(row["step"], ()) if each["output_len"] is not None]
            gone = [each["rid"] for each in retracted.get(row["step"], ()) if each["output_len"] is None]
            prefills = [each for each in rows if each["role"] == "prefill"]
            fields = row | {
                "prefills": [_only(each, PrefillRow) for each in prefills],
                "decodes": [each["rid"] for each in rows if each["role"] == "decode"],
                "sampling": [each["rid"] for each in rows if each["is_sampled"]],
                "retractions": [_only(each, Retraction) for each in lost],
                "preempted": gone,
                "budget_open": _part(row, LedgerView, "open_"),
                "budget_close": _part(row, LedgerView, "close_"),
                "pass_end": _part(row, PassEnd, "pass_"),
                "pages": [row[f"pages_{state}"] for state in PAGE_STATES],
            }
            event = _made(where, StepPlanned, fields)
            yield event.seq, event

    def _completions(self) -> Iterator[tuple[int, AnyEvent]]:
        for where, row, rows in self._with_rows():
            if row["done_seq"] is None:
                continue
            fields = {
                "seq": row["done_seq"],
                "step": row["step"],
                "t_ns": row["done_t_ns"],
                "kind": row["kind"],
                "rows": [
                    _only(each, OutcomeRow) | {"detail": each["detail"] or ""} for each in rows if _has_outcome(each)
                ],
                "times": _only(row, StepTimes),
                "failed": row["failed"],
                "pages": [row[f"done_pages_{state}"] for state in PAGE_STATES],
                "num_waiting": row["done_num_waiting"],
                "num_running": row["done_num_running"],
            }
            event = _made(where, StepCompleted, fields)
            yield event.seq, event


def _made(where: str, kind: type[Any], row: Row) -> Any:
    """The event of a row. Raises JournalError for a word or number that none of ours has."""
    try:
        return msgspec.convert({name: row[name] for name in kind.__struct_fields__ if name in row}, kind)
    except msgspec.ValidationError as error:
        raise JournalError(f"{where}: {error}") from error


def _only(row: Row, kind: type[Any]) -> Row:
    return {name: row[name] for name in kind.__struct_fields__}


def _part(row: Row, kind: type[Any], prefix: str) -> Row | None:
    """A part whose fields are columns with a prefix; None where the event had none."""
    found = {name: row[f"{prefix}{name}"] for name in kind.__struct_fields__}
    return None if all(value is None for value in found.values()) else found


def _has_outcome(row: Row) -> bool:
    """Whether the step's completion told of this row: one whose step failed has no token, but an end."""
    return row["token_ns"] is not None or row["finish"] is not None or row["detail"] is not None
