"""The collector of reference cycles waits for a quiet moment, and gives everything back."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable, Iterator

import pytest

from telemetry import heap
from telemetry.heap import BUSY_THRESHOLD, QuietCollector


class Knot:
    """Refers to itself: no counter of references frees it."""

    def __init__(self) -> None:
        self.me = self


@pytest.fixture
def collector_of(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Callable[[], bool]], QuietCollector]]:
    monkeypatch.setattr(heap, "WORTH_IT", 0)
    made: list[QuietCollector] = []

    def make(is_busy: Callable[[], bool]) -> QuietCollector:
        made.append(QuietCollector(is_busy, look_s=0.005))
        return made[-1]

    yield make
    for collector in made:
        collector.stop()


def is_gone(reference: weakref.ref[Knot], within_s: float) -> bool:
    until = time.monotonic() + within_s
    while reference() is not None and time.monotonic() < until:
        time.sleep(0.005)
    return reference() is None


def test_cycles_are_freed_while_the_engine_rests_and_not_while_it_works(
    collector_of: Callable[[Callable[[], bool]], QuietCollector],
) -> None:
    busy = [True]
    collector = collector_of(lambda: busy[0])
    collector.start()
    knot = weakref.ref(Knot())
    assert not is_gone(knot, 0.2)
    busy[0] = False
    assert is_gone(knot, 30.0)


def test_one_quiet_look_is_no_rest(collector_of: Callable[[Callable[[], bool]], QuietCollector]) -> None:
    looks = [0]

    def is_busy() -> bool:
        looks[0] += 1
        return looks[0] % 2 == 0

    collector = collector_of(is_busy)
    collector.start()
    knot = weakref.ref(Knot())
    while looks[0] < 20:
        time.sleep(0.005)
    assert knot() is not None


def test_what_was_there_before_is_never_looked_at_and_all_is_given_back(
    collector_of: Callable[[Callable[[], bool]], QuietCollector],
) -> None:
    before, frozen = gc.get_threshold(), gc.get_freeze_count()
    collector = collector_of(lambda: True)
    collector.start()
    assert gc.get_threshold() == BUSY_THRESHOLD
    assert gc.get_freeze_count() > frozen + 10_000
    collector.stop()
    collector.stop()
    assert (gc.get_threshold(), gc.get_freeze_count()) == (before, 0)


def test_every_collection_is_counted_whoever_asked_for_it(
    collector_of: Callable[[Callable[[], bool]], QuietCollector],
) -> None:
    collector = collector_of(lambda: True)
    collector.start()
    gc.collect()
    gc.collect()
    assert collector.collections == 2
    spent = collector.spent_ns
    assert spent > 0
    collector.stop()
    gc.collect()
    assert (collector.collections, collector.spent_ns) == (2, spent)


def test_a_stop_without_a_start_changes_nothing() -> None:
    before = gc.get_threshold()
    QuietCollector(lambda: True).stop()
    assert gc.get_threshold() == before
