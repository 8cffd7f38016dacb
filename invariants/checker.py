"""InvariantChecker. Owns: the event sink that runs the laws, counts them, and says or raises what it finds.

It runs on the engine thread, so with `raise` the traceback is at the step that broke the law. With `record` nothing it
finds, and no fault of its own, ever stops the loop: a violation is counted, kept and handed to `listener`. With `off` a
law is not judged; a checker whose every law is off (`is_off`) is left out of an engine's listeners and costs nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from engine.events import (
    AbortRequested,
    AdmissionDecided,
    AnyEvent,
    EngineStarted,
    LockChanged,
    PagesMoved,
    RequestArrived,
    RequestTransitioned,
    StepCompleted,
    StepPlanned,
)
from engine.kvcache.snapshot import SchedulerSnapshot
from engine.request import Cause
from invariants import audit, budget_laws, chunk_laws, lock_laws, page_laws, step_laws
from invariants.audit import AuditPart
from invariants.catalog import CATALOG, LAWS, Group
from invariants.members import ADMIT, FINISHED, PREEMPT
from invariants.meter_books import Readings
from invariants.modes import OnViolation, laws_by_mode, modes_of
from invariants.shadow import Shadow
from invariants.violation import InvariantViolation, Report, Violation
from invariants.watch import GAP_STEPS, Watch

EVIDENCE_EVENTS: Final = 2_000
KEPT_VIOLATIONS: Final = 1_000
RATIO_TOLERANCE: Final = 1e-9
_COMMIT_CAUSES: Final = frozenset({Cause.ADMIT, Cause.RETRACT, Cause.PREEMPT})


class InvariantChecker:
    """Checks every event against a second set of books.

    on_violation       what a violation does; `overrides` says otherwise for single laws
    progress_steps     K of INV-PROG-01
    gap_steps          N of INV-REQ-01
    audit_every        part of the audit -> n: it is made in every n-th audit only; parts not named are in all of them
    time_ns            where the cost of checking is measured; None measures nothing (the core has no clock)
    listener           told of each violation, on the engine thread, before anything is raised

    checks_by_group, violations_by_id, ns_by_tier, internal_errors, audits, audits_by_part
                       counters, only ever growing; read from any thread
    """

    def __init__(
        self,
        *,
        on_violation: OnViolation = "raise",
        overrides: Mapping[str, OnViolation] | None = None,
        progress_steps: int = 64,
        gap_steps: int = GAP_STEPS,
        audit_every: Mapping[AuditPart, int] | None = None,
        time_ns: Callable[[], int] | None = None,
        listener: Callable[[Violation], None] | None = None,
    ) -> None:
        for name, steps in (("progress_steps", progress_steps), ("gap_steps", gap_steps)):
            if steps < 1:
                raise ValueError(f"{name} is {steps}; at least 1 is needed")
        senseless = sorted(part for part, every in (audit_every or {}).items() if every < 1)
        if senseless:
            raise ValueError(f"audit_every of {senseless} is below 1; 1 makes a part in each audit")
        self.on_violation: OnViolation = on_violation
        self._modes = modes_of(on_violation, overrides)
        #: Whether nothing would ever be reported.
        self.is_off = set(self._modes.values()) == {"off"}
        self._progress_steps = progress_steps
        self._gap_steps = gap_steps
        self._audit_every = {part: (audit_every or {}).get(part, 1) for part in AuditPart}
        self._time_ns = time_ns
        self._listener = listener
        self.checks_by_group: dict[str, int] = {group.value: 0 for group in Group}
        self.violations_by_id: dict[str, int] = {law.id: 0 for law in CATALOG}
        self.ns_by_tier: dict[int, int] = {1: 0, 2: 0}
        self.internal_errors = 0
        self.last_internal_error: str | None = None
        self.audits = 0
        self.audits_by_part: dict[str, int] = {part.value: 0 for part in AuditPart}
        self.violations: deque[Violation] = deque(maxlen=KEPT_VIOLATIONS)
        self._evidence: deque[AnyEvent] = deque(maxlen=EVIDENCE_EVENTS)
        self._books: Shadow | None = None
        self._watch: Watch | None = None
        self._last: AnyEvent | None = None
        #: First event of the engine's life, and the snapshot that the latest audit looked at.
        self.started: EngineStarted | None = None
        self.audited: SchedulerSnapshot | None = None
        self._audit_step: int | None = None
        #: The event that is judged later than it came; None: the last one is judged.
        self._judged: AnyEvent | None = None
        self._handlers: dict[type, Callable[[Shadow, Any], None]] = {
            RequestArrived: self._on_arrival,
            AbortRequested: self._on_abort,
            RequestTransitioned: self._on_transition,
            AdmissionDecided: self._on_decision,
            StepPlanned: self._on_plan,
            StepCompleted: self._on_completed,
            PagesMoved: self._on_pages,
            LockChanged: self._on_lock,
        }

    # -- in --------------------------------------------------------------------------------------------------------

    def emit(self, event: AnyEvent) -> None:
        """Check one event. Raises InvariantViolation when the law is to raise."""
        started = self._time_ns() if self._time_ns is not None else 0
        try:
            self._check(event)
        except InvariantViolation:
            raise
        except Exception as error:  # a fault of the checker, or a stream it cannot follow, must not stop a server
            if self.on_violation == "raise":
                raise
            self._note_internal(error)
        finally:
            self._last = event
            if self._time_ns is not None:
                self.ns_by_tier[1] += self._time_ns() - started

    def audit(self, snapshot: SchedulerSnapshot) -> bool:
        """Recount a whole snapshot, taken between steps, and compare it with itself and with the books (tier 2).

        Call it on the engine thread. False, and nothing is checked, in the middle of a step: a request in transit would
        look like a leak.
        """
        books = self._books
        if books is not None and (books.plan is not None or books.in_commit or books.claims):
            return False
        self.audited = snapshot
        with self._auditing(snapshot.step):
            parts = tuple(part for part, every in self._audit_every.items() if self.audits % every == 0)
            self.audits += 1
            for part in parts:
                self.audits_by_part[part] += 1
                self.checks_by_group[audit.GROUPS[part]] += audit.checks(part, snapshot)
            audit.run(books, snapshot, self._report, parts)
            if books is not None and self._watch is not None and AuditPart.BOOKS in parts:
                self._watch.audit(books, snapshot)
        return True

    def audit_readings(self, readings: Readings) -> bool:
        """Compare what a listener shows between two steps with the books (tier 2). On the engine thread, as `audit`.

        False, and nothing is checked, in the middle of a step or before the engine started.
        """
        books, watch = self._books, self._watch
        if books is None or watch is None or books.plan is not None or books.in_commit or books.claims:
            return False
        with self._auditing(books.last_plan_step):
            self.checks_by_group["meter"] += 1
            self.checks_by_group["time"] += watch.on_readings(books, readings)
        return True

    # -- out -------------------------------------------------------------------------------------------------------

    @property
    def seconds_by_tier(self) -> dict[int, float]:
        """Time spent checking, in seconds; zeros without `time_ns`."""
        return {tier: spent / 1e9 for tier, spent in self.ns_by_tier.items()}

    @property
    def total_violations(self) -> int:
        return sum(self.violations_by_id.values())

    @property
    def laws_by_mode(self) -> dict[str, int]:
        """How many laws are in each mode."""
        return laws_by_mode(self._modes)

    def mode_of(self, law: str) -> OnViolation:
        """What a violation of `law` does."""
        return self._modes[law]

    def evidence(self) -> tuple[AnyEvent, ...]:
        """The last events, oldest first: what an evidence file holds."""
        return tuple(self._evidence)

    # -- inside ----------------------------------------------------------------------------------------------------

    @contextmanager
    def _auditing(self, step: int) -> Iterator[None]:
        """Around an audit: the step it is about, its time, and no fault of its own that stops a server."""
        started = self._time_ns() if self._time_ns is not None else 0
        self._audit_step = step
        try:
            yield
        except InvariantViolation:
            raise
        except Exception as error:  # as in `emit`: a fault of the checker must not stop a server
            if self.on_violation == "raise":
                raise
            self._note_internal(error)
        finally:
            self._audit_step = None
            if self._time_ns is not None:
                self.ns_by_tier[2] += self._time_ns() - started

    def _note_internal(self, error: Exception) -> None:
        self.internal_errors += 1
        self.last_internal_error = f"{type(error).__name__}: {error}"

    def _report(
        self, law: str, expected: str, found: str, *, rid: str | None = None, seqs: tuple[int, ...] = ()
    ) -> None:
        mode = self._modes[law]
        if mode == "off":
            return
        now = self._judged or (self._evidence[-1] if self._evidence else None)
        step = self._audit_step if self._audit_step is not None else (now.step if now is not None else -1)
        violation = Violation(
            id=law,
            law=LAWS[law].sentence,
            expected=expected,
            found=found,
            step=step,
            rid=rid,
            evidence=seqs if now is None else (*seqs, now.seq),
            by="event" if self._audit_step is None else "audit",
        )
        self.violations_by_id[law] += 1
        self.violations.append(violation)
        if self._listener is not None:
            self._listener(violation)
        if mode == "raise":
            raise InvariantViolation(violation)

    def _check(self, event: AnyEvent) -> None:
        self._evidence.append(event)
        last, books = self._last, self._books
        if books is None or isinstance(event, EngineStarted):
            self._on_first(event)
            return
        if last is not None and (event.seq != last.seq + 1 or event.step < last.step or event.t_ns < last.t_ns):
            step_laws.on_order(last, event, self._report)
        if isinstance(event, PagesMoved) and event.cause == "claim":
            books.claims.append(event)
            return
        if books.claims and not page_laws.leaves_claims(event):
            self._follow_claims(books)
        handler = self._handlers.get(type(event))
        if handler is not None:
            handler(books, event)

    def _on_first(self, event: AnyEvent) -> None:
        if isinstance(event, EngineStarted):
            self._books = Shadow(event)
            self._watch = Watch(self._books, self._report, gap_steps=self._gap_steps)
            self.started = event
        else:
            self._report("INV-STEP-02", "EngineStarted as the first event", type(event).__name__)

    def _report_on(self, event: AnyEvent) -> Report:
        """Reports that blame an event that came earlier than the one at hand."""
        self._judged = event
        return self._report

    def _follow_claims(self, books: Shadow) -> None:
        """Claims are judged when something comes that asks where pages are: together, which is much quicker."""
        claims, books.claims = books.claims, []
        self.checks_by_group["page"] += len(claims)
        try:
            if books.leaving:
                self._judged = claims[0]
                lock_laws.settle(books, self._report)
            books.in_commit = True
            page_laws.on_claims(books, claims, self._report_on)
        except InvariantViolation:
            raise
        except Exception as error:  # as in `emit`; the event at hand is to be judged all the same
            if self.on_violation == "raise":
                raise
            self._note_internal(error)
        finally:
            self._judged = None

    def _on_arrival(self, books: Shadow, event: RequestArrived) -> None:
        if self._watch is not None and event.rid not in books.requests:
            self._watch.on_arrival(event)
        step_laws.on_arrival(books, event, self._report)
        self.checks_by_group["step"] += 1

    def _on_abort(self, books: Shadow, event: AbortRequested) -> None:
        if event.rid in books.requests:
            books.aborting[event.rid] = event.seq

    def _on_transition(self, books: Shadow, event: RequestTransitioned) -> None:
        report, counts = self._report, self.checks_by_group
        if event.cause in _COMMIT_CAUSES:
            if books.leaving and event.cause is ADMIT:
                lock_laws.settle(books, report)
            books.in_commit = True
        if event.cause is PREEMPT:
            books.count_preempted(event.rid)
        request = step_laws.on_transition(books, event, report)
        counts["step"] += 1
        if request is None:
            return
        if self._watch is not None:
            self._watch.on_transition(event)
            counts["request"] += 1
        chunk_laws.on_transition(books, event, request, report)
        lock_laws.on_transition(books, event, request, report)
        counts["chunk"] += 1
        counts["lock"] += 1
        if event.target is FINISHED:
            step_laws.on_end(books, event, request, report)
            books.remember_end(event.rid, event.seq)
        books.set_state(request, event.target)
        if not books.in_commit and books.plan is None:
            books.take_view()  # an end between two steps: the next plan sees it

    def _on_decision(self, books: Shadow, event: AdmissionDecided) -> None:
        report, counts = self._report, self.checks_by_group
        if not books.decisions:
            if books.leaving:
                lock_laws.settle(books, report)
            if not books.in_commit:
                books.take_view()
                books.in_commit = True
        chunk_laws.on_decision(books, event, report)
        budget_laws.on_decision(books, event, report)
        if self._watch is not None:
            self._watch.on_decision(event)
        books.decide(event)
        counts["chunk"] += 1
        counts["budget"] += 1

    def _on_plan(self, books: Shadow, event: StepPlanned) -> None:
        report, counts = self._report, self.checks_by_group
        if books.leaving:
            lock_laws.settle(books, report)
        step_laws.on_plan(books, event, report)
        if event.prefills or books.decisions or event.continuation is not None or books.view.continuation is not None:
            chunk_laws.on_plan(books, event, report)
            counts["chunk"] += 1
        else:
            books.cut = None
        step_laws.recount(books, event, report)
        budget_laws.on_plan(books, event, report)
        if books.decisions:
            lock_laws.on_plan(books, event, report)
        page_laws.on_counts(books, event, report)
        step_laws.progress(books, event, self._progress_steps, report)
        ratio = budget_laws.next_ratio(books, event)
        if abs(event.new_token_ratio - ratio) > RATIO_TOLERANCE:
            report("INV-BUDGET-04", f"new_token_ratio {ratio:g} after this step", f"{event.new_token_ratio:g}")
        if self._watch is not None:
            self._watch.on_plan(books, event)
            counts["request"] += 1
            counts["flag"] += 1
        books.close_plan(ratio)
        books.last_plan_step = event.step
        books.plan = event
        counts["step"] += 1
        counts["budget"] += 1
        counts["lock"] += 1
        counts["page"] += 1

    def _on_completed(self, books: Shadow, event: StepCompleted) -> None:
        report, counts = self._report, self.checks_by_group
        if self._watch is not None:
            self._watch.on_completed(event)
            counts["time"] += 1
        plan = step_laws.on_completed(books, event, report)
        if plan is not None and plan.prefills:
            chunk_laws.on_completed(books, plan, event, report)
            counts["chunk"] += 1
        if books.leaving:
            lock_laws.settle(books, report)
        page_laws.on_counts(books, event, report)
        books.take_view()
        counts["step"] += 1
        counts["page"] += 1

    def _on_pages(self, books: Shadow, event: PagesMoved) -> None:
        page_laws.on_pages(books, event, self._report)
        self.checks_by_group["page"] += 1

    def _on_lock(self, books: Shadow, event: LockChanged) -> None:
        lock_laws.on_lock(books, event, self._report)
        self.checks_by_group["lock"] += 1
