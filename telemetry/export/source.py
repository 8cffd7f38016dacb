"""What an export hears. Owns: a journal's events in order, with the refusals that it only counted made again.

A replay makes them, as long as record and replay agree. From where they part (the journal of another version, a hole)
the record is heard alone: counted refusals are then handed over as their own lines, and a note says from where.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from engine.events import AnyEvent, EngineStarted
from telemetry.journal import JournalError
from telemetry.journal_gaps import Gap, gaps_in
from telemetry.journal_reader import JournalReader
from telemetry.replay import Comparer, Driver, RecordEnds, Tape, run_tape, search
from telemetry.replay_report import Divergence
from telemetry.schema import LineUnion
from telemetry.schema_journal import EventsMissingRecord, RefusalsFoldedRecord

Heard = AnyEvent | RefusalsFoldedRecord | EventsMissingRecord
Hear = Callable[[Heard], None]


@contextlib.contextmanager
def named_values(path: Path) -> Iterator[None]:
    """Raise JournalError for a value that no engine writes and no export can hold: an altered journal has such."""
    try:
        yield
    except (ValueError, ArithmeticError) as error:
        raise JournalError(f"{path}: a value in it cannot be exported: {error}") from error


class Enough(Exception):
    """Raised by who hears: nothing more is wanted."""


@dataclass
class Told:
    """How a journal was read. `notes` says what it lacks.

    gap  events that its middle lacks without a line that says so: what was made of the lines behind may be wrong
    """

    events: int = 0
    gap: Gap | None = None
    notes: list[str] = field(default_factory=list)


def feed(path: Path, hear: Hear) -> Told:
    """Hand every event of the journal at `path` to `hear`, in order. Raises JournalError."""
    reader = JournalReader(path)
    tape = Tape(reader)
    tape.skip_headers()
    entry = tape.peek()
    if entry is None or not isinstance(entry[1], EngineStarted):
        raise JournalError(f"{path}: an export needs the engine's first event, EngineStarted; this begins later")
    told, heard = Told(), _Counted(hear)
    source, divergence = reader.header.source, None
    if source is None:
        comparer = Comparer(tape, heard)
        divergence = run_tape(tape, Driver(entry[1], comparer, path), comparer)
        if not heard.is_done and (divergence is not None or tape.peek() is not None):
            told.gap = _gap(path, divergence)
    else:
        told.notes.append(f"{source.version} decided this; docs/sglang.md lists what its record does not tell")
    if not heard.is_done:
        folded = _rest(tape, heard)
        if source is not None and heard.last_seq + 1 > heard.events + heard.missing:
            told.gap = gaps_in(path).first
        if divergence is not None:
            told.notes += _of_divergence(divergence, told.gap, heard, folded)
    if heard.fault is not None:
        raise heard.fault
    told.events = heard.events
    if heard.missing:
        told.notes.append(f"{heard.missing} events never reached the journal")
    if reader.torn is not None:
        told.notes.append(f"the journal ends before its time: {reader.torn}")
    elif reader.open_end is not None and not heard.is_done:
        told.notes.append(f"the journal has no clean end: {reader.open_end}")
    return told


def _gap(path: Path, divergence: Divergence | None) -> Gap | None:
    """The first gap in the journal, or the hole at which the replay left it."""
    gaps, causes = search(path, divergence)
    return gaps.first or next(iter(causes), None)


def _of_divergence(divergence: Divergence, gap: Gap | None, heard: _Counted, folded: int) -> list[str]:
    """What is to be said where the record was heard alone. `folded`: refusals that it then only counts."""
    notes = []
    if folded and divergence.step is not None:
        is_by_gap = gap is not None and divergence.step >= gap.after_step
        why = "the journal has a gap" if is_by_gap else f"a replay decides otherwise ({divergence.why})"
        notes.append(
            f"from step {divergence.step} on {why}: {folded} refusals that the journal only counts are in "
            "refusals_folded, and waiting under them counts as `order`"
        )
    lost = heard.last_seq + 1 - heard.events - folded - heard.missing
    if lost > 0 and (gap is None or (not gap.more and lost > gap.missing)):
        notes.append(f"{lost} events up to seq {heard.last_seq} are in no line of the journal")
    return notes


@dataclass
class Survey:
    """What a quick look at every line tells. Times in nanoseconds of the engine's clock.

    steps  (first, last) step of the record
    cuts   when the steps that were asked for began and ended; None: there is none of them
    """

    has_responses: bool = False
    start_ns: int = 0
    end_ns: int = 0
    steps: tuple[int, int] = (0, 0)
    cuts: tuple[int, int] | None = None


def survey(path: Path, *, from_step: int = 0, to_step: int | None = None) -> Survey:
    """Look over the journal at `path` without decoding more than the steps in question. Raises JournalError."""
    found = Survey()
    first_ns: int | None = None
    for line, head in JournalReader(path).read(_HEAD.match):
        if head is None:
            continue
        kind, step, t_ns = head[1], int(head[2]), int(head[3])
        first_ns = t_ns if first_ns is None else first_ns
        found.end_ns = max(found.end_ns, t_ns)
        found.has_responses |= kind == b"ResponseSent"
        if kind == b"StepCompleted":
            found.steps = (found.steps[0] or step, step)
            if step >= from_step and (to_step is None or step <= to_step):
                began, ended = _cuts(line.raw, t_ns)
                found.cuts = (began if found.cuts is None else found.cuts[0], ended)
    found.start_ns = first_ns or 0
    return found


#: The members that every event begins with.
_HEAD: Final = re.compile(rb'\{"type":"([A-Z]\w+)","seq":\d+,"step":(\d+),"t_ns":(\d+)')
_TIMES: Final = re.compile(rb'"started_ns":(\d+).*"applied_ns":(\d+)')


def _cuts(raw: bytes, t_ns: int) -> tuple[int, int]:
    """When a step began and ended, by its completion."""
    times = _TIMES.search(raw)
    began, ended = (int(times[1]), int(times[2])) if times is not None else (0, 0)
    return began or t_ns, ended or t_ns


class _Counted:
    """`hear`, counted, until it has enough. Raises RecordEnds then; `fault` is what it raised otherwise."""

    def __init__(self, hear: Hear) -> None:
        self._hear = hear
        self.events = 0
        self.missing = 0
        self.last_seq = -1
        self.is_done = False
        self.fault: Exception | None = None

    def __call__(self, event: Heard) -> None:
        try:
            self._hear(event)
        except Enough:
            self.is_done = True
            raise RecordEnds from None
        except Exception as error:  # a replay would take it for the scheduler's: `feed` raises it again
            self.is_done, self.fault = True, error
            raise RecordEnds from None
        if not isinstance(event, LineUnion):
            self.events += 1
            self.last_seq = event.seq


def _rest(tape: Tape, heard: _Counted) -> int:
    """The record alone, to its end. Returns how many refusals it only counts."""
    folded, alone_from = 0, heard.last_seq
    while (entry := tape.peek()) is not None:
        tape.pop()
        line = entry[1]
        if isinstance(line, EventsMissingRecord):
            heard.missing += line.missing
        elif isinstance(line, RefusalsFoldedRecord):
            if line.last_seq <= alone_from:
                continue  # the replay made them, and they were heard
            folded += line.count
        elif isinstance(line, LineUnion):
            continue
        try:
            heard(line)
        except RecordEnds:
            break
    return folded
