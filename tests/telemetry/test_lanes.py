"""Lanes show each request's life without a hole they cannot explain; passes say who moved in the queue, and why."""

from __future__ import annotations

import itertools

from hypothesis import given, settings

from engine.clock import VirtualClock
from engine.config import EngineConfig
from engine.request import RequestState
from telemetry.answers_lanes import MAX_SPANS
from telemetry.observe import Lane, PassRow
from telemetry.read_model import ReadModel
from tests.builders import engine_config
from tests.telemetry.live_run import TimedRun, busy, configs, operations, play


def watched(config: EngineConfig) -> tuple[ReadModel, TimedRun]:
    model = ReadModel(clock=VirtualClock())
    return model, TimedRun(config, model)


def is_sound(lane: Lane) -> None:
    """Spans stand in order, do not overlap, and lie between acceptance and end."""
    assert len(lane.spans) <= MAX_SPANS
    assert all(lane.accepted_ns <= span.start_ns < span.end_ns <= lane.end_ns for span in lane.spans)
    assert all(one.end_ns <= two.start_ns for one, two in itertools.pairwise(lane.spans))
    assert all(span.blocker is not None for span in lane.spans if span.kind == "waiting")


def agree(model: ReadModel) -> None:
    answer = model.lanes(50)
    accepted = [lane.accepted_ns for lane in answer.lanes]
    assert accepted == sorted(accepted)
    for lane in answer.lanes:
        is_sound(lane)
        found = model.request(lane.rid)
        assert found is not None
        assert found.lane == lane
        if lane.spans_left_out:
            continue
        chunks = [span.tokens for span in lane.spans if span.kind == "chunk"]
        # A chunk whose step took no time has no width.
        assert len(chunks) <= len(found.timeline.chunks)
        waited = sum(span.end_ns - span.start_ns for span in lane.spans if span.kind == "waiting")
        assert waited == sum(wait.end_ns - wait.start_ns for wait in found.timeline.waits)
        assert len(lane.retracted_ns) == found.request.retractions


@given(config=configs, ops=operations)
@settings(max_examples=30)
def test_spans_of_a_lane_never_overlap(config: EngineConfig, ops: list[tuple[object, ...]]) -> None:
    model, run = watched(config)
    play(run, ops, check=lambda: agree(model))


def test_nor_do_they_under_pressure_with_retractions() -> None:
    marks = 0
    for seed in range(6):
        config, ops = busy(seed)
        model, run = watched(config)
        play(run, ops, check=lambda model=model: agree(model))
        marks += sum(len(lane.retracted_ns) for lane in model.lanes(200).lanes)
    assert marks > 0


def test_one_prompt_in_chunks_has_its_chunks_and_then_decodes() -> None:
    model, run = watched(engine_config(page_size=1, chunked_prefill_size=4))
    run.add("r", 10, 3, ignore_eos=True)
    run.finish_all()
    (lane,) = model.lanes(10).lanes
    assert [(span.kind, span.tokens) for span in lane.spans] == [
        ("chunk", 4),
        ("chunk", 4),
        ("chunk", 2),
        ("decode", 0),
    ]
    assert lane.finish == "length"


def test_the_latest_arrivals_are_sent() -> None:
    model, run = watched(engine_config())
    for at in range(5):
        run.add(f"r{at}", 4, 2, ignore_eos=True)
        run.finish_all()
    answer = model.lanes(2)
    assert [lane.rid for lane in answer.lanes] == ["r3", "r4"]
    assert answer.total == 5


def passes_of(policy: str, **scheduler: object) -> list[PassRow]:
    model, run = watched(engine_config(schedule_policy=policy, max_running_requests=2, **scheduler))
    run.add("warm", 8, 1, ignore_eos=True)
    run.finish_all()
    for rid, length, most in (("a", 9, 3), ("b", 5, 9), ("c", 7, 5)):
        run.add(rid, length, most, ignore_eos=True)
    run.timed_step()
    return [row for row in model.passes(50).passes if row.candidates][-1:]


def test_first_come_first_served_moves_nobody() -> None:
    (row,) = passes_of("fcfs")
    assert row.order_key == "entry"
    assert [(move.rid, move.before, move.after, move.key) for move in row.moves[:2]] == [("a", 0, 0, 0), ("b", 1, 1, 1)]
    assert row.waiting_before == 3


def test_a_policy_that_sorts_says_what_it_sorted_by() -> None:
    (row,) = passes_of("lof")
    assert row.order_key == "max_new_tokens"
    assert [(move.rid, move.before, move.after, move.key) for move in row.moves[:2]] == [("b", 1, 0, 9), ("c", 2, 1, 5)]


@given(config=configs, ops=operations)
@settings(max_examples=30)
def test_places_before_and_after_are_places(config: EngineConfig, ops: list[tuple[object, ...]]) -> None:
    model, run = watched(config)
    waiting: list[int] = []
    play(run, ops, check=lambda: waiting.append(len(run.scheduler.state.waiting)))
    for row in model.passes(512).passes:
        before = [move.before for move in row.moves]
        after = [move.after for move in row.moves if move.after is not None]
        assert len(set(before)) == len(before)
        assert all(place < row.waiting_before for place in before)
        assert after == list(range(len(after)))


def test_the_place_of_a_request_is_its_place_by_entry() -> None:
    for seed in range(4):
        config, ops = busy(seed)
        model, run = watched(config)

        def check(model: ReadModel = model, run: TimedRun = run) -> None:
            queue = model.tracker.queue
            assert [queue.place(rid) for rid in queue.waiting] == list(range(len(queue.waiting)))
            gone = [rid for rid, r in run.scheduler.state.requests.items() if r.state is not RequestState.WAITING]
            assert all(queue.place(rid) is None for rid in gone)

        play(run, ops, check=check)
