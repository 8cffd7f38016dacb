"""Reported faults of priorities and of a queue that is full or too slow: FR-11, 12, 13, 18, 45."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.events import RequestTransitioned
from engine.llm_engine import TokenOutput
from engine.request import Cause, FinishReason
from engine.scheduler.decision import Reason
from invariants import InvariantChecker
from telemetry.explain import explain
from telemetry.journal import JournalSink
from telemetry.replay import replay
from tests.builders import engine_config
from tests.engine.stub_model import StubRun
from tests.field.test_admission_reports import (
    all_end_well,
    computed_tokens,
    decisions,
    mixed_on_and_off,
    pages_1_and_16,
    plans,
    prompt,
    started,
)
from tests.stateful.laws import check_state

both_accountings = pytest.mark.parametrize("accounting", ["reference", "exact"])


def urgent_first(**options: Any) -> EngineConfig:
    """Priorities with preemption; smaller numbers are more urgent and one step of difference is enough."""
    return engine_config(
        **{
            "enable_priority_scheduling": True,
            "enable_priority_preemption": True,
            "low_priority_values_first": True,
            "priority_preemption_threshold": 0,
            "schedule_conservativeness": 0.01,
            **options,
        }
    )


def add(run: StubRun, rid: str, number: int, tokens: int, outputs: int, priority: int) -> None:
    """A request whose output length nobody knows in advance, though it is `outputs`."""
    run.add(rid, prompt(number, tokens), outputs, priority=priority, ignore_eos=False, min_new_tokens=outputs)


@pytest.mark.parametrize("chunk", [None, 64])
@mixed_on_and_off
@pages_1_and_16
@pytest.mark.parametrize("radix", [True, False])
def test_fr_11_memory_refuses_the_urgent_request_and_somebody_gives_way(
    page_size: int, enable_mixed_chunk: bool, chunk: int | None, radix: bool
) -> None:
    """Rows are free, memory is not: in the step it arrives one request gives way, and the record says for what."""
    config = urgent_first(
        page_size=page_size,
        num_pages=208 // page_size,
        kv_accounting="exact",
        chunked_prefill_size=chunk,
        enable_mixed_chunk=enable_mixed_chunk,
        enable_radix=radix,
    )
    run, sink = started(config)
    add(run, "low1", 0, 85, 30, priority=5)
    add(run, "low2", 1, 75, 30, priority=5)
    while len(run.state.running) < 2:
        run.step()
    add(run, "urgent", 2, 60, 5, priority=0)
    run.step()
    check_state(run.state)
    step = plans(sink)[-1]
    refused, admitted = (event for event in decisions(sink, step.step) if event.rid == "urgent")
    assert refused.reason is Reason.KV_TOTAL_EXHAUSTED
    assert refused.need is not None
    assert refused.have is not None
    assert refused.need > refused.have
    assert admitted.selected_extend == 60
    assert step.preempted == ("low2",), "the latest of the least important"
    assert "low2" not in (*step.decodes, *step.sampling)
    run.run()
    assert all(run.end(rid) == ("length", "") for rid in run.requests)
    all_end_well(run)


@pages_1_and_16
def test_fr_11_nobody_gives_way_where_it_would_not_help(page_size: int) -> None:
    """Equally urgent, or too large for what all less important ones hold: a refusal as always, with its numbers."""
    config = urgent_first(page_size=page_size, num_pages=208 // page_size, kv_accounting="exact")
    run, sink = started(config)
    add(run, "low", 0, 60, 30, priority=5)
    add(run, "peer", 1, 90, 30, priority=0)
    while len(run.state.running) < 2:
        run.step()
    add(run, "large", 2, 100, 60, priority=0)
    for _ in range(3):
        run.step()
    assert not any(plan.preempted for plan in plans(sink))
    assert {event.reason for event in decisions(sink) if event.rid == "large"} == {Reason.KV_TOTAL_EXHAUSTED}
    run.run()
    all_end_well(run)


def test_fr_11_the_reference_preempts_for_a_row_only() -> None:
    """Under reference accounting the urgent request waits as it does in SGLang 0.5.23, with memory as its reason."""
    run, sink = started(urgent_first(page_size=1, num_pages=200))
    add(run, "low1", 0, 75, 30, priority=5)
    add(run, "low2", 1, 75, 30, priority=5)
    while len(run.state.running) < 2:
        run.step()
    add(run, "urgent", 2, 60, 5, priority=0)
    run.step()
    assert not plans(sink)[-1].preempted
    assert decisions(sink)[-1].reason is Reason.KV_TOTAL_EXHAUSTED
    run.run()
    all_end_well(run)


@both_accountings
@pytest.mark.parametrize("order", ["CABD", "ABDC"])
def test_fr_12_the_least_important_gives_way_and_the_others_keep_their_step(order: str, accounting: str) -> None:
    """A, B, C, D run and an urgent request needs a row: C is out of the batch, the others advance by one each."""
    priorities = {"A": 0, "B": 1, "C": 2, "D": 1}
    run, sink = started(urgent_first(num_pages=64, max_running_requests=4, kv_accounting=accounting))
    for name in order:
        add(run, name, ord(name) - 65, 20, 30, priority=priorities[name])
    while len(run.state.running) < 4:
        run.step()
    before = {rid: len(run.tokens(rid)) for rid in order}
    add(run, "urgent", 9, 20, 3, priority=0)
    run.step()
    check_state(run.state)
    step = plans(sink)[-1]
    assert step.preempted == ("C",)
    assert [row.rid for row in step.prefills] == ["urgent"]
    assert sorted(step.decodes) == ["A", "B", "D"]
    assert {rid: len(run.tokens(rid)) - before[rid] for rid in order} == {"A": 1, "B": 1, "C": 0, "D": 1}
    run.run()
    all_end_well(run)


@both_accountings
@pages_1_and_16
def test_fr_13_a_row_for_the_urgent_one_and_none_for_an_equal(page_size: int, accounting: str) -> None:
    """(a) one victim, admitted in that step; (b) equals never displace each other, whoever came first."""
    config = urgent_first(
        page_size=page_size, num_pages=1024 // page_size, max_running_requests=2, kv_accounting=accounting
    )
    run, sink = started(config)
    for number in range(3):
        add(run, f"equal{number}", number, 20, 20, priority=5)
    for _ in range(5):
        run.step()
    assert not any(plan.preempted for plan in plans(sink)), "(b)"
    add(run, "urgent", 9, 20, 3, priority=0)
    run.step()
    assert [len(plan.preempted) for plan in plans(sink)][-1] == 1, "(a)"
    assert [row.rid for row in plans(sink)[-1].prefills] == ["urgent"]
    run.run()
    assert sum(len(plan.preempted) for plan in plans(sink)) == 1
    all_end_well(run)


@both_accountings
def test_fr_13_nobody_gives_way_to_what_would_not_fit_then(accounting: str) -> None:
    """(c) Rows are out, and even with both victims' memory the urgent request would be refused: no preemption."""
    run, sink = started(
        urgent_first(page_size=1, num_pages=400, max_running_requests=3, kv_accounting=accounting, enable_radix=False)
    )
    add(run, "peer", 0, 250, 30, priority=0)
    for number in range(2):
        add(run, f"low{number}", number + 1, 20, 25, priority=5)
    while len(run.state.running) < 3:
        run.step()
    add(run, "urgent", 9, 200, 40, priority=0)
    for _ in range(10):
        run.step()
    assert run.end("peer") is None
    assert not any(plan.preempted for plan in plans(sink))
    run.run()
    all_end_well(run)


@both_accountings
@pages_1_and_16
def test_fr_13_between_two_preemptions_a_request_makes_progress(page_size: int, accounting: str) -> None:
    """An urgent request in every second step: whoever gives way again has produced a token since."""
    config = urgent_first(
        page_size=page_size, num_pages=512 // page_size, max_running_requests=2, kv_accounting=accounting
    )
    run, sink = started(config)
    for number in range(2):
        add(run, f"low{number}", number, 20, 12, priority=5)
    for number in range(24):
        if number % 2:
            add(run, f"urgent{number}", 10 + number, 20, 1 + number % 3, priority=number % 5)
        run.step()
        check_state(run.state)
    run.run()
    had: dict[str, int] = {}
    for event in sink.events:
        if isinstance(event, RequestTransitioned) and event.cause is Cause.PREEMPT:
            assert event.output_len > had.get(event.rid, 0)
            had[event.rid] = event.output_len
    assert had, "the scenario must preempt"
    all_end_well(run)


# --- FR-45, without HTTP (with it: tests/engine/server/test_queue_limits.py) --------------------------------------


def ends_of(outputs: list[TokenOutput]) -> list[tuple[str, FinishReason | None, str, int | None]]:
    return [(output.rid, output.finish, output.detail, output.token_id) for output in outputs]


@pages_1_and_16
@pytest.mark.parametrize("radix", [True, False])
def test_fr_45_whoever_waits_too_long_is_refused_once_and_holds_nothing(page_size: int, radix: bool) -> None:
    config = engine_config(page_size=page_size, num_pages=512 // page_size, max_running_requests=1, enable_radix=radix)
    run, sink = started(config)
    run.add("runs", prompt(0, 40), 30)
    run.step()
    run.add("early", prompt(1, 40), 3)
    run.step()
    run.add("late", prompt(2, 40), 3)
    run.step()
    assert run.engine.overdue(3_000_000) == []
    assert run.engine.overdue(2_000_000) == ["early"], "waited two steps of a millisecond"
    assert run.engine.overdue(1_000_000) == ["early", "late"]
    assert run.engine.overdue(0) == ["early", "late"], "who runs does not wait"
    assert run.engine.turn_away("early", Cause.QUEUE_TIMEOUT)
    assert not run.engine.turn_away("early", Cause.QUEUE_TIMEOUT)
    assert not run.engine.turn_away("runs", Cause.QUEUE_TIMEOUT)
    assert not run.engine.abort_request("early")
    outputs = run.step()
    assert ends_of(outputs)[0] == ("early", FinishReason.REFUSED, "queue_timeout", None)
    run.run()
    assert computed_tokens(sink, "early") == 0
    assert run.end("early") == ("refused", "queue_timeout")
    all_end_well(run)


def test_fr_45_a_request_that_ran_and_waits_again_is_not_turned_away() -> None:
    """A retracted request has work to lose: neither late, nor in the way of a more important one."""
    run, sink = started(urgent_first(num_pages=64, max_running_requests=1))
    add(run, "victim", 0, 20, 10, priority=5)
    run.step()
    add(run, "urgent", 1, 20, 10, priority=0)
    run.step()
    run.step()
    assert plans(sink)[-2].preempted == ("victim",) or plans(sink)[-1].preempted == ("victim",)
    add(run, "fresh", 2, 20, 3, priority=9)
    run.step()
    assert run.engine.overdue(0) == ["fresh"]
    assert run.engine.displaceable(0, 1) == ["fresh"]
    assert run.engine.displaceable(0, 2) == []
    run.run()
    all_end_well(run)


@pytest.mark.parametrize("low_first", [True, False])
def test_fr_45_only_the_strictly_less_important_is_displaced_the_latest_first(low_first: bool) -> None:
    config = engine_config(
        num_pages=64, max_running_requests=1, enable_priority_scheduling=True, low_priority_values_first=low_first
    )
    run, _ = started(config)
    sign = 1 if low_first else -1
    add(run, "runs", 0, 20, 9, priority=0)
    run.step()
    for number, (rid, rank) in enumerate([("b1", 3), ("c1", 7), ("b2", 3), ("c2", 7), ("a", 1)], start=1):
        add(run, rid, number, 20, 2, priority=rank * sign)
    run.add("none", prompt(8, 20), 2)
    assert run.engine.displaceable(7 * sign, 1) == ["none"], "without a priority: the least important"
    assert run.engine.displaceable(7 * sign, 2) == []
    assert run.engine.displaceable(3 * sign, 3) == ["none", "c2", "c1"]
    assert run.engine.displaceable(3 * sign, 4) == []
    assert run.engine.displaceable(2 * sign, 5) == ["none", "c2", "c1", "b2", "b1"]
    assert run.engine.displaceable(None, 1) == []
    run.run()
    all_end_well(run)


def test_fr_45_without_priority_scheduling_nobody_is_displaced() -> None:
    run, _ = started(engine_config(num_pages=64, max_running_requests=1))
    add(run, "runs", 0, 20, 9, priority=0)
    run.step()
    add(run, "waits", 1, 20, 9, priority=0)
    assert run.engine.displaceable(100, 1) == run.engine.displaceable(-100, 1) == []
    run.run()
    all_end_well(run)


@pytest.mark.parametrize("cause", [Cause.QUEUE_TIMEOUT, Cause.DISPLACED])
def test_fr_45_the_journal_has_the_cause_and_replays_the_same(tmp_path: Path, cause: Cause) -> None:
    """The decision came from outside the core: it is an input of the record, so a replay needs no clock."""
    config = engine_config(num_pages=64, max_running_requests=1)
    journal = JournalSink(tmp_path / "j.jsonl")
    run = StubRun(config, journal, InvariantChecker())
    run.add("runs", prompt(0, 40), 12)
    run.add("waits", prompt(1, 40), 3)
    for _ in range(4):
        run.step()
    assert run.engine.turn_away("waits", cause)
    run.run()
    journal.close()
    assert replay(tmp_path / "j.jsonl").verdict == "identical"
    story = explain(tmp_path / "j.jsonl", "waits")
    assert story.life.end is not None
    assert story.life.end.cause is cause
    told = [sentence.text for sentence in story.sentences]
    assert told[-1].startswith("Refused: ")
    assert not any("asked to abort" in text for text in told)
    all_end_well(run)


@pytest.mark.parametrize("cause", [Cause.ABORT, Cause.QUEUE_TIMEOUT, Cause.DISPLACED])
def test_fr_18_however_a_waiting_request_goes_it_leaves_nothing(cause: Cause) -> None:
    """There is no host tier to reserve in; what a waiting request may hold is nothing, a hundred times over."""
    run, sink = started(engine_config(num_pages=64, max_running_requests=1))
    shared = prompt(0, 100)
    run.add("warm", shared, 1)
    run.run()
    run.add("runs", prompt(1, 100), 400)
    run.step()
    before = run.kv.snapshot()
    for number in range(100):
        rid = f"w{number}"
        run.add(rid, [*shared, 40 + number % 20], 3)
        if number % 3 == 0:
            run.step()
            before = run.kv.snapshot()
        assert run.engine.abort_request(rid) if cause is Cause.ABORT else run.engine.turn_away(rid, cause)
        after = run.kv.snapshot()
        assert (after.owners, after.leases, after.free_rows) == (before.owners, before.leases, before.free_rows)
        assert [node.lock_count for node in after.nodes] == [node.lock_count for node in before.nodes]
    run.engine.abort_request("runs")
    run.add("last", [*shared, 99], 3)
    run.run()
    hits = {event.rid: event.prefix_len for event in decisions(sink) if event.selected_extend}
    assert hits["last"] == 96
    all_end_well(run)
