"""The tree book. Owns: the shape of the radix tree as the events tell it: parents, sizes, hits, last use, who goes out.

No event names a parent. It follows from their order: a request locks and unlocks its path one node after the other,
upwards, and a split names both halves. One case stays open: what a request leaves behind at its end hangs below where
it held its path, and, when others had computed the same tokens in the meantime, deeper than that; then the number of
duplicates tells how deep. A place that is not proved is marked, and set right by the next lock that passes, or by the
state that the checker's audit looked at (`confirm`). Each event costs as much as its path is deep.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from typing import Final

from engine.events import LockChanged, RequestTransitioned
from engine.request import RequestState

ROOT: Final = 0
#: Nodes that the search for an unproved parent looks at.
_LOOKED_AT: Final = 4_096
_HOLDING: Final = frozenset({RequestState.PREFILL, RequestState.DECODE})


class TreeNode:
    """One node. `below` counts its pages and those of everything beneath it; `tick` orders last uses."""

    __slots__ = (
        *("below", "born_ns", "born_step", "children", "hits", "is_sure"),
        *("own", "parent", "tick", "used_ns", "used_step"),
    )

    def __init__(self, parent: int, own: int, *, t_ns: int, step: int, tick: int) -> None:
        self.parent = parent
        self.own = self.below = own
        self.children: dict[int, None] = {}
        self.hits = 0
        self.is_sure = True
        self.born_ns = self.used_ns = t_ns
        self.born_step = self.used_step = step
        self.tick = tick


class TreeBook:
    """Nodes by id. The root has id 0 and no pages.

    nodes   id -> node
    tips    request -> the deepest node that it locks; who locks nothing is not in it
    """

    def __init__(self) -> None:
        self.nodes: dict[int, TreeNode] = {ROOT: TreeNode(ROOT, 0, t_ns=0, step=0, tick=0)}
        self.tips: dict[str, int] = {}
        self._running: set[str] = set()
        self._tick = 0
        #: The walk under way: request, +1 or -1, its latest node, and where it ends.
        self._walk: tuple[str, int, int, int] | None = None
        self._is_hit = False
        #: The node that the latest event brought, and by whom; the upper half that the latest event cut off.
        self._inserted: tuple[int, str] | None = None
        self._cut: int | None = None
        self.unsure: set[int] = set()

    # -- what happened -----------------------------------------------------------------------------------------------

    def transitioned(self, event: RequestTransitioned) -> None:
        """A request changed state: from its first chunk to its end, what it locks it has computed itself."""
        self.settle()
        if event.target in _HOLDING:
            self._running.add(event.rid)
        else:
            self._running.discard(event.rid)

    def locked(self, event: LockChanged) -> None:
        """A request locked or unlocked a node; those of one path come in a row, upwards."""
        node, rid, delta = event.node, event.rid, event.delta
        walk = self._walk
        if walk is not None and walk[1] == delta and walk[0] == rid:
            self._place(walk[2], node)
            self._walk = (rid, delta, node, walk[3])
        else:
            self._end_walk()
            self._tick += 1
            # A request that is not running yet takes what others have left: that is a hit.
            self._is_hit = delta > 0 and rid not in self._running
            self._walk = (rid, delta, node, self.tips.get(rid, ROOT) if delta > 0 else ROOT)
            if delta > 0:
                self.tips[rid] = node
            else:
                self.tips.pop(rid, None)
        self._inserted = self._cut = None
        found = self.nodes.get(node)
        if found is not None:
            found.hits += self._is_hit
            found.used_ns, found.used_step, found.tick = event.t_ns, event.step, self._tick

    def inserted(self, node: int, rid: str, pages: int, *, t_ns: int, step: int) -> None:
        """`rid` gave `pages` pages to the tree as the new leaf `node`."""
        cut = self._cut
        self.settle()
        self._next_tick()
        parent = self.tips.get(rid, ROOT) if cut is None else cut
        if parent not in self.nodes:
            parent = ROOT
        self.nodes[node] = TreeNode(parent, pages, t_ns=t_ns, step=step, tick=self._tick)
        self.nodes[parent].children[node] = None
        self._grow(parent, pages)
        if cut is not None:
            self._doubt(node)
        for above in self.path(parent):
            self._use(self.nodes[above], t_ns, step)
        self._inserted = (node, rid)

    def duplicate(self, rid: str, pages: int) -> None:
        """`rid` gave up `pages` pages that the tree had already: its new leaf hangs so much deeper."""
        inserted = self._inserted
        self.settle()
        top = self.tips.get(rid, ROOT)
        if inserted is None or inserted[1] != rid or top not in self.nodes:
            return
        node = inserted[0]
        found = self.nodes[node].parent if node in self.unsure else None
        if found is not None and self.depth(found) - self.depth(top) == pages:
            self._trust(node)
            return
        places = list(self._at_depth(top, pages, node))
        if len(places) == 1:
            self._place(node, places[0])
        else:
            self._doubt(node)

    def split(self, lower: int, upper: int, pages: int, *, t_ns: int, step: int) -> None:
        """The first `pages` pages of `lower` became the node `upper`, between it and its parent."""
        self.settle()
        old = self.nodes.get(lower)
        if old is None:
            return
        self._next_tick()
        new = TreeNode(old.parent, pages, t_ns=old.born_ns, step=old.born_step, tick=self._tick)
        new.used_ns, new.used_step, new.below, new.hits = t_ns, step, old.below, old.hits
        above = self.nodes[old.parent].children
        above.pop(lower, None)
        above[upper] = None
        new.children[lower] = None
        self.nodes[upper] = new
        if lower in self.unsure:
            self._doubt(upper)
        old.parent, old.own, old.below = upper, old.own - pages, old.below - pages
        self._trust(lower)
        self._cut = upper

    def evicted(self, node: int) -> None:
        """A leaf was evicted."""
        self.settle()
        gone = self.nodes.pop(node, None)
        self.unsure.discard(node)
        if gone is None:
            return
        self.nodes[gone.parent].children.pop(node, None)
        self._grow(gone.parent, -gone.own)
        for child in gone.children:  # only those hung in the wrong place can be here
            self.nodes[child].parent = gone.parent
            self.nodes[gone.parent].children[child] = None
            self._doubt(child)

    def settle(self) -> None:
        """Something else happened: the walk under way is over."""
        self._end_walk()
        self._inserted = self._cut = None

    def confirm(self, parents: Mapping[int, int]) -> None:
        """Hang what is in doubt where a snapshot has it."""
        for node in [node for node in self.unsure if node in parents]:
            self._place(node, parents[node])

    # -- what is asked -----------------------------------------------------------------------------------------------

    def path(self, node: int) -> list[int]:
        """From below the root down to `node`."""
        up: list[int] = []
        while node != ROOT:
            up.append(node)
            node = self.nodes[node].parent
        return up[::-1]

    def depth(self, node: int) -> int:
        """Pages from the root to the end of `node`."""
        return sum(self.nodes[each].own for each in self.path(node))

    def next_out(self, locked: Mapping[int, object], stamps: Mapping[int, int], after: int, limit: int) -> list[int]:
        """The first `limit` nodes that an eviction would take, in order.

        locked  nodes with a lock
        stamps  order of last uses at the end of step `after`, where it is known exactly; later uses come after them
        """

        def key(node: int) -> tuple[int, int, int]:
            is_older = node in stamps and self.nodes[node].used_step <= after
            return (0, stamps[node], node) if is_older else (1, self.nodes[node].tick, node)

        free = (key(n) for n, found in self.nodes.items() if n != ROOT and not found.children and n not in locked)
        heap = heapq.nsmallest(limit, free)
        heapq.heapify(heap)
        left: dict[int, int] = {}
        out: list[int] = []
        while heap and len(out) < limit:
            node = heapq.heappop(heap)[2]
            out.append(node)
            parent = self.nodes[node].parent
            left[parent] = left.get(parent, len(self.nodes[parent].children)) - 1
            if not left[parent] and parent != ROOT and parent not in locked:
                heapq.heappush(heap, key(parent))
        return out

    # -- inside ------------------------------------------------------------------------------------------------------

    def _next_tick(self) -> None:
        self._tick += 1

    def _use(self, found: TreeNode, t_ns: int, step: int) -> None:
        found.used_ns, found.used_step, found.tick = t_ns, step, self._tick

    def _end_walk(self) -> None:
        if self._walk is not None:
            self._place(self._walk[2], self._walk[3])
            self._walk = None

    def _doubt(self, node: int) -> None:
        self.nodes[node].is_sure = False
        self.unsure.add(node)

    def _trust(self, node: int) -> None:
        self.nodes[node].is_sure = True
        self.unsure.discard(node)

    def _place(self, node: int, parent: int) -> None:
        """`node` hangs below `parent`: proved."""
        found = self.nodes.get(node)
        if found is None or (found.parent == parent and found.is_sure) or parent not in self.nodes:
            return
        if found.parent != parent:
            if node in self.path(parent):
                return  # events were lost: a ring would be worse than a wrong place
            self.nodes[found.parent].children.pop(node, None)
            self._grow(found.parent, -found.below)
            found.parent = parent
            self.nodes[parent].children[node] = None
            self._grow(parent, found.below)
        self._trust(node)

    def _grow(self, node: int, pages: int) -> None:
        """`pages` more beneath `node` and everything above it."""
        while True:
            found = self.nodes[node]
            found.below += pages
            if node == ROOT:
                return
            node = found.parent

    def _at_depth(self, top: int, pages: int, without: int) -> Iterator[int]:
        """Nodes beneath `top` that end exactly `pages` pages below its end."""
        stack = [(child, pages) for child in self.nodes[top].children] if top in self.nodes else []
        looked = 0
        while stack and looked < _LOOKED_AT:
            looked += 1
            node, left = stack.pop()
            left -= self.nodes[node].own
            if node == without or left < 0:
                continue
            if left == 0:
                yield node
            else:
                stack += [(child, left) for child in self.nodes[node].children]
