"""Preemption beside the cache: who gives way must not take the prefix of who comes in with it."""

from __future__ import annotations

from typing import Any

from engine.events import AdmissionDecided, RecordingSink
from engine.scheduler.decision import ADMITTED, Reason
from tests.builders import CoreRun, engine_config
from tests.engine.stub_model import StubRun

#: Whoever is more important takes the place of who runs; promises are too small for rows to be refused.
PREEMPTING: dict[str, Any] = {
    "schedule_conservativeness": 0.01,
    "clip_max_new_tokens": 1,
    "enable_priority_scheduling": True,
    "enable_priority_preemption": True,
    "priority_preemption_threshold": 0,
}


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
        **PREEMPTING,
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


def test_a_preemption_after_the_slice_was_spent_admits_nobody_with_nothing() -> None:
    """The last piece of `long`, a page more than it needs, spends slice and memory; room for `urgent` is then made.

    Its length is known and there is no tree, so that it is cut to what is left of the slice: one token less than none.
    """
    config = engine_config(
        page_size=2,
        num_pages=24,
        enable_radix=False,
        chunked_prefill_size=8,
        max_prefill_tokens=8192,
        max_running_requests=2,
        schedule_policy="lof",
        enable_mixed_chunk=True,
        **PREEMPTING,
    )
    sink = RecordingSink()
    run = CoreRun(config, sink)
    run.add("low", 4, 30, ignore_eos=True, priority=0)
    run.step()
    run.add("long", 35, 4, priority=5)
    run.step()
    run.add("urgent", 2, 4, ignore_eos=True, priority=9)
    while run.has_work:
        run.step()
    decisions = [event for event in sink.events if isinstance(event, AdmissionDecided)]
    refused = [one for one in decisions if one.rid == "urgent" and one.reason is Reason.CHUNK_BELOW_PAGE]
    assert [(one.need, one.have) for one in refused] == [(1, -1)], "the case is met"
    assert all(one.selected_extend > 0 for one in decisions if one.reason in ADMITTED)
