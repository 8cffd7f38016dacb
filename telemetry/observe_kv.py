"""Answers about K/V memory. Owns: what `/observe/tree`, `/observe/pool` and `/observe/pages/{page}` say."""

from __future__ import annotations

from telemetry.observe_base import Head, Value


class PageFact(Head):
    """One page: its state, who holds it, and since when.

    owner        as in `PageOwner.owner`: "r:<row>", "n:<node>", "" when it is free
    owner_kind   request | node | "" when it is free
    label        the rid, or "node <id>"
    owner_pages  pages of that owner
    lock_count   locks on its node; 1 for a request's private page, 0 for a free or evictable one
    holders      rids that hold it, at most 100; `holders_total` counts all
    path         nodes from below the root down to its own
    age_s, age_steps  since it was last taken from the free pages; None when it never was, or is free
    """

    page: int
    state: str
    owner: str = ""
    owner_kind: str = ""
    label: str = ""
    owner_pages: int = 0
    node: int | None = None
    lock_count: int = 0
    holders: tuple[str, ...] = ()
    holders_total: int = 0
    path: tuple[int, ...] = ()
    age_s: float | None = None
    age_steps: int | None = None


class TreeRow(Value):
    """One node of the radix tree of shared prefixes.

    depth        nodes from the root down to it: 1 for a child of the root
    depth_pages  pages of the path down to its end
    pages        its own; `pages_below` with everything beneath it
    children     nodes right beneath it
    holders      requests that lock it now
    hits         requests that found it in the cache and took it
    last_used_s  since the last event that showed a use: taken, extended or left by a request
    age_s        since it was computed
    goes_out     place in the order of eviction, 0 goes next; None: not among the first 64, or locked
    is_sure      whether its place in the tree is proved; else its parent is the likeliest one
    """

    node: int
    parent: int
    depth: int
    depth_pages: int
    pages: int
    pages_below: int
    children: int
    state: str
    lock_count: int
    holders: int
    hits: int
    last_used_s: float
    last_used_step: int
    age_s: float
    goes_out: int | None = None
    is_sure: bool = True


class TreeMore(Value):
    """Children of `parent` that were not sent, and the pages in and beneath them."""

    parent: int
    nodes: int
    pages: int


class TreePick(Value):
    """One node in full.

    path     from below the root down to it
    holders  rids that lock it, at most 200
    lit_b64  base64 of one bit for each page of the pool, most significant first: whether it is on the path
    """

    node: int
    path: tuple[TreeRow, ...]
    holders: tuple[str, ...]
    lit_b64: str


class TreeAnswer(Head):
    """The radix tree, as far as it was asked for: the largest children of the root and of each node of `open`.

    page_size    tokens of a page
    nodes_total  nodes, without the root; `pages_total` pages in them
    unsure       nodes whose place in the tree is not proved
    rows         parents come before their children; children by the pages in and beneath them, largest first
    more         what was left out, by parent
    next_out     what an eviction takes first, in order
    order_step   the order of last uses is known exactly up to this step, from the checker's audit, and from events
                 after it; None: from events alone, which do not show the walks of a pass that admits nobody
    order_age_s  since that audit
    picked       the node that was asked for; None when none was, or it is gone
    """

    page_size: int
    nodes_total: int
    pages_total: int
    unsure: int
    rows: tuple[TreeRow, ...]
    more: tuple[TreeMore, ...]
    next_out: tuple[TreeRow, ...]
    order_step: int | None = None
    order_age_s: float | None = None
    picked: TreePick | None = None


class PoolPoint(Value):
    """The pool at the end of one slot of `PoolAnswer.slot_s` seconds that ends at `t_wall_s`.

    free, private, protected, evictable  pages
    had_tokens       room in free and evictable pages
    promised_tokens  what the running requests are promised of it
    tightest_tokens  the least that was left of the former after the latter in the slot; below zero: more was promised
                     than could be had
    evicted_pages    in the slot
    """

    t_wall_s: float
    free: int
    private: int
    protected: int
    evictable: int
    had_tokens: int
    promised_tokens: float
    tightest_tokens: float | None = None
    evicted_pages: int = 0


class PoolAnswer(Head):
    """Memory over time, oldest first, at most 600 points; a second in which no step was made has none."""

    slot_s: float
    page_size: int
    num_pages: int
    points: tuple[PoolPoint, ...]
