"""Laws of prompt pieces. Owns: INV-CHUNK-01 to 05 — progress, boundaries, no output from a middle piece."""

from __future__ import annotations

from typing import Final

from engine.events import AdmissionDecided, RequestTransitioned, StepCompleted, StepPlanned
from engine.scheduler.decision import ADMITTED, Reason
from engine.scheduler.plan import PrefillRow
from invariants.members import ADMIT, DECODE, FINAL_CHUNK, NEXT_CHUNK, PREFILL, WAITING
from invariants.running_book import ShadowRequest
from invariants.shadow import Shadow
from invariants.violation import Report

#: Refused before any match: prefix_len is then what the queue's order was made with, capped but not floored to pages.
UNTRIED: Final = frozenset({Reason.ROWS_EXHAUSTED, Reason.FULL_FLAG_SET, Reason.DELAYED})


def on_decision(books: Shadow, event: AdmissionDecided, report: Report) -> None:
    """One examination: lengths add up, the continuation is first, cuts are where they may be."""
    rid = event.rid
    if event.extend_end != event.prefix_len + event.selected_extend:
        report(
            "INV-CHUNK-02",
            f"extend_end {event.prefix_len} + {event.selected_extend} = {event.prefix_len + event.selected_extend}",
            f"extend_end {event.extend_end}",
            rid=rid,
        )
    request = books.requests.get(rid)
    if request is not None:
        _considered(books, event, request, report)
    if event.reason not in ADMITTED:
        return
    may_be_empty = event.is_continuation and not books.config.scheduler.guards
    if event.selected_extend <= 0 and not may_be_empty:
        report("INV-CHUNK-01", "selected_extend above 0", f"{event.selected_extend} ({event.reason})", rid=rid)
    if event.is_chunked != (event.selected_extend < event.candidate_extend):
        report(
            "INV-CHUNK-02",
            f"is_chunked exactly when selected_extend is below candidate_extend {event.candidate_extend}",
            f"is_chunked {event.is_chunked}, selected_extend {event.selected_extend}",
            rid=rid,
        )
    cut = event.reason is Reason.ADMITTED_FIRST_CHUNK or (event.is_chunked and not books.reference)
    if cut and event.extend_end % books.page_size:
        treeless = not books.config.cache.enable_radix
        unrounded = books.reference and treeless and request is not None and request.ignore_eos
        if not unrounded:
            report(
                "INV-CHUNK-05",
                f"extend_end a multiple of page_size {books.page_size}",
                f"extend_end {event.extend_end}",
                rid=rid,
            )


def _considered(books: Shadow, event: AdmissionDecided, request: ShadowRequest, report: Report) -> None:
    """A decision against the request as the second books have it."""
    rid = event.rid
    if not books.decisions:
        first = books.view.continuation
        if first is not None and first != rid:
            report("INV-CHUNK-04", f"continuation {first} considered first", f"{rid} considered first", rid=first)
    is_continuation = request.state is PREFILL
    if event.is_continuation != is_continuation or (is_continuation and event.order != 0):
        report(
            "INV-CHUNK-04",
            f"is_continuation {is_continuation}, order {'0' if is_continuation else 'any'}",
            f"is_continuation {event.is_continuation}, order {event.order}",
            rid=rid,
        )
    if is_continuation and request.cursor is not None and event.prefix_len != request.cursor:
        report("INV-CHUNK-02", f"next piece from {request.cursor}", f"prefix_len {event.prefix_len}", rid=rid)
    tried = not is_continuation and event.reason not in UNTRIED
    if tried and (event.prefix_len % books.page_size or not 0 <= event.prefix_len < request.seq_len):
        report(
            "INV-CHUNK-02",
            f"a cached prefix of whole pages of {books.page_size}, below {request.seq_len}",
            f"prefix_len {event.prefix_len}",
            rid=rid,
        )
    if event.candidate_extend != request.seq_len - event.prefix_len:
        report(
            "INV-CHUNK-02",
            f"candidate_extend {request.seq_len} - {event.prefix_len} = {request.seq_len - event.prefix_len}",
            f"candidate_extend {event.candidate_extend}",
            rid=rid,
        )


def on_plan(books: Shadow, event: StepPlanned, report: Report) -> None:
    """The prefill rows of a plan: as decided, contiguous, one cut at most, sampled when complete."""
    _rows_as_decided(books, event, report)
    cut: str | None = None
    for row in event.prefills:
        if row.extend_len <= 0 and books.config.scheduler.guards:
            report("INV-CHUNK-01", "extend_len above 0", f"{row.extend_len}", rid=row.rid)
        request = books.requests.get(row.rid)
        if request is not None:
            _row(request, row, report)
        if not row.is_last:
            if cut is not None:
                report("INV-CHUNK-04", f"one unfinished prefill, {cut}", f"a second, {row.rid}", rid=row.rid)
            cut = row.rid
    held = books.view.continuation
    if cut is None and held is not None and not any(row.rid == held for row in event.prefills):
        request = books.requests.get(held)
        cut = held if request is not None and request.state is PREFILL else None
    books.cut = cut
    if event.continuation != cut:
        report("INV-CHUNK-04", f"continuation {cut}", f"continuation {event.continuation}", rid=cut)
    if event.prefills:
        _sampling(event, report)


def _rows_as_decided(books: Shadow, event: StepPlanned, report: Report) -> None:
    if event.claim_failed:
        return
    decided = [(d.rid, d.prefix_len, d.selected_extend, not d.is_chunked) for d in books.admitted]
    planned = [(row.rid, row.prefix_len, row.extend_len, row.is_last) for row in event.prefills]
    if decided != planned:
        wrong = next((p for p in planned if p not in decided), None) or next(d for d in decided if d not in planned)
        report(
            "INV-CHUNK-02",
            f"prefill rows as decided (rid, prefix_len, extend, last): {decided}",
            f"{planned}",
            rid=wrong[0],
            seqs=tuple(d.seq for d in books.decisions if d.rid == wrong[0]),
        )


def _row(request: ShadowRequest, row: PrefillRow, report: Report) -> None:
    if request.cursor is not None and row.prefix_len != request.cursor:
        report("INV-CHUNK-02", f"next piece from {request.cursor}", f"prefix_len {row.prefix_len}", rid=row.rid)
    if row.extend_end > request.seq_len or row.is_last != (row.extend_end == request.seq_len):
        report(
            "INV-CHUNK-02",
            f"the last piece, and no other, ends at {request.seq_len}",
            f"end {row.extend_end}, is_last {row.is_last}",
            rid=row.rid,
        )
    request.planned_end = request.cursor = row.extend_end


def _sampling(event: StepPlanned, report: Report) -> None:
    # The decodes are as many as run, so they are searched only for who is not among the finished prompts.
    finished = event.sampling[: max(len(event.sampling) - len(event.decodes), 0)]
    for row in event.prefills:
        rid = row.rid
        if row.is_last != (rid in finished or rid in event.sampling):
            what = "last" if row.is_last else "middle"
            report(
                "INV-CHUNK-03",
                f"{'one sampled row' if row.is_last else 'no sampled row'} for a {what} piece",
                f"sampled: {rid in event.sampling}",
                rid=row.rid,
            )


def on_transition(books: Shadow, event: RequestTransitioned, request: ShadowRequest, report: Report) -> None:
    """Counts of a transition: outputs follow the pieces, computed_len follows the cursor."""
    due = request.outputs
    if event.cause is FINAL_CHUNK:
        # Two transitions of one step (DECODE, then an end) tell the same token.
        due += request.token_step != event.step
        if event.output_len != due:
            report("INV-CHUNK-03", f"output_len {due} after the last piece", f"{event.output_len}", rid=event.rid)
        books.add_output(request, event.step)
        request.outputs = event.output_len
    elif event.cause is NEXT_CHUNK and event.output_len != due:
        report("INV-CHUNK-03", f"output_len {due} after a middle piece", f"{event.output_len}", rid=event.rid)
    if event.cause in (NEXT_CHUNK, FINAL_CHUNK):
        if request.planned_end is not None and event.computed_len != request.planned_end:
            report("INV-CHUNK-02", f"computed_len {request.planned_end}", f"{event.computed_len}", rid=event.rid)
        request.planned_end = None
    elif event.cause is ADMIT:
        prefix = books.decided_prefix.get(event.rid, event.computed_len)
        if event.computed_len != prefix or event.cached_len != prefix:
            report(
                "INV-CHUNK-02",
                f"{prefix} tokens found cached, as decided",
                f"computed_len {event.computed_len}, cached_len {event.cached_len}",
                rid=event.rid,
            )
    elif event.target is WAITING and event.computed_len:
        report("INV-CHUNK-02", "no computed token while waiting", f"{event.computed_len}", rid=event.rid)


def on_completed(books: Shadow, plan: StepPlanned, event: StepCompleted, report: Report) -> None:
    """What the pieces of the applied step left behind."""
    if event.failed:
        return
    for row in plan.prefills:
        if not row.is_last and any(done.rid == row.rid for done in event.rows):
            report("INV-CHUNK-03", "no output of a middle piece", "a row in the outcome", rid=row.rid)
        request = books.requests.get(row.rid)
        if request is None:  # ended in this step
            continue
        due = DECODE if row.is_last else PREFILL
        if request.state is not due:
            report(
                "INV-CHUNK-03",
                f"{due} after {'its last' if row.is_last else 'a middle'} piece",
                f"{request.state}",
                rid=row.rid,
                seqs=(plan.seq,),
            )
