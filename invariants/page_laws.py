"""Laws of pages. Owns: INV-PAGE-01 to 03 per event — conservation, legal moves, nothing locked is evicted.

A move that is as it should be is accepted and followed in a few operations, whatever its size; anything else is judged
page by page. Claims of a commit, of which admissions have one for each row, are taken together: see `on_claims`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.events import PagesMoved, StepCompleted, StepPlanned
from invariants import overlap_laws
from invariants.page_book import (
    CHANGES,
    EVICTABLE,
    FREE,
    KEEPS,
    NO_OWNER,
    OTHER_KIND,
    PRIVATE,
    PROTECTED,
    STATE_CODES,
    STATE_NAMES,
    tag_of,
)
from invariants.shadow import Shadow
from invariants.violation import Report

#: Pages of claims that are followed at once.
CLAIMED_TOGETHER: Final = 8_192


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


def on_claims(books: Shadow, claims: list[PagesMoved], report: Callable[[PagesMoved], Report]) -> None:
    """Claims of one commit. `report(claim)` reports about that claim, not about the event at hand."""
    labelled: list[PagesMoved] = []
    for claim in claims:
        if not claim.owners:
            labelled.append(claim)
            continue
        if labelled:
            _on_labelled(books, labelled, report)
            labelled = []
        if not follow_growth(books, claim):
            on_pages(books, claim, report(claim))
    if labelled:
        _on_labelled(books, labelled, report)


def follow_growth(books: Shadow, claim: PagesMoved) -> bool:
    """Follow a claim of several rows. False, and nothing is followed, when it is odd: then `on_pages` judges it."""
    if claim.owner or claim.source != "free" or claim.target != "private":
        return False
    rows = books.pool.follow_growth(claim.pages, claim.owners)
    if rows is None:
        return False
    books.claimed_rows.update(rows)
    return True


def _on_labelled(books: Shadow, claims: list[PagesMoved], report: Callable[[PagesMoved], Report]) -> None:
    """Claims of one row each."""
    # Long prompts in small pages: memory that is asked for in megabytes comes page by page from the system.
    group = max(1, CLAIMED_TOGETHER * 4 // max(len(claims[0].pages), 1))
    for start in range(0, len(claims), group):
        together = claims[start : start + group]
        if not follow_claims(books, together):
            for claim in together:
                on_pages(books, claim, report(claim))


def follow_claims(books: Shadow, claims: list[PagesMoved]) -> bool:
    """Follow claims together. False, and nothing is followed, when any is odd: then `on_pages` judges each."""
    for claim in claims:
        if claim.source != "free" or claim.target != "private":
            return False
    rows = books.pool.follow_claims(tuple([claim.owner for claim in claims]), [claim.pages for claim in claims])
    if rows is None:
        return False
    books.claimed_rows.update(rows)
    return True


def on_pages(books: Shadow, event: PagesMoved, report: Report) -> None:
    """One move: is it legal, are the pages where it says, whose are they; then follow it."""
    move = LEGAL.get((event.source, event.target, event.cause))
    if move is None:
        report("INV-PAGE-02", "a move of the table of page states", f"{event.cause}: {event.source} -> {event.target}")
        target = STATE_CODES.get(event.target)
        if target is None:
            return
        move = Move(STATE_CODES.get(event.source, FREE), target, OTHER_KIND)
    if event.owners:
        if event.cause == "claim" and move.target == PRIVATE:
            _on_shared(books, event, move, report)
            return
        report(
            "INV-PAGE-02", "a row for each page only in a claim", f"{event.cause}: {len(event.owners)} bytes of rows"
        )
    source, state, rule = move
    owner = _owner(event.owner, state, report)
    cause, pages, pool = event.cause, event.pages, books.pool
    count = len(pages) // 4
    if count == 0 or len(pages) % 4:
        report("INV-PAGE-02", "page ids of four bytes, at least one", f"{len(pages)} bytes")
        return
    if cause == "evict":
        _evicts_nobodys(books, pages, count, report)
    tag = tag_of(state, owner)
    old = pool.follow(pages, source, tag, rule)
    if old is None:
        old = _judge(books, event, move, tag, report)
    if cause == "claim":
        pool.remember_claim(pages)
    elif books.in_commit and EVICTABLE in (state, source):
        for page in pool.claimed_now(pages):
            report(
                "INV-PAGE-03",
                "no page claimed and evictable within one commit",
                f"page {page}: {cause} after a claim in the same commit",
            )
    if old is not None:
        _follow(books, event, count, owner, old, report)


def _follow(books: Shadow, event: PagesMoved, count: int, owner: int, old: int, report: Report) -> None:
    """What a legal move of `count` pages from `old` to `owner` means beside where they are."""
    cause = event.cause
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
    elif books.overlap is not None and cause in ("insert", "duplicate"):
        overlap_laws.on_tree(books, books.overlap, old, event.step, report)


def _on_shared(books: Shadow, event: PagesMoved, move: Move, report: Report) -> None:
    """A claim of several rows that was not simply right."""
    pages, owners = event.pages, event.owners
    if len(pages) != len(owners) or len(pages) % 4:
        report("INV-PAGE-02", "four bytes of page and of row each", f"{len(pages)} of pages, {len(owners)} of rows")
        return
    rows = np.frombuffer(owners, dtype="<i4").astype(np.int64)
    if event.owner or rows.min() < 0:
        found = f"owner {event.owner!r}, row {rows.min()}"
        report("INV-PAGE-02", "no owner beside rows of 0 and more", found)
    old = _judge(books, event, move, rows << 2 | PRIVATE, report)
    books.pool.remember_claim(pages)
    if old is not None:
        books.claimed_rows.update(rows.tolist())


def _judge(books: Shadow, event: PagesMoved, move: Move, tag: int | NDArray[np.int64], report: Report) -> int | None:
    """A move that was not simply right: what is wrong with it. Returns the owner before, None after a violation.

    tag  one for all pages, or one for each: int64 [pages]
    """
    pool, pages = books.pool, np.frombuffer(event.pages, dtype="<i4").astype(np.int64)
    low, high = int(pages.min()), int(pages.max())
    if low < 0 or high >= books.num_pages:
        report("INV-PAGE-02", f"page ids below {books.num_pages}", f"{low} to {high}")
        return None
    wrong, old = pool.judge(pages, move.source, tag, move.owner)
    if not wrong:
        if isinstance(tag, int):
            pool.count_move(len(pages), move.source, tag, old)
        else:
            pool.recount()
        return old
    named = event.owner or (f"{len(event.owners) // 4} rows" if event.owners else "nobody")
    whose = "the owner named" if move.owner == KEEPS else "one owner and not yet the one named"
    report(
        "INV-PAGE-02",
        f"{event.cause}: every page {event.source}, with {whose} ({named})",
        f"{len(wrong)} pages elsewhere, such as {wrong[:8]}",
    )
    pool.recount()
    return None


def _evicts_nobodys(books: Shadow, pages: bytes, count: int, report: Report) -> None:
    """An eviction takes one leaf, which nobody may hold."""
    tag = books.pool.tag_at(pages)
    if tag is not None and tag & 3 in (PROTECTED, EVICTABLE) and tag >> 2 in books.node_locks:
        holders = sorted(books.holders.get(tag >> 2, ()))
        report(
            "INV-PAGE-03",
            "no eviction of a node that someone holds",
            f"node {tag >> 2} evicted, {count} pages, held by {holders[:8]}",
        )


def _owner(label: str, target: int, report: Report) -> int:
    prefix = _PREFIX[target]
    if label[:2] == prefix and (not prefix or label[2:].isdigit()):
        return int(label[2:]) if prefix else NO_OWNER
    report("INV-PAGE-02", f"an owner '{prefix}...' of a {STATE_NAMES[target]} page", f"owner {label!r}")
    return NO_OWNER


def on_counts(books: Shadow, event: StepPlanned | StepCompleted, report: Report) -> None:
    """The reported counts against the moves, and every claim against the rows."""
    counts = books.pool.counts
    if event.pages != (counts[FREE], counts[PRIVATE], counts[PROTECTED], counts[EVICTABLE]):
        report(
            "INV-PAGE-01",
            f"[free, private, protected, evictable] {counts}, {books.num_pages} in all",
            f"{list(event.pages)}, {sum(event.pages)} in all",
        )
    if type(event) is StepPlanned and event.evicted_pages != books.evicted_pages:
        report("INV-PAGE-01", f"{books.evicted_pages} pages evicted in this step", f"{event.evicted_pages}")
    if books.claimed_rows:
        if not books.claimed_rows <= books.rows.keys():
            for row in books.claimed_rows - books.rows.keys():
                if books.pool.private_pages(row):
                    report(
                        "INV-PAGE-02", f"row {row} of a live request owns its private pages", "a row that nobody has"
                    )
        books.claimed_rows.clear()
