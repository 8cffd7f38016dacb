"""Journal writer. Owns: the files of a journal — lines, batches, segments, checkpoints, and what a failing disk does.

A journal is JSON lines: a header, then events in the engine's order (repeated refusals folded), checkpoints of their
running hash in between. It holds every input of the core, so `telemetry.replay` can run it again, and no token and no
text: prompts are salted page keys and lengths.

Files     `run.jsonl`, then `run.0001.jsonl`, `run.0002.jsonl` … once a segment passes `rotate_bytes`; each starts with
          a header that carries its number. An existing file is never overwritten.
Batches   lines are written together, every 256 or 50 ms, whichever is first.
Safety    a batch is handed to the operating system when written: it survives the end of the process. `fsync` runs at
          rotation and close only; a power failure may cost what the system had not written yet.
Failures  a write that fails (disk full) is cut off at the last whole line, raised to the caller (BufferedSink counts
          and logs it) and tried again with the next batch. Up to 8 MiB wait; beyond that new events are dropped, and an
          `events_missing` line says how many once writing works again.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import msgspec
from pydantic import JsonValue

from engine.clock import Clock, MonotonicClock
from engine.errors import AdmitscopeError
from engine.events import (
    SCHEMA_VERSION,
    AdmissionDecided,
    AnyEvent,
    EngineStarted,
    RequestTransitioned,
    ResponseSent,
    StepCompleted,
)
from telemetry.folding import EventHash, RefusalFolder, fold_key
from telemetry.schema import LineUnion, encode
from telemetry.schema_journal import CheckpointRecord, EventsMissingRecord, HeaderRecord
from telemetry.schema_parts import SourcePart

ROTATE_BYTES: Final = 64 * 1024 * 1024
BATCH_RECORDS: Final = 256
BATCH_NS: Final = 50_000_000
CHECKPOINT_STEPS: Final = 256
MAX_PENDING_BYTES: Final = 8 * 1024 * 1024
#: What `RefusalFolder` has something to say about.
_FOLDED: Final = frozenset({AdmissionDecided, RequestTransitioned})


class JournalError(AdmitscopeError):
    """A journal cannot be written or read. The message names the file."""


def new_journal_path(folder: Path, wall_ns: int) -> Path:
    """A fresh name in `folder` that sorts by start time: admitscope-20261231T235959.123456Z.jsonl."""
    started = datetime.fromtimestamp(wall_ns / 1e9, tz=UTC)
    return folder / f"admitscope-{started:%Y%m%dT%H%M%S.%f}Z.jsonl"


def segment_path(path: Path, segment: int) -> Path:
    """File of a segment: `path` itself for 0, then `stem.NNNN.suffix`."""
    return path if segment == 0 else path.with_name(f"{path.stem}.{segment:04d}{path.suffix}")


class JournalSink:
    """Writes one engine's life to files. One thread calls it: wrap it in a BufferedSink beside a live engine.

    Its first event must be `EngineStarted`, which the header is made of; the file is created then.

    source  the engine that decided, when it was another one: no replay can make its refusals again, so none is folded
    """

    def __init__(
        self,
        path: Path,
        *,
        rotate_bytes: int = ROTATE_BYTES,
        checkpoint_steps: int = CHECKPOINT_STEPS,
        max_pending_bytes: int = MAX_PENDING_BYTES,
        clock: Clock | None = None,
        source: SourcePart | None = None,
    ) -> None:
        self.path = path
        self._source = source
        self._rotate_bytes = rotate_bytes
        self._checkpoint_steps = checkpoint_steps
        self._max_pending = max_pending_bytes
        self._clock = clock or MonotonicClock()
        self._encoder = msgspec.json.Encoder()
        self._folder = RefusalFolder()
        self._hash = EventHash()
        #: Encoded events that the hash lacks, and how many; none between two calls.
        self._unhashed: list[bytes] = []
        self._num_unhashed = 0
        #: Of the next batch, and how many.
        self._lines: list[bytes] = []
        self._num_lines = 0
        self._pending = bytearray()
        self._file: _SegmentFile | None = None
        self._header: HeaderRecord | None = None
        self._last_flush_ns = self._clock.now_ns()
        self._last_checkpoint_step = 0
        self._last_step = 0
        self._next_seq = 0
        self._closed = False

    @property
    def segment(self) -> int:
        """Number of the segment being written."""
        return self._header.segment if self._header else 0

    @property
    def event_hash(self) -> str:
        """Hash of the core's events so far; once closed, that of the last checkpoint."""
        return self._hash.hexdigest()

    def emit(self, event: AnyEvent) -> None:
        """Take one event; writes when a batch is due. Raises OSError when writing fails, JournalError when misused."""
        self.take((event,))

    def take(self, events: Sequence[AnyEvent]) -> None:
        """Take several. What it raises, it raises once it has them all."""
        if not events:
            return
        if self._closed:
            raise JournalError(f"{self.path}: event {events[0].seq} came after close")
        if self._header is None:
            self._open(events[0])
        if len(self._pending) < self._max_pending:
            self._take_all(events)
        if self._num_lines >= BATCH_RECORDS or self._clock.now_ns() - self._last_flush_ns >= BATCH_NS:
            self.flush()

    def flush(self) -> None:
        """Write what waits. Raises OSError when that fails; the lines then wait for the next attempt."""
        self._last_flush_ns = self._clock.now_ns()
        if self._file is not None:
            self._write(self._file)
            if self._file.size >= self._rotate_bytes:
                self._rotate(self._file)

    def close(self) -> None:
        """Write everything, a last checkpoint included, and make it durable. May be called twice."""
        if self._closed or self._file is None:
            self._closed = True
            return
        self._checkpoint()
        try:
            self._write(self._file)
        finally:
            self._closed = True
            self._file.close()

    def _open(self, event: AnyEvent) -> None:
        if not isinstance(event, EngineStarted):
            raise JournalError(f"{self.path}: the first event is {type(event).__name__}, not EngineStarted")
        config: dict[str, JsonValue] = msgspec.json.decode(event.config, type=dict)
        header = HeaderRecord(
            schema_version=SCHEMA_VERSION,
            version=event.version,
            engine_id=event.engine_id,
            segment=0,
            first_seq=event.seq,
            wall_ns=event.wall_ns,
            mono_ns=event.t_ns,
            config=config,
            source=self._source,
        )
        self._file = _SegmentFile(self.path)
        self._header = header
        self._next_seq = event.seq
        self._line(header)

    def _take_all(self, events: Sequence[AnyEvent]) -> None:
        """Lines of several. Those in a row that nothing is to be said about are encoded together."""
        due, folder, checkpoint_at = self._next_seq, self._folder, self._last_checkpoint_step + self._checkpoint_steps
        begin = 0
        for at, event in enumerate(events):
            kind = type(event)
            if (
                event.seq == due
                and kind is not ResponseSent
                and (kind is not StepCompleted or event.step < checkpoint_at)
                and (kind not in _FOLDED or (folder.is_empty and fold_key(event) is None) or self._source is not None)
            ):
                due += 1
                continue
            self._take_run(events[begin:at])
            self._take(event)
            begin, due, checkpoint_at = at + 1, self._next_seq, self._last_checkpoint_step + self._checkpoint_steps
        self._take_run(events[begin:])
        self._hash_up()

    def _take_run(self, events: Sequence[AnyEvent]) -> None:
        """Events of the core, none of them missing, folded or followed by a checkpoint."""
        if events:
            self._next_seq, self._last_step = events[-1].seq + 1, events[-1].step
            encoded = self._encoder.encode_lines(events)
            self._keep(encoded, len(events))
            self._unhashed.append(encoded)
            self._num_unhashed += len(events)

    def _take(self, event: AnyEvent) -> None:
        if event.seq != self._next_seq:
            missing = EventsMissingRecord(
                after_seq=self._next_seq - 1, before_seq=event.seq, missing=event.seq - self._next_seq
            )
            self._line(missing)
        self._next_seq = event.seq + 1
        self._last_step = event.step
        encoded, kind = self._encoder.encode(event) + b"\n", type(event)
        if kind is not ResponseSent:
            self._unhashed.append(encoded)
            self._num_unhashed += 1
        if kind in _FOLDED and self._source is None:
            folded, written = self._folder.push(event)
            if folded is not None:
                self._line(folded)
            if not written:
                return
        self._keep(encoded, 1)
        if kind is StepCompleted and event.step - self._last_checkpoint_step >= self._checkpoint_steps:
            self._checkpoint()

    def _keep(self, encoded: bytes, lines: int) -> None:
        """Lines that are written with the next batch, each with its end."""
        self._lines.append(encoded)
        self._num_lines += lines

    def _hash_up(self) -> None:
        self._hash.add_all(self._unhashed, self._num_unhashed)
        self._unhashed.clear()
        self._num_unhashed = 0

    def _write(self, file: _SegmentFile) -> None:
        if self._lines:
            self._pending += b"".join(self._lines)
            self._lines.clear()
            self._num_lines = 0
        if self._pending:
            file.append(self._pending)
            self._pending.clear()

    def _line(self, record: LineUnion) -> None:
        self._keep(encode(record) + b"\n", 1)

    def _checkpoint(self) -> None:
        self._hash_up()
        for line in self._folder.flush():
            self._line(line)
        checkpoint = CheckpointRecord(
            step=self._last_step, seq=self._next_seq - 1, events=self._hash.events, hash=self._hash.hexdigest()
        )
        self._line(checkpoint)
        self._last_checkpoint_step = self._last_step

    def _rotate(self, previous: _SegmentFile) -> None:
        """Go on in a new file. What is folded is written first, so that each segment counts its own refusals."""
        assert self._header is not None
        header = self._header.model_copy(update={"segment": self.segment + 1, "first_seq": self._next_seq})
        following = _SegmentFile(segment_path(self.path, header.segment))
        try:
            self._checkpoint()
            self._write(previous)
        finally:
            self._file, self._header = following, header
            self._line(header)
            previous.close()


class _SegmentFile:
    """One open segment. Its content is whole lines at all times, also after a write that failed half-way."""

    def __init__(self, path: Path) -> None:
        try:
            self._file = path.open("xb", buffering=0)
        except FileExistsError as error:
            raise JournalError(f"{path} exists already: a journal is never overwritten, choose another name") from error
        self.size = 0

    def append(self, data: bytes | bytearray) -> None:
        view, done = memoryview(data), 0
        try:
            while done < len(view):
                done += self._file.write(view[done:]) or 0
        except OSError:
            os.ftruncate(self._file.fileno(), self.size)
            self._file.seek(self.size)
            raise
        finally:
            view.release()
        self.size += done

    def close(self) -> None:
        try:
            os.fsync(self._file.fileno())
        finally:
            self._file.close()
