"""Snapshot against books. Owns: every quantity that the engine's state and the events both tell, compared (tier 2).

Pages and their owners, lock totals, states, rows and outputs are compared in `invariants.audit`; here is the rest: who
holds which node, cursors, lists, queue, ratio, flag and growth. Where both know something and only one is right, either
the engine changed without an event or the second books drifted: both are faults.
"""

from __future__ import annotations

from itertools import islice
from typing import Final

from engine.config import Policy
from engine.kvcache.snapshot import RequestView, SchedulerSnapshot, WaitingView
from engine.request import RequestState
from invariants.queue_books import QueueBooks
from invariants.running_book import ShadowRequest
from invariants.shadow import Shadow
from invariants.violation import Report

#: Waiting requests whose own counts one audit compares; the next audit goes on where it ended.
SAMPLE: Final = 256
_ROOT: Final = 0
_RATIO_TOLERANCE: Final = 1e-9


class BookAudit:
    """The comparison, and where its sample of the queue goes on."""

    def __init__(self) -> None:
        self._from = 0

    def run(self, books: Shadow, queue: QueueBooks, snapshot: SchedulerSnapshot, full: bool, report: Report) -> None:
        """Compare everything. `full`: the full flag as the last plan told it."""
        _holds(books, snapshot, report)
        _scalars(books, snapshot, full, report)
        _lists(books, queue, snapshot, report)
        growth = 0
        for view in snapshot.requests:
            request = books.requests.get(view.rid)
            if request is not None:
                _request(books, request, view, report)
            if view.state == RequestState.DECODE:
                growth += min(view.max_new_tokens - view.output_len, books.clip)
        due = books.running.plain_growth + books.running.eos_growth
        if growth != due:
            report("INV-BUDGET-04", f"{due} tokens of growth, from events", f"{growth}")
        if self._from >= len(snapshot.waiting):
            self._from = 0
        for waiting in islice(snapshot.waiting, self._from, self._from + SAMPLE):
            _waiting(books, queue, waiting, report)
        self._from += SAMPLE


def _holds(books: Shadow, snapshot: SchedulerSnapshot, report: Report) -> None:
    """Each request locks the nodes of its lease's path, once; its row and its private pages are those of the events."""
    parents = {node.node: node.parent for node in snapshot.kv.nodes}
    held: dict[str, dict[int, int]] = {}
    for node, holds in books.holders.items():
        for rid, count in holds.items():
            held.setdefault(rid, {})[node] = count
    for lease in snapshot.kv.leases:
        path: dict[int, int] = {}
        node = lease.node
        while node != _ROOT and node in parents and node not in path:
            path[node] = 1
            node = parents[node]
        due = held.pop(lease.rid, {})
        if due != path:
            odd = sorted(node for node in due.keys() | path.keys() if due.get(node) != path.get(node))
            report("INV-LOCK-03", f"nodes {sorted(due)} held, from events", f"{sorted(path)}: {odd[:8]}", rid=lease.rid)
        private, counted = len(lease.pages) - lease.shared_pages, books.pool.private_pages(lease.row)
        if private != counted:
            report(
                "INV-PAGE-02",
                f"{counted} private pages of row {lease.row}, from events",
                f"{private}",
                rid=lease.rid,
            )
    for rid, nodes in held.items():
        report("INV-LOCK-03", "no lock without a lease", f"nodes {sorted(nodes)[:8]}, from events", rid=rid)
    rows = {lease.row: lease.rid for lease in snapshot.kv.leases}
    if rows != books.rows:
        odd_rows = sorted(row for row in rows.keys() | books.rows.keys() if rows.get(row) != books.rows.get(row))
        report("INV-LOCK-02", f"rows {dict(sorted(books.rows.items()))}, from events", f"differs in {odd_rows[:8]}")


def _scalars(books: Shadow, snapshot: SchedulerSnapshot, full: bool, report: Report) -> None:
    """Single values: the ratio, the flag, the continuation."""
    if abs(snapshot.new_token_ratio - books.ratio) > _RATIO_TOLERANCE:
        report("INV-BUDGET-04", f"new_token_ratio {books.ratio:g}, from events", f"{snapshot.new_token_ratio:g}")
    if snapshot.batch_is_full is not full:
        report("INV-FLAG-02", f"batch_is_full {full}, as the last plan told", f"{snapshot.batch_is_full}")
    continuation = books.continuation()
    if snapshot.continuation != continuation:
        report("INV-CHUNK-04", f"continuation {continuation}, from events", f"{snapshot.continuation}")


def _lists(books: Shadow, queue: QueueBooks, snapshot: SchedulerSnapshot, report: Report) -> None:
    """The running list, the queue and its order, and the tokens that wait."""
    running = set(snapshot.running)
    if running != books.running.keys():
        odd = sorted(running ^ books.running.keys())
        report("INV-STEP-04", f"{len(books.running)} running, from events", f"differs for {odd[:8]}", rid=odd[0])
    spent = () if books.overlap is None else tuple(books.overlap.spent)
    if set(snapshot.leaving) != set(spent):
        odd = sorted(set(snapshot.leaving) ^ set(spent))
        report("INV-STEP-04", f"{len(spent)} with their last token under way, from events", f"{odd[:8]}", rid=odd[0])
    waiting = [view.rid for view in snapshot.waiting]
    if len(waiting) != len(queue.waiting) or queue.waiting.keys() != set(waiting):
        odd = sorted(queue.waiting.keys() ^ set(waiting)) or [waiting[0]]
        report("INV-STEP-04", f"{len(queue.waiting)} waiting, from events", f"differs for {odd[:8]}", rid=odd[0])
    scheduler = books.config.scheduler
    fcfs = scheduler.schedule_policy is Policy.FCFS and not scheduler.enable_priority_scheduling
    if fcfs and waiting != list(queue.waiting):
        report("INV-REQ-03", f"the order of entry: {list(queue.waiting)[:8]}", f"{waiting[:8]}")
    tokens = sum(view.prompt_len + view.output_len for view in snapshot.waiting)
    if tokens != books.waiting_tokens:
        report("INV-STEP-04", f"{books.waiting_tokens} tokens waiting, from events", f"{tokens}")


def _request(books: Shadow, request: ShadowRequest, view: RequestView, report: Report) -> None:
    """One live request's lengths; between two steps nothing is in flight, or with overlap the last step planned."""
    if (view.prompt_len, view.max_new_tokens) != (request.prompt_len, request.max_new):
        report(
            "INV-BUDGET-04",
            f"prompt of {request.prompt_len} and at most {request.max_new} outputs, from events",
            f"{view.prompt_len} and {view.max_new_tokens}",
            rid=view.rid,
        )
    if request.state is RequestState.WAITING:
        computed = 0
    elif request.state is RequestState.DECODE:
        computed = request.seq_len - 1  # the last output token is written when the next one is computed
    else:
        computed = view.computed_len if request.cursor is None else request.cursor
    if view.computed_len != computed:
        report("INV-CHUNK-02", f"{computed} tokens computed, from events", f"{view.computed_len}", rid=view.rid)
    due = 0 if books.overlap is None else books.overlap.in_flight(view.rid)
    if view.in_flight != due:
        report("INV-STEP-01", f"{due or 'no'} step in flight between two steps", f"{view.in_flight}", rid=view.rid)


def _waiting(books: Shadow, queue: QueueBooks, view: WaitingView, report: Report) -> None:
    """One waiting request's counts."""
    track, request = queue.waiting.get(view.rid), books.requests.get(view.rid)
    if track is None or request is None:
        return
    if view.num_retractions != track.ways_back:
        report("INV-REQ-05", f"pushed back {track.ways_back} times", f"{view.num_retractions}", rid=view.rid)
    if view.times_passed_over != queue.overtakes(track):
        report("INV-REQ-04", f"passed over {queue.overtakes(track)} times", f"{view.times_passed_over}", rid=view.rid)
    if view.output_len != request.outputs:
        report("INV-STEP-01", f"{request.outputs} output tokens, from events", f"{view.output_len}", rid=view.rid)
