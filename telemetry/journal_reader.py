"""Journal reader. Owns: which files make up a journal, in what order, and what a damaged one means.

Streams; nothing is kept. Segments follow each other as `telemetry.journal` names them, each plain or gzip (`.gz`). A
last line that is cut off or unreadable is what a crash leaves: reading ends before it and `torn` says where. An
unreadable line anywhere else is an error that names file and line: such a journal was altered.
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Final, NamedTuple, TypeVar, cast

import msgspec

from telemetry.journal import JournalError, segment_path
from telemetry.schema import Record, RecordError, SchemaTooNew, decode
from telemetry.schema_journal import HeaderRecord

_T = TypeVar("_T")
#: Longest line that is read. Ours are far shorter; a file that is no journal may be one line without end.
MAX_LINE_BYTES: Final = 64 * 1024 * 1024


_CHECKPOINT: Final = b'{"type":"checkpoint"'
_START: Final = b'{"type":"EngineStarted"'


class _Start(msgspec.Struct):
    """What an engine's start shares with the header."""

    schema_version: int
    engine_id: str


class Line(NamedTuple):
    """One line as it stands in a file; `number` counts from 1."""

    file: Path
    number: int
    raw: bytes

    def __str__(self) -> str:
        return f"{self.file}:{self.number}"

    def damaged(self, error: RecordError) -> str:
        """What is said of a line in the middle that is no record, `error` being why."""
        return (
            f"{self}: the line is damaged: it is not one whole record (it was altered, or two lines were cut and "
            f"joined), so nothing can be told from there on. As read: {error}"
        )


class TornTail(NamedTuple):
    """Where a journal ends before its time, and why the rest was not read."""

    file: Path
    number: int
    why: str

    def __str__(self) -> str:
        return f"{self.file}:{self.number}: {self.why}"


#: Host and port, without what makes a URL of them.
_LIKE_AN_ADDRESS: Final = re.compile(r"[\w.-]+:\d+")
_LATER_SEGMENT: Final = re.compile(r"\.\d{4}(?=\.jsonl$)")


def first_file(path: Path) -> Path:
    """Name of a journal's first file, from any of its files, or from the folder of a run.

    Of several journals in one folder it is the one whose name sorts last: names begin with the time of start.
    Raises JournalError when a folder has none.
    """
    if _asked(path, path.is_dir):
        first = runs_in(path)
        if not first:
            raise JournalError(f"{path}: no journal (*.jsonl) in this folder")
        return path / first[-1]
    plain = _without_gz(path)
    return plain.with_name(_LATER_SEGMENT.sub("", plain.name))


def runs_in(folder: Path) -> list[str]:
    """Names of the first files of all journals in `folder`, oldest first; none when it is no folder."""
    names = {_without_gz(file).name for file in (*folder.glob("*.jsonl"), *folder.glob("*.jsonl.gz"))}
    return sorted(name for name in names if not _LATER_SEGMENT.search(name))


def segment_files(path: Path) -> tuple[Path, ...]:
    """The existing files of the journal at `path`, in order. Raises JournalError."""
    base = first_file(path)
    files: list[Path] = []
    while found := _plain_or_gzip(segment_path(base, len(files))):
        files.append(found)
    if not files:
        hint = f"; a live engine is http://{base}" if _LIKE_AN_ADDRESS.fullmatch(str(base)) else ""
        raise JournalError(f"{base}: no such journal{hint}")
    if not _asked(files[0], lambda: files[0].stat().st_size):
        raise JournalError(f"{files[0]}: the file is empty: nothing was written to it")
    later = sorted(base.parent.glob(f"{base.stem}.[0-9][0-9][0-9][0-9]{base.suffix}*"))
    last_known = len(files) - 1
    for candidate in later:
        number = int(candidate.name[len(base.stem) + 1 :][:4])
        if number > last_known:
            missing = segment_path(base, last_known + 1)
            raise JournalError(f"{missing} is missing, but {candidate.name} is there: the journal has a hole")
    return tuple(files)


class JournalReader:
    """One journal, read front to back as often as needed. `path`: a run's folder, or any of the journal's files.

    header  of the first segment
    torn    set by the latest complete reading when the journal ends in a damaged line
    open_end  set by the latest complete reading when the last line is whole, but is not the checkpoint with which a
              writer closes a journal: it was cut there, or is still being written. Why, in words
    ends_at   set with `open_end`: file:line of that last line
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files = segment_files(path)
        self.torn: TornTail | None = None
        self.open_end: str | None = None
        self.ends_at: str | None = None
        self.header = self._header_of(self.files[0], 0)

    def records(self, *, without: tuple[str, ...] = ()) -> Iterator[Record]:
        """Every record, headers included, validated. Raises JournalError.

        without  types to pass over unread, which is much faster where a question needs only the others
        """
        starts = tuple(f'{{"type":"{kind}",'.encode() for kind in without)

        def decoded(raw: bytes) -> Record | None:
            return None if starts and raw.startswith(starts) and raw.endswith(b"}") else decode(raw)

        for _, record in self.read(decoded):
            if record is not None:
                yield record

    def read(self, decoded: Callable[[bytes], _T]) -> Iterator[tuple[Line, _T]]:
        """Every line with what `decoded` makes of it; it raises RecordError for what it cannot read."""
        self.torn = self.open_end = self.ends_at = None
        starts = 0
        lines = self._lines()
        line = next(lines, None)
        while line is not None:
            following = next(lines, None)
            try:
                value = decoded(line.raw)
            except SchemaTooNew as error:
                raise JournalError(f"{line}: {error}") from error
            except RecordError as error:
                if following is not None:
                    raise JournalError(line.damaged(error)) from error
                self.torn = self.torn or TornTail(line.file, line.number, f"unreadable last line: {error}")
                return
            if line.raw.startswith(_START):
                starts += 1
                self._check_start(line, starts)
            if following is None and self.torn is None and not line.raw.startswith(_CHECKPOINT):
                self.ends_at = str(line)
                self.open_end = f"{line} is no closing checkpoint: the record was cut here, or is still being written"
            yield line, value
            line = following

    def _check_start(self, line: Line, starts: int) -> None:
        """Raise JournalError for an engine's start that contradicts the header, or a second one."""
        if starts > 1:
            raise JournalError(f"{line}: a second EngineStarted: a journal holds one run of one engine")
        started = msgspec.json.decode(line.raw, type=_Start)
        for field in ("schema_version", "engine_id"):
            told, known = getattr(started, field), getattr(self.header, field)
            if told != known:
                raise JournalError(f"{line}: {field} is {told!r}, the journal's header says {known!r}")

    def _lines(self) -> Iterator[Line]:
        for index, file in enumerate(self.files):
            is_last = index == len(self.files) - 1
            if index:
                if is_last and _has_no_line(file):
                    self.torn = TornTail(file, 1, "the segment ends inside its header")
                    return
                self._header_of(file, index)
            number = 0
            with _opened(file) as stream:
                while True:
                    number += 1
                    try:
                        raw = _line_of(stream, file, number)
                    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
                        torn = TornTail(file, number, f"damaged gzip: {error}")
                        if not is_last:
                            raise JournalError(str(torn)) from error
                        self.torn = torn
                        return
                    if not raw:
                        break
                    yield Line(file, number, raw.removesuffix(b"\n"))

    def _header_of(self, file: Path, segment: int) -> HeaderRecord:
        """The header of one file, checked against its place among the others."""
        try:
            with _opened(file) as stream:
                record = decode(_line_of(stream, file, 1))
        except RecordError as error:
            raise JournalError(f"{file}:1: no journal header: {error}") from error
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise JournalError(f"{file}:1: damaged gzip: {error}") from error
        if not isinstance(record, HeaderRecord):
            raise JournalError(f"{file}:1: the first line is {record.type}, not a header")
        if record.segment != segment:
            raise JournalError(f"{file}:1: segment is {record.segment}, but by its name it is {segment}")
        if segment and record.engine_id != self.header.engine_id:
            raise JournalError(
                f"{file}:1: engine_id is {record.engine_id!r}; the journal began with {self.header.engine_id!r}"
            )
        return record


def _without_gz(path: Path) -> Path:
    return path.with_suffix("") if path.suffix == ".gz" else path


def _plain_or_gzip(path: Path) -> Path | None:
    compressed = path.with_name(path.name + ".gz")
    return path if _asked(path, path.is_file) else compressed if _asked(path, compressed.is_file) else None


def _asked(path: Path, question: Callable[[], _T]) -> _T:
    try:
        return question()
    except OSError as error:  # a name that is too long, a folder that may not be entered
        raise JournalError(f"{str(path)[:200]}: {error.strerror}") from error


def _opened(file: Path) -> IO[bytes]:
    try:
        return cast("IO[bytes]", gzip.open(file, "rb")) if file.suffix == ".gz" else file.open("rb")
    except OSError as error:
        raise JournalError(f"{file}: {error.strerror}") from error


def _line_of(stream: IO[bytes], file: Path, number: int) -> bytes:
    """The next line, with its newline; b"" at the end. Raises JournalError for one that cannot be ours."""
    raw = stream.readline(MAX_LINE_BYTES)
    if len(raw) == MAX_LINE_BYTES:
        raise JournalError(f"{file}:{number}: longer than {MAX_LINE_BYTES} bytes: no line of a journal is")
    return raw


def _has_no_line(file: Path) -> bool:
    """A segment that was begun just before the end: not one whole line."""
    if file.suffix == ".gz":
        return False
    with _opened(file) as stream:
        return not _line_of(stream, file, 1).endswith(b"\n")
