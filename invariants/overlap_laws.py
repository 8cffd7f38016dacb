"""Laws where steps overlap. Owns: INV-STEP-01, INV-CHUNK-03 and INV-EXIT-01 of an outcome that comes a plan late, and
INV-PAGE-04: the tree gets what was applied.

The same laws as in `step_laws` and `chunk_laws`, of an engine that counts with the plan and settles with the outcome.
"""

from __future__ import annotations

from engine.events import RequestTransitioned, StepCompleted, StepPlanned
from engine.request import Cause
from invariants.members import PREFILL
from invariants.overlap_book import MOST_IN_FLIGHT, Flown, OverlapBook
from invariants.shadow import Shadow
from invariants.step_laws import ends_followed, recount
from invariants.violation import Report


def on_plan(overlap: OverlapBook, event: StepPlanned, report: Report) -> None:
    """At most one outcome lags behind the plan. Before the books follow it."""
    _moved_on(overlap, report)
    if len(overlap.flights) > MOST_IN_FLIGHT:
        report(
            "INV-STEP-01",
            f"step {overlap.flights[0].plan.step} applied before the next plan but one",
            f"plan of step {event.step}",
            seqs=tuple(flown.plan.seq for flown in overlap.flights),
        )


def follow_plan(books: Shadow, overlap: OverlapBook, event: StepPlanned) -> None:
    """Everybody who decodes in it has one token more; who has his last leaves the running. After all laws saw it."""
    overlap.begin(event)
    requests, running = books.requests, books.running
    if event.decodes and running.are(event.decodes):
        running.tick()
    else:
        for rid in event.decodes:
            if rid in requests:
                requests[rid].outputs += 1
    for rid in event.decodes:
        request = requests.get(rid)
        if request is not None and request.outputs >= request.max_new:
            spend(books, overlap, rid)


def on_end(overlap: OverlapBook, event: RequestTransitioned, report: Report) -> None:
    """A request with rows in flight ends with the outcome of the oldest of them, or has no memory for the next."""
    outcome = overlap.is_of_outcome(event.step)
    if not outcome and event.cause is not Cause.KV_POOL_EXHAUSTED and overlap.in_flight(event.rid):
        step = overlap.flights[0].plan.step
        report("INV-STEP-01", f"an end with the outcome of step {step}", f"in step {event.step}", rid=event.rid)


def spend(books: Shadow, overlap: OverlapBook, rid: str) -> None:
    """A request has all its tokens, the last of them under way."""
    request = books.requests[rid]
    books.running.leave(request)
    overlap.spend(request)


def _moved_on(overlap: OverlapBook, report: Report) -> None:
    """Pieces move their requests on right after their plan."""
    for rid in overlap.awaited:
        report("INV-CHUNK-03", "each piece told as next or last after its plan", f"nothing of {rid}", rid=rid)
    overlap.awaited.clear()


def on_completed(books: Shadow, overlap: OverlapBook, event: StepCompleted, report: Report) -> None:
    """The outcome of the oldest step in flight, against its plan without void rows."""
    _moved_on(overlap, report)
    flown = overlap.flights[0] if overlap.flights else None
    if flown is None or flown.plan.step != event.step:
        report(
            "INV-STEP-01",
            f"step {flown.plan.step} applied" if flown else "no step in flight",
            f"step {event.step} applied",
            seqs=(flown.plan.seq,) if flown else (),
        )
        return
    if event.failed:
        _failed(books, flown, event, report)
    else:
        _rows(books, flown, event, report)
    for rid in overlap.overdue(list(books.aborting), event.step):
        seq = books.aborting.pop(rid)
        if rid in books.requests:
            found = f"still {books.requests[rid].state}"
            report("INV-EXIT-01", "the end that was asked for", found, rid=rid, seqs=(seq,))
    overlap.flights.popleft()
    recount(books, event, report)
    if books.in_state[PREFILL] > 1:
        report("INV-CHUNK-04", "at most one request partly prefilled", f"{books.in_state[PREFILL]}")


def _failed(books: Shadow, flown: Flown, event: StepCompleted, report: Report) -> None:
    if event.rows:
        report("INV-STEP-01", "no rows in a failed step", f"{len(event.rows)} rows", seqs=(flown.plan.seq,))
    for rid in flown.members - flown.void:
        if rid in books.requests:
            found = f"{books.requests[rid].state}"
            report("INV-EXIT-01", "an end by error of every row of a failed step", found, rid=rid)


def _rows(books: Shadow, flown: Flown, event: StepCompleted, report: Report) -> None:
    """One row per sampled request that is not void, and an end for each row that says so."""
    plan = flown.plan
    rids, due = tuple([row.rid for row in event.rows]), flown.wanted(plan.sampling)
    ends_followed(books, plan, event, report)
    if rids != due:
        odd = sorted(set(rids).symmetric_difference(due)) or ["order"]
        report(
            "INV-STEP-01",
            f"one row per sampled request that has not ended, {len(due)}",
            f"{len(rids)} rows, differs for {odd[:8]}",
            rid=odd[0],
            seqs=(plan.seq,),
        )
    for piece in plan.prefills:
        if not piece.is_last and piece.rid in rids:
            report("INV-CHUNK-03", "no output of a middle piece", "a row in the outcome", rid=piece.rid)


def on_tree(books: Shadow, overlap: OverlapBook, row: int, step: int, report: Report) -> None:
    """Pages of a row went to the tree: of whole pages of applied tokens, no more. After the books followed the move."""
    rid = books.rows.get(row)
    request = None if rid is None else books.requests.get(rid)
    if rid is None or request is None:
        return
    planned = request.cursor if request.state is PREFILL and request.cursor is not None else request.seq_len - 1
    size = books.page_size
    applied = planned - overlap.under_way(rid, step)[1]
    shared = -(-planned // size) - books.pool.private_pages(row)
    if shared > applied // size:
        report(
            "INV-PAGE-04",
            f"at most {applied // size} pages of {rid} in the tree: {applied} of {planned} tokens applied",
            f"{shared}",
            rid=rid,
        )
