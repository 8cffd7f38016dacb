"""Parquet files. Owns: one table's files — row groups, one file an hour, a name that appears when it is whole.

    OUT/steps/steps-20261231T10Z-ENGINE.parquet
    OUT/steps/.steps-20261231T10Z-ENGINE.parquet.part      while it is written

A file system that refuses (disk full) does not break a file at once: up to 8 MiB wait and are tried again with the next
row group. Beyond that the file is given up, its rows are counted as lost, and the next row group begins a new one.
"""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from engine.errors import AdmitscopeError
from telemetry.export.parquet_schema import Table

if TYPE_CHECKING:
    import pyarrow as pa

MAX_PENDING_BYTES: Final = 8 * 1024 * 1024
HOUR_NS: Final = 3_600_000_000_000
#: Rows turned into columns at once: beside a running engine, this is how long the interpreter lock is held.
BATCH_ROWS: Final = 512


class ExportError(AdmitscopeError):
    """An export cannot be written. The message names the field, the value and what is wrong."""


class PatientFile(io.RawIOBase):
    """A file whose writes are accepted while the disk refuses them, up to `max_pending` bytes.

    is_broken   more than that waited: the file will never be whole
    """

    def __init__(self, path: Path, *, max_pending: int = MAX_PENDING_BYTES) -> None:
        super().__init__()
        self._file = path.open("xb", buffering=0)
        self._pending = bytearray()
        self._max_pending = max_pending
        self._written = 0
        self.is_broken = False
        self.last_error: OSError | None = None

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        """Accept all of `data`. Never raises OSError."""
        view = memoryview(data).cast("B")
        if not self.is_broken:
            self._pending += view
            self._try()
        return len(view)

    def tell(self) -> int:
        """Bytes accepted so far."""
        return self._written + len(self._pending)

    def _try(self) -> None:
        """Write what waits; what the disk refuses waits on."""
        try:
            while self._pending:
                done = self._file.write(self._pending)
                self._written += done or 0
                del self._pending[: done or 0]
        except OSError as error:
            self.last_error = error
            if len(self._pending) > self._max_pending:
                self.is_broken = True
                self._pending.clear()

    def finish(self) -> None:
        """Make all of it durable. Raises OSError when that fails."""
        self._try()
        if self._pending or self.is_broken:
            raise self.last_error or OSError("not written")
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file, whole or not."""
        self._file.close()
        super().close()


class TableFiles:
    """The files of one table of one engine. Rows wait in memory, as columns but for the last few, until a row group
    is full.

    hour          of the first row, hours since 1970
    rows_written  in files that are whole or will be
    rows_lost     that no file will have
    files         finished
    """

    def __init__(self, folder: Path, table: Table, engine_id: str, *, hour: int) -> None:
        self._folder = folder / table.name
        self._table = table
        self._engine_id = engine_id
        self._schema = table.arrow()
        self._rows: list[tuple[Any, ...]] = []
        self._batches: list[pa.RecordBatch] = []
        self._waiting = 0
        self._file: _OpenFile | None = None
        self._hour = hour
        self.rows_written = 0
        self.rows_lost = 0
        self.files = 0
        self.bytes = 0

    def add(self, row: tuple[Any, ...], hour: int) -> None:
        """Take a row of `hour` (hours since 1970). Raises OSError when rows were lost; they are counted."""
        self._hour = hour
        self._rows.append(row)
        self._waiting += 1
        if len(self._rows) >= BATCH_ROWS:
            self._batch()
            if self._waiting >= self._table.group_rows:
                self._write_group()

    def finish(self, *, even_empty: bool = False) -> None:
        """Write what waits and give the file its name. Raises OSError when rows were lost; they are counted.

        even_empty  make a file without rows when this table never had one, so that queries find its columns
        """
        if self._waiting or (even_empty and self._file is None and not self.files):
            self._write_group()
        file, self._file = self._file, None
        if file is None:
            return
        try:
            self.bytes += file.finish()
        except OSError:
            self.rows_written -= file.rows
            self.rows_lost += file.rows
            raise
        self.files += 1

    @property
    def rows_waiting(self) -> int:
        """Rows in memory."""
        return self._waiting

    def _batch(self) -> None:
        if self._rows:
            self._batches.append(record_batch(self._rows, self._schema))
            self._rows = []

    def _write_group(self) -> None:
        import pyarrow as pa

        self._batch()
        group = pa.Table.from_batches(self._batches, self._schema)
        self._batches, self._waiting = [], 0
        try:
            if self._file is None:
                self._file = _OpenFile(self._new_path(), self._schema)
            self._file.write(group)
        except OSError:
            self.rows_lost += group.num_rows
            if self._file is not None:
                self.rows_written -= self._file.rows
                self.rows_lost += self._file.rows
                self._file.give_up()
                self._file = None
            raise
        self._file.rows += group.num_rows
        self.rows_written += group.num_rows

    def _new_path(self) -> Path:
        """A name that no file has: a second one of the same hour, after a loss, has a number."""
        self._folder.mkdir(parents=True, exist_ok=True)
        began = datetime.fromtimestamp(self._hour * 3600, tz=UTC)
        stem = f"{self._table.name}-{began:%Y%m%dT%H}Z-{self._engine_id}"
        path, number = self._folder / f"{stem}.parquet", 1
        while path.exists() or _part(path).exists():
            path, number = self._folder / f"{stem}-{number}.parquet", number + 1
        return path


class _OpenFile:
    """One file being written."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        import pyarrow.parquet as pq

        self._path = path
        self.rows = 0
        self._file = PatientFile(_part(path))
        self._writer = pq.ParquetWriter(self._file, schema, compression="zstd", write_page_checksum=True)

    def write(self, table: pa.Table) -> None:
        """One row group. Raises OSError when the file cannot become whole any more."""
        self._writer.write_table(table, row_group_size=max(table.num_rows, 1))
        self._raise_if_broken()

    def finish(self) -> int:
        """Footer, disk, name: its size in bytes. Raises OSError, and the file is gone, when one of them fails."""
        try:
            self._writer.close()
            self._raise_if_broken()
            self._file.finish()
            size = self._file.tell()
            self._file.close()
            _part(self._path).replace(self._path)
        except OSError:
            self.give_up()
            raise
        return size

    def give_up(self) -> None:
        """Remove it."""
        self._file.is_broken = True  # the footer goes nowhere
        self._writer.close()
        self._file.close()
        _part(self._path).unlink(missing_ok=True)

    def _raise_if_broken(self) -> None:
        if self._file.is_broken:
            raise self._file.last_error or OSError(f"{self._path}: not written")


def record_batch(rows: Sequence[tuple[Any, ...]], schema: pa.Schema) -> pa.RecordBatch:
    """Rows, at least one, as columns. Raises ArrowInvalid for a value that its column cannot hold."""
    import pyarrow as pa

    arrays = [pa.array(values, type=kind.type) for values, kind in zip(zip(*rows, strict=True), schema, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _part(path: Path) -> Path:
    return path.with_name(f".{path.name}.part")
