"""Traces. Owns: readers of Mooncake JSONL and Azure CSV files, line by line, and the faults that a line can have.

A fault names file, line, field and value. Files may be compressed with gzip or xz. Nothing is kept of a line.
"""

from __future__ import annotations

import csv
import gzip
import io
import lzma
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Final, TextIO

import msgspec
import numpy as np

from engine.errors import AdmitscopeError
from telemetry.demo.trace import DATA_DIR as DEMO_DATA
from telemetry.sim.cost_model import DATA_DIR
from telemetry.sim.workload import FEW, Ask, Blocks, digest64, mixed, mixed_one

#: Tokens that one hash of a Mooncake trace stands for.
MOONCAKE_BLOCK: Final = 512
#: Longest prompt or answer that is believed.
MOST_TOKENS: Final = 2**24
#: Python reads no number of thousands of digits.
_MOST_DIGITS: Final = len(str(MOST_TOKENS))
_MOST_SHOWN: Final = 80
_MOST_MS: Final = 10**12
#: Traces that come with this program.
PACKAGED: Final = {
    "mooncake": DATA_DIR / "mooncake_conversation.jsonl.xz",
    "azure-conv": DEMO_DATA / "azure_conv_2023.csv.gz",
}
_NO_KEYS: Final = np.zeros(0, dtype=np.uint64)
_ONE: Final = np.uint64(1)


class TraceError(AdmitscopeError):
    """A trace cannot be read. The message names file, line, field and value."""


def opened(file: Path) -> TextIO:
    """The text of a trace, decompressed on the way. Raises TraceError."""
    try:
        if file.suffix == ".gz":
            return io.TextIOWrapper(gzip.open(file, "rb"), encoding="utf-8", newline="")
        if file.suffix == ".xz":
            return io.TextIOWrapper(lzma.open(file, "rb"), encoding="utf-8", newline="")
        return file.open(encoding="utf-8", newline="")
    except OSError as error:
        raise TraceError(f"{file}: {error.strerror}") from error


class Trace(ABC):
    """Common to the formats: numbering, counting, the limit, and faults of the file as a whole.

    ask_for   tokens that each request asks for at most, if that is more than its answer; None: as many as its answer
    """

    def __init__(self, file: Path, *, limit: int | None, ask_for: int | None) -> None:
        self.file = file
        self.name = file.name
        self._limit = limit
        self._ask_for = ask_for

    @property
    def notes(self) -> tuple[str, ...]:
        """What whoever reads the result has to know of the file."""
        return ()

    def total(self) -> int:
        rows = sum(1 for _ in self._lines()) - self._header_lines()
        return max(rows if self._limit is None else min(rows, self._limit), 0)

    def asks(self) -> Iterator[Ask]:
        before = 0
        for count, ask in enumerate(self._rows()):
            if count == self._limit:
                return
            if ask.arrival_ns < before:
                raise TraceError(
                    f"{self.file}:{ask.rid[1:]}: arrives {(before - ask.arrival_ns) / 1e9:.3f} s before the line above "
                    "it; a trace is in the order of arrival"
                )
            before = ask.arrival_ns
            yield ask

    @abstractmethod
    def _rows(self) -> Iterator[Ask]:
        """Every request of the file, in its order."""

    def _header_lines(self) -> int:
        return 0

    def _lines(self) -> Iterator[str]:
        """Lines that are not blank. Raises TraceError for a file that is damaged or no text."""
        with opened(self.file) as text:
            try:
                yield from text
            except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
                raise TraceError(f"{self.file}: damaged: {error}") from error
            except UnicodeDecodeError as error:
                raise TraceError(f"{self.file}: not a text file: {error.reason} at byte {error.start}") from error

    def _ask(self, line: int, *, arrival_ns: int, prompt: int, output: int, ids: list[int] | None) -> Ask:
        own = digest64(f"{self.name}:{line}")
        known = prompt if ids else 0
        keys = _chained(ids) if ids else _NO_KEYS
        return Ask(
            rid=f"L{line}",
            arrival_ns=arrival_ns,
            prompt_len=prompt,
            output_len=output,
            max_new_tokens=max(output, self._ask_for or 0),
            blocks=Blocks(size=MOONCAKE_BLOCK, keys=keys, known=known, own=own),
            # An answer of its own length: nobody stopped it.
            ignore_eos=self._ask_for is None,
        )


class _MooncakeRow(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]


class MooncakeTrace(Trace):
    """JSON lines: `timestamp` (ms), `input_length`, `output_length` (tokens), `hash_ids` (one for each 512 tokens)."""

    def _rows(self) -> Iterator[Ask]:
        decoder = msgspec.json.Decoder(_MooncakeRow)
        for number, line in enumerate(self._lines(), 1):
            if not line.strip():
                continue
            where = f"{self.file}:{number}"
            try:
                row = decoder.decode(line)
            except msgspec.ValidationError as error:
                raise TraceError(f"{where}: {field_first(str(error))}; the line is {line.strip()[:120]}") from error
            except (msgspec.DecodeError, RecursionError) as error:
                raise TraceError(f"{where}: no JSON object: {error}; the line is {line.strip()[:120]}") from error
            within(where, "timestamp", row.timestamp, 0, _MOST_MS)
            within(where, "input_length", row.input_length, 1, MOST_TOKENS)
            within(where, "output_length", row.output_length, 0, MOST_TOKENS)
            blocks = -(-row.input_length // MOONCAKE_BLOCK)
            if len(row.hash_ids) != blocks:
                raise TraceError(
                    f"{where}: hash_ids has {len(row.hash_ids)} entries; an input_length of {row.input_length} has "
                    f"{blocks} blocks of {MOONCAKE_BLOCK} tokens"
                )
            bad = next((each for each in row.hash_ids if not 0 <= each < 2**63), None)
            if bad is not None:
                raise TraceError(f"{where}: hash_ids holds {bad}; 0 to 2**63 - 1 are possible")
            yield self._ask(
                number,
                arrival_ns=round(row.timestamp * 1e6),
                prompt=row.input_length,
                output=max(row.output_length, 1),
                ids=row.hash_ids,
            )


class AzureTrace(Trace):
    """CSV with `TIMESTAMP` (date and time), `ContextTokens`, `GeneratedTokens`. Nothing is known of prefixes."""

    def _header_lines(self) -> int:
        return 1

    def _parted(self, rows: csv.DictReader[str]) -> Iterator[dict[str, str]]:
        """Rows as fields. Raises TraceError where a line cannot be parted into some."""
        try:
            yield from rows
        except csv.Error as error:
            raise TraceError(f"{self.file}:{rows.line_num + 1}: no CSV: {error}") from error

    def _rows(self) -> Iterator[Ask]:
        start: datetime | None = None
        rows = csv.DictReader(self._lines())
        try:
            names = list(rows.fieldnames or ())
        except csv.Error as error:
            raise TraceError(f"{self.file}:1: no CSV: {error}") from error
        missing = [name for name in ("TIMESTAMP", "ContextTokens", "GeneratedTokens") if name not in names]
        if missing:
            raise TraceError(f"{self.file}:1: no column {missing[0]}; there are {', '.join(names) or 'none'}")
        for row in self._parted(rows):
            where = f"{self.file}:{rows.line_num}"
            at = _moment(where, row["TIMESTAMP"])
            start = start or at
            prompt = _number(where, "ContextTokens", row["ContextTokens"], 1)
            output = _number(where, "GeneratedTokens", row["GeneratedTokens"], 0)
            try:
                arrival_ns = round((at - start).total_seconds() * 1e9)
            except TypeError as error:
                raise TraceError(
                    f"{where}: TIMESTAMP is {row['TIMESTAMP']!r}; the first has no time zone, or only it has"
                ) from error
            if arrival_ns < 0:
                raise TraceError(f"{where}: TIMESTAMP is {row['TIMESTAMP']}, before the first line's {start}")
            yield self._ask(rows.line_num, arrival_ns=arrival_ns, prompt=prompt, output=max(output, 1), ids=None)


def _chained(ids: list[int]) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    """Keys that stand for their block and all before it."""
    is_short = len(ids) <= FEW
    own = [mixed_one(each + 1) for each in ids] if is_short else mixed(np.array(ids, dtype=np.uint64) + _ONE).tolist()
    keys, chain = [], 0
    for key in own:
        chain = (chain * 0x100000001B3 ^ key) * 0x9E3779B97F4A7C15 % 2**64
        keys.append(mixed_one(chain) if is_short else chain)
    made = np.array(keys, dtype=np.uint64)
    return made if is_short else mixed(made)


def field_first(message: str) -> str:
    """msgspec's "Expected `int`, got `str` - at `$.input_length`", with the field in front."""
    what, _, place = message.partition(" - at `$.")
    return f"{place.rstrip('`')}: {what}" if place else message


def within(where: str, name: str, value: float, least: int, most: int) -> None:
    """Raise TraceError for a value that no request has."""
    if not least <= value <= most:
        raise TraceError(f"{where}: {name} is {value}; {least} to {most} are possible")


def _shown(text: str | None) -> str:
    """A field of a file in a message, which is one line."""
    return (
        repr(text) if text is None or len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]!r}… ({len(text)} characters)"
    )


def _number(where: str, name: str, text: str | None, least: int) -> int:
    if text is None or not (text.strip().isascii() and text.strip().isdigit()):
        raise TraceError(f"{where}: {name} is {_shown(text)}; a whole number is needed")
    if len(text.strip().lstrip("0")) > _MOST_DIGITS:
        raise TraceError(f"{where}: {name} is {_shown(text)}; {least} to {MOST_TOKENS} are possible")
    value = int(text.strip().lstrip("0") or 0)
    within(where, name, value, least, MOST_TOKENS)
    return value


def _moment(where: str, text: str | None) -> datetime:
    """Python reads six places of a second; the trace has seven."""
    try:
        head, _, rest = (text or "").strip().partition(".")
        return datetime.fromisoformat(f"{head}.{rest[:6].ljust(6, '0')}" if rest.isdigit() else (text or "").strip())
    except ValueError as error:
        raise TraceError(f"{where}: TIMESTAMP is {_shown(text)}; a date and time is needed") from error
