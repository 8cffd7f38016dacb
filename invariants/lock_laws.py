"""Laws of what a request holds. Owns: INV-LOCK-01 to 03 — locks, rows, and nothing for those who wait."""

from __future__ import annotations

from engine.events import LockChanged, RequestTransitioned, StepPlanned
from invariants.members import ADMIT, DECODE, FINISHED, PREFILL
from invariants.running_book import ShadowRequest
from invariants.shadow import Shadow
from invariants.violation import Report


def on_lock(books: Shadow, event: LockChanged, report: Report) -> None:
    """One lock count against the holders."""
    mine = books.add_lock(event.node, event.rid, event.delta)
    total = books.node_locks.get(event.node, 0)
    if mine < 0 or event.count < 0:
        report(
            "INV-LOCK-03",
            "a lock count of 0 or more",
            f"{event.rid} holds {mine}, node {event.node} {event.count}",
            rid=event.rid,
        )
    if total != event.count:
        report("INV-LOCK-03", f"node {event.node} held {total} times", f"lock count {event.count}", rid=event.rid)
        books.node_locks[event.node] = max(event.count, 0)


def on_transition(books: Shadow, event: RequestTransitioned, request: ShadowRequest, report: Report) -> None:
    """Rows follow the states: taken by an admission, kept, given back on leaving. Before the books' state changes."""
    if event.target not in (PREFILL, DECODE):
        if event.row != request.row:
            report("INV-LOCK-02", f"row {request.row} given back", f"row {event.row}", rid=event.rid)
        if request.row is not None:
            if books.rows.get(request.row) == event.rid:
                del books.rows[request.row]
            books.leaving[event.rid] = (request, request.row, event.seq, event.target is FINISHED)
            request.row = None
        request.cursor = request.planned_end = None
        return
    if event.cause is not ADMIT:
        if event.row is not None or request.row is None:
            report("INV-LOCK-02", f"row {request.row} kept", f"row {event.row} named", rid=event.rid)
        return
    row = event.row
    other = None if row is None else books.rows.get(row)
    if row is None or not 0 <= row < books.max_rows or (other is not None and other != event.rid):
        report(
            "INV-LOCK-02",
            f"a row of its own below {books.max_rows} in {event.target}",
            f"row {row}" + (f", held by {other}" if other else ""),
            rid=event.rid,
        )
    if row is not None:
        books.rows[row] = event.rid
        request.row = row


def settle(books: Shadow, report: Report) -> None:
    """Whoever left prefill or decode holds nothing any more. Called before rows can be given out again."""
    for rid, (request, row, seq, is_end) in books.leaving.items():
        pages = books.pool.private_pages(row)
        if request.locks or pages:
            nodes = books.locks_of(rid)
            found = f"{request.locks} locks (nodes {nodes[:8]}), {pages} private pages of row {row}"
            if is_end:
                report("INV-EXIT-01", "nothing owned after the end", found, rid=rid, seqs=(seq,))
            else:
                report("INV-LOCK-01", "nothing held while waiting", found, rid=rid, seqs=(seq,))
            for node in nodes:
                books.add_lock(node, rid, -books.holders[node][rid])
    books.leaving.clear()


def on_plan(books: Shadow, event: StepPlanned, report: Report) -> None:
    """A refused request holds nothing and has no place in the plan."""
    planned: set[str] | None = None
    # Where running requests gave way, who was refused for memory may have been looked at again, and admitted.
    tried_again = {decision.rid for decision in books.admitted} if event.preempted else ()
    for decision in books.refused:
        if decision.is_continuation or decision.rid in tried_again:
            continue
        request = books.requests.get(decision.rid)
        if planned is None:
            planned = {row.rid for row in event.prefills}.union(event.decodes, event.sampling)
        placed = decision.rid in planned
        if placed or (request is not None and (request.locks or request.row is not None)):
            report(
                "INV-LOCK-01",
                "a refused request with no lock, row or place in the plan",
                f"locks {request.locks if request else 0}, row {request.row if request else None}, planned {placed}",
                rid=decision.rid,
                seqs=(decision.seq,),
            )
