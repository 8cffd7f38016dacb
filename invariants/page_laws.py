"""Laws of pages. Owns: INV-PAGE-01 to 03 per event — conservation, legal moves, nothing locked is evicted.

A small move is walked page by page over memoryviews, a large one with array operations: both cost about the same at
`SCALAR_PAGES`, and a test holds that they say the same.
"""

from __future__ import annotations

import sys
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.events import PagesMoved, StepCompleted, StepPlanned
from invariants.shadow import EVICTABLE, FREE, NO_OWNER, PRIVATE, PROTECTED, STATE_CODES, STATE_NAMES, Shadow
from invariants.violation import Report

SCALAR_PAGES: Final = 48
_LITTLE: Final = sys.byteorder == "little"
#: Owner rules of a move. Rows and nodes are numbered apart, so OTHER_KIND compares nothing.
OTHER_KIND, KEEPS, CHANGES = 0, 1, 2


class Move(NamedTuple):
    """A legal move. `owner`: the owner named is the one the page has (KEEPS), another (CHANGES), or of another kind."""

    source: int
    target: int
    owner: int


#: (source, target, cause) of every legal move: architecture's page diagram, and the owner change of a split.
LEGAL: Final[dict[tuple[str, str, str], Move]] = {
    (STATE_NAMES[source], STATE_NAMES[target], cause): Move(source, target, rule)
    for source, target, cause, rule in (
        (FREE, PRIVATE, "claim", OTHER_KIND),
        (PRIVATE, PROTECTED, "insert", OTHER_KIND),
        (PRIVATE, EVICTABLE, "insert", OTHER_KIND),
        (PRIVATE, FREE, "duplicate", OTHER_KIND),
        (PRIVATE, FREE, "free", OTHER_KIND),
        (EVICTABLE, PROTECTED, "lock", KEEPS),
        (PROTECTED, EVICTABLE, "unlock", KEEPS),
        (PROTECTED, PROTECTED, "split", CHANGES),
        (EVICTABLE, EVICTABLE, "split", CHANGES),
        (EVICTABLE, FREE, "evict", OTHER_KIND),
    )
}
#: Owner label of each state: row of a private page, node of a tree page.
_PREFIX: Final = {FREE: "", PRIVATE: "r:", PROTECTED: "n:", EVICTABLE: "n:"}


def on_pages(books: Shadow, event: PagesMoved, report: Report) -> None:
    """One move: is it legal, are the pages where it says, whose are they; then follow it."""
    move = LEGAL.get((event.source, event.target, event.cause))
    if move is None:
        report("INV-PAGE-02", "a move of the table of page states", f"{event.cause}: {event.source} -> {event.target}")
        target = STATE_CODES.get(event.target)
        if target is None:
            return
        move = Move(STATE_CODES.get(event.source, FREE), target, OTHER_KIND)
    owner = _owner(event.owner, move.target, report)
    cause, count = event.cause, len(event.pages) // 4
    if count == 0 or len(event.pages) % 4:
        report("INV-PAGE-02", "page ids of four bytes, at least one", f"{len(event.pages)} bytes")
        return
    if count <= SCALAR_PAGES:
        few = memoryview(event.pages).cast("i").tolist() if _LITTLE else np.frombuffer(event.pages, "<i4").tolist()
        if not _in_range(books, min(few), max(few), report):
            return
        if cause == "evict":
            _evicts_nobodys(books, few[0], count, report)
        old = _walk(books, few, move, owner, event, report)
    else:
        many: NDArray[np.int32] = np.frombuffer(event.pages, dtype="<i4")
        if not _in_range(books, int(many.min()), int(many.max()), report):
            return
        if cause == "evict":
            _evicts_nobodys(books, int(many[0]), count, report)
        old = _sweep(books, many, move, owner, event, report)
    if old is None:
        return
    if cause == "claim":
        books.claimed_rows.add(owner)
    elif cause == "split":
        books.split_locks(old, owner)
    elif cause == "lock":
        books.locked_pages += count
    elif cause in ("unlock", "free"):
        books.released_pages += count
    elif cause == "evict":
        books.evicted_pages += count


def _evicts_nobodys(books: Shadow, page: int, count: int, report: Report) -> None:
    """An eviction takes one leaf, which nobody may hold."""
    node = int(books.owners[page])
    if books.states[page] in (PROTECTED, EVICTABLE) and node in books.node_locks:
        holders = sorted(books.holders.get(node, ()))
        report(
            "INV-PAGE-03",
            "no eviction of a node that someone holds",
            f"node {node} evicted, {count} pages, held by {holders[:8]}",
        )


def _owner(label: str, target: int, report: Report) -> int:
    prefix = _PREFIX[target]
    if label[:2] == prefix and (not prefix or label[2:].isdigit()):
        return int(label[2:]) if prefix else NO_OWNER
    report("INV-PAGE-02", f"an owner '{prefix}...' of a {STATE_NAMES[target]} page", f"owner {label!r}")
    return NO_OWNER


def _in_range(books: Shadow, low: int, high: int, report: Report) -> bool:
    if low < 0 or high >= books.num_pages:
        report("INV-PAGE-02", f"page ids below {books.num_pages}", f"{low} to {high}")
        return False
    return True


def _walk(books: Shadow, pages: list[int], move: Move, owner: int, event: PagesMoved, report: Report) -> int | None:
    """Page by page. Returns the owner before, None after a violation (the counters are then rebuilt)."""
    states, owners, claimed = books.state_view, books.owner_view, books.claimed_view
    source, target, rule = move
    step, is_claim, guarded = event.step, event.cause == "claim", EVICTABLE in (source, target)
    old = NO_OWNER
    wrong: list[int] = []
    for page in pages:
        before = owners[page]
        if states[page] != source or (rule and (before == owner) != (rule == KEEPS)):
            wrong.append(page)
        if old == NO_OWNER:
            old = before
        elif before != old and rule != KEEPS and source != EVICTABLE and states[page] == source:
            wrong.append(page)
        states[page] = target
        owners[page] = owner
        if is_claim:
            claimed[page] = step
        elif guarded and books.in_commit and claimed[page] == step:
            report(
                "INV-PAGE-03",
                "no page claimed and evictable within one commit",
                f"page {page}: {event.cause} after a claim in the same commit",
            )
    return _settle(books, len(pages), wrong, move, old, owner, event, report)


def _sweep(
    books: Shadow, pages: NDArray[np.int32], move: Move, owner: int, event: PagesMoved, report: Report
) -> int | None:
    """The same with array operations."""
    source, target, rule = move
    states, before = books.states[pages], books.owners[pages]
    bad = states != source
    if rule:
        bad |= (before == owner) != (rule == KEEPS)
    if rule != KEEPS and source != EVICTABLE:
        bad |= before != before[0]
    if not (pages[1:] > pages[:-1]).all():
        _, firsts = np.unique(pages, return_index=True)
        again = np.ones(len(pages), dtype=bool)
        again[firsts] = False
        bad |= again
    wrong = pages[bad].tolist() if bad.any() else []
    books.states[pages] = target
    books.owners[pages] = owner
    if event.cause == "claim":
        books.claimed_step[pages] = event.step
    elif books.in_commit and EVICTABLE in (source, target) and (books.claimed_step[pages] == event.step).any():
        page = int(pages[books.claimed_step[pages] == event.step][0])
        report(
            "INV-PAGE-03",
            "no page claimed and evictable within one commit",
            f"page {page}: {event.cause} after a claim in the same commit",
        )
    return _settle(books, len(pages), wrong, move, int(before[0]), owner, event, report)


def _settle(
    books: Shadow,
    count: int,
    wrong: list[int],
    move: Move,
    old: int,
    owner: int,
    event: PagesMoved,
    report: Report,
) -> int | None:
    """Counters after a move, or the report and a recount when a page was not where the move said."""
    if wrong:
        whose = "the owner named" if move.owner == KEEPS else "one owner and not yet the one named"
        report(
            "INV-PAGE-02",
            f"{event.cause}: every page {event.source}, with {whose} ({event.owner or 'nobody'})",
            f"{len(wrong)} pages elsewhere, such as {wrong[:8]}",
        )
        books.recount()
        return None
    books.counts[move.source] -= count
    books.counts[move.target] += count
    rows = books.private_of_row
    if move.target == PRIVATE:
        rows[owner] = rows.get(owner, 0) + count
    elif move.source == PRIVATE:
        left = rows.get(old, 0) - count
        if left:
            rows[old] = left
        else:
            rows.pop(old, None)
    return old


def on_counts(books: Shadow, event: StepPlanned | StepCompleted, report: Report) -> None:
    """The reported counts against the moves, and every claim against the rows."""
    counts = books.counts
    if event.pages != (counts[FREE], counts[PRIVATE], counts[PROTECTED], counts[EVICTABLE]):
        report(
            "INV-PAGE-01",
            f"[free, private, protected, evictable] {counts}, {books.num_pages} in all",
            f"{list(event.pages)}, {sum(event.pages)} in all",
        )
    if type(event) is StepPlanned and event.evicted_pages != books.evicted_pages:
        report("INV-PAGE-01", f"{books.evicted_pages} pages evicted in this step", f"{event.evicted_pages}")
    for row in books.claimed_rows:
        if row not in books.rows and row in books.private_of_row:
            report("INV-PAGE-02", f"row {row} of a live request owns its private pages", "a row that nobody has")
    books.claimed_rows.clear()
