"""ParquetSink. Owns: an engine's events as Parquet tables in a folder, live or from a journal.

Feed it from a worker thread (`BufferedSink`). Memory is bounded by one row group per table. A disk that refuses costs
rows, which are counted and raised as OSError for the caller to count; it never ends the sink. A process that is killed
leaves the hour it was writing as `.part` files without a footer: the journal has that hour, `admitscope export` reads
it.
"""

from __future__ import annotations

import glob
import time
from pathlib import Path

from engine.errors import ConfigError
from engine.events import AnyEvent, EngineStarted
from telemetry.export.parquet_files import HOUR_NS, ExportError, TableFiles
from telemetry.export.parquet_rows import Row, RowMaker
from telemetry.export.parquet_schema import TABLES
from telemetry.schema_journal import EventsMissingRecord, RefusalsFoldedRecord


class ParquetSink:
    """Writes every table of one engine into `folder`. Its first event must be `EngineStarted`.

    expects_responses  a server reports the end of each response
    is_live            the wall clock passes: `flush` finishes the files of an hour that is over
    """

    def __init__(self, folder: Path, *, expects_responses: bool, is_live: bool = True) -> None:
        self.folder = folder
        self._expects_responses = expects_responses
        self._is_live = is_live
        self._maker: RowMaker | None = None
        self._hour = 0
        self._errors: list[OSError] = []
        self.tables: dict[str, TableFiles] = {}

    def emit(self, event: AnyEvent | RefusalsFoldedRecord | EventsMissingRecord) -> None:
        """Take one event. Raises OSError when rows were lost on the way."""
        if isinstance(event, EngineStarted):
            self._begin(event)
        maker = self._maker
        if maker is None:
            raise ExportError(f"{self.folder}: the first event is {type(event).__name__}, not EngineStarted")
        if not isinstance(event, RefusalsFoldedRecord | EventsMissingRecord):
            self._turn(maker.wall_ns(event.t_ns) // HOUR_NS)
        maker.take(event)
        self._raise()

    def _begin(self, started: EngineStarted) -> None:
        self.close()
        there = sorted(self.folder.glob(f"*/*Z-{glob.escape(started.engine_id)}.parquet"))
        if there:
            raise ExportError(f"parquet={str(self.folder)!r}: holds {there[0].name} already: choose another folder")
        self._hour = started.wall_ns // HOUR_NS
        self.tables = {
            name: TableFiles(self.folder, table, started.engine_id, hour=self._hour) for name, table in TABLES.items()
        }
        self._maker = RowMaker(started, self._put, expects_responses=self._expects_responses)

    def _put(self, table: str, row: Row) -> None:
        try:
            self.tables[table].add(row, self._hour)
        except OSError as error:
            self._errors.append(error)

    def _turn(self, hour: int) -> None:
        """Finish the files of the hour before. A clock that is set back starts no older file."""
        if hour <= self._hour:
            return
        self._finish(even_empty=False)
        self._hour = hour

    def _finish(self, *, even_empty: bool) -> None:
        for files in self.tables.values():
            try:
                files.finish(even_empty=even_empty)
            except OSError as error:
                self._errors.append(error)

    def _raise(self) -> None:
        """One error for all that went wrong since the last: who feeds this counts it."""
        errors, self._errors = self._errors, []
        if errors:
            raise OSError(errors[0].errno, f"{errors[0].strerror or errors[0]}; {self.rows_lost} rows lost so far")

    def flush(self) -> None:
        """Finish the files of an hour that is over, also when nothing happens. Raises OSError when rows were lost."""
        if self._is_live and self._maker is not None:
            self._turn(time.time_ns() // HOUR_NS)
            self._raise()

    def close(self) -> None:
        """Write everything and finish the files. May be called twice. Raises OSError when rows were lost."""
        maker, self._maker = self._maker, None
        if maker is None:
            return
        maker.close()
        self._finish(even_empty=True)
        self._raise()

    @property
    def rows_written(self) -> int:
        """Of all tables."""
        return sum(files.rows_written for files in self.tables.values())

    @property
    def rows_lost(self) -> int:
        """Of all tables."""
        return sum(files.rows_lost for files in self.tables.values())


def parquet_folder(folder: Path) -> Path:
    """`folder`, made. Raises ConfigError when it cannot be written to, or pyarrow is not installed."""
    try:
        import pyarrow.parquet

        pyarrow.array([""])  # loads what it needs (0.3 s) now, not with an engine's first rows
    except ModuleNotFoundError as error:
        raise ConfigError("parquet: pyarrow is not installed: pip install -e '.[parquet]'") from error
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ConfigError(f"parquet={str(folder)!r}: {error.strerror}") from error
    return folder
