"""Checks of tables. Owns: which numbers, words and orders a column may have. A damaged file often reads without fault.

Checksums of pages find what broke on disk; these find what no engine writes: lengths below 0, times that fall, words of
no kind, two requests of one id at a time. They look at whole batches, and at single rows only to name one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from engine.events import SCHEMA_VERSION, AnyEvent, RequestArrived, RequestTransitioned
from engine.request import Cause, FinishReason, RequestState
from engine.scheduler.plan import StepKind
from telemetry.journal import JournalError
from telemetry.sim.traces import MOST_TOKENS

if TYPE_CHECKING:
    import pyarrow as pa

#: Of a monotonic clock: 36 years.
_MOST_NS: Final = 2**60
_MOST: Final = 2**62
#: (names of columns, least, most); the first that fits.
_RANGES: Final = (
    (re.compile(r"wall_ns"), 0, _MOST),
    (re.compile(r".*_ns"), 0, _MOST_NS),
    (re.compile(r"schema_version"), 1, SCHEMA_VERSION),
    (re.compile(r".*_len"), 0, MOST_TOKENS),
    (re.compile(r"max_new_tokens|requested_new_tokens|waiting_tokens"), 0, _MOST),
    (re.compile(r"(done_)?pages_.*|(done_)?num_.*|mixed_rows|missing|count|step|(.*_)?seq"), 0, _MOST),
)


class Role(StrEnum):
    """What a row of a batch is."""

    PREFILL = "prefill"
    DECODE = "decode"


_WORDS: Final[Mapping[str, type[StrEnum]]] = {
    "cause": Cause,
    "finish": FinishReason,
    "kind": StepKind,
    "role": Role,
    "source": RequestState,
    "target": RequestState,
}
#: Tables whose columns of these names are words of other things.
_WORDS_OF: Final = frozenset({"aborts", "transitions", "steps", "step_rows"})
#: Columns without which a row is of nothing, in any table.
_ALWAYS: Final = frozenset({"seq", "step", "t_ns", "rid", "role", "num_prefills", "num_decodes", "missing", "wall_ns"})
#: What a row has that computes part of a prompt.
_PREFILL: Final = ("prefix_len", "extend_len", "is_last")
#: Columns that never fall from row to row; `seq` of events that are one row each rises.
_RISING: Final = {"requests": ("t_ns",), "steps": ("t_ns", "done_t_ns")}
_ONE_ROW_EACH: Final = frozenset(
    {"requests", "aborts", "transitions", "admissions", "locks", "responses", "steps", "engines"}
)


class RowOrder:
    """Judges the batches of one table, in order. `look` raises JournalError that names file and row."""

    def __init__(self, table: str) -> None:
        self._table = table
        self._last: dict[str, int] = {}

    def look(self, file: Path, batch: pa.RecordBatch, rows_before: int, *, may_be_null: frozenset[str]) -> None:
        """The next batch, `rows_before` rows into `file`."""
        for name in batch.schema.names:
            column = batch.column(name)
            if column.null_count and (name not in may_be_null or name in _ALWAYS):
                at = column.is_null().index(True).as_py()
                raise JournalError(f"{file}: row {rows_before + at + 1}: {name} is null")
            _in_range(file, rows_before, name, column)
            if self._table in _WORDS_OF and name in _WORDS:
                _of_ours(file, rows_before, column, _WORDS[name])
        if self._table == "step_rows":
            _whole_prefills(file, rows_before, batch)
        for name in _RISING.get(self._table, ()):
            self._rises(file, batch, rows_before, name, least_step=0)
        if self._table in _ONE_ROW_EACH and self._table != "engines":
            self._rises(file, batch, rows_before, "seq", least_step=1)

    def _rises(self, file: Path, batch: pa.RecordBatch, rows_before: int, name: str, *, least_step: int) -> None:
        if name not in batch.schema.names:
            return
        column = batch.column(name)
        places = range(len(column)) if not column.null_count else column.is_valid().to_pylist()
        values: Sequence[int] = column.drop_null().to_pylist()
        last = self._last.get(name)
        for number, value in enumerate(values):
            if last is not None and value - last < least_step:
                at = number if isinstance(places, range) else [i for i, valid in enumerate(places) if valid][number]
                raise JournalError(f"{file}: row {rows_before + at + 1}: {name} is {value}, after {last}")
            last = value
        if last is not None:
            self._last[name] = last


class EventOrder:
    """Judges the events of all tables together, in order. `look` raises JournalError.

    row_of_request  names file and row of the arrival with this `seq`
    has_holes       events are missing, nobody knows where: an id may be free again without its end on record
    """

    def __init__(self, folder: Path, row_of_request: Callable[[int], str], *, has_holes: bool = False) -> None:
        self._folder = folder
        self._row_of_request = row_of_request
        self._has_holes = has_holes
        self._seq = -1
        self._live: set[str] = set()

    def look(self, event: AnyEvent) -> None:
        """The next event."""
        if event.seq <= self._seq:
            raise JournalError(f"{self._folder}: two events have seq {event.seq}: a table is not as it was written")
        self._seq = event.seq
        if isinstance(event, RequestTransitioned) and event.target is RequestState.FINISHED:
            self._live.discard(event.rid)
        elif isinstance(event, RequestArrived) and not self._has_holes:
            if event.rid in self._live:
                row = self._row_of_request(event.seq)
                raise JournalError(f"{row}: rid is {event.rid[:80]!r}, as of a request that has not ended by then")
            self._live.add(event.rid)

    def missed(self) -> None:
        """Events are missing here: who is live is not known."""
        self._live.clear()


def _in_range(file: Path, rows_before: int, name: str, column: Any) -> None:
    import pyarrow as pa
    import pyarrow.compute as pc

    if not pa.types.is_integer(column.type):
        return
    found = next(((least, most) for pattern, least, most in _RANGES if pattern.fullmatch(name)), None)
    if found is None:
        return
    least, most = found
    ends = pc.min_max(column).as_py()
    if ends["min"] is None or (ends["min"] >= least and ends["max"] <= most):
        return
    values = column.to_pylist()
    at = next(index for index, value in enumerate(values) if value is not None and not least <= value <= most)
    if name == "schema_version":
        said = f"schema_version is {values[at]}; this version of admitscope reads {least} to {most}"
        raise JournalError(f"{file}: row {rows_before + at + 1}: {said}")
    raise JournalError(f"{file}: row {rows_before + at + 1}: {name} is {values[at]}; {least} to {most} are possible")


def _of_ours(file: Path, rows_before: int, column: Any, kind: type[StrEnum]) -> None:
    for word in column.unique().to_pylist():
        if word is None:
            continue
        try:
            kind(word)
        except ValueError as error:
            at = column.to_pylist().index(word)
            raise JournalError(f"{file}: row {rows_before + at + 1}: {error}") from error


def _whole_prefills(file: Path, rows_before: int, batch: pa.RecordBatch) -> None:
    """A row of a prompt has its lengths; others have none."""
    import pyarrow.compute as pc

    if not {"role", *_PREFILL} <= set(batch.schema.names):
        return
    prefills = pc.equal(batch.column("role"), Role.PREFILL.value)
    for name in _PREFILL:
        lacks = pc.and_(prefills, batch.column(name).is_null())
        at = lacks.index(True).as_py()
        if at >= 0:
            raise JournalError(f"{file}: row {rows_before + at + 1}: {name} is null in a row of a prompt")
