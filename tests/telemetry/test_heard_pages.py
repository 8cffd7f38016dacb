"""Pages heard: who looks has every event, and an event that cannot be followed is a fault at that event, and alone."""

from __future__ import annotations

import pickle

import pytest

from engine.clock import VirtualClock
from engine.events import AnyEvent, LockChanged, RecordingSink
from telemetry.heard_pages import MOST, PagesHeard
from telemetry.isolation import IsolatedSink
from telemetry.page_book import PageBook
from telemetry.read_model import ReadModel
from tests.telemetry.live_run import TimedRun, busy, play


def recorded(seed: int = 3) -> list[AnyEvent]:
    sink = RecordingSink()
    config, ops = busy(seed)
    play(TimedRun(config, sink), ops, check=lambda: None)
    assert len(sink.events) > 2 * MOST
    return sink.events


def shown(book: PageBook) -> tuple[object, ...]:
    tree = {number: (node.parent, node.below, node.hits, node.tick) for number, node in book.tree.nodes.items()}
    return book.packed(), book.counts(), book.locked_nodes(), tree, book.tree.tips


def test_it_is_the_same_whether_somebody_looks_at_each_event_or_at_the_end() -> None:
    events = recorded()
    often, seldom = PagesHeard(), PagesHeard()
    for event in events:
        often.hear(event)
        shown(often.book)
    for at in range(0, len(events), 40):
        seldom.hear_all(events[at : at + 40])
        seldom.settle()
    assert shown(often.book) == shown(seldom.book)
    assert not often.late_faults()
    assert not seldom.late_faults()


def test_what_waits_does_not_grow_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    followed: list[LockChanged] = []
    monkeypatch.setattr(PageBook, "lock_changed", lambda _book, event: followed.append(event))
    pages, events = PagesHeard(), recorded()
    for event in events[:MOST]:
        pages.settle()
        assert not followed
        pages.hear(event)
    pages.settle()
    assert followed == [event for event in events[:MOST] if isinstance(event, LockChanged)]


def test_a_kept_state_has_what_waited() -> None:
    pages = PagesHeard()
    pages.hear_all(recorded()[: MOST - 1])
    kept = pickle.loads(pickle.dumps(pages))
    assert shown(kept.book) == shown(pages.book)


@pytest.mark.parametrize("together", [True, False])
def test_a_fault_is_counted_at_its_event_and_the_next_one_is_followed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, together: bool
) -> None:
    events = recorded()
    broken = next(event for event in events if isinstance(event, LockChanged))
    follow = PageBook.lock_changed

    def fails(book: PageBook, event: LockChanged) -> None:
        if event is broken:
            raise KeyError(event.node)
        follow(book, event)

    monkeypatch.setattr(PageBook, "lock_changed", fails)
    sink = IsolatedSink(ReadModel(clock=VirtualClock()), "read_model")
    for at in range(0, len(events), 40):
        if together:
            sink.take(events[at : at + 40])
        else:
            for event in events[at : at + 40]:
                sink.emit(event)
    assert sink.stats().errors == 1
    assert f"LockChanged of step {broken.step}" in caplog.text
