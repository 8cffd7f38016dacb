"""Judge. Owns: which laws see which event of one engine life, in which order, and what the books learn from it.

Called by `InvariantChecker` with every event but the first. Decode steps are most of a server's
life and are kept cheap: laws look at what changed, and whole tuples are compared before their members are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Protocol

from engine.events import (
    AbortRequested,
    AdmissionDecided,
    AnyEvent,
    EngineStarted,
    LockChanged,
    PagesMoved,
    RequestArrived,
    RequestTransitioned,
    ResponseSent,
    StepCompleted,
    StepPlanned,
)
from engine.request import Cause
from invariants import budget_laws, chunk_laws, lock_laws, overlap_laws, page_laws, step_laws, usual
from invariants.members import ADMIT, ARRIVE, FINAL_CHUNK, FINISHED, NEXT_CHUNK, PREEMPT
from invariants.overlap_book import OverlapBook
from invariants.shadow import Shadow
from invariants.violation import InvariantViolation, Report
from invariants.watch import Watch

RATIO_TOLERANCE: Final = 1e-9
_COMMIT_CAUSES: Final = frozenset({Cause.ADMIT, Cause.RETRACT, Cause.PREEMPT})


class Court(Protocol):
    """What a judge needs of its checker."""

    def report(
        self, law: str, expected: str, found: str, *, rid: str | None = None, seqs: tuple[int, ...] = ()
    ) -> None:
        """A law does not hold, by the event at hand."""

    def blame(self, event: AnyEvent | None) -> Report:
        """From now on reports are about `event`, which came earlier than the one at hand; None: about that one."""

    def excuse(self, error: Exception) -> None:
        """The checker itself failed. Raises `error` where violations are raised."""


class Judge:
    """The laws of tier 1 and their books.

    counts    checks by family of laws, counted here
    handlers  type of event -> what judges it; a type that is missing is judged by nothing but its number and time
    """

    def __init__(
        self, started: EngineStarted, court: Court, counts: dict[str, int], *, progress_steps: int, gap_steps: int
    ) -> None:
        self.books = Shadow(started)
        self.watch = Watch(self.books, court.report, gap_steps=gap_steps)
        self._court = court
        self._report = court.report
        self._counts = counts
        self._progress_steps = progress_steps
        self.handlers: dict[type, Callable[[Any], None]] = {
            RequestArrived: self._on_arrival,
            AbortRequested: self._on_abort,
            RequestTransitioned: self._on_transition,
            AdmissionDecided: self._on_decision,
            StepPlanned: self._on_plan,
            StepCompleted: self._on_completed,
            PagesMoved: self._on_pages,
            LockChanged: self._on_lock,
            ResponseSent: self.watch.spans.on_response,
        }

    @property
    def is_inside_a_step(self) -> bool:
        """Whether a plan was begun and not applied: state is in transit."""
        books = self.books
        if books.overlap is not None and books.overlap.is_inside_a_step:
            return True
        return books.plan is not None or books.in_commit or bool(books.claims)

    def is_of_outcome(self, event: AnyEvent) -> bool:
        """Whether an event may be of the outcome of a step in flight, although the next one was planned."""
        overlap = self.books.overlap
        return overlap is not None and overlap.is_of_outcome(event.step)

    # -- requests --------------------------------------------------------------------------------------------------

    def _on_arrival(self, event: RequestArrived) -> None:
        books = self.books
        if books.claims:
            self._follow_claims()
        if event.rid not in books.requests:
            self.watch.on_arrival(event)
        step_laws.on_arrival(books, event, self._report)
        self._counts["step"] += 1

    def _on_abort(self, event: AbortRequested) -> None:
        if event.rid in self.books.requests and not self.books.is_foreign:
            self.books.aborting[event.rid] = event.seq
            if self.books.overlap is not None:
                self.books.overlap.abort(event.rid)

    def _on_transition(self, event: RequestTransitioned) -> None:
        books, report, counts, cause = self.books, self._report, self._counts, event.cause
        if books.claims and cause is not ADMIT:  # an admission's laws do not ask where pages are
            self._follow_claims()
        if cause in _COMMIT_CAUSES:
            if cause is ADMIT and books.leaving:
                lock_laws.settle(books, report)
            books.in_commit = True
            if cause is PREEMPT:
                books.count_preempted(event.rid)
        counts["step"] += 1
        if books.overlap is not None and event.target is FINISHED:
            overlap_laws.on_end(books.overlap, event, report)
        follow = usual.BY_CAUSE.get(cause, usual.ends)
        if follow(books, self.watch, event):
            if books.overlap is not None:
                self._follow_overlap(books.overlap, event)
            counts["request"] += 1
            counts["chunk"] += 1
            counts["lock"] += 1
            if cause is not ARRIVE and not books.in_commit and books.plan is None:
                books.take_view()
            return
        request = step_laws.on_transition(books, event, report)
        if request is None:
            return
        self.watch.on_transition(event)
        chunk_laws.on_transition(books, event, request, report)
        lock_laws.on_transition(books, event, request, report)
        counts["request"] += 1
        counts["chunk"] += 1
        counts["lock"] += 1
        target = event.target
        if target is FINISHED:
            step_laws.on_end(books, event, request, report)
            books.remember_end(event.rid, event.seq)
        books.set_state(request, target)
        if books.overlap is not None:
            self._follow_overlap(books.overlap, event)
        if not books.in_commit and books.plan is None:
            books.take_view()  # an end between two steps: the next plan sees it

    def _follow_overlap(self, overlap: OverlapBook, event: RequestTransitioned) -> None:
        """What a transition says of steps in flight. After the books followed it."""
        if event.target is FINISHED:
            overlap.follow_end(event)
        elif event.cause in (NEXT_CHUNK, FINAL_CHUNK):
            request = self.books.requests[event.rid]
            if overlap.follow_piece(request):
                overlap_laws.spend(self.books, overlap, event.rid)
                self.watch.queue.changes += 1

    # -- a step ----------------------------------------------------------------------------------------------------

    def _on_decision(self, event: AdmissionDecided) -> None:
        books, report, counts = self.books, self._report, self._counts
        if books.claims:
            self._follow_claims()
        if not books.decisions:
            if books.leaving:
                lock_laws.settle(books, report)
            if not books.in_commit:
                books.take_view()
                books.in_commit = True
        chunk_laws.on_decision(books, event, report)
        budget_laws.on_decision(books, event, report)
        self.watch.on_decision(event)
        books.decide(event)
        counts["chunk"] += 1
        counts["budget"] += 1

    def _on_plan(self, event: StepPlanned) -> None:
        books, report, counts = self.books, self._report, self._counts
        if books.claims:
            self._follow_claims()
        if books.leaving:
            lock_laws.settle(books, report)
        if books.overlap is not None:
            overlap_laws.on_plan(books.overlap, event, report)
        step_laws.on_plan(books, event, report)
        if event.prefills or books.decisions or event.continuation is not None or books.view.continuation is not None:
            chunk_laws.on_plan(books, event, report)
            counts["chunk"] += 1
        else:
            books.cut = None
        step_laws.recount(books, event, report)
        budget_laws.on_plan(books, event, report)
        if books.refused:
            lock_laws.on_plan(books, event, report)
        page_laws.on_counts(books, event, report)
        step_laws.progress(books, event, self._progress_steps, report)
        ratio = budget_laws.next_ratio(books, event)
        if abs(event.new_token_ratio - ratio) > RATIO_TOLERANCE:
            report("INV-BUDGET-04", f"new_token_ratio {ratio:g} after this step", f"{event.new_token_ratio:g}")
        self.watch.on_plan(books, event)
        books.close_plan(ratio)
        books.last_plan_step = event.step
        if books.overlap is None:
            books.plan = event
        else:
            left = books.overlap.left
            overlap_laws.follow_plan(books, books.overlap, event)
            self.watch.queue.changes += books.overlap.left > left
            books.take_view()
        counts["request"] += 1
        counts["flag"] += 1
        counts["step"] += 1
        counts["budget"] += 1
        counts["lock"] += 1
        counts["page"] += 1

    def _on_completed(self, event: StepCompleted) -> None:
        books, report, counts = self.books, self._report, self._counts
        if books.claims:
            self._follow_claims()
        self.watch.on_completed(event)
        if books.overlap is not None:
            overlap_laws.on_completed(books, books.overlap, event, report)
            counts["chunk"] += 1
        else:
            plan = step_laws.on_completed(books, event, report)
            if plan is not None and plan.prefills:
                chunk_laws.on_completed(books, plan, event, report)
                counts["chunk"] += 1
        if books.leaving:
            lock_laws.settle(books, report)
        page_laws.on_counts(books, event, report)
        books.take_view()
        counts["time"] += 1
        counts["step"] += 1
        counts["page"] += 1

    # -- pages and locks -------------------------------------------------------------------------------------------

    def _on_pages(self, event: PagesMoved) -> None:
        books = self.books
        if event.cause == "claim":
            books.claims.append(event)
            return
        if books.claims:
            self._follow_claims()
        page_laws.on_pages(books, event, self._report)
        self._counts["page"] += 1

    def _follow_claims(self) -> None:
        """Claims are judged when something comes that asks where pages are: together, which is much quicker."""
        books, court = self.books, self._court
        claims, books.claims = books.claims, []
        self._counts["page"] += len(claims)
        try:
            if books.leaving:
                lock_laws.settle(books, court.blame(claims[0]))
            books.in_commit = True
            page_laws.on_claims(books, claims, court.blame)
        except InvariantViolation:
            raise
        except Exception as error:  # as in `emit`; the event at hand is to be judged all the same
            court.excuse(error)
        finally:
            court.blame(None)

    def _on_lock(self, event: LockChanged) -> None:
        lock_laws.on_lock(self.books, event, self._report)
        self._counts["lock"] += 1
