"""Overlapped steps: the same answers, whatever is in flight when it happens."""

from __future__ import annotations

from typing import Any

import pytest

from engine.errors import ConfigError
from engine.events import RecordingSink, RequestTransitioned, StepCompleted, StepPlanned
from engine.llm_engine import LLMEngine
from engine.scheduler.plan import StepKind
from invariants import InvariantChecker
from tests.builders import engine_config
from tests.engine.stub_model import StubRun
from tests.stateful.laws import check_state


def prompt(seed: int, length: int) -> list[int]:
    return [32 + (seed * 31 + i * i) % 90 for i in range(length)]


def overlapped(sink: RecordingSink | None = None, **changes: Any) -> StubRun:
    settings = {"page_size": 4, "num_pages": 64, "chunked_prefill_size": 32, "overlap": True}
    return StubRun(engine_config(**(settings | changes)), *([] if sink is None else [sink]))


def drain(run: StubRun, most: int = 1000) -> None:
    for _ in range(most):
        if not run.engine.has_work:
            run.assert_nothing_held()
            for rid in run.requests:
                run.assert_right_tokens(rid)
            return
        run.step()
        check_state(run.state)
    raise AssertionError(f"unfinished: {sorted(run.state.requests)}")


def test_a_step_is_planned_before_the_outcome_of_the_one_before() -> None:
    sink = RecordingSink()
    run = overlapped(sink)
    run.add("a", prompt(1, 10), 4)
    drain(run)
    order = [(type(e).__name__, e.step) for e in sink.events if isinstance(e, StepPlanned | StepCompleted)]
    assert order[:6] == [
        ("StepPlanned", 1),
        ("StepPlanned", 2),
        ("StepCompleted", 1),
        ("StepPlanned", 3),
        ("StepCompleted", 2),
        ("StepPlanned", 4),
    ]


@pytest.mark.parametrize("max_new", [1, 2, 5])
@pytest.mark.parametrize("ignore_eos", [True, False])
@pytest.mark.parametrize("chunk", [8, None])
@pytest.mark.parametrize("mixed", [True, False])
def test_everyone_gets_his_own_tokens(max_new: int, ignore_eos: bool, chunk: int | None, mixed: bool) -> None:
    run = overlapped(chunked_prefill_size=chunk, enable_mixed_chunk=mixed, max_running_requests=3)
    for index in range(8):
        run.add(f"r{index}", prompt(index % 3, 5 + 7 * index), max_new, ignore_eos=ignore_eos)
    drain(run)
    assert all(run.end(rid) is not None for rid in run.requests)


def test_no_step_is_planned_for_a_token_beyond_the_last() -> None:
    sink = RecordingSink()
    run = overlapped(sink)
    run.add("a", prompt(1, 10), 3)
    drain(run)
    sampled = sum(len(event.sampling) for event in sink.events if isinstance(event, StepPlanned))
    assert sampled == 3


def test_the_row_of_a_request_that_a_token_ended_reaches_nobody() -> None:
    sink = RecordingSink()
    run = overlapped(sink)
    for seed in range(12):
        run.add(f"r{seed}", prompt(seed, 9), 40, stop_token_ids=(40, 41, 42, 60, 61, 62, 80, 81))
    drain(run)
    planned = sum(len(event.sampling) for event in sink.events if isinstance(event, StepPlanned))
    told = sum(len(event.rows) for event in sink.events if isinstance(event, StepCompleted))
    assert planned > told == sum(len(run.tokens(rid)) for rid in run.requests)


def test_an_id_that_ended_may_be_used_again_while_its_row_is_in_flight() -> None:
    run = overlapped()
    stops = tuple(range(32, 128))
    run.add("a", prompt(1, 9), 40, stop_token_ids=stops)
    run.add("b", prompt(2, 9), 6)
    while run.end("a") is None:
        run.step()
    assert [flight.void for flight in run.state.flights] == [{"a"}]
    first = run.outputs.pop("a")
    run.add("a", prompt(3, 9), 3)
    drain(run)
    assert len(first) == 1
    assert len(run.tokens("a")) == 3


@pytest.mark.parametrize("steps", range(1, 9))
def test_an_abort_at_any_moment_ends_once(steps: int) -> None:
    run = overlapped(chunked_prefill_size=8, max_running_requests=2)
    for index in range(4):
        run.add(f"r{index}", prompt(index, 20), 5)
    for _ in range(steps):
        run.step()
    for rid in sorted(run.state.requests)[::2]:
        assert run.engine.abort_request(rid)
    drain(run)


@pytest.mark.parametrize("at_launch", [False, True])
@pytest.mark.parametrize("steps", range(1, 9))
def test_a_failure_ends_the_members_of_its_step_alone(steps: int, at_launch: bool) -> None:
    run = overlapped(chunked_prefill_size=8, max_running_requests=3)
    for index in range(5):
        run.add(f"r{index}", prompt(index, 20), 6)
    for _ in range(steps):
        run.step()
    if at_launch:
        run.late.fail_next_launch = True
    else:
        run.model.fail_next = True
    drain(run)
    ends = [run.end(rid) for rid in run.requests]
    assert ("error", "executor_failed") in ends
    assert ("length", "") in ends


@pytest.mark.parametrize("accounting", ["reference", "exact"])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_under_pressure_retractions_keep_what_was_said(accounting: str, page_size: int) -> None:
    sink = RecordingSink()
    run = overlapped(
        sink,
        page_size=page_size,
        num_pages=320 // page_size,
        chunked_prefill_size=48,
        kv_accounting=accounting,
        schedule_conservativeness=0.05,
        schedule_policy="lpm",
        clip_max_new_tokens=8,
        max_running_requests=6,
    )
    for index in range(16):
        run.add(f"r{index}", prompt(index % 4, 20 + 5 * (index % 5)), 90, ignore_eos=index % 2 == 0)
    drain(run)
    if accounting == "reference":
        assert any(event.retractions for event in sink.events if isinstance(event, StepPlanned))


def test_a_token_may_end_a_request_that_was_pushed_back_while_it_was_under_way() -> None:
    sink, checker = RecordingSink(), InvariantChecker()
    run = StubRun(
        engine_config(
            overlap=True,
            page_size=4,
            enable_priority_scheduling=True,
            enable_priority_preemption=True,
            priority_preemption_threshold=0,
            max_running_requests=1,
        ),
        sink,
        checker,
    )
    run.add("low", prompt(1, 9), 40, priority=0, stop_token_ids=tuple(range(32, 128)), min_new_tokens=2)
    run.step()
    run.step()
    run.add("high", prompt(2, 9), 3, priority=9)
    drain(run)
    assert run.end("low") == ("stop", "stop_token")
    assert len(run.tokens("low")) == 2
    ends = [event for event in sink.events if isinstance(event, RequestTransitioned) and event.rid == "low"][-2:]
    assert [(event.source, event.target, event.cause) for event in ends] == [
        ("decode", "waiting", "preempt"),
        ("waiting", "finished", "stop"),
    ]
    assert checker.total_violations == 0


def test_idle_steps_are_as_few_as_without() -> None:
    kinds = []
    for overlap in (False, True):
        sink = RecordingSink()
        run = overlapped(sink, overlap=overlap)
        run.add("a", prompt(1, 40), 4)
        drain(run)
        kinds.append([event.kind for event in sink.events if isinstance(event, StepPlanned)])
    assert kinds[0] == kinds[1]
    assert kinds[0].count(StepKind.IDLE) == 1


@pytest.mark.parametrize("length", [10, 40], ids=["decoding", "in pieces"])
def test_nothing_is_computed_ahead_for_those_alone_whose_end_was_asked_for(length: int) -> None:
    sink = RecordingSink()
    run = overlapped(sink, chunked_prefill_size=8)
    for index in range(2):
        run.add(f"r{index}", prompt(index, length), 9)
    run.step()
    run.step()
    planned = run.state.step
    for rid in list(run.state.requests):
        assert run.engine.abort_request(rid)
    drain(run)
    computing = [e for e in sink.events if isinstance(e, StepPlanned) and e.kind is not StepKind.IDLE]
    assert computing[-1].step == planned


def test_a_step_that_only_brings_in_is_progress() -> None:
    """All that run leave, and somebody waits for their rows: who drives the engine must not rest before it looks."""
    run = overlapped(max_running_requests=1)
    for index in range(3):
        run.add(f"r{index}", prompt(index, 9), 2)
    while run.state.requests:
        before = run.engine.moves
        run.step()
        assert run.engine.moves > before
    before = run.engine.moves
    drain(run)
    assert run.engine.moves == before


def test_an_executor_that_cannot_overlap_is_refused() -> None:
    run = overlapped(overlap=False)
    with pytest.raises(ConfigError, match=r"executor\.overlap"):
        LLMEngine(engine_config(overlap=True, page_size=4), executor=run.model, clock=run.clock, sink=RecordingSink())
