"""The engine thread is never held up or hurt by a listener: full queues, slow sinks, full disks, raising sinks."""

from __future__ import annotations

import itertools
import logging
import resource
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.events import AnyEvent, RecordingSink
from telemetry import buffered, pacing
from telemetry.buffered import BufferedSink
from telemetry.error_log import ErrorLog
from telemetry.isolation import IsolatedSink
from telemetry.journal import JournalSink
from telemetry.journal_reader import JournalReader


class Gated:
    """Holds its thread inside `emit` until told to go on."""

    def __init__(self) -> None:
        self.inside = threading.Event()
        self.go_on = threading.Event()
        self.events: list[AnyEvent] = []
        self.threads: set[int] = set()

    def emit(self, event: AnyEvent) -> None:
        self.threads.add(threading.get_ident())
        self.inside.set()
        assert self.go_on.wait(30)
        self.events.append(event)


class Failing:
    """Raises on every event but those of even steps."""

    def __init__(self) -> None:
        self.events: list[AnyEvent] = []

    def emit(self, event: AnyEvent) -> None:
        if event.step % 2:
            raise ValueError(f"label of step {event.step}")
        self.events.append(event)


def test_everything_arrives_in_order_on_another_thread(numbered: Any) -> None:
    gate = Gated()
    gate.go_on.set()
    sink = BufferedSink(gate, "journal")
    events = [numbered.planned(step) for step in range(5000)]
    for event in events:
        sink.emit(event)
    assert sink.flush()
    assert gate.events == events
    assert gate.threads.isdisjoint({threading.get_ident()})
    assert sink.close()
    assert (sink.stats().accepted, sink.stats().delivered, sink.stats().dropped) == (5000, 5000, 0)


def test_a_stuck_listener_fills_the_queue_and_the_newest_are_dropped_and_counted(numbered: Any) -> None:
    gate = Gated()
    sink = BufferedSink(gate, "spans", capacity=10, period_s=0.001)
    sink.emit(numbered.planned(0))
    assert gate.inside.wait(30)  # the worker holds event 0 and nothing else moves
    for step in range(1, 26):
        sink.emit(numbered.planned(step))
    stats = sink.stats()
    assert (stats.accepted, stats.dropped, stats.queued) == (11, 15, 10)
    gate.go_on.set()
    assert sink.close()
    assert [event.step for event in gate.events] == list(range(11))


def test_a_raising_listener_is_counted_and_logged_at_a_bounded_rate(
    numbered: Any, caplog: pytest.LogCaptureFixture
) -> None:
    failing = Failing()
    sink = BufferedSink(failing, "spans")
    with caplog.at_level(logging.ERROR, "admitscope.telemetry"):
        for step in range(100):
            sink.emit(numbered.planned(step))
        assert sink.flush()
    assert sink.close()
    stats = sink.stats()
    assert (stats.errors, stats.delivered, len(failing.events)) == (50, 100, 50)
    assert stats.last_error == "ValueError: label of step 99"
    assert len(caplog.records) == 1
    assert (
        caplog.records[0]
        .getMessage()
        .startswith("spans failed while taking StepPlanned of step 1 (ValueError: label of step 1)")
    )


def test_disk_full_behind_the_buffer_costs_the_engine_nothing(numbered: Any, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    sink = BufferedSink(JournalSink(path), "journal", period_s=0.001)
    sink.emit(numbered.started())
    assert sink.flush()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 100, hard))
    try:
        for step in range(1, 50):
            sink.emit(numbered.planned(step))
        assert sink.flush()
        errors = sink.stats().errors
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert errors > 0
    assert "File too large" in sink.stats().last_error
    assert sink.close()
    steps = [r.step for r in JournalReader(path).records() if r.type == "StepPlanned"]
    assert steps == list(range(1, 50)), "what waited out the outage is written afterwards"


def test_a_failing_close_is_counted_and_the_thread_ends(numbered: Any) -> None:
    class Unclosable(RecordingSink):
        def close(self) -> None:
            raise OSError("no space left")

    inner = Unclosable()
    sink = BufferedSink(inner, "journal")
    sink.emit(numbered.started())
    assert sink.close()
    assert inner.events == numbered.events
    assert (sink.stats().errors, sink.stats().last_error) == (1, "OSError: no space left")


def test_after_close_events_are_counted_as_dropped(numbered: Any) -> None:
    sink = BufferedSink(RecordingSink(), "journal")
    assert sink.close()
    sink.emit(numbered.started())
    assert (sink.stats().accepted, sink.stats().dropped) == (0, 1)
    assert sink.flush()


def test_flush_gives_up_on_a_stuck_listener(numbered: Any) -> None:
    gate = Gated()
    sink = BufferedSink(gate, "journal", period_s=0.001)
    sink.emit(numbered.started())
    assert gate.inside.wait(30)
    assert not sink.flush(timeout_s=0.05)
    assert not sink.close(timeout_s=0.05)
    gate.go_on.set()
    assert sink.close()


def test_a_queue_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match="capacity is 0"):
        BufferedSink(RecordingSink(), "journal", capacity=0)


def test_fr_29_faulty_listeners_change_nothing_for_any_request(tmp_path: Path, simulated: Any) -> None:
    """FR-29: raising listeners and a journal that cannot be opened leave every event as it is without them."""
    plain = simulated(tmp_path / "plain.jsonl", 4)
    plain.play(20)
    unopened = BufferedSink(JournalSink(Path("/dev/full")), "journal", period_s=0.001)
    raising = BufferedSink(Failing(), "spans", capacity=50, period_s=0.001)
    metrics = IsolatedSink(Failing(), "metrics")
    faulty = simulated(tmp_path / "faulty.jsonl", 4, listeners=(metrics, raising, unopened))
    faulty.play(20)
    assert raising.close()
    assert unopened.close()
    assert faulty.recorded.events == plain.recorded.events
    assert (tmp_path / "faulty.jsonl").read_bytes() == (tmp_path / "plain.jsonl").read_bytes()
    assert min(sink.stats().errors for sink in (metrics, raising, unopened)) > 0


class Broken(Exception):
    """Stands for an invariant violation in `raise` mode."""


class Judge:
    """Raises what it is told to."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def emit(self, event: AnyEvent) -> None:
        raise self.error


def test_isolation_keeps_faults_from_the_engine_thread_and_counts_them(
    numbered: Any, caplog: pytest.LogCaptureFixture
) -> None:
    failing = Failing()
    sink = IsolatedSink(failing, "metrics")
    with caplog.at_level(logging.ERROR, "admitscope.telemetry"):
        for step in range(10):
            sink.emit(numbered.planned(step))
    assert [event.step for event in failing.events] == [0, 2, 4, 6, 8]
    assert (sink.stats().component, sink.stats().errors, sink.stats().delivered) == ("metrics", 5, 5)
    assert len(caplog.records) == 1


def test_isolation_goes_on_behind_the_event_that_a_listener_of_many_raised_for(
    numbered: Any, caplog: pytest.LogCaptureFixture
) -> None:
    class FedFailing(Failing):
        fed = 0

        def feed(self, events: Iterator[AnyEvent]) -> None:
            self.fed += 1
            for event in events:
                self.emit(event)

    failing = FedFailing()
    sink = IsolatedSink(failing, "read_model")
    with caplog.at_level(logging.ERROR, "admitscope.telemetry"):
        sink.take([numbered.planned(step) for step in range(8)])
    assert [event.step for event in failing.events] == [0, 2, 4, 6]
    assert failing.fed == 4, "once, and once more behind each fault but the last event's"
    assert (sink.stats().errors, sink.stats().delivered) == (4, 4)
    assert sink.stats().last_error == "ValueError: label of step 7"
    assert "taking StepPlanned of step 1" in caplog.records[0].getMessage()


def test_isolation_counts_a_listener_that_takes_nothing_for_each_event(numbered: Any) -> None:
    class Refusing(Failing):
        def feed(self, events: Iterator[AnyEvent]) -> None:
            raise RuntimeError("out of order")

    sink = IsolatedSink(Refusing(), "checker")
    sink.take([numbered.planned(step) for step in range(5)])
    sink.take([])
    assert (sink.stats().errors, sink.stats().delivered) == (5, 0)


def test_isolation_lets_named_verdicts_and_interrupts_through(numbered: Any) -> None:
    event = numbered.planned(1)
    with pytest.raises(Broken):
        IsolatedSink(Judge(Broken()), "checker", lets_through=(Broken,)).emit(event)
    IsolatedSink(Judge(Broken()), "checker").emit(event)
    with pytest.raises(KeyboardInterrupt):
        IsolatedSink(Judge(KeyboardInterrupt()), "metrics").emit(event)


def test_the_error_log_says_what_it_left_out(caplog: pytest.LogCaptureFixture) -> None:
    log = ErrorLog("spans", every_s=0.0)
    silent = ErrorLog("spans", every_s=3600.0)
    with caplog.at_level(logging.ERROR, "admitscope.telemetry"):
        for _ in range(3):
            log.record(ValueError("x"), "writing")
            silent.record(ValueError("x"), "writing")
    assert (log.count, silent.count) == (3, 3)
    assert len(caplog.records) == 4


class Slow(RecordingSink):
    """Takes an event each time it is allowed to, and says when it was closed."""

    def __init__(self, allowed: int) -> None:
        super().__init__()
        self.allowed = threading.Semaphore(allowed)
        self.is_closed = False

    def emit(self, event: AnyEvent) -> None:
        assert self.allowed.acquire(timeout=30)
        super().emit(event)

    def close(self) -> None:
        self.is_closed = True


def test_what_a_close_could_not_deliver_is_counted_and_said(numbered: Any, caplog: pytest.LogCaptureFixture) -> None:
    slow = Slow(3)
    sink = BufferedSink(slow, "journal", period_s=0.001)
    for step in range(10):
        sink.emit(numbered.planned(step))
    with caplog.at_level(logging.WARNING, "admitscope.telemetry"):
        assert not sink.close(timeout_s=0.2)
    assert sink.lost == 7
    assert [record.getMessage()[:41] for record in caplog.records] == ["journal: 7 of 10 events are lost: not wri"]
    assert not slow.is_closed, "a journal that is cut gets no end of its own"

    def allow_the_rest() -> None:
        # A worker that goes on before it is told to would see that it was given up, and end.
        while sink._given_up:
            time.sleep(0.001)
        slow.allowed.release(7)

    threading.Thread(target=allow_the_rest, daemon=True).start()
    assert sink.close(), "what was given up is taken up again"
    assert (sink.lost, len(slow.events), slow.is_closed) == (0, 10, True)


def test_a_close_waits_as_long_as_something_is_delivered_and_says_what_is_left(
    numbered: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buffered, "CLOSE_LOG_EVERY_S", 0.0)
    slow = Slow(0)
    sink = BufferedSink(slow, "journal", period_s=0.001)
    for step in range(4):
        sink.emit(numbered.planned(step))
    ended: list[bool] = []
    closing = threading.Thread(target=lambda: ended.append(sink.close(timeout_s=20, most_s=60)))
    with caplog.at_level(logging.WARNING, "admitscope.telemetry"):
        closing.start()
        for _ in range(4):
            slow.allowed.release()
        closing.join(30)
    assert (ended, len(slow.events), sink.lost) == ([True], 4, 0)
    assert "journal: 4 events still to be written; given up in 60 s" in caplog.text
    assert "lost" not in caplog.text


def test_a_worker_that_died_is_counted_and_nobody_is_told_that_he_caught_up(
    numbered: Any, caplog: pytest.LogCaptureFixture
) -> None:
    sink = BufferedSink(Judge(SystemExit()), "journal", period_s=0.001)
    with caplog.at_level(logging.ERROR, "admitscope.telemetry"):
        for step in range(5):
            sink.emit(numbered.planned(step))
        assert not sink.catch_up(30)
        assert not sink.flush(30)
        taken = sink.stats().accepted
        sink.emit(numbered.planned(5))
        assert not sink.close()
    stats = sink.stats()
    assert (stats.delivered, stats.errors, stats.last_error) == (0, 1, "SystemExit: ")
    assert (stats.accepted, stats.dropped) == (taken, 6 - taken), "nothing is queued for nobody"
    assert "journal failed while working: its thread has ended" in caplog.text
    assert f"journal: {taken} of {taken} events are lost" in caplog.text


def test_above_half_its_room_an_engine_gives_way_to_a_worker_that_is_at_work_but_not_to_one_that_stands(
    numbered: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gave_way: list[float] = []
    gate, inside = threading.Semaphore(0), threading.Semaphore(0)

    class Counted:
        """One event for each `release` of the gate."""

        def emit(self, _event: AnyEvent) -> None:
            inside.release()
            assert gate.acquire(timeout=30)

    sink = BufferedSink(Counted(), "journal", capacity=16, period_s=0.001, batch=1)
    sink.emit(numbered.planned(0))
    assert inside.acquire(timeout=30)  # neither rests nor waits from here on
    sink.hand([numbered.planned(step) for step in range(1, 17)])
    monkeypatch.setattr(buffered, "GIVE_WAY_S", 0.0625)
    really_sleep = buffered.time.sleep
    monkeypatch.setattr(buffered.time, "sleep", lambda s: gave_way.append(s) if s == 0.0625 else really_sleep(s))
    sink.planned()
    assert gave_way == [], "nothing was delivered"
    gate.release()
    assert inside.acquire(timeout=30)  # it has come to the next
    sink.planned()
    sink.planned()
    assert gave_way == [0.0625], "once for what was delivered since"
    gate.release(100)
    assert sink.close()


def test_whoever_asks_is_answered_beside_an_engine_that_never_rests_and_whose_forwards_are_short(
    numbered: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pacing, "PATIENCE_S", 600.0)
    sink = BufferedSink(RecordingSink(), "read_model", period_s=600.0)
    has_asked = threading.Event()

    def work() -> None:
        for step in itertools.count():
            sink.emit(numbered.planned(step))
            sink.emit(numbered.completed(step))
            if has_asked.wait(0.0005):
                return

    engine = threading.Thread(target=work, daemon=True)
    engine.start()
    assert all(sink.catch_up(60) for _ in range(5))
    has_asked.set()
    engine.join()
    assert sink.close()
