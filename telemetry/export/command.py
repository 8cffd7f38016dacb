"""`admitscope export`. Owns: running the exports that were asked for, and what is said of them."""

from __future__ import annotations

import sys
from pathlib import Path

from telemetry.export.parquet_sink import ParquetSink, parquet_folder
from telemetry.export.source import Enough, Heard, Told, feed, named_values, survey
from telemetry.settings import ExportCommand


def run_export(command: ExportCommand) -> int:
    """Write what was asked for. Returns the exit status; raises JournalError, ConfigError or ExportError."""
    if command.parquet is not None:
        try:
            told, sink = write_tables(command.journal, command.parquet)
        except OSError as error:
            _say(f"admitscope: parquet={str(command.parquet)!r}: {error}", to_stderr=True)
            return 1
        _notes(told)
        files = sum(each.files for each in sink.tables.values())
        size = sum(each.bytes for each in sink.tables.values())
        _say(
            f"{command.parquet}: {sink.rows_written:,} rows of {told.events:,} events in {files:,} files of "
            f"{len(sink.tables)} tables, {_mib(size)}"
        )
    if command.perfetto is not None:
        from telemetry.export.perfetto import DiskRefused, UnknownRid, export_trace

        try:
            trace = export_trace(command, command.perfetto)
        except (UnknownRid, DiskRefused) as error:
            _say(f"admitscope: {error}", to_stderr=True)
            return 1
        _notes(trace.told)
        _say(
            f"{command.perfetto}: {trace.entries:,} trace events of {trace.requests:,} requests and {trace.steps:,} "
            f"steps, {_mib(trace.bytes)}; open it in https://ui.perfetto.dev"
        )
    return 0


def write_tables(journal: Path, folder: Path) -> tuple[Told, ParquetSink]:
    """Every table of the journal, in `folder`.

    Raises JournalError, ConfigError, ExportError, and OSError when rows were lost.
    """
    expects_responses = survey(journal).has_responses
    sink = ParquetSink(parquet_folder(folder), expects_responses=expects_responses, is_live=False)
    fault: list[OSError] = []

    def hear(event: Heard) -> None:
        try:
            sink.emit(event)
        except OSError as error:
            fault.append(error)
            raise Enough from None

    with named_values(journal):
        told = feed(journal, hear)
        try:
            sink.close()
        except OSError as error:
            fault.append(error)
    if fault:
        raise fault[0]
    return told, sink


def _notes(told: Told) -> None:
    if told.gap is not None:
        _say(f"note: {told.gap.text()}")
    for note in told.notes:
        _say(f"note: {note}")


def _mib(size: int) -> str:
    return f"{size / 1024:,.0f} KiB" if size < 1024 * 1024 else f"{size / 1024 / 1024:,.1f} MiB"


def _say(text: str, *, to_stderr: bool = False) -> None:
    print(text, file=sys.stderr if to_stderr else sys.stdout)
