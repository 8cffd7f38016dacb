"""The audit. Owns: tier 2 — a whole snapshot recounted, page ownership as sets, and compared with the second books.

A sum can balance although one page has two owners and another none; so every page must be found exactly once among the
free list, the nodes and the private parts of the page tables. Take snapshots between steps: inside one, a request in
transit looks like a leak.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import StrEnum
from typing import Final

import numpy as np
from numpy.typing import NDArray

from engine.kvcache.snapshot import KvSnapshot, LeaseView, NodeView, SchedulerSnapshot
from engine.request import RequestState
from invariants import index_laws
from invariants.catalog import Group
from invariants.page_book import EVICTABLE, FREE, NO_OWNER, PRIVATE, PROTECTED, STATE_NAMES
from invariants.shadow import Shadow
from invariants.violation import Report

ROOT = 0


class AuditPart(StrEnum):
    """What an audit is made of; each part can be made less often than the others."""

    OWNERSHIP = "ownership"
    LOCKS = "locks"
    PAGE_TABLES = "page_tables"
    ROWS = "rows"
    LISTS = "lists"
    ORDER = "order"
    BOOKS = "books"


#: The family of laws that each part belongs to.
GROUPS: Final[dict[AuditPart, Group]] = {
    AuditPart.OWNERSHIP: Group.PAGE,
    AuditPart.LOCKS: Group.LOCK,
    AuditPart.PAGE_TABLES: Group.PAGE,
    AuditPart.ROWS: Group.LOCK,
    AuditPart.LISTS: Group.STEP,
    AuditPart.ORDER: Group.INDEX,
    AuditPart.BOOKS: Group.STEP,
}


def checks(part: AuditPart, snapshot: SchedulerSnapshot) -> int:
    """How many checks a part counts as: one, or one for each request whose place is looked at."""
    if part is AuditPart.ORDER:
        return 0 if snapshot.order is None else len(snapshot.order.settled)
    return 1


def run(
    books: Shadow | None, snapshot: SchedulerSnapshot, report: Report, parts: Collection[AuditPart] = tuple(AuditPart)
) -> None:
    """The laws of tier 2, as far as `parts` goes.

    `books` None: the snapshot is only compared with itself (no event was seen).
    """
    if AuditPart.OWNERSHIP in parts:
        _ownership(snapshot.kv, report)
    if AuditPart.LOCKS in parts:
        _locks(snapshot.kv, report)
    if AuditPart.PAGE_TABLES in parts:
        _page_tables(snapshot.kv, report)
    if AuditPart.ROWS in parts:
        _rows(snapshot, None if books is None else books.max_rows, report)
    if AuditPart.LISTS in parts:
        _lists(snapshot, report)
    if snapshot.order is not None and AuditPart.ORDER in parts:
        index_laws.on_sample(snapshot.order, snapshot.kv.page_size, report)
    if books is not None and AuditPart.BOOKS in parts:
        _against_books(books, snapshot, report)


def _arrays(kv: KvSnapshot) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    return np.frombuffer(kv.states, dtype=np.uint8), np.frombuffer(kv.owners, dtype="<i8")


def _ownership(kv: KvSnapshot, report: Report) -> None:
    """Each page in exactly one place, and its state and owner say which."""
    states, owners = _arrays(kv)
    recount = tuple(int(count) for count in np.bincount(states, minlength=4)[:4])
    if kv.counts != recount or sum(kv.counts) != kv.num_pages:
        report("INV-PAGE-01", f"counts {recount}, {kv.num_pages} in all", f"{kv.counts}, {sum(kv.counts)} in all")
    held = _Places(kv)
    if held.outside:
        report("INV-PAGE-02", f"page ids below {kv.num_pages}", f"{held.outside[:4]}")
    times = np.bincount(held.pages, minlength=kv.num_pages)
    for page in np.flatnonzero(times != 1).tolist():
        where = held.find(page)
        report("INV-PAGE-02", f"page {page} in exactly one place", f"{len(where)}: {where[:4]}")
    due_state = np.zeros(kv.num_pages, dtype=np.uint8)
    due_owner = np.full(kv.num_pages, NO_OWNER, dtype=np.int64)
    due_state[held.pages], due_owner[held.pages] = held.states, held.owners
    wrong = np.flatnonzero(((states != due_state) | (owners != due_owner)) & (times == 1))
    if len(wrong):
        page = int(wrong[0])
        report(
            "INV-PAGE-02",
            f"page {page}, found in {held.find(page)[0]}: {STATE_NAMES[due_state[page]]}, owner {due_owner[page]}",
            f"{STATE_NAMES[states[page]]}, owner {owners[page]} ({len(wrong)} such pages)",
        )


def unaccounted(kv: KvSnapshot) -> int:
    """Pages that are in no free list, no node and no lease: a leak, whatever their state says."""
    return kv.num_pages - len(np.unique(_Places(kv).pages))


class _Places:
    """Every place a page is found in: the free list, nodes, private parts of page tables. Arrays of equal length."""

    def __init__(self, kv: KvSnapshot) -> None:
        self._kv = kv
        runs: list[tuple[tuple[int, ...], int, int]] = [(kv.free_list, FREE, NO_OWNER)]
        runs += [(node.pages, PROTECTED if node.lock_count > 0 else EVICTABLE, node.node) for node in kv.nodes]
        runs += [(lease.pages[lease.shared_pages :], PRIVATE, lease.row) for lease in kv.leases]
        sizes = [len(pages) for pages, _, _ in runs]
        pages = np.array([page for run, _, _ in runs for page in run], dtype=np.int64)
        inside = (pages >= 0) & (pages < kv.num_pages)
        self.outside: list[int] = pages[~inside].tolist()
        self.pages = pages[inside]
        self.states = np.repeat(np.array([state for _, state, _ in runs], dtype=np.uint8), sizes)[inside]
        self.owners = np.repeat(np.array([owner for _, _, owner in runs], dtype=np.int64), sizes)[inside]

    def find(self, page: int) -> list[str]:
        """Where a page is, in words; once for each time."""
        kv = self._kv
        found = ["free list"] * kv.free_list.count(page)
        for node in kv.nodes:
            found += [f"node {node.node}"] * node.pages.count(page)
        for lease in kv.leases:
            private = lease.pages[lease.shared_pages :]
            found += [f"request {lease.rid}, row {lease.row}"] * private.count(page)
        return found


def _locks(kv: KvSnapshot, report: Report) -> None:
    """Lock count of each node = leases at or beneath it."""
    parents = {node.node: node.parent for node in kv.nodes}
    due = dict.fromkeys(parents, 0)
    for lease in kv.leases:
        node = lease.node
        for _ in range(len(parents) + 1):
            if node == ROOT:
                break
            if node not in parents:
                report("INV-LOCK-03", "a locked node of the tree", f"node {node}", rid=lease.rid)
                break
            due[node] += 1
            node = parents[node]
        else:
            report("INV-LOCK-03", "a path that ends at the root", f"a ring above node {lease.node}", rid=lease.rid)
    for view in kv.nodes:
        if view.lock_count != due[view.node]:
            holders = [lease.rid for lease in kv.leases if lease.node == view.node]
            report(
                "INV-LOCK-03",
                f"node {view.node} locked by its {due[view.node]} leases at or beneath it",
                f"lock count {view.lock_count}, leases right at it: {holders[:8]}",
            )


def _path(nodes: dict[int, NodeView], lease: LeaseView) -> list[int]:
    """Pages of the path from the root to the node that a lease locks."""
    parts: list[tuple[int, ...]] = []
    node = lease.node
    while node in nodes and len(parts) <= len(nodes):
        parts.append(nodes[node].pages)
        node = nodes[node].parent
    return [page for part in reversed(parts) for page in part]


def _page_tables(kv: KvSnapshot, report: Report) -> None:
    """A page table is the pages of the locked path, then private pages."""
    nodes = {node.node: node for node in kv.nodes}
    for lease in kv.leases:
        path = _path(nodes, lease)
        if list(lease.pages[: lease.shared_pages]) != path:
            report(
                "INV-PAGE-02",
                f"a page table that starts with the {len(path)} pages of its locked path",
                f"{lease.shared_pages} shared pages, {_difference(lease, path)}",
                rid=lease.rid,
            )
    depth: dict[int, int] = {ROOT: 0}
    for node in kv.nodes:  # parents come before children
        depth[node.node] = depth.get(node.parent, 0) + len(node.pages)
        if node.parent not in depth or node.depth_pages != depth[node.node] or not node.pages:
            report(
                "INV-PAGE-02",
                f"node {node.node} below its parent, {depth[node.node]} pages deep",
                f"parent {node.parent}, {len(node.pages)} pages, {node.depth_pages} deep",
            )


def _difference(lease: LeaseView, path: list[int]) -> str:
    shared = lease.pages[: lease.shared_pages]
    for index, (left, right) in enumerate(zip(shared, path, strict=False)):
        if left != right:
            return f"page {left} instead of {right} at {index}"
    return "the same as far as both go"


def _rows(snapshot: SchedulerSnapshot, max_rows: int | None, report: Report) -> None:
    """Rows: each free or leased, once; leases exactly in prefill and decode, long enough for what was computed."""
    kv = snapshot.kv
    rows = sorted([*kv.free_rows, *(lease.row for lease in kv.leases)])
    count = len(rows) if max_rows is None else max_rows
    if rows != list(range(count)):
        report("INV-LOCK-02", f"each of {count} rows once, free or leased", f"{rows[:16]}")
    leases = {lease.rid: lease for lease in kv.leases}
    active = (RequestState.PREFILL, RequestState.DECODE)
    for view in snapshot.requests:
        lease = leases.pop(view.rid, None)
        if (lease is not None) != (view.state in active) or view.has_lease != (lease is not None):
            report(
                "INV-LOCK-02", f"a lease in {view.state}: {view.state in active}", f"{lease is not None}", rid=view.rid
            )
        elif lease is not None:
            held, computed = len(lease.pages), view.computed_len
            if view.row != lease.row or held < -(-computed // kv.page_size):
                report(
                    "INV-LOCK-02",
                    f"row {lease.row} and pages for {computed} tokens",
                    f"row {view.row}, {held} pages",
                    rid=view.rid,
                )
    for rid, lease in leases.items():
        report("INV-EXIT-01", "no lease of a request that is not alive", f"row {lease.row}", rid=rid)


def _lists(snapshot: SchedulerSnapshot, report: Report) -> None:
    """Each live request is in exactly one list."""
    waiting = [view.rid for view in snapshot.waiting]
    placed = [*waiting, *snapshot.running]
    placed += snapshot.leaving
    if snapshot.continuation is not None:
        placed.append(snapshot.continuation)
    live = {view.rid: view for view in snapshot.requests}
    if sorted(placed) != sorted(live):
        odd = sorted(set(placed) ^ set(live)) or sorted(rid for rid in live if placed.count(rid) > 1)
        report(
            "INV-STEP-04",
            "each live request once: waiting, running or the continuation",
            f"not so: {odd[:8]}",
            rid=odd[0],
        )
    for rid in waiting:
        if rid in live and live[rid].state != RequestState.WAITING:
            report("INV-STEP-04", f"{rid} waiting, as listed", live[rid].state, rid=rid)
    for rid in (*snapshot.running, *snapshot.leaving):
        if rid in live and live[rid].state != RequestState.DECODE:
            report("INV-STEP-04", f"{rid} in decode, as listed", live[rid].state, rid=rid)


def _against_books(books: Shadow, snapshot: SchedulerSnapshot, report: Report) -> None:
    """The engine's own state against what its events told."""
    kv = snapshot.kv
    states, owners = _arrays(kv)
    pool = books.pool
    if tuple(pool.counts) != kv.counts:
        report("INV-PAGE-01", f"counts {tuple(pool.counts)} from events", f"{kv.counts}")
    differs = np.flatnonzero((owners << 2 | states) != pool.tags)
    if len(differs):
        page = int(differs[0])
        tag = int(pool.tags[page])
        report(
            "INV-PAGE-02",
            f"page {page} {STATE_NAMES[tag & 3]}, owner {tag >> 2}, from events",
            f"{STATE_NAMES[states[page]]}, owner {owners[page]} ({len(differs)} such pages)",
        )
    locked = {node.node: node.lock_count for node in kv.nodes if node.lock_count}
    if locked != books.node_locks:
        nodes = sorted(
            node for node in locked.keys() | books.node_locks.keys() if locked.get(node) != books.node_locks.get(node)
        )
        node = nodes[0]
        report(
            "INV-LOCK-03",
            f"node {node} held {books.node_locks.get(node, 0)} times, from events",
            f"lock count {locked.get(node, 0)} ({len(nodes)} such nodes)",
        )
    live = {view.rid: view for view in snapshot.requests}
    if live.keys() != books.requests.keys():
        odd = sorted(live.keys() ^ books.requests.keys())
        report(
            "INV-EXIT-01",
            f"{len(books.requests)} live requests, from events",
            f"{len(live)}, differs for {odd[:8]}",
            rid=odd[0],
        )
    for rid, request in books.requests.items():
        view = live.get(rid)
        if view is None:
            continue
        if view.state != request.state:
            report("INV-STEP-05", f"{request.state}, from events", view.state, rid=rid)
        if view.row != request.row:
            report("INV-LOCK-02", f"row {request.row}, from events", f"row {view.row}", rid=rid)
        if view.output_len != request.outputs:
            report("INV-STEP-01", f"{request.outputs} output tokens, from events", f"{view.output_len}", rid=rid)
