"""PrefixIndex. Owns: at which tree node each waiting request's match ends, and what their walks would have stamped.

The radix cache tells it of inserted leaves and evicted nodes, by direct call, so that the order is current before the
next plan. Work follows what changed: a new leaf concerns only requests parked at its parent whose next key fits.

A pass of the reference matches every waiting request in present order and so stamps every node on their paths. Here the
pass only takes a tick. When an eviction asks for a node's stamp, it is (tick, place of the last waiting request parked
there); a request that leaves writes its stamp on its path first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Final

from engine.kvcache.page_keys import Keys
from engine.kvcache.radix_cache import Node, RadixCache, Stamp
from engine.request import Request

#: Key to sort entries by where they stood.
STOOD: Final = attrgetter("place")
#: Place in the queue before a pass sorted it: (0, …) of an ordered request, (1, entry, 0) of an arrival.
Place = tuple[object, ...]


class Entry:
    """One waiting request: where it is parked, where it stands. Written by the queue and the index only.

    rid, seq_len, entry_seq are the request's, at hand: constant from its first ordering on. matched: its `matched_len`.
    """

    __slots__ = (
        "cold_head",
        "entry_seq",
        "is_arrival",
        "is_put_back",
        "key",
        "key_to_come",
        "label",
        "matched",
        "next_key",
        "node",
        "pages",
        "place",
        "place_pass",
        "request",
        "rid",
        "seq_len",
    )

    def __init__(self, request: Request) -> None:
        self.request = request
        self.rid = request.rid
        self.seq_len = 0
        self.entry_seq = 0
        self.matched = 0
        self.node: Node | None = None
        self.pages = 0
        self.next_key: int | None = None
        self.key: tuple[int, ...] = ()
        self.key_to_come: tuple[int, ...] = ()
        self.label = 0
        self.is_arrival = True
        self.is_put_back = False
        self.cold_head: int | None = None
        self.place: Place = ()
        self.place_pass = -1


class _Way:
    """From `start` to `end`, as the first entry of a pass went it, and who followed.

    Nothing but splits changes the tree within a pass, and a split leaves both ends where they are.
    """

    __slots__ = (
        "_keys", "_packed", "end", "end_pages", "first_key", "followers", "last_key", "next_keys", "parked", "start",
        "start_pages",
    )  # fmt: skip

    def __init__(self, start: Node, end: Node, keys: Keys, start_pages: int) -> None:
        self.start = start
        self.first_key: int = keys.item(0)
        self.last_key: int = keys.item(-1)
        self.followers: list[Entry] = []
        #: Key by which each follower goes on, None: its keys end here.
        self.next_keys: list[int | None] = []
        #: How many of them, the first, were parked at the start; the others are arrivals.
        self.parked = 0
        self.end = end
        self.start_pages = start_pages
        self.end_pages = start_pages + len(keys)
        self._keys = keys
        self._packed = b""

    def packed(self) -> bytes:
        """Its keys as bytes, made when they are asked for."""
        if not self._packed:
            self._packed = self._keys.tobytes()
        return self._packed

    def stamp(self, tick: int) -> None:
        """Stamp the way as the last who went it would have."""
        stamp: Stamp = (tick, self.followers[-1].place, 0)
        node: Node | None = self.end
        while node is not None and node is not self.start:
            node.stamp = max(node.stamp, stamp)
            node = node.parent


class PrefixIndex:
    """Listener of one radix cache.

    standing      where the queue says that a request which did not move in the last pass stood before it
    chained_keys  whether a page's key stands for all pages before it too, so that one comparison tells a whole way
    """

    def __init__(self, tree: RadixCache, standing: Callable[[Entry], Place], *, chained_keys: bool) -> None:
        self._tree = tree
        self._chained_keys = chained_keys
        self._standing = standing
        tree.listener = self
        self._tick = 0
        #: node id -> next key (None: nothing follows) -> who is parked there: mostly one, whose tail is its own
        self._parked: dict[int, dict[int | None, Entry | dict[str, Entry]]] = {}
        self._pending: dict[str, Entry] = {}
        self._last_place: dict[int, Place] = {}

    # -- called by the tree ----------------------------------------------------------------------------------------

    def leaf_inserted(self, leaf: Node) -> None:
        """Requests parked at the parent whose next key the leaf begins with may match more."""
        assert leaf.parent is not None
        groups = self._parked.get(leaf.parent.node_id)
        group = None if groups is None else groups.get(int(leaf.keys[0]))
        if isinstance(group, dict):
            self._pending.update(group)
        elif group is not None:
            self._pending[group.rid] = group

    def node_evicted(self, node: Node, parent: Node) -> None:
        """Requests parked at the node match up to its parent now; they walked through it in the last pass too."""
        self._last_place.pop(node.node_id, None)
        groups = self._parked.pop(node.node_id, None)
        if groups is None:
            return
        key = int(node.keys[0])
        self._last_place.pop(parent.node_id, None)
        for group in groups.values():
            for entry in _members(group):
                entry.node, entry.next_key = parent, key
                entry.pages -= len(node.keys)
                self._park(entry, parent, key)
                self._pending[entry.rid] = entry

    def stamp_of(self, node: Node) -> Stamp:
        """What a walk of the whole queue in the last pass would have left on `node`, or a later explicit stamp."""
        groups = self._parked.get(node.node_id)
        if not groups or not self._tick:
            return node.stamp
        last = self._last_place.get(node.node_id)
        if last is None:
            last = max(self.place_of(entry) for group in groups.values() for entry in _members(group))
            self._last_place[node.node_id] = last
        return max(node.stamp, (self._tick, last, 0))

    def is_pending(self, rid: str) -> bool:
        """Whether the request's match is to be walked again in the next pass."""
        return rid in self._pending

    # -- called by the queue ---------------------------------------------------------------------------------------

    def begin_pass(self) -> list[Entry]:
        """Everything walked from here on carries one new tick, ordered by place.

        Returns the requests, arrivals aside, whose match may have changed since the last pass, in the order they stand.
        """
        self._tick = self._tree.next_tick()
        self._last_place.clear()
        pending = list(self._pending.values())
        self._pending = {}
        tick, standing = self._tick, self._standing
        for entry in pending:  # none of them is an arrival: those are parked nowhere
            entry.place = standing(entry)
            entry.place_pass = tick
        pending.sort(key=STOOD)
        return pending

    def walk(self, entries: list[Entry], page_size: int) -> None:
        """Match every entry as far as it goes now, from where it is parked; they must come in order of place.

        Sets each one's `matched_len`: `page_size` tokens a page, but at least one token is left to compute.

        Most of a queue goes the same few ways: an entry whose keys equal the way that one before it went, and which
        ends where that one ended, is not walked again but put beside it.
        """
        ways: dict[tuple[int, int], _Way] = {}
        tick, root, chained = self._tick, self._tree.root, self._chained_keys
        way: _Way | None = None  # the one that the entry before went or looked at
        for entry in entries:
            if entry.place_pass != tick:
                self.remember_place(entry)
            request, start, key = entry.request, entry.node, entry.next_key
            keys, most = request.keys, entry.seq_len - 1
            if start is None:
                start, key = root, keys.at(0) if len(keys) else None
            if key is None:
                self._settle(entry, start, entry.pages, None)
                entry.matched = request.matched_len = min(entry.pages * page_size, most)
                continue
            if way is None or start is not way.start or key != way.first_key:
                way = ways.get((start.node_id, key))
            if way is not None:
                if chained:
                    next_key = keys.after_chain(way.end_pages, way.last_key)
                else:
                    next_key = keys.after(way.start_pages, way.end_pages, way.packed())
                if next_key is not False and next_key not in way.end.children:
                    way.followers.append(entry)
                    way.next_keys.append(next_key)
                    if entry.node is not None:
                        way.parked += 1
                    pages = way.end_pages
                    entry.node, entry.pages, entry.next_key = way.end, pages, next_key
                    matched = pages * page_size
                    entry.matched = request.matched_len = matched if matched < most else most
                    continue
            stamp: Stamp = (tick, entry.place, 0)
            path = keys.first(len(keys))
            node, pages = self._tree.walk(path, start, entry.pages, stamp, (tick, entry.place, 1))
            if way is None and node is not start:
                way = ways[start.node_id, key] = _Way(start, node, path[entry.pages : pages], entry.pages)
            self._settle(entry, node, pages, keys.at(pages) if pages < len(keys) else None)
            entry.matched = request.matched_len = min(pages * page_size, most)
        for way in ways.values():
            if way.followers:
                self._unpark_followers(way)
                self._park_followers(way)
                way.stamp(tick)

    def _unpark_followers(self, way: _Way) -> None:
        """Take them, who are parked at the way's start if anywhere, out there: mostly the whole group at once."""
        groups = self._parked.get(way.start.node_id)
        group = None if groups is None else groups.get(way.first_key)
        if groups is None or group is None:
            return
        if isinstance(group, dict):
            if way.parked < len(group):
                for entry in way.followers[: way.parked]:
                    del group[entry.rid]
                return
        elif group is not way.followers[0]:
            return
        del groups[way.first_key]
        if not groups:
            del self._parked[way.start.node_id]

    def _park_followers(self, way: _Way) -> None:
        groups = self._parked.setdefault(way.end.node_id, {})
        alone: dict[int | None, Entry] = dict(zip(way.next_keys, way.followers, strict=True))
        if len(alone) == len(way.followers) and groups.keys().isdisjoint(alone):
            groups.update(alone)
            return
        for entry, key in zip(way.followers, way.next_keys, strict=True):
            if groups.setdefault(key, entry) is not entry:
                self._park(entry, way.end, key)

    def _settle(self, entry: Entry, node: Node, pages: int, next_key: int | None) -> None:
        """Park the entry at `node`, where its match of `pages` pages ends and its keys go on with `next_key`."""
        if node is entry.node:
            return
        self._unpark(entry)
        entry.node, entry.pages, entry.next_key = node, pages, next_key
        groups = self._parked.get(node.node_id)
        if groups is not None and next_key not in groups:
            groups[next_key] = entry
        else:
            self._park(entry, node, next_key)

    def _park(self, entry: Entry, node: Node, key: int | None) -> None:
        groups = self._parked.get(node.node_id)
        if groups is None:
            groups = self._parked[node.node_id] = {}
        group = groups.get(key)
        if group is None:
            groups[key] = entry
        elif type(group) is dict:
            group[entry.rid] = entry
        else:
            groups[key] = {other.rid: other for other in (*_members(group), entry)}

    def remember_place(self, entry: Entry) -> None:
        """Keep where the request stood before this pass sorts it."""
        if entry.place_pass != self._tick:
            if entry.is_arrival:
                request = entry.request
                entry.seq_len, entry.entry_seq = request.seq_len, request.entry_seq
                entry.place = (1, entry.entry_seq, 0)
            else:
                entry.place = self._standing(entry)
            entry.place_pass = self._tick

    def place_of(self, entry: Entry) -> Place:
        """Where the request stood before the last pass sorted the queue."""
        if entry.place_pass == self._tick:
            return entry.place
        if entry.is_arrival:
            return (1, entry.request.entry_seq, 0)
        return self._standing(entry)

    def leave(self, entry: Entry) -> None:
        """Forget a request; what it stamped in the last pass is written down first."""
        self._pending.pop(entry.rid, None)
        if entry.node is None:
            return
        stamp: Stamp = (self._tick, self.place_of(entry), 0)
        node: Node | None = entry.node
        while node is not None and node.parent is not None:
            node.stamp = max(node.stamp, stamp)
            node = node.parent
        self._unpark(entry)

    def _unpark(self, entry: Entry) -> None:
        if entry.node is None:
            return
        groups = self._parked[entry.node.node_id]
        group = groups[entry.next_key]
        if type(group) is dict:
            del group[entry.rid]
            if group:
                return
        del groups[entry.next_key]
        if not groups:
            del self._parked[entry.node.node_id]


def _members(group: Entry | dict[str, Entry] | None) -> Iterable[Entry]:
    if group is None:
        return ()
    return group.values() if isinstance(group, dict) else (group,)
