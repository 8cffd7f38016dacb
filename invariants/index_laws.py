"""Law of the indexed order. Owns: a sampled stretch of the queue against a fresh match of all its keys (INV-INDEX-01).

The rules of order are written down here a second time, from the rule book and not from the engine's code.
"""

from __future__ import annotations

from typing import Final

from engine.kvcache.snapshot import OrderSample, OrderView
from invariants.violation import Report

_LAW: Final = "INV-INDEX-01"
#: In-batch rule: only requests with at most this many cached tokens may be put back.
COLD_TOKENS: Final = 32
#: A node's own requests come after its subtrees: greater than any (-weight, rank).
_OWN: Final = (1, 0)


def on_sample(sample: OrderSample, page_size: int, report: Report) -> None:
    """Each settled request where a match ends, ordered by what is cached, and in order among its neighbours."""
    for view in sample.settled:
        _parked(view, page_size, report)
    if sample.policy != "dfs-weight":
        _put_back(sample, page_size, report)
    for before, after in zip(sample.settled, sample.settled[1:], strict=False):
        first, second = _key(sample.policy, before, page_size), _key(sample.policy, after, page_size)
        if first > second:
            report(
                _LAW,
                f"{sample.policy}: {after.rid} with key {_short(second)} ahead of {before.rid} with {_short(first)}",
                f"behind it, at positions {after.position} and {before.position}",
                rid=after.rid,
            )


def _matched(view: OrderView, page_size: int) -> int:
    """Cached tokens that count: at least one token is always computed."""
    return min(view.match_pages * page_size, view.prompt_len + view.output_len - 1)


def _parked(view: OrderView, page_size: int, report: Report) -> None:
    if (view.node, view.pages) != (view.match_node, view.match_pages):
        where = "inside a node" if view.match_node is None else f"at node {view.match_node}"
        report(
            _LAW,
            f"{view.match_pages} pages matched, ending {where}",
            f"parked at node {view.node}, {view.pages} pages",
            rid=view.rid,
        )
    elif view.matched_len != _matched(view, page_size):
        report(_LAW, f"ordered by {_matched(view, page_size)} cached tokens", f"{view.matched_len}", rid=view.rid)


def _put_back(sample: OrderSample, page_size: int, report: Report) -> None:
    """Who shares a cold head is put back, but for one."""
    firsts: dict[int, str] = {}
    for view in sample.settled:
        head = view.head32_key
        if head is None or view.match_pages * page_size > COLD_TOKENS:
            if view.put_back:
                report(_LAW, f"{view.rid} not put back: it is not cold", "put back", rid=view.rid)
        elif not view.put_back and firsts.setdefault(head, view.rid) != view.rid:
            report(
                _LAW,
                f"one of the cold requests that share a head ahead of the others, {firsts[head]}",
                f"{view.rid} too",
                rid=view.rid,
            )


def _key(policy: str, view: OrderView, page_size: int) -> tuple[object, ...]:
    """What the policy sorts by, smaller first, from the fresh match."""
    matched = _matched(view, page_size)
    if policy == "lpm":
        return (1, 0) if view.put_back else (0, -matched)
    if policy == "shortest-prefill-first":
        return (view.put_back, max(1, view.prompt_len + view.output_len - matched), view.entry_seq)
    return (*((-weight, rank) for weight, rank in view.path), _OWN)


def _short(key: tuple[object, ...]) -> str:
    """A key in words, without the shared beginning of a deep path."""
    return str(key if len(key) <= 4 else ("...", *key[-3:]))
