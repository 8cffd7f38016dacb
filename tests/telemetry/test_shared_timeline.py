"""One timeline for the read model and for spans: each shows what it would with its own, whatever befalls the other."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count

import pytest
from hypothesis import given, settings

from engine.clock import VirtualClock
from engine.config import EngineConfig
from engine.events import AnyEvent, EngineStarted, RecordingSink
from telemetry.isolation import IsolatedSink
from telemetry.read_model import ReadModel
from telemetry.shared_sink import SharedSink
from telemetry.shared_timeline import SharedTimeline
from telemetry.spans.sink import SpanSink
from tests.builders import engine_config
from tests.telemetry.live_run import TimedRun, busy, configs, operations, play
from tests.telemetry.test_spans import Collected

#: Events that a worker takes at once, and after which somebody looks.
BATCH = 8
LOOK_EVERY = 48


class Pair:
    """A read model and a span sink, that share a timeline or have one each."""

    def __init__(self, *, shared: bool, responses: bool = True, others: Sequence[RecordingSink] = ()) -> None:
        self.output = Collected()
        self.model = ReadModel(clock=VirtualClock(), expects_responses=responses)
        self.spans = SpanSink(
            self.output, expects_responses=responses, sample_ratio=0.5, max_traces_per_s=1e9, with_held=True
        )
        self.takers: list[IsolatedSink | SharedTimeline]
        if shared:
            together = SharedTimeline(self.model, self.spans, expects_responses=responses, others=others)
            self.takers, self.sinks = [together], together.sinks
        else:
            self.sinks = (IsolatedSink(self.model, "read_model"), IsolatedSink(self.spans, "spans"))
            self.takers = list(self.sinks)

    def take(self, events: Sequence[AnyEvent]) -> None:
        for at in range(0, len(events), BATCH):
            for taker in self.takers:
                taker.take(events[at : at + BATCH])

    @property
    def errors(self) -> list[int]:
        return [sink.stats().errors for sink in self.sinks]

    def shown(self) -> list[object]:
        """Every answer, and a reading for the checker."""
        model = self.model
        rids = [*model.tracker.live, *model.finished]
        return [
            *(model.status(), model.queue(100), model.passes(100), model.latency(), model.breakdown()),
            *(model.lanes(100), model.requests(100), model.page_map(), model.pool_over_time()),
            model.tree(node=None, opened=(), top=50),
            *(model.request(rid) for rid in rids),
            *(model.explain(rid) for rid in rids),
            self.spans.reading(),
        ]


def _recorded(config: EngineConfig, ops: Sequence[tuple[object, ...]]) -> list[AnyEvent]:
    """A run of which most responses are reported."""
    run = TimedRun(config)
    for number, rid in enumerate(play(run, ops)):
        if number % 5:
            run.respond(rid, run.now_ns)
    return run.recorded.events


def _agree(events: Sequence[AnyEvent], *, responses: bool) -> Collected:
    shared, apart = Pair(shared=True, responses=responses), Pair(shared=False, responses=responses)
    for at in range(0, len(events), LOOK_EVERY):
        for pair in (shared, apart):
            pair.take(events[at : at + LOOK_EVERY])
        assert shared.shown() == apart.shown()
    for pair in (shared, apart):
        for sink in pair.sinks:
            sink.close()
        assert pair.errors == [0, 0]
    assert shared.output.trees == apart.output.trees
    return shared.output


@settings(max_examples=40, deadline=None)
@given(configs, operations)
def test_together_they_show_what_they_show_apart(config: EngineConfig, ops: list[tuple[object, ...]]) -> None:
    _agree(_recorded(config, ops), responses=True)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("responses", [True, False])
def test_under_load_too(seed: int, responses: bool) -> None:
    assert _agree(_recorded(*busy(seed)), responses=responses).trees


def _healthy(events: Sequence[AnyEvent]) -> Pair:
    pair = Pair(shared=False)
    pair.take(events)
    return pair


def _raises(*_: object, **__: object) -> None:
    raise ValueError("a fault")


@pytest.mark.parametrize("broken", ["on_gaps", "on_finished", "on_first_token", "_completed", "_planned", "_applied"])
def test_a_fault_of_the_read_model_costs_the_spans_nothing(monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    events = _recorded(*busy(1))
    monkeypatch.setattr(ReadModel, broken, _raises)
    pair = Pair(shared=True)
    pair.take(events)
    monkeypatch.undo()
    assert pair.errors[0] > 10
    assert pair.errors[1] == 0
    assert pair.sinks[0].stats().last_error == "ValueError: a fault"
    assert pair.output.trees == _healthy(events).output.trees


@pytest.mark.parametrize("broken", ["_transitioned", "_planned", "_completed", "on_finished"])
def test_a_fault_of_the_spans_costs_the_read_model_nothing(monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    events = _recorded(*busy(1))
    monkeypatch.setattr(SpanSink, broken, _raises)
    pair = Pair(shared=True)
    pair.take(events)
    monkeypatch.undo()
    assert pair.errors[0] == 0
    assert pair.errors[1] > 10
    assert pair.shown()[:-1] == _healthy(events).shown()[:-1]


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("broken", ["_arrived", "_transitioned", "_completed", "on_finished"])
def test_spans_that_failed_at_an_event_are_not_compared(
    monkeypatch: pytest.MonkeyPatch, broken: str, shared: bool
) -> None:
    """What they miss from then on is their fault: a law that is told of it would accuse the engine."""
    events, sound, calls = _recorded(*busy(1)), getattr(SpanSink, broken), count(1)

    def fails_once(*arguments: object) -> None:
        if next(calls) == 5:
            raise ValueError("a fault")
        sound(*arguments)

    monkeypatch.setattr(SpanSink, broken, fails_once)
    pair = Pair(shared=shared)
    pair.take(events)
    assert pair.errors == [0, 1]
    assert pair.spans.reading() is None


@pytest.mark.parametrize(("owner", "place"), [(ReadModel, 0), (SpanSink, 1)])
def test_an_event_is_one_error_however_often_a_listener_fails_at_it(
    monkeypatch: pytest.MonkeyPatch, owner: type, place: int
) -> None:
    pair = Pair(shared=True)
    for name in ("on_finished", "on_gaps", "on_first_token", "_completed", "_transitioned", "_planned"):
        monkeypatch.setattr(owner, name, _raises, raising=False)
    run = TimedRun(engine_config(num_pages=400, page_size=4))
    for number in range(12):
        run.add(f"r{number}", 8, 3, ignore_eos=True)
    run.finish_all()
    pair.take(run.recorded.events)
    assert 0 < pair.errors[place] <= len(run.recorded.events)
    assert pair.errors[1 - place] == 0


def test_nobody_who_asks_waits_for_who_else_listens() -> None:
    class Asks(RecordingSink):
        def emit(self, event: AnyEvent) -> None:
            # On another thread, as a page is: with the lock held it would wait for ever.
            seen.append(readers.submit(pair.model.head).result(timeout=30).observe_seq)

    seen: list[int] = []
    events = _recorded(*busy(2))
    pair = Pair(shared=True, others=(Asks(),))
    with ThreadPoolExecutor(1) as readers:
        pair.take(events[:40])
    assert pair.errors == [0, 0]
    assert len(seen) == 40


def test_who_else_listens_hears_all_after_a_fault_of_his_too() -> None:
    class Deaf(RecordingSink):
        def emit(self, event: AnyEvent) -> None:
            super().emit(event)
            if event.step % 2:
                raise ValueError("a log that cannot be written")

    events, deaf, hears = _recorded(*busy(2)), Deaf(), RecordingSink()
    pair = Pair(shared=True, others=(deaf, hears))
    pair.take(events)
    assert deaf.events == hears.events == events
    assert pair.errors == [sum(event.step % 2 for event in events), 0]
    assert pair.shown() == _healthy(events).shown()


def test_both_are_counted_by_the_worker_that_feeds_them() -> None:
    events = _recorded(*busy(3))
    together = Pair(shared=True).takers[0]
    assert isinstance(together, SharedTimeline)
    sink = SharedSink([("metrics", RecordingSink())], together=together)
    for event in events:
        sink.emit(event)
    assert sink.catch_up(30)
    assert [stats.component for stats in sink.stats()] == ["metrics", "read_model", "spans"]
    assert {stats.delivered for stats in sink.stats()} == {len(events)}
    assert sink.close()


@pytest.mark.parametrize("shared", [True, False])
def test_an_engine_s_first_pages_may_come_with_its_start(shared: bool) -> None:
    run = TimedRun(engine_config(num_pages=40, page_size=4))
    run.add("a", 30, 5, ignore_eos=True)
    run.finish_all()
    assert isinstance(run.recorded.events[0], EngineStarted)
    pair = Pair(shared=shared)
    for taker in pair.takers:
        taker.take(run.recorded.events)
    assert pair.errors == [0, 0]
    assert pair.model.page_map().counts.capacity == 40
