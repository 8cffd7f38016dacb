"""A run whose steps overlap: its record replays, its laws hold, and every view of it adds up."""

from __future__ import annotations

import json
import random
import re
from collections import deque
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from engine.clock import VirtualClock
from engine.config import EngineConfig
from engine.events import AnyEvent, FanOut, RecordingSink, StepCompleted, StepPlanned
from engine.executor.background import with_carried
from engine.executor.base import ForwardBatch, StepResult
from engine.executor.simulated import SimulatedExecutor
from engine.llm_engine import EngineRequest, LLMEngine
from engine.sampling_params import SamplingParams
from invariants import InvariantChecker
from telemetry.check import check
from telemetry.explain import explain
from telemetry.export.perfetto import ENGINE, export_trace
from telemetry.journal import JournalSink
from telemetry.metric_catalog import PHASES
from telemetry.metrics import MetricsSink
from telemetry.read_model import ReadModel
from telemetry.readings import readings_of
from telemetry.replay import replay
from telemetry.request_timeline import RequestTimeline
from telemetry.settings import ExportCommand
from telemetry.sim.cost_fit import StepSamples
from telemetry.spans.draft import SpanDraft
from telemetry.spans.sink import SpanSink
from tests.builders import engine_config
from tests.engine.stub_model import StubRun

_US = 1_000


class TimedDevice(SimulatedExecutor):
    """Computes beside the host: a batch begins when it is launched and the one before it is done."""

    def __init__(self, config: EngineConfig, clock: VirtualClock) -> None:
        super().__init__(config)
        self._clock = clock
        self._done_ns = 0
        self._launched: deque[tuple[ForwardBatch, int]] = deque()
        self.forwards: list[int] = []

    def allows_next(self, batch: ForwardBatch) -> bool:
        return len(batch.rids) > 0

    def launch(self, batch: ForwardBatch) -> None:
        self._clock.advance_ns(150 * _US)  # putting it together
        spent = 3_000 * _US + 40 * _US * (len(batch.token_ids) - len(batch.rids))
        self._done_ns = max(self._done_ns, self._clock.now_ns()) + spent
        self.forwards.append(spent)
        self._launched.append((batch, self._done_ns))

    def collect(self) -> StepResult:
        batch, done_ns = self._launched.popleft()
        self._clock.advance_ns(max(0, done_ns - self._clock.now_ns()))
        return self.execute(with_carried(batch, tuple(range(len(batch.rids)))))


class Spans:
    """Keeps what a span sink hands over."""

    def __init__(self) -> None:
        self.trees: list[list[SpanDraft]] = []

    def start(self, engine: object) -> None: ...

    def send(self, spans: list[SpanDraft]) -> None:
        self.trees.append(spans)

    def refuse(self, spans: int) -> None: ...

    def close(self) -> None: ...


class Run:
    """One run, heard by everybody."""

    def __init__(self, path: Path) -> None:
        scheduler = {"chunked_prefill_size": 64, "max_running_requests": 8, "enable_mixed_chunk": True}
        scheduler |= {"schedule_conservativeness": 0.05, "clip_max_new_tokens": 8, "schedule_policy": "lpm"}
        config = EngineConfig.model_validate(
            {
                "scheduler": scheduler,
                "cache": {"page_size": 16, "num_pages": 40},
                "executor": {"kind": "simulated", "overlap": True},
            }
        )
        self.clock = VirtualClock(1_000_000_000)
        self.device = TimedDevice(config, self.clock)
        self.recorded, self.checker = RecordingSink(), InvariantChecker()
        self.metrics, self.model = MetricsSink(clock=self.clock), ReadModel(clock=self.clock)
        self.spans = Spans()
        self.span_sink = SpanSink(self.spans, expects_responses=False, sample_ratio=1.0, max_traces_per_s=1e9)
        journal = JournalSink(path, clock=self.clock)
        sinks = (self.recorded, self.checker, journal, self.metrics, self.model, self.span_sink)
        self.engine = LLMEngine(config, executor=self.device, clock=self.clock, sink=FanOut(sinks), wall_ns=1)
        self.ended: list[RequestTimeline] = []
        told = self.metrics.on_finished
        self.metrics.on_finished = lambda request: (self.ended.append(request), told(request))[1]  # type: ignore[method-assign]  # heard and passed on
        self._play(random.Random(5))
        journal.close()
        self.span_sink.close()

    def _play(self, rng: random.Random) -> None:
        heads = [tuple(rng.randrange(100, 500) for _ in range(48)) for _ in range(2)]
        came = 0
        while came < 60 or self.engine.has_work:
            while came < 60 and rng.random() < 0.4:
                own = tuple(rng.randrange(100, 500) for _ in range(rng.choice((3, 30, 150))))
                params = SamplingParams(max_new_tokens=rng.choice((1, 2, 20, 60)), ignore_eos=rng.random() < 0.3)
                prompt = (*(heads[came % 2] if came % 3 else ()), *own)
                self.engine.add_request(EngineRequest(rid=f"r{came}", prompt_ids=prompt, params=params))
                came += 1
            if came % 9 == 8 and self.engine.scheduler.state.requests:
                self.engine.abort_request(rng.choice(sorted(self.engine.scheduler.state.requests)))
            self.engine.step()
            self.clock.advance_ns(80 * _US)
            assert self.checker.audit(self.engine.snapshot())
            assert self.checker.audit_readings(readings_of(self.metrics, also=self.ended))
            reading = self.span_sink.reading()
            assert reading is not None
            assert self.checker.audit_spans(reading)
            self.ended.clear()

    def of(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.recorded.events if isinstance(event, kind)]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(tmp_path_factory.mktemp("run") / "run.jsonl")


@pytest.fixture(scope="module")
def journal(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("again") / "run.jsonl"
    sink = JournalSink(path)
    for event in run.recorded.events:
        sink.emit(event)
    sink.close()
    return path


def test_the_record_replays_and_its_laws_hold(run: Run, journal: Path) -> None:
    steps = run.of(StepPlanned)
    assert sum(after.step > before.step for before, after in pairwise(steps)) == len(steps) - 1
    assert replay(journal).verdict == "identical"
    report = check(journal)
    assert (report.verdict, report.violations) == ("held", ())
    assert run.checker.total_violations == 0


def test_plans_come_before_the_outcomes_of_the_steps_before(run: Run) -> None:
    applied = ahead = 0
    for event in run.recorded.events:
        if isinstance(event, StepCompleted):
            assert event.step == applied + 1
            applied = event.step
        elif isinstance(event, StepPlanned):
            assert event.step <= applied + 2
            ahead += event.step == applied + 2
    assert ahead > len(run.of(StepPlanned)) // 2


def test_the_parts_of_a_first_token_add_up_and_forwards_are_not_counted_twice(run: Run) -> None:
    seen = 0
    for request in run.model.finished.values():
        if request.ttft_ns is None:
            continue
        assert sum(request.parts) == request.ttft_ns
        chunks = [chunk for chunk in request.chunks if chunk.launched_ns is not None and chunk.ready_ns is not None]
        for before, after in pairwise(chunks):
            assert before.ready_ns is not None
            assert after.launched_ns is not None
            assert before.ready_ns <= after.launched_ns, "one piece is computed after the other"
        seen += len(chunks) > 1
    assert seen > 5


def test_the_forward_of_a_piece_is_what_the_device_took(run: Run) -> None:
    plans = {event.step: event for event in run.of(StepPlanned)}
    computing = [step for step in plans if plans[step].kind != "idle"]
    spent = dict(zip(computing, run.device.forwards, strict=True))
    checked = 0
    for request in run.model.finished.values():
        for chunk in request.chunks:
            if chunk.launched_ns is not None and chunk.ready_ns is not None:
                # The host may come to look later than the device is ready, never earlier.
                assert chunk.ready_ns - chunk.launched_ns >= spent[chunk.step] - 1
                checked += 1
    assert checked > 20


def test_phases_of_the_loop_add_up_to_the_time_that_passed(run: Run) -> None:
    cells, at = run.metrics.snapshot(), run.metrics.at
    total = sum(cells[at["step_phase_seconds_total", phase]] for phase in PHASES)
    first, last = run.recorded.events[0], run.of(StepCompleted)[-1]
    assert total == last.times.applied_ns - first.t_ns


def test_no_span_ends_before_it_begins_and_pieces_come_one_after_the_other(run: Run) -> None:
    spans = [span for tree in run.spans.trees for span in tree]
    assert len(spans) > 200
    assert all(span.end_ns >= span.start_ns for span in spans)


def test_spans_of_a_lane_do_not_overlap(run: Run) -> None:
    lanes = run.model.lanes(200).lanes
    assert lanes
    for lane in lanes:
        for before, after in pairwise(lane.spans):
            assert before.end_ns <= after.start_ns, lane.rid


def test_steps_that_overlap_lie_on_two_tracks(journal: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    export_trace(ExportCommand(journal=journal, perfetto=trace), trace)
    steps = [
        (entry["tid"], entry["ts"], entry["ts"] + entry["dur"])
        for entry in json.loads(trace.read_text())["traceEvents"]
        if entry["ph"] == "X" and entry["pid"] == ENGINE and entry["name"] == "step"
    ]
    assert {tid for tid, _, _ in steps} == {1, 2}
    for track in (1, 2):
        ends = sorted((start, end) for tid, start, end in steps if tid == track)
        assert all(before[1] <= after[0] + 1e-6 for before, after in pairwise(ends))


def test_a_cost_model_counts_only_what_the_device_waited_for(run: Run) -> None:
    samples = StepSamples()
    for event in run.recorded.events:
        samples.emit(event)
    _, forward_ns, host_ns = samples.table()
    wall = run.of(StepCompleted)[-1].t_ns - run.of(StepPlanned)[0].t_ns
    assert 0.9 * wall < forward_ns.sum() + host_ns.sum() < 1.1 * wall
    assert host_ns.sum() < 0.2 * forward_ns.sum()


def test_an_explanation_tells_the_first_token_once(run: Run) -> None:
    whole: Callable[[str], Any] = run.model.explain
    for rid in list(run.model.finished)[:20]:
        told = whole(rid)
        assert told is not None
        assert told.sentences


def test_the_shares_of_a_first_token_are_a_whole(run: Run, journal: Path) -> None:
    """Of a prompt in pieces: the step of one is planned while the step of the one before is computed."""
    seen = 0
    for rid, request in run.model.finished.items():
        if request.ttft_ns is None or len(request.chunks) < 2 or request.num_retractions:
            continue
        line = next(one.text for one in explain(journal, rid).sentences if "first token. TTFT" in one.text)
        shares = [int(share) for share in re.findall(r"\((\d+) %\)", line)]
        assert abs(sum(shares) - 100) <= len(shares), line
        seen += 1
    assert seen > 5


def test_every_event_is_known_to_the_readers(run: Run) -> None:
    events: list[AnyEvent] = run.recorded.events
    assert [event.seq for event in events] == list(range(len(events)))


def test_a_check_up_to_a_step_hears_its_outcome(run: Run, journal: Path) -> None:
    until = next(event.step for event in run.of(StepPlanned) if event.step > 40)
    report = check(journal, until_step=until)
    heard = run.recorded.events[: report.events]
    assert heard[-1].step == until
    assert isinstance(heard[-1], StepCompleted)


def test_a_step_says_how_much_of_it_the_step_before_was_computed(run: Run, journal: Path) -> None:
    done = {event.step: event.times for event in run.of(StepCompleted)}
    behind_ns = {step: max(0, done[step - 1].ready_ns - done[step].started_ns) for step in done if step > 1} | {1: 0}
    shown = [row for row in run.model.passes(400).passes if row.step_s is not None]
    assert all(row.behind_s == behind_ns[row.step] / 1e9 for row in shown[1:])
    assert sum(row.behind_s > 0 for row in shown) > 100
    for row in shown:
        assert row.step_s is not None
        assert row.behind_s <= row.step_s
    chunks = [chunk for rid in list(run.model.finished)[:20] for chunk in explain(journal, rid).life.chunks]
    assert [chunk.behind_ns for chunk in chunks] == [behind_ns[chunk.step] for chunk in chunks]
    assert sum(chunk.behind_ns > 0 for chunk in chunks) > 5


def test_who_is_pushed_back_and_then_fails_leaves_with_the_tokens_that_it_came_back_with() -> None:
    """Its last token was counted when its step was planned, and never came; the queue held it with that token."""
    config = engine_config(
        overlap=True,
        page_size=4,
        enable_priority_scheduling=True,
        enable_priority_preemption=True,
        priority_preemption_threshold=0,
        max_running_requests=1,
    )
    metrics, checker = MetricsSink(clock=VirtualClock()), InvariantChecker()
    run = StubRun(config, metrics, checker)
    run.add("low", range(40, 49), 40, priority=0)
    run.step()
    run.step()
    run.add("high", range(60, 69), 3, priority=9)
    run.add("other", range(80, 90), 3, priority=0)
    run.model.fail_next = True
    run.step()
    assert run.end("low") == ("error", "executor_failed")
    assert metrics.snapshot()[metrics.at["waiting_tokens", ""]] == 10 == run.state.waiting_tokens
    assert checker.audit_readings(readings_of(metrics))
