"""Preemption beside the cache: who gives way must not take the prefix of who comes in with it."""

from __future__ import annotations

from tests.builders import engine_config
from tests.engine.stub_model import StubRun


def test_a_prefix_that_only_the_victim_held_is_still_there() -> None:
    """`urgent` matches one token that only `low` holds. Preempting `low` evicts, and the plan still counts on it."""
    config = engine_config(
        page_size=1,
        num_pages=10,
        chunked_prefill_size=None,
        max_prefill_tokens=8,
        max_running_requests=2,
        schedule_policy="shortest-prefill-first",
        enable_mixed_chunk=False,
        schedule_conservativeness=0.01,
        clip_max_new_tokens=1,
        enable_priority_scheduling=True,
        enable_priority_preemption=True,
        priority_preemption_threshold=0,
    )
    run = StubRun(config)
    run.add("a", [100, 101], 2)
    run.add("b", [110], 1)
    run.add("c", [120], 1)
    run.add("low", [39], 2)
    run.add("urgent", [39, 40, 43], 1, priority=0)
    run.run()
    run.assert_nothing_held()
    for rid in run.requests:
        run.assert_right_tokens(rid)
