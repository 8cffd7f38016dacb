"""Watch. Owns: which of the laws about requests, flags, times and meters sees which event, with their books.

`InvariantChecker` calls it beside the laws that stand on `Shadow` alone. What it keeps is counts: none of it grows with
the number that waits, and a step that only decodes costs a handful of additions.
"""

from __future__ import annotations

from engine.events import (
    AdmissionDecided,
    RequestArrived,
    RequestTransitioned,
    StepCompleted,
    StepPlanned,
)
from engine.kvcache.snapshot import SchedulerSnapshot
from engine.scheduler.plan import StepKind
from invariants.book_audit import BookAudit
from invariants.flag_laws import FlagLaws
from invariants.members import FINISHED
from invariants.meter_books import MeterBooks, Readings
from invariants.meter_laws import MeterLaws
from invariants.queue_books import QueueBooks
from invariants.request_laws import RequestLaws
from invariants.shadow import Shadow
from invariants.span_laws import SpanBook, SpanReading
from invariants.time_laws import TimeLaws, on_lives
from invariants.violation import Report

#: N of INV-REQ-01 where nobody says otherwise: prompts come first, so decodes wait as long as memory takes prompts in.
GAP_STEPS = 1_024


class Watch:
    """Books and laws of one engine life. Call each method before `Shadow` follows the event, unless said otherwise."""

    def __init__(self, books: Shadow, report: Report, *, gap_steps: int = GAP_STEPS) -> None:
        self._report = report
        self._requests = RequestLaws(books.config, gap_steps=gap_steps)
        self._flags = FlagLaws(books.config)
        self._overlap = books.overlap
        self._times = TimeLaws(overlaps=books.overlap is not None)
        self._meter_laws = MeterLaws()
        self._book_audit = BookAudit()
        self.queue = QueueBooks()
        self.meters = MeterBooks()
        self.spans = SpanBook()
        self._changes = -1

    def on_arrival(self, event: RequestArrived) -> None:
        """A new request."""
        self._times.on_arrival(event, self._report)
        self.queue.arrive(event)
        self.meters.arrived += 1
        self.spans.on_arrival(event)

    def on_transition(self, event: RequestTransitioned) -> None:
        """A request changed state."""
        track = self.queue.transition(event)
        if track is not None:
            ahead = 0 if self._overlap is None else self._overlap.under_way(event.rid, event.step)[1]
            self._requests.on_transition(track, event, self._report, ahead=ahead)
            self.meters.on_transition(track, event)
            if event.target is FINISHED:
                self.spans.on_end(event)
            if not self.queue.live:
                self.meters.promising = None

    def on_decision(self, event: AdmissionDecided) -> None:
        """A pass examined a request."""
        self._requests.on_decision(self.queue, event, self._report)
        self.meters.on_decision(event)

    def on_plan(self, books: Shadow, event: StepPlanned) -> None:
        """A plan was committed; its decisions are still in the books."""
        queue, last = self.queue, self.meters.last_plan
        if (
            last is not None
            and queue.changes == self._changes
            and event.kind is last.kind is StepKind.DECODE
            and event.batch_is_full is last.batch_is_full
            and event.pass_end == last.pass_end
            and not (books.decisions or event.evicted_pages or event.prefills or event.retractions or event.guards)
            and last.decodes
            and event.decodes
        ):
            # As the step before, which was checked, with nobody come or gone since: every law would say the same.
            self.meters.last_plan = self.meters.promising = self._flags.last = event
            if event.budget_close is not None:
                self.meters.closing = event  # a pass that looked at nobody; decode rows took of its room meanwhile
            return
        self._changes = queue.changes
        self._requests.on_plan(books, queue, event, self._report)
        self._flags.on_plan(books, queue, event, self._report)
        self.meters.on_plan(books, event)

    def on_completed(self, event: StepCompleted) -> None:
        """A step is over."""
        self._times.on_completed(event, self._report)
        meters, kind = self.meters, event.kind
        meters.steps[kind] = meters.steps.get(kind, 0) + 1
        if not event.failed:
            meters.tokens += len(event.rows)
        if meters.firsts:
            overlap = self._overlap
            void = overlap.flights[0].void if overlap is not None and overlap.flights else ()
            meters.on_first_tokens(self.queue, event, void)
        if not self.queue.live:
            meters.promising = None

    def audit(self, books: Shadow, snapshot: SchedulerSnapshot) -> None:
        """The engine's state between two steps."""
        self._book_audit.run(books, self.queue, snapshot, self._flags.full, self._report)

    def on_readings(self, books: Shadow, readings: Readings) -> int:
        """What a listener shows between two steps. Returns how many lives were checked."""
        self._meter_laws.on_readings(books, self.queue, self.meters, readings, self._report)
        return on_lives(self.queue, readings.lives, self._report)

    def on_spans(self, reading: SpanReading) -> bool:
        """What whoever builds spans has. False when it cannot be compared."""
        return self.spans.on_reading(self.queue, reading, self._report)
