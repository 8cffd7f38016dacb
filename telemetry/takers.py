"""Takers. Owns: what a listener may offer beside `emit` to whoever feeds it from a worker, and its counters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import msgspec

from engine.events import AnyEvent, EventSink

Taker = Callable[[Sequence[AnyEvent]], None]


@runtime_checkable
class Flushable(Protocol):
    """A sink that holds events back for a while."""

    def flush(self) -> None: ...


@runtime_checkable
class TakesMany(Protocol):
    """A sink that rather takes several events at once. What it raises counts as one error, and loses the rest."""

    def take(self, events: Sequence[AnyEvent], /) -> None: ...


@runtime_checkable
class HasTakers(Protocol):
    """Several in one, each of which takes all events by itself: in order, with a break in between where one is due."""

    @property
    def takers(self) -> Sequence[Taker]: ...


@runtime_checkable
class FailsLate(Protocol):
    """A sink that follows some events later than it took them."""

    def late_faults(self) -> list[tuple[Exception, AnyEvent]]:
        """What failed so, and at which event, once."""


@runtime_checkable
class Closable(Protocol):
    """A sink with something to give back."""

    def close(self) -> None: ...


class SinkStats(msgspec.Struct, frozen=True):
    """Counters of one sink since its start.

    accepted   events taken over from the engine; `delivered` of them have reached the listener
    dropped    events refused because the queue was full
    errors     exceptions of the listener, `last_error` the latest in words
    """

    component: str
    accepted: int
    delivered: int
    dropped: int
    errors: int
    queued: int
    last_error: str = ""


def takers_of(sink: EventSink) -> Sequence[Taker]:
    """What takes several events of `sink` at once; nothing where it takes them one by one."""
    if isinstance(sink, HasTakers):
        return sink.takers
    return (sink.take,) if isinstance(sink, TakesMany) else ()
