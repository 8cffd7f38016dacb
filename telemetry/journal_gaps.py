"""Gaps of a journal. Owns: finding events that its middle lacks and that no line of it accounts for.

The engine numbers its events without holes. A number that no line has was a refusal that a later line counts, or was
lost where an `events_missing` line says so. Any other number was in a line that is gone: lines were cut out, or a block
of the file was. What is made of the lines behind such a gap is wrong, so whoever reads a journal asks here.

A checkpoint comes after all counts were written, so numbers and counts agree there exactly. Where they do not, the gap
is where steps jump as no pass does; else at numbers that the counts left cannot be about; else it is only known between
which lines it is. Behind the last checkpoint counts may still be owed: there only a jump is certain, and other holes
are doubtful. Lines that are out of order are not judged: they lack nothing.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final, NamedTuple

from pydantic import BaseModel, ConfigDict

from telemetry.journal import JournalError
from telemetry.journal_reader import JournalReader, Line
from telemetry.schema import LineUnion, Record, RecordError, decode
from telemetry.schema_journal import CheckpointRecord, EventsMissingRecord, HeaderRecord, RefusalsFoldedRecord
from telemetry.words import t, tn

#: The members that every event begins with, as the engine writes them.
_EVENT: Final = re.compile(rb'\{"type":"[A-Z]\w+","seq":(\d+),')
_STEP: Final = re.compile(rb'"step": ?(\d+)')
#: Refusals that are only counted are of one pass: of the step of the lines around them, or between it and the next.
_NO_PASS_JUMPS: Final = 2
#: Doubtful holes near the place where a replay left the record: each costs one more replay up to it.
_MOST_TRIED: Final = 4


class Gap(BaseModel):
    """Events that the middle of a journal lacks, and that no line of it counts.

    missing  how many
    more     how many further gaps there are
    after_seq, after_step, after_line     the last event in front of them: its number, its step, its file:line
    before_seq, before_step, before_line  the first event behind them (or the checkpoint that should follow them)
    """

    model_config = ConfigDict(frozen=True)

    missing: int
    after_seq: int
    after_step: int
    after_line: str
    before_seq: int
    before_step: int
    before_line: str
    more: int = 0

    def text(self) -> str:
        """What is lacking, in the language in use."""
        said = tn(
            self.missing,
            "The journal lacks {n} event in its middle, between event {after} (step {after_step}, {after_line}) and "
            "event {before} (step {before_step}, {before_line}).",
            "The journal lacks {n} events in its middle, between event {after} (step {after_step}, {after_line}) and "
            "event {before} (step {before_step}, {before_line}).",
            after=self.after_seq,
            after_step=self.after_step,
            after_line=self.after_line,
            before=self.before_seq,
            before_step=self.before_step,
            before_line=self.before_line,
        )
        if self.more:
            said += " " + tn(self.more, "It has another gap behind that.", "It has {n} more gaps behind that.")
        return said

    def judged_text(self) -> str:
        """The same, and what a reading makes of it that ends there."""
        return f"{self.text()} {t('It was read up to there: behind a gap nothing can be told for certain.')}"

    def is_behind(self, seq: int, step: int, due: int | None) -> bool:
        """Whether a replay may leave the record at event `seq` of `step` for it, with `due` made in its place.

        In front of it when the time of the pass stands behind it, or is gone; right behind it when an event that it
        should have made is not there; and soon behind it when it cannot go on without what is gone.
        """
        if self.after_seq >= seq:
            return self.after_step <= step + 1
        return self.before_step >= step - 1 if due is None else self.before_seq == seq and due < seq

    def as_record(self) -> EventsMissingRecord:
        """The line that an engine would have written in its place."""
        return EventsMissingRecord(after_seq=self.after_seq, before_seq=self.before_seq, missing=self.missing)


class Gaps(NamedTuple):
    """What was found. `certain` and `doubtful`: in the order of the journal.

    wide      as the first of `certain`, but from where its section first lacks a number: it may be that early
    doubtful  numbers behind the last checkpoint that refusals may have which nothing came to count
    """

    certain: tuple[Gap, ...]
    wide: Gap | None
    doubtful: tuple[Gap, ...]

    @property
    def first(self) -> Gap | None:
        """The first gap; it says how many follow."""
        return self.certain[0].model_copy(update={"more": len(self.certain) - 1}) if self.certain else None

    def may_explain(self, seq: int | None, step: int | None, due: int | None) -> tuple[Gap, ...]:
        """Gaps that may be why a replay left the record at event `seq` of `step`, where it made event `due`.

        The likeliest first: of several that it agrees up to, that is the one. `due` None: the replay made nothing, it
        could not go on there.
        """
        found = [self.first] if self.first is not None else []
        if self.wide is not None and self.wide.after_seq != found[0].after_seq:
            found.append(self.wide.model_copy(update={"more": found[0].more}))
        if seq is not None and step is not None:
            near = [hole for hole in self.doubtful if hole.is_behind(seq, step, due)]
            found += sorted(near, key=lambda hole: abs(hole.before_seq - seq))[:_MOST_TRIED]
        return tuple(found)


NO_GAPS: Final = Gaps((), None, ())


def gaps_in(path: Path) -> Gaps:
    """All gaps of the journal at `path`, which is read through for them. Raises JournalError.

    A line beside a gap that is no whole record is what the gap comes from: it is named then.
    """
    reader = JournalReader(path)
    watch = GapWatch(reader.header)
    for line, read in reader.read(number_of):
        watch.look(line, read)
    return watch.gaps()


def number_of(raw: bytes) -> int | Record:
    """`seq` of an event, read quickly; everything else as a record. Raises RecordError."""
    event = _EVENT.match(raw)
    return int(event[1]) if event is not None else decode(raw)


class _Hole(NamedTuple):
    """Numbers between two lines that neither has. `size`: those of them that are not said to be lost."""

    lines: tuple[Line, Line]
    after_seq: int
    before_seq: int
    size: int
    after_step: int
    before_step: int

    def is_counted(self, folds: list[RefusalsFoldedRecord]) -> bool:
        """Whether counts may be about all of it. A pass refuses nobody twice: each count has at most one number."""
        return self.size <= sum(fold.first_seq < self.before_seq and fold.last_seq > self.after_seq for fold in folds)

    def to(self, other: _Hole, missing: int) -> Gap:
        """The gap that reaches from this hole to `other`."""
        return Gap(
            missing=missing,
            after_seq=self.after_seq,
            after_step=self.after_step,
            after_line=str(self.lines[0]),
            before_seq=other.before_seq,
            before_step=other.before_step,
            before_line=str(other.lines[1]),
        )


class GapWatch:
    """Is shown every line of a journal, in order."""

    def __init__(self, header: HeaderRecord) -> None:
        self._counts_refusals = header.source is None
        executor = header.config.get("executor")
        # A step that is planned beside the one before it ends behind the next plan: steps around a hole lie apart more.
        self._jump = _NO_PASS_JUMPS + bool(isinstance(executor, dict) and executor.get("overlap"))
        self._due = header.first_seq
        self._last: Line | None = None
        self._declared = 0
        self._is_disordered = False
        self._holes: list[_Hole] = []
        self._folds: list[RefusalsFoldedRecord] = []
        self._found: list[tuple[Gap, tuple[Line, ...]]] = []
        self._wide: Gap | None = None

    def look(self, line: Line, read: int | Record) -> None:
        """Take the next line; `read` as of `number_of`, or decoded."""
        if isinstance(read, int):
            seq = read
        elif isinstance(read, LineUnion):
            self._own_line(line, read)
            return
        else:
            seq = read.seq
        if seq != self._due or self._declared:
            self._hole(line, seq)
        self._due = seq + 1
        self._last = line

    def gaps(self) -> Gaps:
        """All that were found, once every line was looked at. Raises JournalError for a damaged line beside one."""
        owed = [] if self._is_disordered else self._holes
        if not self._counts_refusals:
            sure, doubtful = owed, []
        else:
            sure = [hole for hole in owed if self._jumps(hole)]
            doubtful = [hole for hole in owed if not self._jumps(hole)]
        self._add(sure, sum(hole.size for hole in sure))
        if self._found:
            refuse_damaged(self._found[0][1])
        return Gaps(
            certain=tuple(gap for gap, _ in self._found),
            wide=self._wide,
            doubtful=tuple(hole.to(hole, hole.size) for hole in doubtful),
        )

    def _own_line(self, line: Line, record: LineUnion) -> None:
        match record:
            case HeaderRecord() if self._last is None:
                self._last = line
            case RefusalsFoldedRecord():
                self._folds.append(record)
            case EventsMissingRecord():
                self._declared += max(record.missing, 0)
            case CheckpointRecord():
                if record.seq >= self._due:
                    self._hole(line, record.seq + 1)
                    self._due, self._last = record.seq + 1, line
                self._settle()

    def _hole(self, line: Line, seq: int) -> None:
        size = seq - self._due - self._declared
        self._declared = 0
        if size < 0:
            self._is_disordered = True
        elif size and self._last is not None:
            lines = (self._last, line)
            self._holes.append(_Hole(lines, self._due - 1, seq, size, *map(_step_of, lines)))

    def _settle(self) -> None:
        """All counts are written: what they do not explain is gone."""
        if self._holes and not self._is_disordered:
            lacking = sum(hole.size for hole in self._holes) - sum(fold.count for fold in self._folds)
            if lacking > 0:
                self._add(self._places(lacking), lacking)
        self._holes.clear()
        self._folds.clear()
        self._is_disordered = False

    def _places(self, lacking: int) -> list[_Hole]:
        """Where it is that the section lacks something; none where that is not known."""
        if not self._counts_refusals:
            return self._holes
        if jumps := [hole for hole in self._holes if self._jumps(hole)]:
            return jumps
        uncounted = [hole for hole in self._holes if not hole.is_counted(self._folds)]
        largest = sorted(uncounted, key=lambda hole: hole.size)[-1:]
        # One alone is too small where it was a count that is gone: it may have been about any of them.
        return [hole for hole in largest if hole.size >= lacking]

    def _jumps(self, hole: _Hole) -> bool:
        """Whether steps are gone as well: none can pass in refusals alone."""
        return hole.before_step - hole.after_step >= self._jump and hole.size == hole.before_seq - hole.after_seq - 1

    def _add(self, places: list[_Hole], lacking: int) -> None:
        if not self._holes or lacking <= 0:
            return
        first, last = self._holes[0], self._holes[-1]
        wide = first.to(last, lacking)
        if self._wide is None and not self._found:
            self._wide = wide
        self._found += [(hole.to(hole, min(hole.size, lacking)), hole.lines) for hole in places] or [
            (wide, (first.lines[0], last.lines[1]))
        ]


def refuse_damaged(lines: tuple[Line, ...]) -> None:
    """Raise JournalError for the first of `lines` that is no whole record."""
    for line in lines:
        try:
            decode(line.raw)
        except RecordError as error:
            raise JournalError(line.damaged(error)) from error


def _step_of(line: Line) -> int:
    """0 for a header."""
    found = _STEP.search(line.raw)
    return int(found[1]) if found is not None else 0
