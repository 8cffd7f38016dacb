"""Laws of derived values. Owns: INV-FLAG-01 to 04 - kind, full flag, end of a pass, cap, each worked out a second time.

A stale flag is the quietest fault there is: every step is legal and nothing happens. So a flag is not compared with
what it was a moment ago, but with what its definition says about the events since.
"""

from __future__ import annotations

import math
from typing import Final

from engine.config import EngineConfig, Policy
from engine.events import StepPlanned
from engine.scheduler.decision import ADMITTED, Reason, Result
from engine.scheduler.plan import PassEnd, StepKind
from invariants.members import DECODE_STEP, EXTEND_STEP, IDLE_STEP, MIXED_STEP, WAITING
from invariants.queue_books import QueueBooks
from invariants.shadow import Shadow
from invariants.violation import Report

_STOPS_AT: Final = frozenset({"result", "slots"})


class FlagLaws:
    """The laws, and what they remember of the plan before."""

    def __init__(self, config: EngineConfig) -> None:
        scheduler = config.scheduler
        #: Without a latch, and with preemption, the flag is of no consequence after its step and is not followed.
        self._latches = str(scheduler.kv_accounting) == "reference" and not scheduler.enable_priority_preemption
        self._caps = scheduler.schedule_policy is Policy.SHORTEST_PREFILL_FIRST
        align = scheduler.truncation_align_size
        #: The shortest cut that an alignment allows: a cap below it does not make the piece shorter.
        self._shortest = 1 if align is None else math.lcm(align, config.cache.page_size)
        #: The full flag as the last plan told it.
        self.full = False
        #: The plan before, whose batch a flag may outlive or not.
        self.last: StepPlanned | None = None
        #: Overlap: how many had left ahead of their last token by the plan before.
        self._left = 0

    def on_plan(self, books: Shadow, queue: QueueBooks, event: StepPlanned, report: Report) -> None:
        """Every derived value of a plan."""
        kind = _kind(event)
        if event.kind is not kind:
            report("INV-FLAG-01", f"kind {kind}: what it computes", f"kind {event.kind}")
        if self._latches:
            due = self._due_flag(books, queue, event)
            if event.batch_is_full is not due:
                report(
                    "INV-FLAG-02",
                    f"batch_is_full {due}, from {self.full} before and what happened since",
                    f"{event.batch_is_full}",
                )
        if event.pass_end is not None:
            _pass_end(books, queue, event, event.pass_end, report)
        if event.chunk_limit is not None:
            self._cap(books, event, event.chunk_limit, report)
        self.full = event.batch_is_full
        self.last = event
        queue.ends = 0
        if books.overlap is not None:
            self._left = books.overlap.left

    def _due_flag(self, books: Shadow, queue: QueueBooks, event: StepPlanned) -> bool:
        """The reference's full flag by its definition: set by a refusal for rows or memory, cleared when anyone left,
        when a prompt moved on, and when nobody runs."""
        end = event.pass_end
        if end is None or event.retractions:
            return False
        held = self.full and not self._cleared(books, queue)
        if end.stop == "skipped":
            return held or end.stopped_by is Reason.ROWS_EXHAUSTED
        if event.claim_failed:
            return held
        if end.stop == "slots":
            return held or end.stopped_by is Reason.ROWS_EXHAUSTED
        if end.stop == "result" and books.decisions:
            last = books.decisions[-1]
            if last.result is Result.NO_TOKEN and not last.is_continuation:
                return bool(event.prefills or books.view.running)
        return held

    def _cleared(self, books: Shadow, queue: QueueBooks) -> bool:
        """Whether anything since the last plan clears the flag."""
        if queue.ends or not books.view.running or (books.overlap is not None and books.overlap.left > self._left):
            return True
        last = self.last
        if last is None or not last.prefills:
            return False
        if last.decodes or not last.prefills[-1].is_last or any(not row.is_last for row in last.prefills):
            return True
        # A batch that found nobody running becomes the running batch, with a flag of its own.
        return books.view.running <= sum(row.rid in books.running for row in last.prefills)

    def _cap(self, books: Shadow, event: StepPlanned, cap: int, report: Report) -> None:
        """The cap on a continuation leaves whole pages to shorter prompts, and the continuation keeps to it."""
        opened, page = event.budget_open, books.page_size
        room = 0 if opened is None or opened.rem_chunk is None else opened.rem_chunk
        if not self._caps or books.view.continuation is None or cap % page or not page <= cap <= room - page:
            report(
                "INV-FLAG-04",
                f"a cap for a continuation under {Policy.SHORTEST_PREFILL_FIRST}, whole pages from {page} to "
                f"{room - page}",
                f"chunk_limit {cap}, continuation {books.view.continuation}",
            )
            return
        most = max(cap, self._shortest)
        for decision in books.decisions[:1]:
            if decision.is_continuation and decision.selected_extend > most:
                report(
                    "INV-FLAG-04",
                    f"a piece of at most {most} tokens",
                    f"{decision.selected_extend}",
                    rid=decision.rid,
                    seqs=(decision.seq,),
                )


def _kind(event: StepPlanned) -> StepKind:
    if event.prefills:
        return MIXED_STEP if event.decodes else EXTEND_STEP
    return DECODE_STEP if event.decodes else IDLE_STEP


def _pass_end(books: Shadow, queue: QueueBooks, event: StepPlanned, end: PassEnd, report: Report) -> None:
    """Where and why a pass ended, and how many it did not get to, from its decisions."""
    decisions = books.decisions
    if not decisions:
        waited = 0 if not queue.waiting and not event.retractions else _waiting_before(books, event)
        left = 0 if end.stop == "queue_end" else waited
    else:
        waited = _waiting_before(books, event)
        # Who was refused for memory may be examined again once running requests give way: two decisions, one request.
        left = waited - len({decision.rid for decision in decisions}) + decisions[0].is_continuation
        last = decisions[-1]
        stops = end.stop in _STOPS_AT
        if last.stopped_pass is not stops or any(decision.stopped_pass for decision in decisions[:-1]):
            report(
                "INV-FLAG-03",
                f"stopped_pass {stops} in the last decision, and in no other",
                f"{[decision.stopped_pass for decision in decisions][-8:]}, ended by {end.stop}",
                rid=last.rid,
                seqs=(last.seq,),
            )
        is_named = end.rid == last.rid and (last.reason in ADMITTED or end.stopped_by is last.reason)
        if stops and not is_named:
            report(
                "INV-FLAG-03",
                f"a pass ended by {last.rid}: {last.reason}",
                f"{end.rid}: {end.stopped_by}",
                rid=last.rid,
                seqs=(last.seq,),
            )
    if end.not_considered != left:
        report("INV-FLAG-03", f"{left} of {waited} waiting requests not considered", f"{end.not_considered}")


def _waiting_before(books: Shadow, event: StepPlanned) -> int:
    """Waiting requests that the pass found."""
    held = books.view.continuation
    came = sum(row.rid != held for row in event.prefills)
    back = len(event.preempted) + sum(not victim.aborted for victim in event.retractions)
    return books.in_state[WAITING] + came - back
