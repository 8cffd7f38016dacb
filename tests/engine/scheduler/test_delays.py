"""Admission delays: what each changes, what it leaves in the record, and that a replay decides alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from engine.clock import VirtualClock
from engine.config import EngineConfig
from engine.events import AdmissionDecided, AnyEvent, RecordingSink, StepPlanned
from engine.executor.base import ForwardBatch, StepResult
from engine.executor.simulated import SimulatedExecutor
from engine.llm_engine import EngineRequest, LLMEngine
from engine.sampling_params import SamplingParams
from engine.scheduler.decision import Reason
from engine.scheduler.delays import (
    HISTORY_STEPS,
    LEAST_STEPS,
    StepHistory,
    StepModel,
    StepShape,
    choose_chunk,
    delay_of,
    shape_of,
)
from invariants import InvariantChecker
from telemetry.journal import JournalSink
from telemetry.replay import replay
from tests.builders import CoreRun, engine_config


class Fan:
    """Checker first, then the rest."""

    def __init__(self, *sinks: Any) -> None:
        self.sinks = sinks

    def emit(self, event: AnyEvent) -> None:
        for sink in self.sinks:
            sink.emit(event)


def checked(sink: RecordingSink, config: EngineConfig) -> CoreRun:
    return CoreRun(config, Fan(InvariantChecker(), sink))


def plans(sink: RecordingSink) -> list[StepPlanned]:
    return [event for event in sink.events if isinstance(event, StepPlanned)]


def delayed(sink: RecordingSink) -> list[AdmissionDecided]:
    return [e for e in sink.events if isinstance(e, AdmissionDecided) and e.reason is Reason.DELAYED]


# --- the prefill delayer ----------------------------------------------------------------------------------------------


def arrivals_one_by_one(**scheduler: Any) -> RecordingSink:
    """One request decodes; four short prompts come in four steps."""
    sink = RecordingSink()
    run = checked(sink, engine_config(num_pages=64, **scheduler))
    run.add("first", 20, 40)
    run.step()
    run.step()
    for index in range(4):
        run.add(f"r{index}", 20, 4)
        run.step()
    run.run()
    return sink


def admitting_steps(sink: RecordingSink) -> list[int]:
    """Prompts in each step that computed some."""
    return [len(plan.prefills) for plan in plans(sink) if plan.prefills]


def test_prefill_delayer_gathers_a_batch() -> None:
    assert admitting_steps(arrivals_one_by_one()) == [1, 1, 1, 1, 1]
    sink = arrivals_one_by_one(prefill_delay_max_passes=10, prefill_delay_until_waiting=3)
    # r3 comes after the batch, and nobody else comes: it waits all 10 passes.
    assert admitting_steps(sink) == [1, 3, 1]
    assert [(d.rid, d.need, d.have) for d in delayed(sink)[:2]] == [("r0", 3, 1), ("r0", 3, 2)]
    ends = [plan.pass_end for plan in plans(sink) if plan.pass_end and plan.pass_end.stopped_by is Reason.DELAYED]
    assert [(end.stop, end.rid, end.not_considered) for end in ends[:2]] == [("result", "r0", 0), ("result", "r0", 1)]
    assert [d.rid for d in delayed(sink)[2:]] == ["r3"] * 10


def test_prefill_delayer_gives_up_after_its_passes() -> None:
    sink = arrivals_one_by_one(prefill_delay_max_passes=2, prefill_delay_until_waiting=30)
    assert admitting_steps(sink) == [1, 3, 1]
    assert [d.have for d in delayed(sink)] == [1, 2, 1, 1]


def test_nothing_is_delayed_while_nothing_decodes() -> None:
    sink = RecordingSink()
    run = checked(sink, engine_config(prefill_delay_max_passes=9, prefill_delay_until_waiting=9, min_free_rows=32))
    run.add("only", 20, 4)
    assert run.step().prefills
    assert not delayed(sink)


def test_decodes_go_on_while_prompts_are_delayed() -> None:
    sink = arrivals_one_by_one(prefill_delay_max_passes=10, prefill_delay_until_waiting=3)
    assert all(plan.decodes for plan in plans(sink) if plan.pass_end and plan.pass_end.stopped_by is Reason.DELAYED)


def test_a_delay_does_not_hold_a_half_done_prompt() -> None:
    sink = RecordingSink()
    config = engine_config(prefill_delay_max_passes=50, prefill_delay_until_waiting=9, chunked_prefill_size=32)
    run = checked(sink, config)
    run.add("first", 16, 60)
    run.add("long", 100, 4)
    run.step()
    run.add("late", 20, 4)
    for _ in range(3):
        plan = run.step()
        assert [row.rid for row in plan.prefills] == ["long"]
    run.run()


# --- free rows --------------------------------------------------------------------------------------------------------


def interruptions(**scheduler: Any) -> tuple[int, RecordingSink]:
    """Eight requests of different lengths on four rows: steps in which decode shares with, or waits for, a prompt."""
    sink = RecordingSink()
    run = checked(sink, engine_config(max_running_requests=4, **scheduler))
    for index in range(8):
        run.add(f"r{index}", 20, 4 + 3 * index)
    run.run()
    return sum(bool(plan.prefills) for plan in plans(sink)), sink


def test_free_rows_make_fewer_interruptions() -> None:
    often, _ = interruptions()
    seldom, sink = interruptions(min_free_rows=3)
    assert seldom < often
    first = delayed(sink)[0]
    assert (first.need, first.have, first.selected_extend) == (3, 1, 0)
    assert first.remaining_total_before == first.remaining_total_after


# --- the dynamic chunk ------------------------------------------------------------------------------------------------

PER_QUERY_NS, PER_CONTEXT_NS, BASE_NS = 10_000, 50, 2_000_000


class TimedExecutor(SimulatedExecutor):
    """Steps take the time of a linear model on the virtual clock."""

    def __init__(self, config: EngineConfig, clock: VirtualClock) -> None:
        super().__init__(config)
        self._clock = clock

    def execute(self, batch: ForwardBatch) -> StepResult:
        query = int(batch.metadata.qo_indptr[-1])
        context = int(batch.metadata.seq_lens.sum())
        self._clock.advance_ns(BASE_NS + PER_QUERY_NS * query + PER_CONTEXT_NS * context)
        return super().execute(batch)


def long_prompts(sink: Any, **scheduler: Any) -> LLMEngine:
    clock = VirtualClock()
    config = engine_config(num_pages=1024, chunked_prefill_size=2048, **scheduler)
    engine = LLMEngine(config, executor=TimedExecutor(config, clock), clock=clock, sink=sink)
    for index in range(4):
        prompt = tuple((index * 31 + place * 7) % 400 for place in range(40))
        params = SamplingParams(max_new_tokens=200, ignore_eos=True)
        engine.add_request(EngineRequest(rid=f"d{index}", prompt_ids=prompt, params=params))
    for step in range(30):
        if step in (12, 20):
            prompt = tuple((step + place * 11) % 400 for place in range(3000))
            params = SamplingParams(max_new_tokens=4, ignore_eos=True)
            engine.add_request(EngineRequest(rid=f"long{step}", prompt_ids=prompt, params=params))
        engine.step()
    while engine.has_work:
        engine.step()
    return engine


def test_dynamic_chunk_meets_its_target() -> None:
    fixed, dynamic = RecordingSink(), RecordingSink()
    long_prompts(Fan(InvariantChecker(), fixed))
    long_prompts(Fan(InvariantChecker(), dynamic), target_step_ms=8.0)

    def worst(sink: RecordingSink) -> int:
        ends = {e.step: e.times.ready_ns - e.times.launched_ns for e in sink.events if hasattr(e, "times")}
        return max(ends[plan.step] for plan in plans(sink) if plan.kind.value == "mixed")

    assert worst(fixed) > 20_000_000
    assert worst(dynamic) <= 8_000_000
    chosen = [plan for plan in plans(dynamic) if plan.kind.value == "mixed"]
    assert all(plan.chunk_size is not None and plan.predicted_step_ns is not None for plan in chosen)
    assert all(plan.predicted_step_ns <= 8_000_000 for plan in chosen if plan.predicted_step_ns)
    assert all(plan.chunk_size is None for plan in plans(fixed))
    # Decode rows differ too little from each other to tell context from query; with prompts in the history it does.
    assert any((plan.chunk_size or 0) > 200 for plan in chosen)


def test_dynamic_chunk_never_falls_below_a_page() -> None:
    sink = RecordingSink()
    long_prompts(Fan(InvariantChecker(), sink), target_step_ms=0.001)
    pieces = [row.extend_len for plan in plans(sink) for row in plan.prefills if row.rid.startswith("long")]
    assert min(pieces) >= 8  # only the end of a prompt is shorter than a page: 3000 = 187 pages and 8
    assert pieces.count(16) > 100


def test_a_short_history_uses_the_configured_slice() -> None:
    history = StepHistory()
    for _ in range(LEAST_STEPS - 1):
        history.add(StepShape(10, 100), 1000)
    history.add(StepShape(0, 0), 5)  # an empty step tells nothing
    assert history.fit() is None
    assert choose_chunk(None, target_ns=1, most=512, riding=3, context_tokens=9, unit=16) == (512, None)


@given(
    base=st.integers(0, 5_000_000),
    query=st.integers(1, 100_000),
    context=st.integers(0, 1000),
    shapes=st.lists(st.tuples(st.integers(1, 4096), st.integers(1, 100_000)), min_size=12, max_size=200, unique=True),
)
def test_the_fit_finds_a_linear_law(base: int, query: int, context: int, shapes: list[tuple[int, int]]) -> None:
    history = StepHistory()
    for one in shapes:
        history.add(StepShape(*one), base + query * one[0] + context * one[1])
    assert len(history) <= HISTORY_STEPS
    model = history.fit()
    assert model is not None
    assert min(model) >= 0


def test_the_fit_is_exact_where_the_law_is() -> None:
    history = StepHistory()
    for index in range(40):
        shape = StepShape(1 + index * 37 % 500, 10 + index * 911 % 20_000)
        history.add(shape, BASE_NS + PER_QUERY_NS * shape.query_tokens + PER_CONTEXT_NS * shape.context_tokens)
    model = history.fit()
    assert model is not None
    assert model == pytest.approx((BASE_NS, PER_QUERY_NS, PER_CONTEXT_NS), rel=1e-6)
    # 8 ms: 2 base, 4 rows with 200 of context take 0.05, and 10,050 ns a prompt token leave 592, 37 pages.
    choice = choose_chunk(model, target_ns=8_000_000, most=2048, riding=4, context_tokens=200, unit=16)
    assert choice.chunk_tokens == 4 + 592
    assert choice.predicted_ns == pytest.approx(2_000_000 + 596 * 10_000 + 792 * 50, abs=2)


@given(
    target=st.integers(1, 10**8),
    most=st.integers(16, 4096),
    riding=st.integers(0, 300),
    model=st.builds(StepModel, st.floats(0, 1e7), st.floats(0, 1e5), st.floats(0, 1e3)),
)
def test_a_choice_is_within_a_page_and_the_configured_slice(
    target: int, most: int, riding: int, model: StepModel
) -> None:
    chunk, predicted = choose_chunk(model, target_ns=target, most=most, riding=riding, context_tokens=500, unit=16)
    assert chunk is not None
    assert predicted is not None
    assert min(most, riding + 16) <= chunk <= most
    if chunk > riding + 16:
        assert predicted <= target + 1


def test_the_shape_of_a_step() -> None:
    assert shape_of([(32, 16), (0, 5)], [41, 8]) == (23, 102)


# --- all of them ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "delays",
    [
        {"prefill_delay_max_passes": 3, "prefill_delay_until_waiting": 4},
        {"min_free_rows": 5, "max_running_requests": 6},
        {"target_step_ms": 6.0},
        {"target_step_ms": 4.0, "kv_accounting": "exact", "truncation_align_size": 32},
    ],
)
def test_a_replay_decides_alike(tmp_path: Path, delays: dict[str, Any]) -> None:
    path = tmp_path / "journal.jsonl"
    journal = JournalSink(path)
    long_prompts(journal, **delays)
    journal.close()
    report = replay(path)
    assert report.verdict == "identical", report
    assert report.steps > 50


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"prefill_delay_max_passes": 3}, ("prefill_delay_max_passes=3", "prefill_delay_until_waiting=None")),
        ({"prefill_delay_until_waiting": 3}, ("prefill_delay_max_passes=None", "prefill_delay_until_waiting=3")),
        ({"min_free_rows": 33}, ("min_free_rows=33", "max_running_requests=32")),
        ({"target_step_ms": 5, "chunked_prefill_size": None}, ("target_step_ms=5", "chunked_prefill_size=None")),
    ],
)
def test_contradictions_name_both_fields(settings: dict[str, Any], names: tuple[str, str]) -> None:
    with pytest.raises(ValidationError) as refused:
        engine_config(**settings)
    assert all(name in str(refused.value) for name in names)


def test_strategies_are_pure() -> None:
    config = engine_config(prefill_delay_max_passes=2, prefill_delay_until_waiting=5, min_free_rows=2).scheduler
    asked = {"waiting": 3, "running": 4, "passes": 1}
    assert delay_of(config, free_rows=1, **asked) == (2, 1, 1)
    assert delay_of(config, free_rows=2, **asked) == (5, 3, 2)
    assert delay_of(config, free_rows=2, waiting=3, running=4, passes=2) is None
    assert delay_of(config, free_rows=2, waiting=5, running=4, passes=0) is None
    assert delay_of(config, free_rows=0, waiting=3, running=0, passes=0) is None
