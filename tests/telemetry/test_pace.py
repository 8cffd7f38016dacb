"""A worker asks for a processor before it works beside a forward; what it was lent is given back, whatever happens."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from engine.events import AnyEvent
from telemetry import pacing
from telemetry.buffered import BufferedSink
from telemetry.pacing import LOAN_NS, Bell, ForwardWindow, Pace

MS = 1_000_000
LONG_NS = 60_000 * MS


class Bank:
    """Notes what a worker asked for, and whether it slept since."""

    def __init__(self, pace: Pace, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[int | str] = []
        pace.lend_core = self.asked.append
        monkeypatch.setattr(pacing.time, "sleep", lambda _seconds: self.asked.append("break"))

    def take(self) -> list[int | str]:
        asked, self.asked[:] = list(self.asked), []
        return asked


def pace_beside(window: ForwardWindow) -> Pace:
    return Pace(window, published=lambda: 0)


def long_forward(window: ForwardWindow) -> None:
    """One is open now that ends in a minute, for all one knows."""
    now = time.monotonic_ns()
    window.forward.open(now - 2 * LONG_NS)
    window.forward.shut(now - LONG_NS)
    window.forward.open(now)


@pytest.fixture
def window(monkeypatch: pytest.MonkeyPatch) -> ForwardWindow:
    monkeypatch.setattr(pacing, "LEAD", 0.0)
    return ForwardWindow(Bell())


def test_a_worker_asks_then_takes_its_break_then_works(window: ForwardWindow, monkeypatch: pytest.MonkeyPatch) -> None:
    pace = pace_beside(window)
    bank = Bank(pace, monkeypatch)
    long_forward(window)
    pace.begin()
    pace.before_work(is_polite=True)
    assert bank.take() == [LOAN_NS, "break"]
    monkeypatch.setattr(pacing, "LENT_SLICE_NS", LONG_NS)
    pace.before_work(is_polite=True)
    assert bank.take() == [], "its stretch is not over"
    monkeypatch.setattr(pacing, "LENT_SLICE_NS", -1)
    pace.before_work(is_polite=True)
    assert bank.take() == [LOAN_NS, "break"]
    assert 0 < pace.lent_ns < 60 * 10**9, "what is over"
    before = pace.lent_ns
    pace.end()
    pace.end()
    assert bank.take() == [0], "given back once"
    assert before < pace.lent_ns <= before + LOAN_NS


def test_nothing_is_asked_for_where_no_forward_leaves_time(
    window: ForwardWindow, monkeypatch: pytest.MonkeyPatch
) -> None:
    pace = pace_beside(window)
    bank = Bank(pace, monkeypatch)
    monkeypatch.setattr(window, "wait", lambda *_a, **_k: False)
    monkeypatch.setattr(pacing, "SLICE_NS", -1)
    pace.begin()
    pace.before_work(is_polite=True)  # no forward
    window.forward.open(time.monotonic_ns())
    pace.begin()
    pace.before_work(is_polite=True)  # nobody knows when it ends
    assert bank.take() == ["break", "break"]
    long_forward(window)
    pace.before_work(is_polite=True)
    assert bank.take() == [LOAN_NS, "break"]
    monkeypatch.setattr(pacing, "LENT_SLICE_NS", -1)
    pace.before_work(is_polite=False)
    assert bank.take() == [0, "break"], "a worker that cannot follow takes what it gets"


def test_a_forward_that_ends_takes_the_processor_back(window: ForwardWindow, monkeypatch: pytest.MonkeyPatch) -> None:
    pace = pace_beside(window)
    bank = Bank(pace, monkeypatch)
    long_forward(window)
    pace.begin()
    pace.before_work(is_polite=True)
    bank.take()
    window.forward.shut(time.monotonic_ns() + LONG_NS)

    def wait(*_args: Any, **_named: Any) -> bool:
        bank.asked.append("waits")
        long_forward(window)
        return True

    monkeypatch.setattr(window, "wait", wait)
    pace.before_work(is_polite=True)
    assert bank.take() == [0, "waits", LOAN_NS, "break"]


def test_without_a_lender_only_breaks_are_taken(window: ForwardWindow, monkeypatch: pytest.MonkeyPatch) -> None:
    pace = pace_beside(window)
    bank = Bank(pace, monkeypatch)
    pace.lend_core = None
    long_forward(window)
    pace.begin()
    pace.before_work(is_polite=True)
    assert bank.take() == []
    monkeypatch.setattr(pacing, "SLICE_NS", -1)
    pace.before_work(is_polite=True)
    pace.end()
    assert bank.take() == ["break"]


@pytest.mark.parametrize("fault", [ValueError("a listener's"), SystemExit(3)])
def test_a_listener_that_fails_keeps_no_processor(
    fault: BaseException, numbered: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pacing, "LEAD", 0.0)
    is_given_back = threading.Event()
    asked: list[int] = []

    class Fails:
        def emit(self, _event: AnyEvent) -> None:
            raise fault

    def lend(ns: int) -> None:
        asked.append(ns)
        if not ns:
            is_given_back.set()

    sink = BufferedSink(Fails(), "read_model", period_s=0.01)
    sink.share_processors(lend, period_s=0.01)
    long_forward(sink.window)
    sink.hand([numbered.planned(step) for step in range(3)])
    assert is_given_back.wait(60)
    assert asked == [LOAN_NS, 0]
    sink.close()
