"""Orders of the queue against naive ones: match each request by brute force, build the side tree, sort a copy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.events import NullSink
from engine.request import Request
from tests.builders import CoreRun, engine_config
from tests.stateful.effort import effort

COLD = 32


def cached_prefixes(run: CoreRun) -> set[tuple[int, ...]]:
    """Every prefix that the tree holds, in page keys."""
    paths: dict[int, tuple[int, ...]] = {run.scheduler.kv.tree.root.node_id: ()}
    found: set[tuple[int, ...]] = set()
    for node in run.scheduler.kv.tree.nodes():
        assert node.parent is not None
        above = paths[node.parent.node_id]
        for key in node.keys.tolist():
            above = (*above, key)
            found.add(above)
        paths[node.node_id] = above
    return found


class Naive:
    """Matched tokens and put-back rids of a queue, by looking at everything."""

    def __init__(self, run: CoreRun, queue: list[Request], tokens: dict[str, list[int]]) -> None:
        prefixes, size = cached_prefixes(run), run.config.cache.page_size
        self.raw: dict[str, int] = {}
        for request in queue:
            keys = tuple(request.keys.first(len(request.keys)).tolist())
            self.raw[request.rid] = size * max(n for n in range(len(keys) + 1) if not n or keys[:n] in prefixes)
        self.matched = {request.rid: min(self.raw[request.rid], request.seq_len - 1) for request in queue}
        # The side tree of the reference: earlier cold prompts, token by token.
        self.put_back: set[str] = set()
        cold: list[list[int]] = []
        for request in queue:
            if self.raw[request.rid] > COLD:
                continue
            mine = tokens[request.rid]
            shared = [sum(1 for _ in _common(mine, other)) for other in cold]
            if max(shared, default=0) >= COLD:
                self.put_back.add(request.rid)
            else:
                cold.append(mine)


def _common(left: list[int], right: list[int]) -> list[int]:
    shared = []
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        shared.append(a)
    return shared


def _fcfs(queue: list[Request], naive: Naive, processed: int) -> list[Request]:
    return queue


def _lpm(queue: list[Request], naive: Naive, processed: int) -> list[Request]:
    kept = [request for request in queue if request.rid not in naive.put_back]
    back = [request for request in queue if request.rid in naive.put_back]
    return sorted(kept, key=lambda request: -naive.matched[request.rid]) + back


def _shortest(queue: list[Request], naive: Naive, processed: int) -> list[Request]:
    def work(request: Request) -> tuple[bool, int, int]:
        left = max(1, request.seq_len - naive.matched[request.rid])
        return request.rid in naive.put_back, left, request.entry_seq

    return sorted(queue, key=work)


def _lof(queue: list[Request], naive: Naive, processed: int) -> list[Request]:
    return sorted(queue, key=lambda request: -request.max_new_tokens)


def _hrrn(queue: list[Request], naive: Naive, processed: int) -> list[Request]:
    def key(request: Request) -> tuple[Any, ...]:
        uncached = max(0, request.prompt_len - naive.matched[request.rid])
        waited = max(0, processed - request.processed_at_entry)
        if request.rid in naive.put_back:
            return (2, 0.0, request.rid)
        return (0, 0.0, request.rid) if uncached == 0 else (1, -waited / uncached, request.rid)

    return sorted(queue, key=key)


ORDERS: dict[str, Callable[[list[Request], Naive, int], list[Request]]] = {
    "fcfs": _fcfs,
    "lpm": _lpm,
    "shortest-prefill-first": _shortest,
    "lof": _lof,
    "hrrn": _hrrn,
}

#: (family, shared tokens, own tokens, output limit): families share beginnings around the 32 tokens of the rule.
arrivals = st.lists(
    st.tuples(
        st.integers(0, 2), st.sampled_from([0, 16, 31, 32, 33, 48, 64]), st.integers(1, 40), st.sampled_from([1, 3, 9])
    ),
    min_size=1,
    max_size=4,
)


@pytest.mark.parametrize("incremental", [True, False])
@pytest.mark.parametrize("policy", sorted(ORDERS))
@effort(12)
@given(bursts=st.lists(arrivals, min_size=1, max_size=5), page_size=st.sampled_from([1, 16]))
def test_an_order_is_the_naive_one(policy: str, incremental: bool, bursts: list[Any], page_size: int) -> None:
    """Kept by what changed, or matched and sorted whole (which also says what was matched and put back)."""
    config = engine_config(
        page_size=page_size,
        num_pages=400 // page_size,
        schedule_policy=policy,
        incremental_order=incremental,
        chunked_prefill_size=48,
        max_running_requests=3,
    )
    run = CoreRun(config, NullSink())
    state = run.scheduler.state
    serial = 0

    def checked_step() -> None:
        """A step whose order is compared right after `prepare`, when the tree is what the order was made on."""
        before, processed = list(state.waiting), state.processed_tokens
        prepare = run.scheduler.prepare

        def compare(now_ns: int) -> None:
            prepare(now_ns)
            if state.skip_reason is None and before:
                naive = Naive(run, before, run._tokens)
                expected = [request.rid for request in ORDERS[policy](list(before), naive, processed)]
                assert [request.rid for request in state.waiting] == expected
                assert state.ordering is not None
                if not incremental and state.ordering.deprioritized is not None:
                    assert state.ordering.deprioritized == tuple(sorted(naive.put_back))
                    assert dict(zip(state.ordering.order, state.ordering.matched, strict=True)) == naive.matched

        run.scheduler.prepare = compare
        try:
            run.step()
        finally:
            run.scheduler.prepare = prepare

    for burst in bursts:
        for family, shared, own, limit in burst:
            serial += 1
            prompt = [family * 1000 + i for i in range(shared)] + [100_000 * serial + i for i in range(own)]
            run.add(f"r{serial}", prompt, limit, ignore_eos=True)
        checked_step()
    for _ in range(300):
        if not run.has_work:
            return
        checked_step()
    raise AssertionError("unfinished")
