"""Numbers of the view "K/V pages". Owns: pool, tree and pages -> frames, rows and sentences, ready to draw. Pure."""

from __future__ import annotations

import base64
from typing import Any, Final

import numpy as np
import pandas as pd

from dashboard import formats as f
from dashboard.frames import page_bytes
from dashboard.words import t
from telemetry.observe import PAGE_STATES, PageFact, PageMap, PoolAnswer, TreeAnswer, TreeMore, TreeRow

#: Points of a chart over time: more than its pixels would be sent for nothing.
MAX_SHOWN: Final = 200
#: How many children of a node are asked for, smallest step first.
TOPS: Final = (20, 60, 200)
MAX_OPEN: Final = 48
_MAX_TEXT: Final = 400

_POOL_COLUMNS: Final = ["at", *PAGE_STATES, "evicted"]
_PROMISE_COLUMNS: Final = ["at", "side", "tokens"]
#: The two sides of the ledger remaining_total, and the least that was left of one after the other.
SIDES: Final = ("free + evictable", "promised", "least left")


def _thinned(pool: PoolAnswer) -> list[Any]:
    """Every n-th point, counted from the newest, so that the end is always shown."""
    stride = -(-len(pool.points) // MAX_SHOWN) or 1
    return list(pool.points[::-1][::stride])[::-1]


def pool_frame(pool: PoolAnswer) -> pd.DataFrame:
    """Pages by state over time, one row per shown slot; `at` in UTC."""
    rows = [(p.t_wall_s, *(getattr(p, state) for state in PAGE_STATES), p.evicted_pages) for p in _thinned(pool)]
    frame = pd.DataFrame(rows, columns=_POOL_COLUMNS)
    frame["at"] = pd.to_datetime(frame["at"], unit="s", utc=True)
    return frame


def promise_frame(pool: PoolAnswer) -> pd.DataFrame:
    """What could be had against what is promised, in tokens; a row per shown slot and side."""
    rows = [
        (p.t_wall_s, side, value)
        for p in _thinned(pool)
        for side, value in zip(SIDES, (p.had_tokens, p.promised_tokens, p.tightest_tokens), strict=True)
        if value is not None
    ]
    frame = pd.DataFrame(rows, columns=_PROMISE_COLUMNS)
    frame["at"] = pd.to_datetime(frame["at"], unit="s", utc=True)
    return frame


def promise_words(pool: PoolAnswer) -> str:
    """The ledger in one sentence, with the numbers of the latest slot."""
    if not pool.points:
        return t("No step has been made yet.")
    last = pool.points[-1]
    left = last.had_tokens - last.promised_tokens
    seen = [p.tightest_tokens for p in pool.points if p.tightest_tokens is not None]
    now = t(
        "Free and evictable pages hold {had} tok, running requests are promised {promised} tok: {left} tok are left.",
        had=f.tokens(last.had_tokens),
        promised=f.tokens(round(last.promised_tokens, 1)),
        left=f.tokens(round(left, 1)),
    )
    if not seen:
        return now
    least = t("The least in the time shown: {least} tok.", least=f.tokens(round(min(seen), 1)))
    over = t("Below zero, more was promised than could be had.") if min(seen) < 0 else ""
    return " ".join(filter(None, (now, least, over)))


def owner_bitmap(pages: PageMap, page: int) -> str:
    """Base64 of one bit per page: those of the owner of `page`; "" for a free page, or an owner that is not listed."""
    if not 0 <= page < pages.num_pages:
        return ""
    owners = page_bytes(pages)[1]
    number = int(owners[page])
    if not 0 < number <= len(pages.owners):
        return ""
    return base64.b64encode(np.packbits(owners == number).tobytes()).decode()


def page_sentence(fact: PageFact, page_size: int) -> str:
    """Who holds one page, since when, in plain sentences."""
    start = t("Page {page} is {state}", page=f.count(fact.page), state=fact.state)
    if not fact.owner:
        return t("{start}: nobody holds it.", start=start)
    size = t(
        "{pages} pages ({tokens} tok)", pages=f.count(fact.owner_pages), tokens=f.count(fact.owner_pages * page_size)
    )
    if fact.owner_kind == "request":
        who = t("{start}: request {rid} owns it, with {size}.", start=start, rid=fact.label, size=size)
    elif fact.holders_total:
        who = t(
            "{start}: it belongs to {node}, a shared prefix of {size}, lock count {locks}.",
            start=start,
            node=fact.label,
            size=size,
            locks=f.count(fact.lock_count),
        )
    else:
        who = t(
            "{start}: it belongs to {node}, a shared prefix of {size} that no request uses now: it can be evicted.",
            start=start,
            node=fact.label,
            size=size,
        )
    if fact.age_s is None:
        return who
    age = t("Taken {age} ago, {steps} steps.", age=f.duration(fact.age_s), steps=f.count(fact.age_steps))
    return f"{who} {age}"


# -- the tree --------------------------------------------------------------------------------------------------------


def open_nodes(text: str) -> tuple[int, ...]:
    """The opened nodes that an address names. Raises ValueError for a text that names none."""
    names = text.split(",")
    if not all(name.isascii() and name.isdigit() for name in names):
        raise ValueError(f"{text!r} is not a list of nodes")
    return tuple(dict.fromkeys(int(name[:9]) for name in names))[:MAX_OPEN]


def toggled(opened: tuple[int, ...], node: int) -> str:
    """The address' text with `node` opened, or closed when it was open. The oldest give way; "0" is the root alone."""
    kept = [each for each in opened if each not in {0, node}] + ([] if node in opened else [node])
    while len(kept) > MAX_OPEN or len(",".join(map(str, kept))) > _MAX_TEXT:
        kept.pop(0)
    return ",".join(map(str, kept)) or "0"


def only_child(tree: TreeAnswer) -> int | None:
    """The one node below the root, when it is closed and has children: behind it is everything."""
    first = tree.rows[0] if len(tree.rows) == 1 else None
    return first.node if first is not None and first.children else None


def opened_in(tree: TreeAnswer) -> tuple[int, ...]:
    """The node that was asked for open because it is the only one below the root."""
    tops = [row.node for row in tree.rows if row.depth == 1]
    return tuple(tops) if len(tops) == 1 and len(tree.rows) > 1 else ()


def tree_rows(tree: TreeAnswer, opened: tuple[int, ...], top: int) -> list[dict[str, Any]]:
    """Rows of the explorer: nodes as far as they are open, and after the last child of each what was left out."""
    largest = max((row.pages_below for row in tree.rows), default=1)
    more = {left.parent: left for left in tree.more}
    made: list[dict[str, Any]] = []
    parents: list[tuple[int, int]] = [(0, 0)]
    for row in tree.rows:
        while parents[-1][1] >= row.depth:
            made += _left_out(more.get(parents.pop()[0]), len(parents) + 1, top)
        made.append(_node(row, tree.page_size, largest, is_open=row.node in opened))
        parents.append((row.node, row.depth))
    while parents:
        parent, depth = parents.pop()
        made += _left_out(more.get(parent), depth + 1, top)
    return made


def _node(row: TreeRow, page_size: int, largest: int, *, is_open: bool) -> dict[str, Any]:
    return {
        "node": row.node,
        "depth": row.depth,
        "label": t("node {node}", node=row.node),
        "children": row.children,
        "open": is_open and row.children > 0,
        "state": row.state,
        "share": row.pages_below / largest if largest else 0.0,
        "cells": [
            f.count(row.pages),
            f.count(row.pages * page_size),
            f.count(row.pages_below),
            f.count(row.lock_count),
            f.count(row.hits),
            f.duration(row.last_used_s),
            f.NOTHING if row.goes_out is None else f.count(row.goes_out + 1),
        ],
        "doubt": "" if row.is_sure else t("its place in the tree is not proved yet"),
    }


def _left_out(left: TreeMore | None, depth: int, top: int) -> list[dict[str, Any]]:
    if left is None:
        return []
    label = t("and {n} more, {pages} pages", n=f.count(left.nodes), pages=f.count(left.pages))
    return [{"more": next((each for each in TOPS if each > top), 0), "depth": depth, "label": label}]


def order_words(tree: TreeAnswer) -> str:
    """What the order of eviction stands on."""
    if tree.order_step is None:
        return t(
            "Order of eviction from events alone, without the walks of passes that admitted nobody: no audit has "
            "looked at the tree."
        )
    age = f.NOTHING if tree.order_age_s is None else f.duration(tree.order_age_s)
    return t(
        "Order of eviction from the checker's audit after step {step} ({age} ago) and the events since.",
        step=f.count(tree.order_step),
        age=age,
    )


def next_out_words(tree: TreeAnswer) -> str:
    """Which nodes go next."""
    if not tree.next_out:
        return t("Nothing can be evicted: every node is locked, or the tree is empty.")
    names = ", ".join(f"{row.node} ({f.count(row.pages)})" for row in tree.next_out[:6])
    return t("Goes next, in order (pages): {names}.", names=names)
