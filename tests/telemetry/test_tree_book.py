"""The tree book: after any schedule it has the engine's own tree, though no event names a parent."""

from __future__ import annotations

import base64
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings

from engine.clock import VirtualClock
from engine.config import EngineConfig
from engine.kvcache.snapshot import KvSnapshot
from engine.scheduler.plan import StepKind
from telemetry.read_model import ReadModel
from telemetry.tree_book import ROOT
from tests.builders import engine_config
from tests.telemetry.live_run import TimedRun, busy, configs, operations, play


def agrees(run: TimedRun, model: ReadModel) -> KvSnapshot:
    """Ids, parents, pages, locks and ages of the read model against a picture of the engine, which it never sees."""
    kv = run.scheduler.kv.snapshot()
    book, tree = model.pages, model.pages.tree
    tree.settle()
    assert set(tree.nodes) - {ROOT} == {view.node for view in kv.nodes}
    for view in kv.nodes:
        node = tree.nodes[view.node]
        assert (node.own, tree.depth(view.node)) == (len(view.pages), view.depth_pages)
        assert sum(book.holders(view.node).values()) == view.lock_count
        assert node.parent == view.parent or not node.is_sure
    for number, node in tree.nodes.items():
        assert node.below == node.own + sum(tree.nodes[child].below for child in node.children), number
    tree.confirm({view.node: view.parent for view in kv.nodes})
    assert {n: node.parent for n, node in tree.nodes.items() if n} == {view.node: view.parent for view in kv.nodes}
    return kv


def followed(config: EngineConfig, ops: Sequence[tuple[object, ...]]) -> ReadModel:
    model = ReadModel(clock=VirtualClock())
    run = TimedRun(config, model)
    play(run, ops, check=lambda: agrees(run, model))
    return model


@settings(max_examples=40, deadline=None)
@given(configs, operations)
def test_the_tree_of_the_events_is_the_engines(config: EngineConfig, ops: list[tuple[object, ...]]) -> None:
    followed(config, ops)


@pytest.mark.parametrize("seed", range(12))
def test_also_under_load_with_retractions_and_preemptions(seed: int) -> None:
    followed(*busy(seed))


@pytest.mark.parametrize("seed", [18, 20, *range(40, 46)])
def test_after_a_loss_of_events_the_tree_is_wrong_but_can_be_asked(seed: int) -> None:
    run = TimedRun(busy(seed)[0])
    play(run, busy(seed)[1])
    start, *events = run.recorded.events
    for first in range(0, len(events), len(events) // 12):
        for length in (1, 5, 20):
            model = ReadModel(clock=VirtualClock())
            for event in (start, *events[:first], *events[first + length :]):
                model.emit(event)
            assert model.tree(node=None, opened=(), top=50).nodes_total >= 0


def test_what_an_eviction_takes_is_what_was_said_to_go_next() -> None:
    model = ReadModel(clock=VirtualClock())
    run = TimedRun(engine_config(num_pages=24, page_size=4, schedule_policy="fcfs"), model)
    seen = 0
    for at in range(30):
        run.add(f"r{at}", range(at % 7 * 1000, at % 7 * 1000 + 24), 3)
        while run.has_work:
            tree, book = model.pages.tree, model.pages
            tree.settle()
            kv = run.scheduler.kv.snapshot()
            stamps = {view.node: view.stamp for view in kv.nodes}
            said = tree.next_out(book.locked_nodes(), stamps, model.step, 64)
            before = set(tree.nodes)
            if run.timed_step().kind is StepKind.IDLE:
                continue
            gone = [node for node in said if node not in model.pages.tree.nodes]
            assert {node for node in before if node not in model.pages.tree.nodes} == set(gone)
            assert gone == said[: len(gone)]
            seen += len(gone)
    assert seen > 5


def test_hits_are_requests_that_found_it_and_not_the_one_that_computed_it() -> None:
    model = ReadModel(clock=VirtualClock())
    run = TimedRun(engine_config(num_pages=64, page_size=4), model)
    for at in range(3):
        run.add(f"r{at}", range(20), 4)
        run.finish_all()
    hits = [node.hits for number, node in model.pages.tree.nodes.items() if number]
    assert max(hits) == 2
    page = model.page(0)
    assert page is not None
    assert page.age_steps is not None


def test_a_picked_node_lights_up_the_pages_of_its_path() -> None:
    model = ReadModel(clock=VirtualClock())
    run = TimedRun(engine_config(num_pages=64, page_size=4), model)
    for tail in (100, 200):
        run.add(f"r{tail}", [*range(16), *range(tail, tail + 16)], 4)
        run.finish_all()
    kv = run.scheduler.kv.snapshot()
    leaf = max(kv.nodes, key=lambda view: view.depth_pages)
    answer = model.tree(node=leaf.node, opened=(), top=1)
    assert answer.picked is not None
    bits = np.unpackbits(np.frombuffer(base64.b64decode(answer.picked.lit_b64), dtype=np.uint8))[: kv.num_pages]
    parents = {view.node: view for view in kv.nodes}
    path = [view for view in (leaf, parents.get(leaf.parent)) if view is not None]
    assert set(np.flatnonzero(bits).tolist()) == {page for view in path for page in view.pages}
    assert [row.node for row in answer.picked.path] == [view.node for view in reversed(path)]


def test_the_pool_over_time_ends_with_the_pool_of_now() -> None:
    model = ReadModel(clock=VirtualClock())
    run = TimedRun(engine_config(num_pages=64, page_size=4), model)
    run.add("r", range(40), 8)
    for _ in range(4):
        run.timed_step()
    last = model.pool_over_time().points[-1]
    counts = model.pages.counts()
    assert (last.free, last.private, last.protected, last.evictable) == (
        counts.free,
        counts.private,
        counts.protected,
        counts.evictable,
    )
    assert last.promised_tokens > 0
    assert last.tightest_tokens is not None
