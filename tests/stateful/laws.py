"""What must hold between any two steps, recomputed from scratch. Owns: the oracle of the engine machine."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from engine.request import RequestState


def check_partition(state: Any) -> None:
    """Every live request is in exactly one place."""
    homes = [*state.waiting, *state.running]
    homes += [request for request in state.last_prefill if request is not state.continuation]
    if state.continuation is not None:
        homes.append(state.continuation)
    homes += state.leaving.values()
    counts = Counter(request.rid for request in homes)
    assert counts == Counter(state.requests.keys()), "each request has one home"
    for request in homes:
        assert state.requests[request.rid] is request
        holds = request.lease is not None
        assert holds == (request.state in (RequestState.PREFILL, RequestState.DECODE)), request.rid
        assert (request.rid in state.kv.leases) == holds
        assert request.in_flight == sum(request.rid in members(flight) for flight in state.flights)
    assert all(request.state is RequestState.WAITING for request in state.waiting)
    assert all(request.state is RequestState.DECODE for request in state.running)
    if state.continuation is not None:
        assert state.continuation.state is RequestState.PREFILL
        assert 0 < state.continuation.computed_len < state.continuation.seq_len
    assert state.waiting_tokens == sum(request.seq_len for request in state.waiting)
    assert len(state.kv.leases) <= state.config.max_running_requests


def members(flight: Any) -> set[str]:
    """Whose rows a step in flight computes for somebody."""
    return {row.rid for row in flight.plan.prefills}.union(flight.plan.decodes) - flight.void


def check_flights(state: Any) -> None:
    """Between two steps nothing is in flight; with overlap at most one step is, of which the tree knows nothing."""
    assert len(state.flights) <= state.overlaps
    ahead_len: Counter[str] = Counter()
    ahead_outputs: Counter[str] = Counter()
    for flight in state.flights:
        for row in flight.plan.prefills:
            ahead_len[row.rid] += row.extend_len
        ahead_len.update(flight.plan.decodes)
        ahead_outputs.update(flight.plan.sampling)
        for rid in flight.void:
            del ahead_len[rid], ahead_outputs[rid]
    for request in state.requests.values():
        assert request.ahead_len == (0 if request.lease is None else ahead_len[request.rid])
        assert request.ahead_outputs == ahead_outputs[request.rid]
        if request.lease is not None:
            assert request.lease.shared * state.kv.page_size <= request.applied_len
    for request in state.leaving.values():
        assert request.in_flight
        assert request.output_len == request.max_new_tokens
    assert all(request.output_len < request.max_new_tokens for request in state.running)


def check_lengths(state: Any) -> None:
    """What is computed, what is keyed, and what is held agree for each request."""
    size = state.kv.page_size
    for request in state.requests.values():
        assert len(request.keys) == (request.seq_len - request.ahead_outputs) // size
        if request.lease is None:
            assert request.computed_len == 0
            continue
        lease = request.lease
        assert lease.count * size >= request.computed_len
        if request.state is RequestState.DECODE:
            assert request.computed_len == request.seq_len - 1
            assert lease.count == state.kv.pages_ceil(request.computed_len)
        assert 0 <= lease.shared <= lease.count
        assert lease.shared * size <= request.computed_len


def check_ownership(kv: Any) -> None:
    """Every page has exactly one owner; locks are the leases below; counters are a recount."""
    snapshot = kv.snapshot()
    owner_of = np.frombuffer(snapshot.owners, dtype=np.int64)
    claimed: list[int] = list(snapshot.free_list)
    by_node = {node.node: node for node in snapshot.nodes}
    locks: Counter[int] = Counter()
    for lease in snapshot.leases:
        path: list[int] = []
        node = by_node.get(lease.node)
        while node is not None:
            locks[node.node] += 1
            path = [*node.pages, *path]
            node = by_node.get(node.parent)
        assert list(lease.pages[: lease.shared_pages]) == path, f"{lease.rid} does not use the pages that it locks"
        private = lease.pages[lease.shared_pages :]
        assert all(snapshot.states[page] == 1 and owner_of[page] == lease.row for page in private)
        claimed += private
    for node in snapshot.nodes:
        assert node.lock_count == locks[node.node]
        state = 2 if node.lock_count else 3
        assert all(snapshot.states[page] == state and owner_of[page] == node.node for page in node.pages)
        claimed += node.pages
    assert sorted(claimed) == list(range(snapshot.num_pages)), "every page has exactly one owner"
    assert snapshot.counts == tuple(snapshot.states.count(state) for state in range(4))
    rows = [lease.row for lease in snapshot.leases]
    assert len({*rows, *snapshot.free_rows}) == len(rows) + len(snapshot.free_rows)


def check_state(state: Any) -> None:
    """All of it."""
    check_partition(state)
    check_flights(state)
    check_lengths(state)
    check_ownership(state.kv)
