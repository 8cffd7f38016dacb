"""Arrivals. Owns: when each request of a workload comes: at its own time, faster, by chance, or when another ends."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import Final, Protocol

from telemetry.settings import UsageError
from telemetry.sim.workload import Ask

NS: Final = 1_000_000_000
#: Nobody simulates longer; and the times of a journal end at 292 years.
MOST_NS: Final = 100 * 365 * 86_400 * NS
_TOO_LATE: Final = "more than a hundred years after the start"


class Arrivals(Protocol):
    """Where the simulation gets its requests from. Times never fall."""

    def next_ns(self) -> int | None:
        """When the next one comes; None when none will, or when one has to end before that is known."""
        ...

    def take(self) -> Ask:
        """The next one."""
        ...

    def ended(self, now_ns: int) -> None:
        """A request ended."""
        ...


class OpenLoop:
    """Each comes at its time, whatever the engine does. The times are those of the workload, divided by `scale`."""

    def __init__(self, asks: Iterator[Ask], *, scale: float = 1.0) -> None:
        self._asks = asks if scale == 1.0 else (_scaled(ask, scale) for ask in asks)
        self._next = next(self._asks, None)

    def next_ns(self) -> int | None:
        return None if self._next is None else self._next.arrival_ns

    def take(self) -> Ask:
        ask = self._next
        assert ask is not None, "next_ns said that none comes"
        self._next = next(self._asks, None)
        return ask

    def ended(self, now_ns: int) -> None:
        """Nobody waits for it."""


def poisson(asks: Iterator[Ask], *, rate: float, seed: int) -> Iterator[Ask]:
    """The same requests in the same order, `rate` a second on average, with gaps drawn from `seed`."""
    rng = Random(seed)  # noqa: S311 - a draw that can be made again, no secret
    now_ns = 0
    for number, ask in enumerate(asks, 1):
        gap_ns = rng.expovariate(rate) * NS
        if now_ns + gap_ns > MOST_NS:
            raise UsageError(f"--rate {rate:g}: request {number} would come {_TOO_LATE}")
        now_ns += round(gap_ns)
        yield _moved(ask, now_ns)


class ClosedLoop:
    """`concurrency` clients, each of which sends its next request when the last one ended."""

    def __init__(self, asks: Iterator[Ask], *, concurrency: int) -> None:
        self._asks = asks
        self._next = next(asks, None)
        self._free = [0] * concurrency  # since when each client without a request has none; in order

    def next_ns(self) -> int | None:
        return self._free[0] if self._free and self._next is not None else None

    def take(self) -> Ask:
        ask = self._next
        assert ask is not None, "next_ns said that none comes"
        self._next = next(self._asks, None)
        return _moved(ask, self._free.pop(0))

    def ended(self, now_ns: int) -> None:
        self._free.append(now_ns)


def _scaled(ask: Ask, scale: float) -> Ask:
    arrival_ns = ask.arrival_ns / scale
    if arrival_ns > MOST_NS:
        raise UsageError(f"--rate-scale {scale:g}: {ask.rid} would come {_TOO_LATE}")
    return _moved(ask, round(arrival_ns))


def _moved(ask: Ask, arrival_ns: int) -> Ask:
    """The same at another time; a client that left does so as long after it came."""
    left = None if ask.abort_ns is None else arrival_ns + ask.abort_ns - ask.arrival_ns
    return replace(ask, arrival_ns=arrival_ns, abort_ns=left)
