"""A question is answered from all that was published before it was asked, however seldom the worker looks by itself."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from engine.clock import VirtualClock
from telemetry import listeners
from telemetry.fresh import Fresh
from telemetry.settings import ServeCommand, parse
from telemetry.shared_sink import SharedSink
from tests.builders import CoreRun, engine_config

#: Nobody looks by himself for as long as a test runs.
LONG_S = 600.0


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> Iterator[listeners.Listeners]:
    """What hears a served engine, with a worker that only looks when somebody rings."""

    class Rare(SharedSink):
        def __init__(self, *arguments: object, **named: object) -> None:
            super().__init__(*arguments, period_s=LONG_S, **named)

    monkeypatch.setattr(listeners, "SharedSink", Rare)
    command = parse(["serve", "--executor.kind", "simulated"])
    assert isinstance(command, ServeCommand)
    made = listeners.Listeners(command, clock=VirtualClock(), journal=None, engine_id="test", version="test")
    yield made
    made.close()


def test_an_answer_has_what_was_published_before_the_question(heard: listeners.Listeners) -> None:
    run = CoreRun(engine_config(num_pages=64), heard.hears)
    for number in range(5):
        run.add(f"r{number}", list(range(40)), max_new_tokens=50)
        run.step()
        status = heard.read_model.status()
        assert (status.requests_received, status.step) == (number + 1, run.scheduler.publisher.step)
        assert heard.read_model.request(f"r{number}") is not None


def test_a_worker_that_stands_holds_up_an_answer_but_not_for_good(heard: listeners.Listeners) -> None:
    run = CoreRun(engine_config(num_pages=64), heard.hears)
    assert heard.read_model.status().requests_received == 0
    gate, stands = threading.Event(), threading.Event()
    heard._shared.call(lambda: (stands.set(), gate.wait()))
    heard._shared.queue._bell.ring()
    assert stands.wait(60)
    run.add("late", list(range(40)), max_new_tokens=5)
    run.step()
    began = time.monotonic()
    assert heard.read_model.status().requests_received == 0, "what is known is told"
    assert time.monotonic() - began >= listeners.CATCH_UP_S
    gate.set()
    assert heard.settle()
    assert heard.read_model.status().requests_received == 1


def test_a_reader_has_the_lock_and_gives_it_back() -> None:
    lock, was_locked = threading.Lock(), []
    fresh = Fresh(lock)
    fresh.catch_up = lambda: was_locked.append(lock.locked())
    with fresh:
        assert lock.locked()
    with pytest.raises(KeyError), fresh:
        raise KeyError
    assert not lock.locked()
    assert was_locked == [False, False], "whoever is to catch up needs it"
