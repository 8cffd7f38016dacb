"""A worker runs while the model computes; never held for good by an engine that rests, or is too quick to wait for."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable

import pytest

from telemetry import pacing
from telemetry.pacing import Bell, ForwardWindow


class Engine(threading.Thread):
    """Publishes without pause; `opens` says at which of its events the window is open, and whether it rings."""

    def __init__(self, window: ForwardWindow, bell: Bell, opens: Callable[[int], bool]) -> None:
        super().__init__(daemon=True)
        self.published = 0
        self._window, self._bell, self._opens = window, bell, opens
        self._ends = threading.Event()

    def run(self) -> None:
        for number in itertools.count(1):
            if self._ends.wait(0.0005):
                return
            self.published = number
            if not self._opens(number):
                self._window.forward.shut(time.monotonic_ns())
                continue
            self._window.forward.open(time.monotonic_ns())
            if self._window.is_awaited:
                self._bell.ring()

    def end(self) -> None:
        self._ends.set()
        self.join()


def waited(opens: Callable[[int], bool], patience_s: float) -> tuple[bool, int]:
    """What the wait said, and events published meanwhile."""
    bell = Bell()
    window = ForwardWindow(bell)
    engine = Engine(window, bell, opens)
    engine.start()
    while not engine.published:
        time.sleep(0.001)
    before = engine.published
    opened = window.wait(lambda: engine.published, patience_s)
    seen = engine.published - before
    engine.end()
    assert not window.is_awaited
    return opened, seen


def test_it_waits_for_the_next_plan_of_an_engine_at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pacing, "IDLE_S", 10.0)  # a slow machine is not an engine that rests
    opened, seen = waited(lambda number: number >= 60, 60.0)
    assert opened
    assert seen >= 10


def test_an_engine_that_never_computes_is_waited_for_no_longer_than_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pacing, "IDLE_S", 0.5)
    opened, seen = waited(lambda number: False, 0.5)
    assert not opened
    assert seen > 0


def test_an_engine_that_rests_is_not_waited_for() -> None:
    bell = Bell()
    began = time.monotonic()
    assert not ForwardWindow(bell).wait(lambda: 7, 600.0)
    assert time.monotonic() - began < 60.0


def test_ringing_twice_is_ringing_once() -> None:
    bell = Bell()
    bell.ring()
    bell.ring()
    assert bell.wait(0)
    assert not bell.wait(0)


def test_work_ends_before_the_shortest_of_the_last_forwards_would(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0
    monkeypatch.setattr("telemetry.pacing.time.monotonic_ns", lambda: now)
    window = ForwardWindow(Bell())
    for lasts_ns in (9_000_000, 5_000_000, 7_000_000):
        window.forward.open(now)
        now += lasts_ns
        window.forward.shut(now)
        assert not window.forward.leaves_time
    window.forward.open(now)
    end = now + round(5_000_000 * (1 - pacing.MARGIN))
    now = end - 1
    before = window.forward.leaves_time
    now = end
    assert (before, window.forward.leaves_time) == (True, False)
    assert window.forward.is_open, "the model still computes, but who knows for how long"
    for _ in range(4):  # long ago is forgotten
        window.forward.open(now)
        now += 20_000_000
        window.forward.shut(now)
    window.forward.open(now)
    now += round(20_000_000 * (1 - pacing.MARGIN)) - 1
    assert window.forward.leaves_time


def test_forwards_that_are_too_short_to_plan_with_are_no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0
    monkeypatch.setattr("telemetry.pacing.time.monotonic_ns", lambda: now)
    window = ForwardWindow(Bell())
    window.forward.open(now)
    now += 2 * pacing.MARGIN_NS
    window.forward.shut(now)
    window.forward.open(now)
    now += 10**10
    assert window.forward.leaves_time


def test_work_begins_once_the_batch_is_put_together(monkeypatch: pytest.MonkeyPatch) -> None:
    now, slept = 0, []

    def sleep(seconds: float) -> None:
        nonlocal now
        slept.append(seconds)
        now += round(seconds * 1e9)

    monkeypatch.setattr("telemetry.pacing.time.monotonic_ns", lambda: now)
    monkeypatch.setattr("telemetry.pacing.time.sleep", sleep)
    window = ForwardWindow(Bell())
    window.forward.open(now, prepare_ns=200_000)
    assert not window.forward.leaves_time, "the engine is still at work"
    assert window.wait(lambda: 0, 60.0)
    assert slept == [0.0003], "somewhat later than last time, without the bell"
    now += 10_000_000
    window.forward.shut(now)
    window.forward.open(now)
    now += round(pacing.LEAD * 10_000_000) - 1
    before = window.forward.leaves_time
    now += 20_000  # it took 0.3 ms more
    assert (before, window.forward.leaves_time) == (False, True), "an executor lays out its batch"


def test_a_forward_that_lasts_longer_than_the_last_few_is_used_until_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pacing, "IDLE_S", 0.001)
    now = 0
    monkeypatch.setattr("telemetry.pacing.time.monotonic_ns", lambda: now)
    window = ForwardWindow(Bell())
    window.forward.open(now)
    now += 5_000_000
    window.forward.shut(now)
    window.forward.open(now)
    now += 9_999_999
    assert not window.wait(lambda: 7, 0.01), "work beside it may have made it longer"
    before = window.forward.leaves_time
    now += 1
    assert window.wait(lambda: 7, 60.0), "nothing is published meanwhile, but the engine does not rest: it computes"
    after = window.forward.leaves_time
    window.forward.shut(now)
    assert (before, after, window.forward.leaves_time) == (False, True, False)
    assert not window.wait(lambda: 7, 60.0)


def test_rings_that_come_too_late_do_not_keep_a_worker_for_ever() -> None:
    """Forwards so short that each is over before the worker has woken up to its ring."""

    class Late(Bell):
        def wait(self, timeout_s: float) -> bool:
            time.sleep(0.001)
            return True

    assert not ForwardWindow(Late()).wait(lambda: 7, 0.05)


def _after(lasted_ns: int, monkeypatch: pytest.MonkeyPatch) -> ForwardWindow:
    """A window whose last forward lasted so long, and whose next one is open."""
    now = 0
    monkeypatch.setattr("telemetry.pacing.time.monotonic_ns", lambda: now)
    monkeypatch.setattr(pacing, "LEAD", 0.0)
    window = ForwardWindow(Bell())
    window.forward.open(now)
    now += lasted_ns
    window.forward.shut(now)
    window.forward.open(now)
    return window


def test_a_forward_that_is_over_at_once_is_not_worth_to_be_woken_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pacing, "IDLE_S", 0.001)
    events = itertools.count()
    short = _after(pacing.OF_USE_NS, monkeypatch)
    assert not short.forward.is_of_use
    assert short.forward.leaves_time
    assert not short.wait(lambda: next(events), 0.05), "open, but over before anything is done beside it"
    long = _after(pacing.OF_USE_NS + 1, monkeypatch)
    assert long.forward.is_of_use
    assert long.wait(lambda: next(events), 60.0)
    assert ForwardWindow(Bell()).forward.is_of_use, "as long as nobody knows"


def test_a_short_one_that_lasts_is_used_after_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pacing, "IDLE_S", 0.001)
    window = _after(1_000, monkeypatch)
    assert window.wait(lambda: 7, 60.0), "nothing is published: it computes longer than ever"
    assert window.forward.is_of_use
    window.forward.shut(time.monotonic_ns())
    window.forward.open(time.monotonic_ns())
    assert not window.forward.is_of_use, "what was learned of one is not said of the next"


def test_who_is_waited_for_waits_for_no_forward_that_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pacing, "IDLE_S", 0.001)
    events = itertools.count()
    asked_from = 5
    short = _after(pacing.OF_USE_NS, monkeypatch)
    assert not short.wait(lambda: next(events), 600.0, is_hurried=lambda: next(events) > asked_from)
    assert next(events) > asked_from, "somebody asked while it waited"
