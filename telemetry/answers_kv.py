"""Answers about K/V memory. Owns: how page book, tree book and pool ring become the values of `telemetry.observe_kv`.

The caller holds the read model's lock. What is asked for is bounded, and so is the time: only the order of eviction
looks at every leaf.
"""

from __future__ import annotations

import base64
import heapq
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Final, NamedTuple

from engine.kvcache.snapshot import SchedulerSnapshot
from telemetry.observe import Head
from telemetry.observe_kv import PageFact, PoolAnswer, TreeAnswer, TreeMore, TreePick, TreeRow
from telemetry.pool_ring import SLOT_NS
from telemetry.tree_book import ROOT

if TYPE_CHECKING:
    from telemetry.read_model import ReadModel

MAX_TOP: Final = 200
MAX_OPEN: Final = 64
_RANKED: Final = 64
_NEXT_SHOWN: Final = 12
_MAX_HOLDERS: Final = 200
_PAGE_HOLDERS: Final = 100


class Order(NamedTuple):
    """Last uses as an audit saw them.

    step     the audit was made after it
    t_ns     end of that step, on the engine's clock; None when it is too long ago to be known
    stamps   node -> its place in the order of last uses; parents: node -> the node above it
    """

    step: int
    t_ns: int | None
    stamps: Mapping[int, int]
    parents: Mapping[int, int]


def order_of(model: ReadModel, snapshot: SchedulerSnapshot) -> Order:
    """What an audited state says of the tree."""
    at = None
    for row in reversed(model.steps):
        # Where steps overlap, the step of a snapshot is in flight: the one before it was applied.
        if (
            snapshot.step - model.config.executor.overlap <= row.planned.step <= snapshot.step
            and row.completed is not None
        ):
            at = row.completed.times.applied_ns
            break
    nodes = snapshot.kv.nodes
    return Order(snapshot.step, at, {n.node: n.stamp for n in nodes}, {n.node: n.parent for n in nodes})


def page(model: ReadModel, head: Head, number: int) -> PageFact | None:
    """One page; None when the pool has none of this number."""
    book = model.pages
    if not 0 <= number < book.num_pages:
        return None
    state, owner, node, taken_ns, taken_step = book.page(number)
    common = head.model_dump() | {"page": number, "state": state}
    if owner is None:
        return PageFact(**common)
    known = node is not None and node in book.tree.nodes
    return PageFact(
        **common,
        owner=owner.owner,
        owner_kind=owner.kind,
        label=owner.label,
        owner_pages=owner.pages,
        node=node,
        lock_count=owner.lock_count,
        holders=owner.holders[:_PAGE_HOLDERS],
        holders_total=len(owner.holders),
        path=tuple(book.tree.path(node)) if known and node is not None else (),
        age_s=max(model.clock.now_ns() - taken_ns, 0) / 1e9,
        age_steps=max(model.step - taken_step, 0),
    )


def pool(model: ReadModel, head: Head) -> PoolAnswer:
    """The pool over time."""
    page_size = model.config.cache.page_size
    return PoolAnswer(
        **head.model_dump(),
        slot_s=SLOT_NS / 1e9,
        page_size=page_size,
        num_pages=model.pages.num_pages,
        points=tuple(model.pool.points(page_size, model.wall_s)),
    )


class _Rows:
    """Rows of one answer."""

    def __init__(self, model: ReadModel, ranks: Mapping[int, int]) -> None:
        self._book, self._tree = model.pages, model.pages.tree
        self._now, self._ranks = model.clock.now_ns(), ranks

    def row(self, node: int) -> TreeRow:
        found, holders = self._tree.nodes[node], self._book.holders(node)
        path = self._tree.path(node)
        return TreeRow(
            node=node,
            parent=found.parent,
            depth=len(path),
            depth_pages=sum(self._tree.nodes[each].own for each in path),
            pages=found.own,
            pages_below=found.below,
            children=len(found.children),
            state="protected" if holders else "evictable",
            lock_count=sum(holders.values()),
            holders=len(holders),
            hits=found.hits,
            last_used_s=max(self._now - found.used_ns, 0) / 1e9,
            last_used_step=found.used_step,
            age_s=max(self._now - found.born_ns, 0) / 1e9,
            goes_out=self._ranks.get(node),
            is_sure=found.is_sure,
        )

    def beneath(self, parent: int, opened: set[int], top: int) -> tuple[list[TreeRow], list[TreeMore]]:
        """The largest children of `parent`, each followed by its own where it is open."""
        rows: list[TreeRow] = []
        more: list[TreeMore] = []
        # Ids of opened nodes are taken out as they are met, so that none is sent twice.
        stack = [parent]
        while stack:
            node = stack.pop()
            if node != parent:
                rows.append(self.row(node))
            if node == parent or node in opened:
                children = self._tree.nodes[node].children
                shown = heapq.nlargest(top, children, key=lambda child: (self._tree.nodes[child].below, -child))
                left = len(children) - len(shown)
                if left:
                    beneath = self._tree.nodes[node].below - self._tree.nodes[node].own
                    rest = beneath - sum(self._tree.nodes[child].below for child in shown)
                    more.append(TreeMore(parent=node, nodes=left, pages=rest))
                stack += reversed(shown)
        return rows, more


def tree(
    model: ReadModel, head: Head, order: Order | None, *, node: int | None, opened: Iterable[int], top: int
) -> TreeAnswer:
    """The tree, as far as it is open. `order`: what the latest audit saw."""
    book = model.pages
    shape = book.tree
    shape.settle()
    if order is not None:
        shape.confirm(order.parents)
    stamps, after = (order.stamps, order.step) if order is not None else ({}, -1)
    ranked = shape.next_out(book.locked_nodes(), stamps, after, _RANKED)
    made = _Rows(model, {each: rank for rank, each in enumerate(ranked)})
    rows, more = made.beneath(ROOT, {each for each in opened if each in shape.nodes}, top)
    picked = None
    if node is not None and node != ROOT and node in shape.nodes:
        path = shape.path(node)
        picked = TreePick(
            node=node,
            path=tuple(map(made.row, path)),
            holders=tuple(book.holders(node))[:_MAX_HOLDERS],
            lit_b64=base64.b64encode(book.bitmap(set(path))).decode(),
        )
    return TreeAnswer(
        **head.model_dump(),
        page_size=model.config.cache.page_size,
        nodes_total=len(shape.nodes) - 1,
        pages_total=shape.nodes[ROOT].below,
        unsure=len(shape.unsure),
        rows=tuple(rows),
        more=tuple(more),
        next_out=tuple(map(made.row, ranked[:_NEXT_SHOWN])),
        order_step=None if order is None else order.step,
        order_age_s=_ago(model, None if order is None else order.t_ns),
        picked=picked,
    )


def _ago(model: ReadModel, t_ns: int | None) -> float | None:
    return None if t_ns is None else max(model.clock.now_ns() - t_ns, 0) / 1e9
