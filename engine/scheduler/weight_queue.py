"""WeightQueue. Owns: the order of dfs-weight, kept up to date by what changed.

Each waiting request is at home at the tree node where its match ends; a home keeps its requests in queue order. A pass
moves the requests whose home changed, weighs the homes (not the requests) and walks from the root: heavier child first,
ties in the order children were added, a node's own requests after its subtrees. Equal to `policies/dfs_weight.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from engine.config import Policy
from engine.kvcache.radix_cache import Node, RadixCache
from engine.request import Request
from engine.scheduler.entry_queue import EntryQueue
from engine.scheduler.policies import Ordering, OrderInputs
from engine.scheduler.policies.ordering import COLD_LIMIT_TOKENS
from engine.scheduler.prefix_index import STOOD, Entry, Place


class _Home:
    """A node and the requests whose match ends there, in queue order."""

    __slots__ = ("entries", "node")

    def __init__(self, node: Node) -> None:
        self.node = node
        self.entries: dict[str, Entry] = {}


class WeightQueue(EntryQueue):
    """The waiting queue under dfs-weight."""

    def __init__(self, tree: RadixCache, *, chained_keys: bool = False) -> None:
        super().__init__(tree, self._standing, chained_keys=chained_keys)
        self._homes: dict[int, _Home] = {}
        #: node id -> place of that home in the walk, as of the last pass, and of the one before.
        self._walk_order: dict[int, int] = {}
        self._order_before: dict[int, int] = {}
        self._labels = 0
        #: Homes of those who left since the last pass, which weighed them still.
        self._left: list[Node] = []

    # -- the queue -------------------------------------------------------------------------------------------------

    def _leave_order(self, entry: Entry, *, is_arrival: bool) -> None:
        if not is_arrival:
            self._left.append(self._homes[entry.key[0]].node)
            self._leave_home(entry)

    def weights(self) -> Callable[[Node], int]:
        weights: Counter[int] = Counter()
        counts = [(home.node, len(home.entries)) for home in self._homes.values()]
        for home, count in [*counts, *((node, 1) for node in self._left)]:
            node: Node | None = home
            while node is not None:
                weights[node.node_id] += count
                node = node.parent
        return lambda node: weights[node.node_id]

    def __iter__(self) -> Iterator[Request]:
        for node_id in self._walk_order:
            home = self._homes.get(node_id)
            if home is not None:
                for entry in home.entries.values():
                    yield entry.request
        for entry in self._arrivals.values():
            yield entry.request

    # -- one pass --------------------------------------------------------------------------------------------------

    def order(self, inputs: OrderInputs) -> Ordering:
        self._order_before = self._walk_order
        changed = self._index.begin_pass()
        before = list(self) if inputs.keep_record else []
        pages_of: dict[str, int] = {}
        walked = changed + list(self._arrivals.values())
        self._index.walk(walked, inputs.kv.page_size)
        if inputs.keep_record:
            pages_of = {rid: entry.pages for rid, entry in self._entries.items()}
        self._move(walked)
        self._walk_order = self._walk()
        self._left.clear()
        if not inputs.keep_record:
            return Ordering(Policy.DFS_WEIGHT, (), (), ())
        requests = list(self)
        return Ordering(
            active_policy=Policy.DFS_WEIGHT,
            order=tuple(request.rid for request in requests),
            matched=tuple(request.matched_len for request in requests),
            deprioritized=_put_back(before, pages_of, inputs.kv.page_size),
        )

    def _standing(self, entry: Entry) -> Place:
        """Where a request that did not move stood before the last pass."""
        return (0, self._order_before[entry.key[0]], entry.label)

    def _move(self, walked: list[Entry]) -> None:
        """Bring everyone whose home changed there: ahead of who was there already if they stood ahead, else behind."""
        arriving: dict[int, list[Entry]] = {}
        for entry in walked:
            assert entry.node is not None
            if entry.is_arrival or entry.key[0] != entry.node.node_id:
                if not entry.is_arrival:
                    self._leave_home(entry)
                entry.is_arrival = False
                arriving.setdefault(entry.node.node_id, []).append(entry)
        for node_id, entries in arriving.items():
            home = self._homes.get(node_id)
            if home is None:
                node = entries[0].node
                assert node is not None
                home = self._homes[node_id] = _Home(node)
            entries.sort(key=STOOD)  # whoever was walked has its place written down
            edge: Place = (0, self._order_before.get(node_id, -1))
            ahead = [entry for entry in entries if entry.place < edge] if entries[0].place < edge else []
            key = (node_id,)
            for label, entry in enumerate(entries, self._labels + 1):
                entry.label = label
                entry.key = key
            self._labels += len(entries)
            for place, entry in enumerate(ahead):
                entry.label = place - self._labels - len(ahead)
            self._labels += len(ahead)
            behind = entries[len(ahead) :]
            if ahead:
                home.entries = {entry.rid: entry for entry in [*ahead, *home.entries.values(), *behind]}
            else:
                home.entries.update((entry.rid, entry) for entry in behind)
        self._arrivals.clear()

    def _leave_home(self, entry: Entry) -> None:
        home = self._homes[entry.key[0]]
        del home.entries[entry.rid]
        if not home.entries:
            del self._homes[entry.key[0]]

    def _walk(self) -> dict[int, int]:
        """node id -> place of each home, depth first by weight."""
        weights: dict[int, int] = {}
        children: dict[int, list[Node]] = {}
        for home in self._homes.values():
            node, count = home.node, len(home.entries)
            while node.parent is not None:
                if node.node_id not in weights:
                    weights[node.node_id] = 0
                    children.setdefault(node.parent.node_id, []).append(node)
                weights[node.node_id] += count
                node = node.parent
        result: dict[int, int] = {}
        stack: list[tuple[Node, bool]] = [(self._tree.root, False)]
        while stack:
            node, is_done = stack.pop()
            if is_done:
                if node.node_id in self._homes:
                    result[node.node_id] = len(result)
                continue
            stack.append((node, True))
            below = children.get(node.node_id)
            if below:
                below.sort(key=lambda child: (-weights[child.node_id], child.rank), reverse=True)
                stack.extend((child, False) for child in below)
        return result


def _put_back(before: list[Request], pages_of: dict[str, int], page_size: int) -> tuple[str, ...]:
    """What the in-batch rule would put back; dfs-weight computes it, as the reference does, and ignores it."""
    seen: set[int] = set()
    put_back: list[str] = []
    for request in before:
        if pages_of[request.rid] * page_size <= COLD_LIMIT_TOKENS and request.head32_key is not None:
            if request.head32_key in seen:
                put_back.append(request.rid)
            seen.add(request.head32_key)
    return tuple(sorted(put_back))
