"""Laws of spans: whoever builds them may lag behind, and is compared as of the event that it has come to."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from engine.events import AnyEvent, FanOut, RequestArrived, ResponseSent
from engine.executor.simulated import SimulatedExecutor
from engine.llm_engine import EngineRequest, LLMEngine
from engine.sampling_params import SamplingParams
from engine.server.engine_thread import EngineThread
from invariants import InvariantChecker, OnViolation
from invariants import span_laws as laws
from invariants.span_laws import SpanReading, SpanTimes, TreeReading
from telemetry.auditor import Auditor
from telemetry.buffered import BufferedSink
from telemetry.spans import ledger, sink
from telemetry.spans.sink import SpanSink
from tests.builders import CoreRun, engine_config
from tests.sabotage.scenario import Nowhere
from tests.telemetry.test_audited_metrics import TickingClock


def spans_of(*, expects_responses: bool = False, rate: float = 1_000.0) -> SpanSink:
    return SpanSink(Nowhere(), expects_responses=expects_responses, sample_ratio=0.5, max_traces_per_s=rate)


class Behind:
    """Feeds a sink some events after they came, as a thread of its own does."""

    def __init__(self, listener: SpanSink) -> None:
        self.listener = listener
        self.queue: deque[AnyEvent] = deque()

    def emit(self, event: AnyEvent) -> None:
        self.queue.append(event)

    def feed(self, events: int) -> None:
        for _ in range(min(events, len(self.queue))):
            self.listener.emit(self.queue.popleft())


class Rig:
    """Engine core, checker and span sink; responses are told by hand, in the numbers of the one stream."""

    def __init__(self, *, mode: OnViolation = "raise", **options: Any) -> None:
        self.checker = InvariantChecker(on_violation=mode)
        self.spans = spans_of(**options)
        self.behind = Behind(self.spans)
        self.told = 0
        self.run = CoreRun(engine_config(num_pages=12, max_running_requests=3, clip_max_new_tokens=4), self)

    def emit(self, event: AnyEvent) -> None:
        self.last = replace(event, seq=self.told)
        self.told += 1
        for listener in (self.checker, self.behind):
            listener.emit(self.last)

    def respond(self, rid: str) -> None:
        at = self.last.t_ns
        self.emit(ResponseSent(0, self.last.step, at, rid, at, at, 10, 0, False))

    def compare(self) -> bool:
        """False where nothing could be compared: between an end and the step that it is the end of."""
        reading = self.spans.reading()
        return reading is not None and self.checker.audit_spans(reading)


STEPS = st.lists(
    st.tuples(st.sampled_from(("add", "step", "step", "abort", "respond", "read")), st.integers(0, 40)), max_size=60
)


# Too slow: an example is the life of a whole engine.
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(moves=STEPS, responds=st.booleans(), rate=st.sampled_from((1.0, 1_000.0)))
def test_a_sink_that_lags_behind_agrees_as_of_its_own_event(moves: Any, responds: bool, rate: float) -> None:
    rig = Rig(expects_responses=responds, rate=rate)
    came: list[str] = []
    answered: set[str] = set()
    read = 0
    for move, number in moves:
        live = list(rig.run.scheduler.state.requests)
        if move == "add" and len(live) < 12:
            rid = f"r{number % 9}"  # ids are used again once they have ended
            if rid not in live:
                rig.run.now_ns += 1  # no two lives of one id begin at the same time
                rig.run.add(rid, 5 + number, 1 + number % 7, ignore_eos=True)
                came.append(rid)
                answered.discard(rid)
        elif move == "step":
            rig.run.step(fail=number == 13)
        elif move == "abort" and live:
            rig.run.abort(live[number % len(live)])
        elif move == "respond" and came and responds:
            rid = came[number % len(came)]
            if rid not in answered:
                answered.add(rid)
                rig.respond(rid)
        elif move == "read":
            rig.behind.feed(number)
            if rig.spans._ledger.next_seq >= 0:
                read += rig.compare()
    while rig.run.has_work:
        rig.run.step()
    rig.behind.feed(100_000)
    assert rig.compare()
    assert rig.checker.total_violations == 0
    assert rig.checker.checks_by_group["span"] == read + 1


def test_an_open_span_is_told_once_and_not_in_every_reading() -> None:
    rig = Rig(mode="record")
    rig.run.add("a", 20, 2)
    rig.spans.on_finished = lambda request: None
    while rig.run.has_work:
        rig.run.step()
    rig.behind.feed(1_000)
    for _ in range(3):
        assert rig.compare()
    told = [one.found for one in rig.checker.violations]
    assert len(told) == 2  # the draft that is open, and the end that was not closed
    assert "still open: ['a']" in told[0]
    assert "never closed" in told[1]


def test_a_draft_that_outlives_its_response_is_noticed() -> None:
    rig = Rig(mode="record", expects_responses=True)
    rig.run.add("a", 20, 2)
    while rig.run.has_work:
        rig.run.step()
    rig.behind.feed(1_000)
    assert rig.compare()
    assert not rig.checker.violations
    rig.respond("a")
    del rig.spans._ended["a"]
    rig.behind.feed(1)  # the sink sees the response, and has nobody to close
    rig.spans._ended["a"] = None
    assert rig.compare()
    assert [one.rid for one in rig.checker.violations] == ["a"]


def test_nothing_is_compared_once_events_were_lost_on_the_way() -> None:
    rig = Rig()
    rig.run.add("a", 20, 2)
    rig.run.step()
    rig.behind.queue.remove(next(event for event in rig.behind.queue if isinstance(event, RequestArrived)))
    rig.behind.feed(1_000)
    assert rig.spans.reading() is None


def test_a_book_that_nobody_reads_stays_small_and_can_be_read_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(laws, "MARKS", 5)
    monkeypatch.setattr(laws, "AWAITED", 4)
    monkeypatch.setattr(sink, "_ENDED_KEPT", 2)
    monkeypatch.setattr(ledger, "CLOSED_KEPT", 3)
    rig = Rig(expects_responses=True)
    for number in range(20):
        rig.run.add(f"r{number}", 8, 1)
        rig.run.step()
        rig.run.step()
    judge = rig.checker._judge
    assert judge is not None
    book = judge.watch.spans
    assert (len(book._marks), len(book._awaited), book._ends) == (5, 4, None)
    early = SpanReading(3, frozenset(), frozenset(), (), {}, 0)
    assert not rig.checker.audit_spans(early)
    rig.behind.feed(10_000)
    assert rig.compare()
    rig.run.add("later", 8, 1)
    while rig.run.has_work:
        rig.run.step()
    rig.behind.feed(10_000)
    assert rig.compare()
    assert rig.checker.total_violations == 0


def test_a_reading_before_the_start_is_not_compared() -> None:
    assert not InvariantChecker().audit_spans(SpanReading(3, frozenset(), frozenset(), (), {}, 0))


@pytest.mark.parametrize(
    ("spans", "words"),
    [
        (((1, None, 0, 9), (1, 1, 2, 3)), "2 spans with ids of their own"),
        (((1, None, 0, 9), (2, None, 2, 3)), "a parent of s2 in its tree"),
        (((1, None, 0, 9), (2, 1, 2, 10)), "s2 within s1, 0 to 9 ns"),
        (((1, None, 3, 9), (2, 1, 2, 5)), "s2 within s1, 3 to 9 ns"),
        (((1, None, 9, 0),), "s1 ending at 9 ns or later"),
    ],
)
def test_a_tree_whose_spans_do_not_fit_is_told_by_its_span(spans: Any, words: str) -> None:
    rig = Rig(mode="record")
    rig.run.add("a", 20, 2)
    rig.behind.feed(1_000)
    reading = rig.spans.reading()
    assert reading is not None
    tree = TreeReading("other", 0, tuple([SpanTimes(f"s{one[0]}", *one) for one in spans]))
    assert rig.checker.audit_spans(reading._replace(trees=(tree,)))
    assert words in rig.checker.violations[0].expected
    assert {one.id for one in rig.checker.violations} == {"INV-SPAN-02"}


def test_the_auditor_compares_a_sink_that_works_on_a_thread_of_its_own() -> None:
    clock, checker, spans = TickingClock(), InvariantChecker(), spans_of()
    buffered = BufferedSink(spans, "spans", period_s=0.005)
    config = engine_config()
    engine = LLMEngine(config, executor=SimulatedExecutor(config), clock=clock, sink=FanOut((buffered, checker)))
    thread = EngineThread(engine, max_queued_requests=4, max_running_requests=4, clock=clock)
    auditor = Auditor(engine, thread, checker, period_s=None, spans=spans)
    for number in range(6):
        params = SamplingParams(max_new_tokens=3)
        engine.add_request(EngineRequest(rid=f"r{number}", prompt_ids=tuple(range(40)), params=params))
        engine.step()
        assert buffered.flush()
        auditor.audit()
    assert checker.checks_by_group["span"] >= 5
    assert checker.total_violations == 0
    assert buffered.stats().errors == 0
    buffered.close()
