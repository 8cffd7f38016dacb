"""Depth-first by weight. Owns: the walk of the tree in which the subtree that most waiting requests end in goes first.

Requests whose match ends at a node come after its subtrees, in queue order; ties between children keep the order in
which they were added to the node. The in-batch rule is computed and ignored, as in the reference.
"""

from __future__ import annotations

from engine.config import Policy
from engine.kvcache.radix_cache import Node
from engine.request import Request
from engine.scheduler.policies.ordering import Ordering, OrderInputs, match_queue, ordered


def order(inputs: OrderInputs) -> Ordering:
    """Sort in place by that walk."""
    match = match_queue(inputs)
    ending: dict[int, list[Request]] = {}
    weights: dict[int, int] = {}
    for request in inputs.waiting:
        node: Node | None = match.nodes[request.rid]
        assert node is not None
        ending.setdefault(node.node_id, []).append(request)
        while node is not None:
            weights[node.node_id] = weights.get(node.node_id, 0) + 1
            node = node.parent
    inputs.waiting[:] = _walk(inputs.kv.tree.root, ending, weights)
    return ordered(inputs, Policy.DFS_WEIGHT, match.put_back)


def _walk(root: Node, ending: dict[int, list[Request]], weights: dict[int, int]) -> list[Request]:
    """Post-order over nodes that carry weight, without recursion: a tree may be deep."""
    result: list[Request] = []
    stack: list[tuple[Node, bool]] = [(root, False)]
    while stack:
        node, is_done = stack.pop()
        if is_done:
            result.extend(ending.get(node.node_id, ()))
            continue
        stack.append((node, True))
        children = [child for child in node.children.values() if child.node_id in weights]
        children.sort(key=lambda child: -weights[child.node_id])
        stack.extend((child, False) for child in reversed(children))
    return result
