"""Replay. Owns: running a journal's inputs through a fresh scheduler, and saying where it first decides otherwise.

The core's only inputs are arrivals, aborts, the `now` of each plan and the outcome of each step; a journal has them
all. They go in again in the same order, and each line that comes out is compared with the recorded one, byte by byte:
events, folded refusals, and the running hash at every checkpoint. No model, no tokens, no threads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
from pydantic import ValidationError

from engine.config import CacheConfig, EngineConfig, ExecutorConfig, SchedulerConfig
from engine.errors import LawBroken
from engine.events import (
    SCHEMA_VERSION,
    AbortRequested,
    AnyEvent,
    EngineStarted,
    EventSink,
    RequestArrived,
    ResponseSent,
    StepCompleted,
    StepPlanned,
)
from engine.scheduler.plan import StepOutcome
from engine.scheduler.scheduler import Arrival, Scheduler
from telemetry.evidence_bundle import is_bundle
from telemetry.folding import EventHash, RefusalFolder
from telemetry.journal import JournalError
from telemetry.journal_gaps import NO_GAPS, Gap, Gaps, gaps_in
from telemetry.journal_reader import JournalReader, Line
from telemetry.replay_report import Divergence, ReplayReport, difference, render
from telemetry.replay_surroundings import with_surroundings
from telemetry.schema import DEEP, NOT_TAKEN, LineUnion, RecordError, decode, encode, faults
from telemetry.schema_journal import CheckpointRecord, EventsMissingRecord, HeaderRecord, RefusalsFoldedRecord

Entry = AnyEvent | LineUnion
#: Events that are inputs of the core, or that take a number from its sequence.
INPUTS: Final = (RequestArrived, AbortRequested, StepPlanned, StepCompleted, EngineStarted, ResponseSent)
_EVENTS: Final = msgspec.json.Decoder(AnyEvent)
#: First version whose decode steps tell the claims of all their rows as one move.
_CLAIMS_TOGETHER_SINCE: Final = 2
#: Lines shown in front of a divergence.
_LINES_BEFORE: Final = 5
#: As `cache.num_pages` allows: an altered number would ask for all memory there is.
MOST_PAGES: Final = 2**24


class Diverged(Exception):
    """The replay left the record."""

    def __init__(self, divergence: Divergence) -> None:
        super().__init__(divergence.why)
        self.divergence = divergence


class RecordEnds(Exception):
    """The journal has no further line, or lacks events from here on; or a listener has seen enough."""


def replay(path: Path) -> ReplayReport:
    """Run the journal at `path` again. Raises JournalError when it cannot be read or configured."""
    reader = JournalReader(path)
    if (source := reader.header.source) is not None:
        raise JournalError(
            f"{path}: {source.version} decided this, and its record has no page keys: only this engine's own can be "
            "replayed (docs/sglang.md)"
        )
    report, is_whole = _replayed(reader, None)
    if is_whole:
        return report
    gaps, causes = search(path, report.divergence)
    for gap in causes:
        again, _ = _replayed(reader, gap)
        if again.divergence is None:
            return again
    # It left the record in front of any gap, for a reason of its own.
    return report.model_copy(update={"gap": gaps.first})


def _replayed(reader: JournalReader, gap: Gap | None) -> tuple[ReplayReport, bool]:
    """A replay up to `gap`, and whether it used every line up to there."""
    tape = Tape(reader, gap)
    tape.skip_headers()
    entry = tape.peek()
    if entry is None or not isinstance(entry[1], EngineStarted):
        raise JournalError(f"{reader.path}: a replay needs the engine's first event, EngineStarted; this begins later")
    comparer = Comparer(tape)
    driver = Driver(entry[1], comparer, reader.path)
    divergence = run_tape(tape, driver, comparer)
    unchecked, missing = 0, comparer.missing
    is_whole = divergence is None and (missing is not None or tape.peek() is None)
    if divergence is None and missing is None:
        unchecked, missing = tape.unchecked()
    report = ReplayReport(
        verdict="diverged" if divergence else "incomplete" if missing else "identical",
        events=comparer.hash.events,
        steps=driver.steps,
        hash=comparer.hash.hexdigest(),
        checkpoints=comparer.checkpoints,
        responses=comparer.responses,
        unchecked=unchecked,
        torn=str(reader.torn) if reader.torn else None,
        open_end=reader.open_end,
        note=""
        if missing is None or gap is not None
        else f"{missing.missing} events after seq {missing.after_seq} never reached the journal",
        gap=gap,
        divergence=divergence,
    )
    return report, is_whole


def search(path: Path, divergence: Divergence | None) -> tuple[Gaps, tuple[Gap, ...]]:
    """The gaps of the journal, and those that may be why a replay left it at `divergence`; the likeliest first.

    divergence  None: the replay came to no end of it
    """
    if divergence is None:
        gaps = gaps_in(path)
        return gaps, gaps.may_explain(None, None, None)
    if is_bundle(path) or [each.field for each in divergence.fields] == ["count"]:
        return NO_GAPS, ()  # the engine skipped a number, or a count of refusals was altered: no line is gone
    made = msgspec.json.decode(divergence.replayed) if divergence.replayed else {}
    gaps = gaps_in(path)
    return gaps, gaps.may_explain(divergence.seq, divergence.step, made.get("seq"))


def run_tape(tape: Tape, driver: Driver, comparer: Comparer) -> Divergence | None:
    """Feed input after input until the record ends or the replay leaves it."""
    try:
        while (found := tape.next_input()) is not None:
            line, event = found
            try:
                driver.feed(event)
            except (Diverged, RecordEnds, JournalError):
                raise
            except Exception as error:  # an altered input can break the scheduler anywhere: that is the finding
                why = f"the scheduler fails on the recorded input: {type(error).__name__}: {error}"
                raise Diverged(difference(line, b"", why)) from error
            if tape.holds(line):
                why = f"the journal has a {type(event).__name__} here that the replay does not produce"
                raise Diverged(difference(line, b"", why))
            comparer.settle()
    except Diverged as error:
        return with_surroundings(error.divergence, driver.scheduler, comparer.agreed)
    except RecordEnds:
        pass
    return None


class Tape:
    """The journal's lines with look-ahead: the `now` of a step stands behind the decisions it led to.

    gap  a hole that no line tells of: it is read as if one did, and so ends whatever reads up to a hole
    """

    def __init__(self, reader: JournalReader, gap: Gap | None = None) -> None:
        self._gap = gap
        self._lines: Iterator[tuple[Line, Entry]] = reader.read(_decode)
        self._ahead: deque[tuple[Line, Entry]] = deque()

    def peek(self, place: int = 0) -> tuple[Line, Entry] | None:
        """The line `place` further on; None at the end."""
        while len(self._ahead) <= place:
            read = next(self._lines, None)
            if read is None:
                return None
            self._ahead.append(read)
            if self._gap is not None and str(read[0]) == self._gap.after_line:
                self._ahead.append((Line(*read[0]), self._gap.as_record()))
                self._gap = None
        return self._ahead[place]

    def pop(self) -> None:
        self._ahead.popleft()

    def skip_headers(self) -> None:
        while (entry := self.peek()) is not None and isinstance(entry[1], HeaderRecord):
            self.pop()

    def next_input(self) -> tuple[Line, AnyEvent] | None:
        """The next line that is an input of the core; None when none follows, or a hole comes first."""
        place = 0
        while (entry := self.peek(place)) is not None:
            line, value = entry
            if isinstance(value, EventsMissingRecord):
                return None
            if isinstance(value, INPUTS):
                return line, value
            place += 1
        return None

    def holds(self, line: Line) -> bool:
        """Whether `line` was not consumed yet."""
        return any(ahead is line for ahead, _ in self._ahead)

    def unchecked(self) -> tuple[int, EventsMissingRecord | None]:
        """Events after the last input, up to the end or to the first hole, and that hole."""
        events = 0
        while (entry := self.peek()) is not None:
            if isinstance(entry[1], EventsMissingRecord):
                return events, entry[1]
            events += not isinstance(entry[1], LineUnion)
            self.pop()
        return events, None


def _decode(raw: bytes) -> Entry:
    """Events as the engine's own structs, so that encoding them again gives comparable bytes."""
    # Tags of events are capitalised, those of the journal's own lines are not.
    if raw[9:10].isupper():
        try:
            return _EVENTS.decode(raw)
        except msgspec.MsgspecError as error:
            raise RecordError(str(error)) from error
        except RecursionError as error:
            raise RecordError(DEEP) from error
    record = decode(raw)
    if not isinstance(record, LineUnion):
        raise RecordError(f"{record.type} is not written as the engine writes it")
    return record


class Driver:
    """Feeds recorded inputs to a fresh scheduler. `LLMEngine.step` makes the same calls around an executor."""

    def __init__(self, started: EngineStarted, comparer: EventSink, path: Path) -> None:
        self.scheduler = Scheduler(_config(started, path), num_pages=started.num_pages, sink=comparer)
        self.scheduler.publisher.claims_apart = started.schema_version < _CLAIMS_TOGETHER_SINCE
        self.steps = 0

    def feed(self, event: AnyEvent) -> None:
        scheduler = self.scheduler
        match event:
            case RequestArrived():
                scheduler.add(_arrival(event), event.t_ns)
            case AbortRequested():
                scheduler.abort(event.rid, event.t_ns, detail=event.detail, cause=event.cause)
            case StepPlanned():
                # An allocation miss is decided outside the core, so what happened is an input as well.
                scheduler.kv.allocation_fault = (lambda _: True) if event.claim_failed else None
                scheduler.prepare(event.t_ns)
                scheduler.commit(scheduler.plan(event.t_ns))
                self.steps += 1
            case StepCompleted():
                plan = scheduler.state.in_flight
                if plan is None:
                    raise LawBroken(f"step {event.step} is completed, but none is in flight")
                scheduler.apply(plan, StepOutcome(event.step, event.rows, event.times, event.failed))
                scheduler.complete(event.times)
            case EngineStarted() | ResponseSent():
                # Not the scheduler's, but they take a number from the same sequence.
                seq, _, _ = scheduler.publisher.head()
                scheduler.publisher.emit(msgspec.structs.replace(event, seq=seq))


def _config(started: EngineStarted, path: Path) -> EngineConfig:
    """The parts of the recorded configuration that decide anything."""
    if not 1 <= started.num_pages <= MOST_PAGES:
        raise JournalError(f"{path}: the recorded num_pages is {started.num_pages}; 1 to {MOST_PAGES} are possible")
    try:
        recorded = msgspec.json.decode(started.config, type=dict[str, dict[str, Any]])
        scheduler = SchedulerConfig.model_validate(recorded["scheduler"] | _capacity(started))
        cache = CacheConfig.model_validate(recorded["cache"] | {"page_size": started.page_size})
        # Of the executor one thing decides anything; which executor it was does not.
        overlap = recorded.get("executor", {}).get("overlap", False)
        executor = ExecutorConfig.model_validate({"kind": "simulated", "overlap": overlap})
        return EngineConfig(scheduler=scheduler, cache=cache, executor=executor)
    except KeyError as error:
        raise JournalError(f"{path}: the recorded configuration has no section {error}") from error
    except msgspec.MsgspecError as error:
        raise JournalError(f"{path}: the recorded configuration cannot be read: {error}") from error
    except RecursionError as error:
        raise JournalError(f"{path}: the recorded configuration cannot be read: {DEEP}") from error
    except ValidationError as error:
        raise JournalError(f"{path}: {NOT_TAKEN}: {faults(error)}") from error


def _capacity(started: EngineStarted) -> dict[str, Any]:
    return {"max_running_requests": started.max_running_requests}


def _arrival(event: RequestArrived) -> Arrival:
    return Arrival(
        rid=event.rid,
        prompt_len=event.prompt_len,
        max_new_tokens=event.requested_new_tokens,
        page_keys=event.page_keys,
        head32_key=event.head32_key,
        ignore_eos=event.ignore_eos,
        priority=event.priority,
        routing_key=event.routing_key,
        accepted_ns=event.accepted_ns,
        trace_id=event.trace_id,
        parent_span_id=event.parent_span_id,
        trace_sampled=event.trace_sampled,
    )


class Comparer:
    """The sink of the replayed scheduler: folds and hashes as the journal did, and compares line by line.

    listener  told of each event once it is known to be the recorded one, folded refusals included
    agreed    the last lines that were equal
    """

    def __init__(self, tape: Tape, listener: Callable[[AnyEvent], None] | None = None) -> None:
        self._tape = tape
        self._listener = listener
        self._encoder = msgspec.json.Encoder()
        self._folder = RefusalFolder()
        self.hash = EventHash()
        self.checkpoints = 0
        self.responses = 0
        self.missing: EventsMissingRecord | None = None
        self._is_older = False
        self._last_seq = -1
        self.agreed: deque[bytes] = deque(maxlen=_LINES_BEFORE)

    def emit(self, event: AnyEvent) -> None:
        self.settle()
        if isinstance(event, EngineStarted):
            self._is_older = event.schema_version < SCHEMA_VERSION
        if self._tape.peek() is None:
            raise RecordEnds
        self._last_seq = event.seq
        encoded = self._encoder.encode(event)
        folded, written = self._folder.push(event)
        if folded is not None:
            self._expect(encode(folded), "folded refusals")
        if written:
            # The journal's own bytes are hashed: an older version wrote fewer fields.
            encoded = self._expect(encoded, type(event).__name__)
        if isinstance(event, ResponseSent):
            self.responses += 1
        else:
            self.hash.add(encoded)
        if self._listener is not None:
            self._listener(event)

    def settle(self) -> None:
        """Take what stands between two events: headers of segments, holes, checkpoints and the folds before them."""
        self._tape.skip_headers()
        folds = 0
        while (entry := self._tape.peek(folds)) is not None and isinstance(entry[1], RefusalsFoldedRecord):
            folds += 1
        match entry:
            case (_, EventsMissingRecord() as missing) if folds == 0:
                self.missing = missing
                raise RecordEnds
            case (line, CheckpointRecord() as checkpoint) if checkpoint.events <= self.hash.events:
                self._check(line, checkpoint)
                self.settle()

    def _check(self, line: Line, checkpoint: CheckpointRecord) -> None:
        for fold in self._folder.flush():
            self._expect(encode(fold), "folded refusals")
        ahead = self._tape.peek()
        assert ahead is not None, "the checkpoint was seen ahead"
        if ahead[0] is not line:
            raise Diverged(difference(ahead[0], b"", "the journal counts refusals that the replay does not make"))
        now = {"seq": self._last_seq, "events": self.hash.events, "hash": self.hash.hexdigest()}
        replayed = checkpoint.model_copy(update=now)
        if replayed.seq < checkpoint.seq:  # of events that are not hashed
            raise Diverged(difference(line, encode(replayed), "events in front of the checkpoint are in no line"))
        if replayed.model_copy(update={"seq": checkpoint.seq}) != checkpoint:
            raise Diverged(difference(line, encode(replayed), "the running hash differs: a folded refusal changed"))
        self.checkpoints += 1
        self._tape.pop()

    def _expect(self, replayed: bytes, what: str) -> bytes:
        """The next line, which must say what `replayed` does."""
        entry = self._tape.peek()
        if entry is None:
            raise RecordEnds
        line, recorded = entry
        if line.raw != replayed and not (self._is_older and _says(recorded, replayed)):
            raise Diverged(difference(line, replayed, f"the replay's {what} differs from the record"))
        self._tape.pop()
        self.agreed.append(line.raw)
        return line.raw


def _says(recorded: Entry, replayed: bytes) -> bool:
    """Whether an older version's event, with the fields it did not have at their defaults, is the replayed one."""
    return isinstance(recorded, msgspec.Struct) and _EVENTS.decode(replayed) == recorded


__all__ = ["Divergence", "ReplayReport", "render", "replay"]
