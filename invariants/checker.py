"""InvariantChecker. Owns: the event sink that runs the laws, counts them, and says or raises what it finds.

With `raise` it runs on the engine thread, so that the traceback is at the step that broke the law. With `record`
nothing it finds, and no fault of its own, ever stops the loop: a violation is counted, kept and handed to `listener`;
it may then run on one thread beside the engine's (`may_be_behind`). With `off` a law is not judged; a checker whose
every law is off (`is_off`) is left out of an engine's listeners and costs nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from engine.events import AnyEvent, EngineStarted
from engine.kvcache.snapshot import SchedulerSnapshot
from invariants import audit, step_laws
from invariants.audit import AuditPart
from invariants.catalog import CATALOG, LAWS, Group
from invariants.judge import Judge
from invariants.meter_books import Readings
from invariants.modes import OnViolation, laws_by_mode, modes_of
from invariants.span_laws import SpanReading
from invariants.violation import InvariantViolation, Report, Violation
from invariants.watch import GAP_STEPS

EVIDENCE_EVENTS: Final = 2_000
KEPT_VIOLATIONS: Final = 1_000


class InvariantChecker:
    """Checks every event against a second set of books.

    on_violation       what a violation does; `overrides` says otherwise for single laws
    progress_steps     K of INV-PROG-01
    gap_steps          N of INV-REQ-01
    audit_every        part of the audit -> n: it is made in every n-th audit only; parts not named are in all of them
    time_ns            where the cost of checking is measured; None measures nothing (the core has no clock)
    listener           told of each violation, on the thread that judges, before anything is raised
    lost               events that were lost on their way here; a gap after a loss is no broken law, but the end of
                       judging: from then on only what a snapshot says of itself is checked (`is_blind`)

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
        lost: Callable[[], int] = lambda: 0,
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
        #: Whether nothing is to be raised: then a step need not wait for the verdict.
        self.may_be_behind = "raise" not in self._modes.values()
        self._progress_steps = progress_steps
        self._gap_steps = gap_steps
        self._audit_every = {part: (audit_every or {}).get(part, 1) for part in AuditPart}
        self._time_ns = time_ns
        self._listener = listener
        self.lost = lost
        #: Set before the first event, of a stream that another engine's decisions make: its pages are not told, and it
        #: ends an aborted request when that one next runs. What needs more is judged by what the event itself says.
        self.is_foreign = False
        #: Events were lost, so that the books no longer tell the engine's state: nothing more is judged by them.
        self.is_blind = False
        self.checks_by_group: dict[str, int] = {group.value: 0 for group in Group}
        self.violations_by_id: dict[str, int] = {law.id: 0 for law in CATALOG}
        self.ns_by_tier: dict[int, int] = {1: 0, 2: 0}
        self.internal_errors = 0
        self.last_internal_error: str | None = None
        self.audits = 0
        self.audits_by_part: dict[str, int] = {part.value: 0 for part in AuditPart}
        self.violations: deque[Violation] = deque(maxlen=KEPT_VIOLATIONS)
        self._evidence: deque[AnyEvent] = deque(maxlen=EVIDENCE_EVENTS)
        self._judge: Judge | None = None
        self._handlers: dict[type, Callable[[Any], None]] = {}
        self._last: AnyEvent | None = None
        #: Of `_last`: the number that follows it, its step and its time.
        self._due = (0, 0, 0)
        #: First event of the engine's life, and the snapshot that the latest audit looked at.
        self.started: EngineStarted | None = None
        self.audited: SchedulerSnapshot | None = None
        self._audit_step: int | None = None
        #: The event that is judged later than it came; None: the last one is judged.
        self._judged: AnyEvent | None = None

    # -- in --------------------------------------------------------------------------------------------------------

    def emit(self, event: AnyEvent) -> None:
        """Check one event. Raises InvariantViolation when the law is to raise."""
        self.feed((event,))

    def feed(self, events: Iterable[AnyEvent]) -> None:
        """Check several, which costs less than one by one. Raises as `emit` does, before the event that follows."""
        time_ns = self._time_ns
        began = time_ns() if time_ns is not None else 0
        remember, handlers, now = self._evidence.append, self._handlers, self._last
        due, step, t_ns = self._due
        try:
            for event in events:
                last, now = now, event
                remember(event)
                seq, last_step, last_ns = event.seq, step, t_ns
                step, t_ns = event.step, event.t_ns
                is_next, due = seq == due, seq + 1
                try:
                    handle = handlers.get(type(event))
                    if handle is None or last is None:
                        self._on_first(event)
                        handlers = self._handlers
                        continue
                    if not is_next or step < last_step or t_ns < last_ns:
                        if seq > last.seq + 1 and self.lost():
                            self._go_blind()
                            handlers = self._handlers
                            continue
                        is_late = self._judge is not None and self._judge.is_of_outcome(event)
                        step_laws.on_order(last, event, self.report, is_late=is_late)
                    handle(event)
                except InvariantViolation:
                    raise
                except Exception as error:  # a fault of the checker, or a stream it cannot follow: no server stops
                    self.excuse(error)
        finally:
            self._last, self._due = now, (due, step, t_ns)
            if time_ns is not None:
                self.ns_by_tier[1] += time_ns() - began

    def note_loss(self) -> None:
        """Events were lost before what comes next, even if no later event has shown the gap yet. Before an audit."""
        if not self.is_blind:
            self._go_blind()

    def audit(self, snapshot: SchedulerSnapshot) -> bool:
        """Recount a whole snapshot, taken between steps, and compare it with itself and with the books (tier 2).

        Call it on the thread that judges, after the events that came before it and before those after. False, and
        nothing is checked, in the middle of a step: a request in transit would look like a leak.
        """
        judge = self._judge
        if judge is not None and judge.is_inside_a_step:
            return False
        self.audited = snapshot
        with self._auditing(snapshot.step):
            parts = tuple(part for part, every in self._audit_every.items() if self.audits % every == 0)
            self.audits += 1
            for part in parts:
                self.audits_by_part[part] += 1
                self.checks_by_group[audit.GROUPS[part]] += audit.checks(part, snapshot)
            audit.run(None if judge is None else judge.books, snapshot, self.report, parts)
            if judge is not None and AuditPart.BOOKS in parts:
                judge.watch.audit(judge.books, snapshot)
        return True

    def audit_readings(self, readings: Readings) -> bool:
        """Compare what a listener shows between two steps with the books (tier 2). Called as `audit` is.

        False, and nothing is checked, in the middle of a step or before the engine started.
        """
        judge = self._judge
        if judge is None or judge.is_inside_a_step:
            return False
        with self._auditing(judge.books.last_plan_step):
            self.checks_by_group["meter"] += 1
            self.checks_by_group["time"] += judge.watch.on_readings(judge.books, readings)
        return True

    def audit_spans(self, reading: SpanReading) -> bool:
        """Compare what whoever builds spans has with the books as of its event (tier 2). Called as `audit` is.

        False, and nothing is checked, before the engine started, or when the reading is older than the books can tell.
        """
        judge, is_compared = self._judge, False
        if judge is None:
            return False
        with self._auditing(judge.books.last_plan_step):
            is_compared = judge.watch.on_spans(reading)
            self.checks_by_group["span"] += is_compared
        return is_compared

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
            self.excuse(error)
        finally:
            self._audit_step = None
            if self._time_ns is not None:
                self.ns_by_tier[2] += self._time_ns() - started

    def _go_blind(self) -> None:
        """Books that missed something would accuse a sound engine."""
        self.is_blind = True
        self.internal_errors += 1
        self.last_internal_error = f"{self.lost()} events were lost on the way here: only recounts judge from now on"
        self._judge, self._handlers = None, {}

    def _on_first(self, event: AnyEvent) -> None:
        if self.is_blind:
            return
        if not isinstance(event, EngineStarted):
            if self.lost():
                self._go_blind()
                return
            self.report("INV-STEP-02", "EngineStarted as the first event", type(event).__name__)
            return
        self._judge = Judge(
            event, self, self.checks_by_group, progress_steps=self._progress_steps, gap_steps=self._gap_steps
        )
        self._judge.books.is_foreign = self.is_foreign
        self._handlers = self._judge.handlers
        self.started = event

    # -- for the judge ---------------------------------------------------------------------------------------------

    def excuse(self, error: Exception) -> None:
        """Count a fault of the checker's own. Raises it where violations are raised."""
        if self.on_violation == "raise":
            raise error
        self.internal_errors += 1
        self.last_internal_error = f"{type(error).__name__}: {error}"

    def blame(self, event: AnyEvent | None) -> Report:
        """From now on reports are about `event`, which came earlier than the one at hand; None: about that one."""
        self._judged = event
        return self.report

    def report(
        self, law: str, expected: str, found: str, *, rid: str | None = None, seqs: tuple[int, ...] = ()
    ) -> None:
        """Count a broken law, tell the listener, and raise it where it is to be raised."""
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
