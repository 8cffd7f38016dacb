"""Judge of a check. Owns: laying events before the laws, one after the other, and telling what was found."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from typing import Final

from engine.events import AnyEvent, EngineStarted, RequestTransitioned, StepCompleted
from engine.kvcache.snapshot import SchedulerSnapshot
from invariants.checker import InvariantChecker
from invariants.modes import OnViolation
from telemetry.check_report import CheckReport, Found
from telemetry.journal_gaps import Gap
from telemetry.journal_reader import JournalReader
from telemetry.replay import Driver, RecordEnds
from telemetry.replay_report import Divergence
from telemetry.schema import LineUnion
from telemetry.schema_journal import EventsMissingRecord, RefusalsFoldedRecord
from telemetry.schema_parts import SourcePart
from telemetry.sglang.judging import Lines, not_judged
from telemetry.sglang.judging import notes as foreign_notes

#: Laws that are wrong about a pass of which a decision is missing.
NEEDS_EACH_DECISION: Final = frozenset(
    {"INV-STEP-02", "INV-BUDGET-03", "INV-CHUNK-04", "INV-FLAG-03", "INV-REQ-03"},
)
#: Steps between two audits of the replayed state.
AUDIT_STEPS: Final = 16


class Folded:
    """Which numbers a journal folded away, as intervals."""

    def __init__(self, reader: JournalReader) -> None:
        spans = sorted(
            (record.first_seq, record.last_seq)
            for record in JournalReader(reader.path).records()
            if isinstance(record, RefusalsFoldedRecord)
        )
        self._starts = [first for first, _ in spans]
        self._reach: list[int] = []
        for _, last in spans:
            self._reach.append(max(last, self._reach[-1] if self._reach else last))

    def covers(self, seqs: Iterable[int]) -> bool:
        """Whether each of these may be a folded refusal."""
        for seq in seqs:
            at = bisect_right(self._starts, seq) - 1
            if at < 0 or self._reach[at] < seq:
                return False
        return True


class Judge:
    """The checker with its ears: what it hears, from where, up to where."""

    def __init__(
        self,
        until_step: int | None,
        until_seq: int | None,
        limit: int,
        source: SourcePart | None = None,
        tell: Callable[[int], None] | None = None,
    ) -> None:
        self._source = source
        self._tell = tell
        self._until_step = until_step
        self._until_seq = until_seq
        self._limit = limit
        self._off: dict[str, OnViolation] = dict.fromkeys(not_judged(source), "off") if source is not None else {}
        self._checker = InvariantChecker(on_violation="record", overrides=self._off)
        self._checker.is_foreign = source is not None
        self._seq: int | None = None
        self._last_seq = -1
        self._events = 0
        self._last_step = 0
        self._audited_step = 0
        #: The time of the event heard last, Unix ns, and what to add to the engine's clock for it.
        self._wall_ns = self._offset_ns = 0
        self._shown: list[Found] = []
        self._latest: dict[str, Found] = {}
        self._counts: dict[str, int] = {}
        self._counted = 0
        self._unjudged_from: int | None = None
        self.is_done = False
        #: Requests that live as of the last event, in the order of their coming.
        self.unended: dict[str, None] = {}
        self.is_alone = False
        self.driver: Driver | None = None

    def hear_confirmed(self, event: AnyEvent) -> None:
        """An event that record and replay agree on. Raises RecordEnds once enough was heard."""
        if not self._hear(event):
            raise RecordEnds
        if isinstance(event, StepCompleted) and event.step - self._audited_step >= AUDIT_STEPS:
            self._audit_replay()

    @property
    def lacks_numbers(self) -> bool:
        """Whether fewer events were heard than their numbers say; of a record that counts none."""
        return self._last_seq + 1 > self._events

    def hear_rest(
        self, tape: Lines, folded: Folded | None, *, ends_in_doubt: bool = False
    ) -> EventsMissingRecord | None:
        """The record alone, to its end or to a hole in it, which is returned."""
        while (entry := tape.peek()) is not None and not self.is_done:
            tape.pop()
            if isinstance(entry[1], EventsMissingRecord):
                return entry[1]
            if isinstance(entry[1], LineUnion):
                continue
            event = entry[1]
            is_apart = self._seq is not None and event.seq > self._seq + 1 and self._source is None
            if is_apart and ends_in_doubt:
                return None
            if is_apart and self._seq is not None and self._unjudged_from is None:
                gap = range(self._seq + 1, event.seq)
                if folded is None or folded.covers(gap):
                    self._unjudged_from = event.step
            self._hear(event)
        return None

    def _awaits_outcome(self) -> bool:
        """Whether the last step that is asked for is in flight, as where steps overlap it is behind the next plan."""
        flights = () if self.driver is None or self.is_alone else self.driver.scheduler.state.flights
        return any(flight.plan.step == self._until_step for flight in flights)

    def _hear(self, event: AnyEvent) -> bool:
        """Judge one event. False once the end that was asked for is reached."""
        past_step = self._until_step is not None and event.step > self._until_step and not self._awaits_outcome()
        if past_step or (self._until_seq is not None and event.seq > self._until_seq):
            self.is_done = True
            return False
        if isinstance(event, EngineStarted):
            self._offset_ns = event.wall_ns - event.t_ns
        self._wall_ns = self._offset_ns + event.t_ns
        self._checker.emit(event)
        if isinstance(event, RequestTransitioned):
            if event.target == "finished":
                self.unended.pop(event.rid, None)
            else:
                self.unended[event.rid] = None
        self._seq, self._last_step = event.seq, event.step
        self._last_seq = max(self._last_seq, event.seq)
        self._events += 1
        self._collect(event.seq)
        if self._tell is not None:
            self._tell(event.step)
        self.is_done = event.seq == self._until_seq
        return not self.is_done

    def audit(self, snapshot: SchedulerSnapshot) -> bool:
        """Audit a recorded state; False when the record ends inside a step."""
        done = self._checker.audit(snapshot)
        self._collect(self._seq)
        return done

    def _audit_replay(self) -> None:
        """Audit the replayed state, which is the engine's as long as both agree."""
        assert self.driver is not None, "set before anything is heard"
        scheduler = self.driver.scheduler
        self._audited_step = self._last_step
        self._checker.audit(scheduler.snapshot())
        self._collect(self._seq)

    def _collect(self, seq: int | None) -> None:
        """Take over what the checker found since the last time."""
        new = self._checker.total_violations - self._counted
        if not new:
            return
        self._counted += new
        for violation in list(self._checker.violations)[-new:]:
            if self._unjudged_from is not None and violation.id in NEEDS_EACH_DECISION:
                continue
            self._counts[violation.id] = self._counts.get(violation.id, 0) + 1
            found = Found(
                id=violation.id,
                law=violation.law,
                step=violation.step,
                t_wall_s=self._wall_ns / 1e9,
                seq=seq,
                rid=violation.rid,
                expected=violation.expected,
                found=violation.found,
                by=violation.by,
            )
            self._latest[found.id] = found
            if len(self._shown) < self._limit:
                self._shown.append(found)

    def report(
        self,
        divergence: Divergence | None,
        missing: EventsMissingRecord | None,
        *,
        gap: Gap | None,
        ends: str | None,
        audited: bool | None,
    ) -> CheckReport:
        """All of it."""
        notes = foreign_notes(self._source) if self._source is not None else []
        if divergence is not None and not self.is_done:
            notes.append(
                f"from step {divergence.step} on the record was heard alone, since a replay decides otherwise: "
                f"{divergence.why}"
            )
        if self._unjudged_from is not None:
            notes.append(
                f"from step {self._unjudged_from} on these were not judged, for want of refusals that the journal only "
                f"counts: {', '.join(sorted(NEEDS_EACH_DECISION))}"
            )
        if missing is not None and gap is None:
            notes.append(f"{missing.missing} events after seq {missing.after_seq} never reached the journal")
        if ends is not None:
            notes.append(ends)
        if audited is False:
            notes.append("the snapshot was not audited: the record ends inside a step")
        if self._checker.internal_errors:
            notes.append(
                f"{self._checker.internal_errors} events could not be followed: {self._checker.last_internal_error}"
            )
        return CheckReport(
            verdict="broken" if self._counts else "held" if missing is None else "incomplete",
            events=self._events,
            steps=self._last_step,
            audits=self._checker.audits,
            checks=dict(self._checker.checks_by_group),
            counts=self._counts,
            violations=tuple(self._shown),
            last=self._latest,
            unjudged=tuple(self._off),
            notes=tuple(notes),
            gap=gap,
        )
