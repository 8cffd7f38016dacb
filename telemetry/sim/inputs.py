"""Inputs. Owns: what kind of file a workload is read from, found out from the file itself."""

from __future__ import annotations

import lzma
import zlib
from itertools import islice
from pathlib import Path
from typing import Final

from telemetry.sim.sglang_log import FINISHED, SglangExport, SglangRequestLog
from telemetry.sim.traces import AzureTrace, MooncakeTrace, Trace, TraceError, opened

#: A server says this much before its first request, at most.
_LINES: Final = 5_000
_MOST_LINE: Final = 1 << 20
_JOURNAL_BEGINS: Final = '{"type":"header"'
_PARQUET_BEGINS: Final = "PAR1"
KINDS: Final = (
    "a journal of this engine, a folder of its Parquet tables, a Mooncake trace (JSON lines with input_length and "
    "hash_ids), an Azure one (CSV with TIMESTAMP, ContextTokens, GeneratedTokens), a request log of SGLang "
    "(--log-requests --log-requests-format json, or --export-metrics-to-file)"
)


def is_journal(path: Path) -> bool:
    """Whether `path` names a journal of this engine: a folder, or a file that begins with a journal's header."""
    if path.is_dir():
        return True
    if not path.is_file():
        return False
    with opened(path) as text:
        try:
            return text.readline(4096).startswith(_JOURNAL_BEGINS)
        except (OSError, EOFError, lzma.LZMAError, zlib.error, UnicodeDecodeError):
            return False  # the readers of traces say what is wrong


def trace_format(file: Path) -> type[Trace]:
    """The reader of `file`, by its first lines. Raises TraceError when it is none that is known, or unreadable."""
    try:
        return _by_start(file)
    except UnicodeDecodeError as error:
        raise TraceError(f"{file}: {_binary(file) or f'not a text file: {error.reason}'}") from error
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        raise TraceError(f"{file}: cannot be read: {error}") from error


def _by_start(file: Path) -> type[Trace]:
    with opened(file) as text:
        first = text.readline(_MOST_LINE)
        if first.startswith(_PARQUET_BEGINS):
            raise TraceError(f"{file}: {_ONE_TABLE}")
        if "ContextTokens" in first or "TIMESTAMP" in first:
            return AzureTrace
        if '"input_length"' in first or '"hash_ids"' in first:
            return MooncakeTrace
        if '"request_parameters"' in first:
            return SglangExport
        is_text_log = False
        for line in (first, *islice(text, _LINES)):
            if FINISHED in line:
                return SglangRequestLog
            is_text_log |= "Finish: obj=" in line and "'meta_info'" in line
    if is_text_log:
        raise TraceError(
            f"{file}: a request log of SGLang as text, which is made for people: start SGLang with "
            "--log-requests-format json"
        )
    raise TraceError(f"{file}: none of these: {KINDS}")


_ONE_TABLE: Final = "one Parquet file: name the folder that holds the tables (requests, steps, …), as export wrote it"


def _binary(file: Path) -> str | None:
    """What a file that is no text may be, in words."""
    with file.open("rb") as raw:
        start = raw.read(4)
    if start == _PARQUET_BEGINS.encode():
        return _ONE_TABLE
    if start[:1] == b"\x80":
        return (
            "a pickle, as SGLang's request dumps are: reading one would run what is in it. Write a request log "
            "instead: --log-requests --log-requests-format json"
        )
    return None
