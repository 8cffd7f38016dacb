"""Tables as recording. Owns: the events that a workload and its costs follow from, read back from Parquet tables.

`admitscope export --parquet` and `serve --parquet` write them, one folder a table. Tables are merged by `seq`, batch by
batch; what stays in memory is a batch of each. Lists that a table only counts (guards, retractions) stay empty here: no
workload and no cost follows from them.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

from engine.errors import ConfigError
from engine.events import AbortRequested, EngineStarted, RequestArrived, RequestTransitioned, StepCompleted, StepPlanned
from engine.request import Cause, FinishReason, RequestState
from engine.scheduler.plan import OutcomeRow, PrefillRow, StepKind, StepTimes
from telemetry.export.parquet_schema import TABLES, TABLES_VERSION
from telemetry.journal import JournalError
from telemetry.sim.journal_workload import Heard, Missing
from telemetry.sim.table_checks import EventOrder, RowOrder

if TYPE_CHECKING:
    import pyarrow as pa

_BATCH_ROWS: Final = 2_048
_HOUR: Final = len("YYYYMMDDTHHZ")
_TIMES: Final = StepTimes.__struct_fields__
#: Null together, for a step whose completion is not recorded.
_DONE: Final = (
    *("done_seq", "done_t_ns", *_TIMES, "failed", "done_num_waiting", "done_num_running"),
    *("done_pages_free", "done_pages_private", "done_pages_protected", "done_pages_evictable"),
)
#: Columns that are read of each table.
_COLUMNS: Final = {
    "engines": (
        *("engine_id", "seq", "step", "t_ns", "schema_version", "version", "config", "model", "attention_backend"),
        *("page_size", "num_pages", "max_running_requests", "wall_ns"),
    ),
    "requests": (
        *("engine_id", "seq", "step", "t_ns", "rid", "prompt_len", "max_new_tokens", "requested_new_tokens"),
        *("page_keys", "head32_key", "ignore_eos", "priority", "routing_key", "accepted_ns"),
    ),
    "aborts": ("engine_id", "seq", "step", "t_ns", "rid", "detail", "cause"),
    "transitions": (
        *("engine_id", "seq", "step", "t_ns", "rid", "source", "target", "cause", "prompt_len", "output_len"),
        *("computed_len", "row", "num_retractions", "cached_len", "detail"),
    ),
    "steps": (
        *("engine_id", "seq", "step", "t_ns", "kind", "num_prefills", "num_decodes", "mixed_rows", "batch_is_full"),
        *("new_token_ratio", "num_waiting", "num_running", "waiting_tokens", "promised_tokens", "evicted_pages"),
        *("pages_free", "pages_private", "pages_protected", "pages_evictable"),
        *_DONE,
    ),
    "step_rows": (
        *("engine_id", "step", "rid", "role", "token_ns", "prefix_len", "extend_len", "is_last", "finish", "detail"),
        *("new_page_key", "head32_key"),
    ),
    "holes": ("engine_id", "after_seq", "missing"),
}
_MAY_BE_NULL: Final = frozenset(
    (
        *("head32_key", "priority", "routing_key", "source", "row", *_DONE),
        *("token_ns", "prefix_len", "extend_len", "is_last", "finish", "detail", "new_page_key"),
    )
)
#: What rows are in order of, where it is not `seq`.
_ORDER: Final = {"step_rows": "step", "retractions": "step", "holes": "after_seq", "refusals_folded": "last_seq"}
Row = dict[str, Any]


def is_tables(path: Path) -> bool:
    """Whether `path` is a folder of tables, and not of journals."""
    return (path / "engines").is_dir() and (path / "requests").is_dir() and not any(path.glob("*.jsonl*"))


class TableRecording:
    """The tables of one engine in `folder`: of several engines, the one that started last.

    notes        what a reader of the result has to know
    columns      that are read of each table
    may_be_null  columns that need no value in each row
    """

    columns: ClassVar[Mapping[str, tuple[str, ...]]] = _COLUMNS
    may_be_null: ClassVar[frozenset[str]] = _MAY_BE_NULL

    def __init__(self, folder: Path) -> None:
        try:
            import pyarrow.parquet
        except ModuleNotFoundError as error:
            raise ConfigError("parquet: pyarrow is not installed: pip install -e '.[parquet]'") from error
        self._open = pyarrow.parquet.ParquetFile
        self.path = folder
        judge = RowOrder("engines")
        started = [row for file in _files(folder / "engines") for row in self._rows("engines", file, None, judge)]
        if not started:
            raise JournalError(f"{folder}: no engine in it: engines has no whole Parquet file with a row")
        last = max(started, key=lambda row: int(row["wall_ns"]))
        self._engine_id = str(last["engine_id"])
        self._started = last
        self.name = folder.name
        self.notes = (
            [f"{folder} holds tables of {len(started)} engines: this is the last one, {self._engine_id}"]
            if len(started) > 1
            else []
        )

    def arrivals(self) -> int:
        """How many requests there are."""
        return self._count("requests")

    def events(self) -> Iterator[Heard]:
        """Everything in its order. Raises JournalError for what cannot be a table of ours."""
        started = {name: self._started[name] for name in _COLUMNS["engines"] if name != "engine_id"}
        yield EngineStarted(**started, engine_id=self._engine_id)
        streams = (
            self._facts("requests", lambda row: (row["seq"], RequestArrived(**row))),
            self._facts("aborts", lambda row: (row["seq"], AbortRequested(**row | {"cause": Cause(row["cause"])}))),
            self._facts("transitions", _ended),
            self._facts("holes", lambda row: (row["after_seq"] + 1, Missing(row["missing"]))),
            self._steps(),
        )
        order = EventOrder(self.path, self._row_of_request)
        for _, event in heapq.merge(*streams, key=lambda pair: pair[0]):
            if isinstance(event, Missing):
                order.missed()
            else:
                order.look(event)
            yield event

    def _row_of_request(self, seq: int) -> str:
        """File and row of the arrival with this `seq`."""
        return next(where for where, row in self._table("requests") if row["seq"] == seq)

    # -- tables --------------------------------------------------------------------------------------------------------

    def _facts(self, table: str, make: Callable[[Row], tuple[int, Heard] | None]) -> Iterator[tuple[int, Heard]]:
        """(seq, event) of every row that `make` makes one of."""
        for where, row in self._table(table):
            try:
                made = make(row)
            except ValueError as error:  # a word that is none of ours
                raise JournalError(f"{where}: {error}") from error
            if made is not None:
                yield made

    def _steps(self) -> Iterator[tuple[int, Heard]]:
        """Plan and completion of every step that was completed."""
        for where, row, rows in self._with_rows():
            if row["done_seq"] is None:
                continue
            try:
                pair = _planned(row, rows), _completed(row, rows)
            except (ValueError, TypeError) as error:  # a word that is none of ours, or no number where one has to be
                raise JournalError(f"{where}: {error}") from error
            for event in pair:
                yield event.seq, event

    def _with_rows(self) -> Iterator[tuple[str, Row, list[Row]]]:
        """(where, step, its rows) of every step. Raises JournalError where rows were lost."""
        batches = self._batches_of_steps()
        ahead = next(batches, None)
        for where, row in self._table("steps"):
            while ahead is not None and ahead[0] < row["step"]:
                ahead = next(batches, None)
            rows = ahead[1] if ahead is not None and ahead[0] == row["step"] else []
            counted = (row["num_prefills"] or 0) + (row["num_decodes"] or 0)
            if len(rows) != counted:
                raise JournalError(
                    f"{where}: step_rows has {len(rows)} rows of step {row['step']}, steps counts {counted}: rows were "
                    "lost when the tables were written"
                )
            yield where, row, rows

    def _batches_of_steps(self) -> Iterator[tuple[int, list[Row]]]:
        """(step, its rows)."""
        step, rows = -1, list[Row]()
        for _, row in self._table("step_rows"):
            if row["step"] != step:
                if rows:
                    yield step, rows
                step, rows = row["step"], []
            rows.append(row)
        if rows:
            yield step, rows

    # -- files ---------------------------------------------------------------------------------------------------------

    def _of_engine(self, table: str) -> list[Path]:
        return [file for file in _files(self.path / table) if _is_of(file, table, self._engine_id)]

    def _table(self, table: str) -> Iterator[tuple[str, Row]]:
        """(where it stands, row without the engine's id) of one table, in order."""
        before, order, judge = -1, _ORDER.get(table, "seq"), RowOrder(table)
        for file in self._of_engine(table):
            for number, row in enumerate(self._rows(table, file, self._engine_id, judge), 1):
                if row[order] < before:
                    raise JournalError(f"{file}: row {number}: {order} is {row[order]}, after {before}")
                before = row[order]
                yield f"{file}: row {number}", row

    def _count(self, table: str) -> int:
        return sum(self._opened(table, file).metadata.num_rows for file in self._of_engine(table))

    def _opened(self, table: str, file: Path) -> Any:
        """The file, with every column that is needed, of its kind."""
        import pyarrow as pa

        try:
            opened = self._open(file, page_checksum_verification=True)
        except (OSError, pa.ArrowException) as error:
            raise JournalError(f"{file}: no Parquet file that can be read: {error}") from error
        metadata = opened.schema_arrow.metadata or {}
        version = metadata.get(b"admitscope.version", b"").decode("ascii", "replace")
        if metadata.get(b"admitscope.table", b"").decode("utf-8", "replace") != table:
            raise JournalError(f"{file}: not a table `{table}` of this engine")
        if not version.isdigit() or int(version) > TABLES_VERSION:
            raise JournalError(f"{file}: its tables have version {version!r}; {TABLES_VERSION} is the newest known")
        expected = TABLES[table].arrow()
        for name in self.columns[table]:
            at = opened.schema_arrow.get_field_index(name)
            if at < 0:
                raise JournalError(
                    f"{file}: no column {name}: an older version wrote these tables; export the journal anew"
                )
            found, wanted = opened.schema_arrow.field(at).type, expected.field(name).type
            if found != wanted:
                raise JournalError(f"{file}: column {name} is {found}; {wanted} is expected")
        return opened

    def _rows(self, table: str, file: Path, engine_id: str | None, judge: RowOrder) -> Iterator[Row]:
        import pyarrow as pa

        columns, read = list(self.columns[table]), 0
        try:
            for batch in self._opened(table, file).iter_batches(batch_size=_BATCH_ROWS, columns=columns):
                judge.look(file, batch, read, may_be_null=self.may_be_null)
                read += batch.num_rows
                values = [_values(batch.column(name)) for name in columns]
                for row in zip(*values, strict=True):
                    named = dict(zip(columns, row, strict=True))
                    if engine_id is not None and named.pop("engine_id") != engine_id:
                        raise JournalError(f"{file}: engine_id is not {engine_id!r} in every row, as its name says")
                    yield named
        except (OSError, pa.ArrowException) as error:
            raise JournalError(f"{file}: damaged: {error}") from error


def _values(column: pa.Array) -> list[Any]:
    """The values of a column; lists of keys and pages packed, as an event has them."""
    import pyarrow as pa

    if not pa.types.is_list(column.type) or not pa.types.is_integer(column.type.value_type):
        return list(column.to_pylist())
    ends = column.offsets.to_numpy()
    keys = column.values.to_numpy()
    keys = keys.astype(keys.dtype.newbyteorder("<"), copy=False)
    return [keys[start:end].tobytes() for start, end in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)]


def _files(folder: Path) -> list[Path]:
    """Whole files of a table in order of time; a second one of an hour has a number."""
    found = []
    for file in folder.glob("[!.]*.parquet"):
        hour, _, rest = file.stem.removeprefix(f"{folder.name}-").partition("-")
        _, _, number = rest.rpartition("-")
        found.append((hour, int(number) if number.isdigit() else 0, file.name, file))
    return [entry[-1] for entry in sorted(found)]


def _is_of(file: Path, table: str, engine_id: str) -> bool:
    rest = file.stem.removeprefix(f"{table}-")[_HOUR + 1 :]
    return rest == engine_id or (rest.startswith(f"{engine_id}-") and rest[len(engine_id) + 1 :].isdigit())


def _pages(row: Row, prefix: str = "") -> tuple[int, int, int, int]:
    free, private, protected, evictable = (
        row[f"{prefix}pages_{state}"] for state in ("free", "private", "protected", "evictable")
    )
    return free, private, protected, evictable


def _ended(row: Row) -> tuple[int, Heard] | None:
    """The end of a request; None for a transition that is none."""
    if row["target"] != RequestState.FINISHED:
        return None
    source = None if row["source"] is None else RequestState(row["source"])
    named = {"source": source, "target": RequestState.FINISHED, "cause": Cause(row["cause"])}
    return row["seq"], RequestTransitioned(**row | named)


def _planned(row: Row, rows: list[Row]) -> StepPlanned:
    prefills = [each for each in rows if each["role"] == "prefill"]
    return StepPlanned(
        seq=row["seq"],
        step=row["step"],
        t_ns=row["t_ns"],
        kind=StepKind(row["kind"]),
        active_policy=None,
        prefills=tuple(
            PrefillRow(each["rid"], each["prefix_len"], each["extend_len"], each["is_last"]) for each in prefills
        ),
        decodes=tuple(each["rid"] for each in rows if each["role"] == "decode"),
        sampling=(),
        retractions=(),
        preempted=(),
        mixed_rows=row["mixed_rows"],
        budget_open=None,
        budget_close=None,
        pass_end=None,
        chunk_limit=None,
        continuation=None,
        batch_is_full=row["batch_is_full"],
        new_token_ratio=row["new_token_ratio"],
        num_waiting=row["num_waiting"],
        num_running=row["num_running"],
        waiting_tokens=row["waiting_tokens"],
        promised_tokens=row["promised_tokens"],
        evicted_pages=row["evicted_pages"],
        pages=_pages(row),
    )


def _completed(row: Row, rows: list[Row]) -> StepCompleted:
    empty = next((name for name in _DONE if row[name] is None), None)
    if empty is not None:
        raise ValueError(f"{empty} is null, but done_seq is {row['done_seq']}")
    tokens = [each for each in rows if each["token_ns"] is not None]
    return StepCompleted(
        seq=row["done_seq"],
        step=row["step"],
        t_ns=row["done_t_ns"],
        kind=StepKind(row["kind"]),
        rows=tuple(
            OutcomeRow(
                each["rid"],
                each["new_page_key"],
                each["head32_key"],
                None if each["finish"] is None else FinishReason(each["finish"]),
                each["detail"] or "",
            )
            for each in tokens
        ),
        times=StepTimes(*(row[name] for name in _TIMES)),
        failed=row["failed"],
        pages=_pages(row, "done_"),
        num_waiting=row["done_num_waiting"],
        num_running=row["done_num_running"],
    )
