"""`admitscope export`. Owns: running the exports that were asked for, and what is said of them."""

from __future__ import annotations

import sys
from pathlib import Path

from telemetry.export.parquet_sink import ParquetSink, parquet_folder
from telemetry.export.source import Enough, Heard, Told, feed, survey
from telemetry.settings import ExportCommand


def run_export(command: ExportCommand) -> int:
    """Write what was asked for. Returns the exit status; raises JournalError, ConfigError or ExportError."""
    status = 0
    if command.parquet is not None:
        status = _tables(command.journal, command.parquet)
    if command.perfetto is not None:
        from telemetry.export.perfetto import export_trace

        trace = export_trace(command, command.perfetto)
        _notes(trace.told)
        _say(
            f"{command.perfetto}: {trace.entries:,} trace events of {trace.requests:,} requests and {trace.steps:,} "
            f"steps, {_mib(trace.bytes)}; open it in https://ui.perfetto.dev"
        )
    return status


def _tables(journal: Path, folder: Path) -> int:
    expects_responses = survey(journal).has_responses
    sink = ParquetSink(parquet_folder(folder), expects_responses=expects_responses, is_live=False)
    fault: list[OSError] = []

    def hear(event: Heard) -> None:
        try:
            sink.emit(event)
        except OSError as error:
            fault.append(error)
            raise Enough from None

    told = feed(journal, hear)
    try:
        sink.close()
    except OSError as error:
        fault.append(error)
    _notes(told)
    if fault:
        _say(f"admitscope: parquet={str(folder)!r}: {fault[0]}", to_stderr=True)
        return 1
    files = sum(each.files for each in sink.tables.values())
    size = sum(each.bytes for each in sink.tables.values())
    _say(
        f"{folder}: {sink.rows_written:,} rows of {told.events:,} events in {files:,} files of {len(sink.tables)} "
        f"tables, {_mib(size)}"
    )
    return 0


def _notes(told: Told) -> None:
    for note in told.notes:
        _say(f"note: {note}")


def _mib(size: int) -> str:
    return f"{size / 1024:,.0f} KiB" if size < 1024 * 1024 else f"{size / 1024 / 1024:,.1f} MiB"


def _say(text: str, *, to_stderr: bool = False) -> None:
    print(text, file=sys.stderr if to_stderr else sys.stdout)
