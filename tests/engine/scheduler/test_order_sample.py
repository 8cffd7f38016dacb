"""Samples of the order reach everyone, write nothing, and leave out whoever is to be placed anew."""

from __future__ import annotations

from itertools import pairwise

import pytest

from engine.events import NullSink
from engine.kvcache.snapshot import OrderSample
from engine.request import RequestState
from engine.scheduler.entry_queue import EntryQueue
from engine.scheduler.order_sample import SAMPLE_REQUESTS
from invariants import InvariantChecker
from tests.builders import CoreRun, engine_config

POLICIES = ("lpm", "shortest-prefill-first", "dfs-weight")


def crowded(policy: str, waiting: int) -> CoreRun:
    """Many who wait behind one row, all settled: everybody was ordered, and nothing happened since."""
    run = CoreRun(engine_config(schedule_policy=policy, max_running_requests=1, num_pages=256), NullSink())
    run.add("first", range(48), 1)
    run.run()
    for number in range(waiting):
        run.add(f"r{number}", [*range(48), *range(1000 * number + 1000, 1000 * number + 1010 + number % 4)], 40)
    run.step()
    return run


def sample(run: CoreRun, start: int) -> OrderSample:
    order = run.scheduler.snapshot(order_from=start).order
    assert order is not None
    return order


@pytest.mark.parametrize("policy", POLICIES)
def test_a_standing_queue_is_covered_in_one_round(policy: str) -> None:
    """Everyone, and everyone beside the next."""
    run = crowded(policy, 300)
    queue = [request.rid for request in run.scheduler.state.waiting]
    pairs: set[tuple[str, str]] = set()
    start = rounds = 0
    while rounds == 0 or start != 0:
        stretch = sample(run, start)
        rids = [view.rid for view in stretch.settled]
        assert [view.position for view in stretch.settled] == [queue.index(rid) for rid in rids]
        assert len(rids) <= SAMPLE_REQUESTS
        pairs |= set(pairwise(rids))
        start, rounds = stretch.next_start, rounds + 1
    assert rounds == -(-(len(queue) - 1) // (SAMPLE_REQUESTS - 1))
    assert pairs == set(pairwise(queue))


@pytest.mark.parametrize("policy", POLICIES)
def test_whoever_waits_three_rounds_is_looked_at(policy: str) -> None:
    """With arrivals, departures and re-keys between the samples."""
    checker = InvariantChecker()
    run = CoreRun(engine_config(schedule_policy=policy, max_running_requests=2, num_pages=128), checker)
    waited: dict[str, int] = {}
    start = 0
    for step in range(400):
        for member in range(2 if step < 200 else 0):
            document = (step + member) % 5
            head = range(10_000 * document, 10_000 * document + 16 * (1 + document))
            own = 1_000_000 + 100 * (2 * step + member)
            run.add(f"r{step}-{member}", [*head, *range(own, own + 20 + step % 11)], 1 + step % 3)
        run.step()
        snapshot = run.scheduler.snapshot(order_from=start)
        assert snapshot.order is not None
        checker.audit(snapshot)
        stretches = 1 + len(snapshot.waiting) // (SAMPLE_REQUESTS - 1)
        start = snapshot.order.next_start
        seen = {view.rid for view in snapshot.order.settled}
        queue = run.scheduler.state.waiting
        assert isinstance(queue, EntryQueue)
        settled = [view.rid for view in snapshot.waiting if queue.settled(view.rid) is not None]
        waited = {rid: 0 if rid in seen else waited.get(rid, 0) + 1 for rid in settled}
        # Whole families change places meanwhile, so one round may miss somebody.
        assert max(waited.values(), default=0) <= 3 * stretches
    assert checker.total_violations == 0


def test_a_request_to_be_placed_anew_is_left_out() -> None:
    run = crowded("lpm", 4)
    run.add("late", 30)
    settled = {view.rid for view in sample(run, 0).settled}
    waiting = {request.rid for request in run.scheduler.state.waiting}
    assert "late" in waiting - settled
    run.run()


def test_a_start_beyond_the_queue_begins_anew() -> None:
    run = crowded("lpm", 10)
    assert sample(run, 500).start == 0
    assert sample(run, 3).start == 3


@pytest.mark.parametrize(
    "settings", [{"schedule_policy": "fcfs"}, {"schedule_policy": "lpm", "incremental_order": False}]
)
def test_an_order_that_is_no_index_has_no_sample(settings: dict[str, object]) -> None:
    run = CoreRun(engine_config(**settings), NullSink())
    run.add("r", 30)
    assert run.scheduler.snapshot().order is None


def test_a_sample_writes_nothing() -> None:
    """Not even stamps: what is evicted next, and every later order, are the same with audits and without."""

    def play(*, sampled: bool) -> list[object]:
        run = crowded("lpm", 80)
        seen: list[object] = []
        while run.has_work:
            plan = run.step()
            if sampled:
                sample(run, 5)
            seen.append((plan.kind, [row.rid for row in plan.prefills], run.scheduler.kv.pool.counts))
        return seen

    assert play(sampled=True) == play(sampled=False)


def test_states_of_the_sampled_are_waiting() -> None:
    run = crowded("dfs-weight", 20)
    requests = run.scheduler.state.requests
    assert all(requests[view.rid].state is RequestState.WAITING for view in sample(run, 0).settled)
