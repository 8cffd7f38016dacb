"""Check. Owns: judging a journal offline, every law over what was recorded, whoever or whatever wrote it.

The laws want every event, but a journal only counts refusals that repeat. A replay makes them again: as long as record
and replay agree, the judge hears the whole stream, and the replayed scheduler's state is audited as well. Where they
part (other code, or an engine that went wrong in a way that the code alone does not), the judge goes on with the record
alone. From the first refusal that is then missing, laws that need each decision of a pass are no longer judged, and the
report says so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from engine.events import EngineStarted
from engine.kvcache.snapshot import SchedulerSnapshot
from telemetry.check_judge import NEEDS_EACH_DECISION, Folded, Judge
from telemetry.check_report import CheckReport
from telemetry.journal import JournalError
from telemetry.journal_gaps import Gap, gaps_in
from telemetry.journal_reader import JournalReader
from telemetry.replay import Comparer, Driver, Tape, run_tape, search
from telemetry.replay_report import Divergence
from telemetry.schema import LineUnion
from telemetry.schema_journal import EventsMissingRecord
from telemetry.sglang.judging import OneByOne


def check(
    path: Path,
    *,
    until_step: int | None = None,
    until_seq: int | None = None,
    snapshot: Path | None = None,
    limit: int = 20,
    tell: Callable[[int], None] | None = None,
) -> CheckReport:
    """Judge the journal at `path`. Raises JournalError when it cannot be read or configured.

    until_step, until_seq  the last step, or event, that is heard
    snapshot  a file of an evidence bundle: audited once everything was heard
    limit     violations that the report names; all are counted
    tell      is told of the step of each event that was heard
    """
    reader = JournalReader(path)
    source = reader.header.source
    asked = _Asked(until_step, until_seq, limit, tell)
    if source is None:
        hearing = _heard_with_replay(reader, asked)
    elif snapshot is None:
        hearing = _heard_alone(reader, asked)
    else:
        raise JournalError(f"{path}: a journal of {source.name} has no snapshot to be audited")
    # A state that was taken behind a hole says nothing about the events in front of it.
    is_whole = hearing.missing is None
    audited = hearing.judge.audit(_read(snapshot)) if snapshot is not None and is_whole else None
    return hearing.judge.report(
        hearing.divergence,
        hearing.missing,
        gap=hearing.gap if hearing.is_at_gap else None,
        ends=_ends(reader, hearing.judge) if is_whole else None,
        audited=audited,
    )


@dataclass(frozen=True)
class _Asked:
    """What `check` was asked for."""

    until_step: int | None
    until_seq: int | None
    limit: int
    tell: Callable[[int], None] | None


def _heard_with_replay(reader: JournalReader, asked: _Asked) -> _Hearing:
    """The record of this engine; where it has a gap, up to there."""
    hearing = _Hearing(reader, asked, None)
    hearing.replay()
    ends_in_doubt = False
    if hearing.is_left:
        gaps, causes = search(reader.path, hearing.divergence)
        for gap in causes:
            again = _Hearing(reader, asked, gap)
            again.replay()
            if again.divergence is None:
                hearing = again
                break
        else:
            if gaps.first is not None:  # the replay leaves the record in front of it, for a reason of its own
                hearing = _Hearing(reader, asked, gaps.first)
                hearing.replay()
        ends_in_doubt = hearing.divergence is None and bool(gaps.doubtful)
    hearing.hear_rest(ends_in_doubt=ends_in_doubt)
    return hearing


def _heard_alone(reader: JournalReader, asked: _Asked) -> _Hearing:
    """The record of another engine, which counts no refusal: a number that is not there is a gap."""
    hearing = _Hearing(reader, asked, None)
    hearing.hear_rest()
    gap = gaps_in(reader.path).first if hearing.judge.lacks_numbers else None
    if gap is not None:
        hearing = _Hearing(reader, asked, gap)
        hearing.hear_rest()
    return hearing


class _Hearing:
    """One reading of the journal, up to `gap` where one is known."""

    def __init__(self, reader: JournalReader, asked: _Asked, gap: Gap | None) -> None:
        self._reader = reader
        self._tape = Tape(reader, gap)
        self._tape.skip_headers()
        entry = self._tape.peek()
        if entry is None or not isinstance(entry[1], EngineStarted):
            raise JournalError(
                f"{reader.path}: the laws need the engine's first event, EngineStarted; this begins later"
            )
        self.gap = gap
        self.judge = Judge(asked.until_step, asked.until_seq, asked.limit, reader.header.source, asked.tell)
        self.divergence: Divergence | None = None
        self.missing: EventsMissingRecord | None = None
        self._started = entry[1]

    @property
    def is_left(self) -> bool:
        """Whether a replay ended in front of lines that it should have used."""
        if self.judge.is_done or self.missing is not None:
            return False
        return self.divergence is not None or self._tape.peek() is not None

    @property
    def is_at_gap(self) -> bool:
        """Whether it ended at the gap: not in front of it, at a hole that the journal tells of or where it was to."""
        return self.gap is not None and self.missing == self.gap.as_record()

    def replay(self) -> None:
        """Hear what record and replay agree on."""
        comparer = Comparer(self._tape, self.judge.hear_confirmed)
        self.judge.driver = Driver(self._started, comparer, self._reader.path)
        self.divergence = run_tape(self._tape, self.judge.driver, comparer)
        self.missing = comparer.missing

    def hear_rest(self, *, ends_in_doubt: bool = False) -> None:
        """Hear the record alone, from where it stands. `ends_in_doubt`: only up to the first number it lacks."""
        if self.judge.is_done or self.missing is not None:
            return
        if self._reader.header.source is not None:
            self.missing = self.judge.hear_rest(OneByOne(self._tape), None)
            return
        if self.divergence is None and self.judge.driver is not None:
            _finish_pass(self._tape, self.judge.driver)
        self.judge.is_alone = True
        # What explains a hole in front of a gap may be a count that is in the gap.
        is_counted = self.divergence is not None and self.gap is None
        folded = Folded(self._reader) if is_counted else None
        self.missing = self.judge.hear_rest(self._tape, folded, ends_in_doubt=ends_in_doubt)


def _ends(reader: JournalReader, judge: Judge) -> str | None:
    """How the journal ends, when it has no clean end."""
    if reader.torn is not None:
        return f"the journal ends before its time: {reader.torn}"
    if reader.open_end is not None and not judge.is_done:
        return f"the journal has no clean end, and nothing behind it was judged: {reader.open_end}"
    if judge.unended and not judge.is_done and reader.header.source is None:
        # No law: an engine that stopped inside a step ends nobody, and its record may still hold every one of them.
        return (
            f"the journal was closed with no end of {len(judge.unended)} of its requests, the first of them "
            f"{next(iter(judge.unended))}: the engine had stopped by itself, or a step outlasted the stop"
        )
    return None


def _read(path: Path) -> SchedulerSnapshot:
    try:
        return msgspec.json.decode(path.read_bytes(), type=SchedulerSnapshot)
    except OSError as error:
        raise JournalError(f"{path}: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        raise JournalError(f"{path}: no snapshot of this version: {error}") from error
    except RecursionError as error:
        raise JournalError(f"{path}: no snapshot of this version: nested too deeply") from error


def _finish_pass(tape: Tape, driver: Driver) -> None:
    """Make the pass whose plan never reached the record: the engine stopped inside it.

    Its decisions are heard as they are confirmed, refusals that were folded among them.
    """
    entry = tape.peek()
    if entry is None or isinstance(entry[1], LineUnion) or driver.scheduler.state.has_step_to_await:
        return
    now_ns = entry[1].t_ns
    try:
        driver.scheduler.prepare(now_ns)
        driver.scheduler.commit(driver.scheduler.plan(now_ns))
    except Exception:  # it differs or breaks here: the rest of the record is heard alone, which needs no reason
        return


__all__ = ["NEEDS_EACH_DECISION", "check"]
