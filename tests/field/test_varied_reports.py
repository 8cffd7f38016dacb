"""Reported faults again with other numbers and settings than their own: FR-01, 03, 05, 06, 07, 12, 14, 33, 40."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from engine.clock import VirtualClock
from engine.events import AdmissionDecided, FanOut, RecordingSink
from engine.scheduler.decision import Guard, Reason
from invariants import InvariantChecker
from telemetry.journal_reader import JournalReader
from telemetry.metrics import MetricsSink
from telemetry.schema_events import RequestArrivedRecord, RequestTransitionedRecord
from tests.builders import engine_config
from tests.engine.stub_model import StubRun
from tests.field.test_admission_reports import (
    all_end_well,
    computed_tokens,
    decisions,
    mixed_on_and_off,
    plans,
    prompt,
    retractions,
    started,
)
from tests.field.test_queue_reports import add, both_accountings, urgent_first
from tests.field.whole import whole
from tests.stateful.laws import check_state
from tests.telemetry.test_read_model import Watched

chunk_on_and_off = pytest.mark.parametrize("chunk", [None, 64])
radix_on_and_off = pytest.mark.parametrize("radix", [True, False])


@both_accountings
@radix_on_and_off
@mixed_on_and_off
@chunk_on_and_off
@pytest.mark.parametrize(("page_size", "tokens"), [(2, 1), (4, 3), (16, 3), (64, 10)])
def test_fr_01_a_burst_never_takes_more_pages_than_there_are(
    page_size: int, tokens: int, chunk: int | None, enable_mixed_chunk: bool, radix: bool, accounting: str
) -> None:
    """Four pages and a spare, nine short prompts: no allocation misses, and who is refused says need and have."""
    config = engine_config(
        page_size=page_size,
        num_pages=5,
        enable_radix=radix,
        kv_accounting=accounting,
        chunked_prefill_size=chunk,
        enable_mixed_chunk=enable_mixed_chunk,
    )
    run, sink = started(config)
    for number in range(9):
        run.add(f"r{number}", prompt(number, tokens), 2, ignore_eos=False, min_new_tokens=2)
    run.run()
    assert not any(plan.claim_failed for plan in plans(sink))
    assert all(len(plan.prefills) <= 5 for plan in plans(sink))
    refused = [event for event in decisions(sink) if event.reason is Reason.KV_TOTAL_EXHAUSTED]
    assert refused or chunk == page_size, "a chunk of one page is spent before the memory is"
    assert all(event.need is not None and event.have is not None and event.need >= event.have for event in refused)
    all_end_well(run)


@pytest.mark.parametrize("page_size", [1, 16])
@mixed_on_and_off
@both_accountings
def test_fr_03_one_miss_is_one_failure_in_the_numbers(
    page_size: int, enable_mixed_chunk: bool, accounting: str
) -> None:
    metrics = MetricsSink(clock=VirtualClock())
    config = engine_config(
        page_size=page_size,
        num_pages=640 // page_size,
        enable_mixed_chunk=enable_mixed_chunk,
        kv_accounting=accounting,
    )
    run = StubRun(config, metrics, InvariantChecker())
    for number in range(3):
        run.add(f"r{number}", prompt(number, 40), 3)
    left = [True]
    run.kv.allocation_fault = lambda _kind: bool(left) and left.pop()
    run.run()
    cells, at = metrics.snapshot(), metrics.at
    failures = {caller: cells[at["kv_claim_failures_total", caller]] for caller in ("prefill", "decode")}
    assert failures == {"prefill": 1, "decode": 0}
    assert cells[at["guard_activations_total", Guard.ALLOC_MISS]] == 1
    all_end_well(run)


@pytest.mark.parametrize("page_size", [1, 4, 16])
@mixed_on_and_off
@chunk_on_and_off
@radix_on_and_off
def test_fr_05_counted_exactly_a_lone_request_uses_the_pool_to_its_last_page(
    page_size: int, chunk: int | None, enable_mixed_chunk: bool, radix: bool
) -> None:
    """64 tokens of pool, 40 of prompt, 60 wanted: one end at the wall, nothing computed twice, the next one served."""
    config = engine_config(
        page_size=page_size,
        num_pages=64 // page_size,
        kv_accounting="exact",
        chunked_prefill_size=chunk,
        enable_mixed_chunk=enable_mixed_chunk,
        enable_radix=radix,
    )
    run, sink = started(config)
    run.add("r", prompt(0, 40), 60, ignore_eos=False, min_new_tokens=60)
    run.run(max_steps=100)
    assert run.end("r") == ("length", "kv_pool_exhausted")
    assert len(run.tokens("r")) == 64 - 40 + 1, "the last output needs no place"
    assert computed_tokens(sink) <= 2 * 40
    assert len(retractions(sink)) <= 1
    run.add("s", prompt(1, 10), 3)
    run.run()
    assert run.end("s") == ("length", "")
    all_end_well(run)


@both_accountings
@mixed_on_and_off
@pytest.mark.parametrize("page_size", [1, 16])
def test_fr_06_three_long_prompts_take_turns(page_size: int, enable_mixed_chunk: bool, accounting: str) -> None:
    config = engine_config(
        page_size=page_size,
        num_pages=1200 // page_size,
        chunked_prefill_size=128,
        enable_mixed_chunk=enable_mixed_chunk,
        kv_accounting=accounting,
    )
    run, sink = started(config)
    for number in range(3):
        run.add(f"r{number}", prompt(number, 700), 50, ignore_eos=False, min_new_tokens=50)
    run.run()
    assert computed_tokens(sink) <= 1.2 * 2100
    assert max(Counter(retractions(sink)).values(), default=0) <= 1
    all_end_well(run)


@both_accountings
@mixed_on_and_off
@pytest.mark.parametrize(("page_size", "length"), [(1, 7), (2, 8), (16, 48), (64, 64)])
@pytest.mark.parametrize("chunk", [None, 64])
def test_fr_07_whole_prompts_cached_at_any_page_size(
    page_size: int, length: int, chunk: int | None, enable_mixed_chunk: bool, accounting: str
) -> None:
    config = engine_config(
        page_size=page_size,
        num_pages=2048 // page_size,
        chunked_prefill_size=chunk,
        enable_mixed_chunk=enable_mixed_chunk,
        kv_accounting=accounting,
    )
    run, sink = started(config)
    base = prompt(0, length + 2)
    for rid, tokens in (("first", length), ("again", length), ("longer", length + 1), ("shorter", length - 1)):
        run.add(rid, base[:tokens], 3)
        run.run()
    for twin in ("twin1", "twin2"):
        run.add(twin, base[:length], 3)
    run.run()
    for rid in run.requests:
        pieces = [event for event in decisions(sink) if event.rid == rid and event.selected_extend]
        assert all(piece.selected_extend >= 1 for piece in pieces)
        assert pieces[0].prefix_len + sum(p.selected_extend for p in pieces) == len(run.requests[rid].prompt_ids)
    all_end_well(run)


@mixed_on_and_off
@pytest.mark.parametrize("page_size", [1, 16])
def test_fr_12_under_priorities_a_retraction_for_memory_costs_nobody_else_a_step(
    page_size: int, enable_mixed_chunk: bool
) -> None:
    config = urgent_first(page_size=page_size, num_pages=96 // page_size, enable_mixed_chunk=enable_mixed_chunk)
    run, sink = started(config)
    for rid, priority in (("C", 2), ("A", 0), ("B", 1), ("D", 1)):
        add(run, rid, ord(rid) - 65, 12, 40, priority)
    for _ in range(400):
        if not run.engine.has_work:
            break
        before = {request.rid: len(run.tokens(request.rid)) for request in run.state.live_running}
        run.step()
        check_state(run.state)
        plan = plans(sink)[-1]
        victims = [*[victim.rid for victim in plan.retractions], *plan.preempted]
        assert len(set(victims)) == len(victims)
        assert not set(victims) & {*plan.decodes, *plan.sampling}
        if victims and not plan.prefills:
            stayed = [rid for rid in before if rid not in victims]
            assert sorted(plan.decodes) == sorted(stayed)
            assert all(len(run.tokens(rid)) == before[rid] + 1 for rid in stayed)
    assert retractions(sink), "the scenario must retract"
    all_end_well(run)


@both_accountings
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("policy", ["lpm", "shortest-prefill-first", "dfs-weight"])
@pytest.mark.parametrize("incremental", [True, False])
def test_fr_14_a_bound_on_overtakes_holds_under_every_order_by_prefix(
    page_size: int, policy: str, accounting: str, incremental: bool
) -> None:
    """A hot request arrives in every step, a cold one in the fifth: admitted at the latest after eight were first."""
    config = engine_config(
        page_size=page_size,
        num_pages=2048 // page_size,
        schedule_policy=policy,
        max_overtakes=8,
        max_running_requests=2,
        kv_accounting=accounting,
        incremental_order=incremental,
        chunked_prefill_size=64,
    )
    run, sink = started(config)
    hot = prompt(0, 64)
    for number in range(60):
        run.add(f"hot{number}", [*hot, 40 + number % 50, 33 + number % 60], 3)
        if number == 5:
            run.add("cold", prompt(7, 90), 3)
        run.step()
    cold = [event for event in decisions(sink) if event.rid == "cold"]
    admitted = next(event for event in cold if event.selected_extend)
    assert admitted.times_passed_over <= 8
    assert {plan.active_policy for plan in plans(sink) if plan.active_policy} == {policy}, "the rule is in the record"
    run.run()
    all_end_well(run)


def test_fr_33_who_waits_behind_a_more_important_one_names_it() -> None:
    """Priority as the limit: the important one lacks memory and ends the pass; who is behind says behind whom."""
    watched = Watched(engine_config(num_pages=20, page_size=4, enable_priority_scheduling=True, schedule_policy="fcfs"))
    run = watched.run
    run.add("runs", 30, 30, ignore_eos=True, priority=5)
    run.timed_step()
    run.add("small", 4, 2, priority=1)
    run.add("important", 30, 10, priority=9)
    run.timed_step()
    entries = watched.entries()
    assert entries["important"].blocker == "kv_total"
    assert (entries["small"].blocker, entries["small"].who_stopped) == ("order", "important")
    assert entries["small"].priority == 1
    assert [entries[rid].position for rid in ("important", "small")] == [0, 1]


@pytest.mark.parametrize("stream", [True, False])
def test_fr_40_usage_is_what_the_record_says(tmp_path: Path, stream: bool) -> None:
    """The numbers of the answer and those of the journal are the same, for each choice and together."""
    with whole(tmp_path, scheduler={"chunked_prefill_size": 64}) as live:
        options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        answer = live.post(prompt=["a" * 100, "bb"], n=2, max_tokens=4, ignore_eos=True, **options)
        assert answer.status_code == 200
        if stream:
            last = answer.text.split("\n\n")[-3].removeprefix("data: ")
            usage = json.loads(last)["usage"]
        else:
            usage = answer.json()["usage"]
    records = list(JournalReader(tmp_path).records())
    arrived = [record for record in records if isinstance(record, RequestArrivedRecord)]
    ended = [r for r in records if isinstance(r, RequestTransitionedRecord) and r.target == "finished"]
    assert len(arrived) == len(ended) == 4
    assert usage["completion_tokens"] == sum(record.output_len for record in ended) == 16
    assert usage["prompt_tokens"] == sum(record.prompt_len for record in arrived) // 2 == 102


def test_fr_09_budgets_only_shrink_within_a_pass_whatever_comes() -> None:
    """Twelve prompts of odd sizes: each record leaves at most what the one before it left, in every ledger."""
    sink = RecordingSink()
    config = engine_config(
        page_size=16, num_pages=128, chunked_prefill_size=96, max_prefill_tokens=200, kv_accounting="exact"
    )
    run = StubRun(config, FanOut((sink, InvariantChecker())))
    for number in range(12):
        run.add(f"r{number}", prompt(number, 7 + 13 * number % 90), 4)
    run.run()
    for step in range(1, run.engine.steps_done + 1):
        found = [e for e in sink.events if isinstance(e, AdmissionDecided) and e.step == step]
        for before, after in pairwise(found):
            assert after.rem_input_before <= before.rem_input_after
            assert (after.rem_chunk_before or 0) <= (before.rem_chunk_after or 0)
            assert after.remaining_total_before <= before.remaining_total_after
    all_end_well(run)
