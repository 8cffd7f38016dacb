"""What scrapes cost the engine thread: steps of a quarter of a millisecond beside ten scrapes a second. No asserts.

    python -m bench.scrape

Both threads share one interpreter lock, as in the server. Per format: processor time of one scrape, and the longest
stretch of it between two offers of the lock, which is the most that it can hold up a step; then how long steps took, by
the wall clock, that no scrape ran beside, and those that one did. The first row has no scrapes; `library` is the
encoder of prometheus-client, for comparison, which offers the lock only when it is asked for, after 5 ms. In the rows
with `worker`, each step also hands an event, some 9,000 a second, to the worker that counts metrics beside a live
engine, and a scrape waits until those before it are counted. What other programs take from this one is in every row.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain, cycle, pairwise
from typing import NamedTuple

from prometheus_client.openmetrics.exposition import generate_latest

from engine.clock import VirtualClock
from engine.events import RecordingSink
from telemetry import rendering
from telemetry.exposition import Exposition
from telemetry.listeners import CATCH_UP_S
from telemetry.metrics import MetricsSink
from telemetry.shared_sink import SharedSink
from telemetry.views import count_samples, sglang
from tests.builders import CoreRun, engine_config

#: Additions in one step.
WORK = 5_000
PER_SECOND = 10
WIDTHS = (8, 11, 7, 17, 7, 13, 7)


class Seen(NamedTuple):
    """One variant, in microseconds.

    beside, alone  steps, by the wall clock
    scrapes        processor time of each
    held           the most of it between two offers of the lock, of each scrape
    """

    beside: list[float]
    alone: list[float]
    scrapes: list[float]
    held: list[float]


def busy_step() -> int:
    """Python work that holds the lock as the scheduler does."""
    total = 0
    for number in range(WORK):
        total += number
    return total


@contextmanager
def offers_noted(offers: list[float]) -> Iterator[None]:
    """Appends the processor time of this thread at each offer of the lock."""
    offer = rendering.offer_lock

    def noted() -> None:
        offers.append(time.thread_time())
        offer()

    rendering.offer_lock = noted
    yield
    rendering.offer_lock = offer


def no_event() -> None:
    """Nobody listens."""


def measure(scrape: Callable[[], object] | None, seconds: float, publish: Callable[[], None] = no_event) -> Seen:
    """Steps of one thread while another one scrapes. `publish` is called at the end of each step."""
    seen = Seen([], [], [], [])
    stop, running = threading.Event(), threading.Event()
    done = [0]

    def scraper() -> None:
        while scrape is not None and not stop.wait(1 / PER_SECOND):
            running.set()
            offers = [time.thread_time()]
            with offers_noted(offers):
                scrape()
            offers.append(time.thread_time())
            running.clear()
            done[0] += 1
            seen.scrapes.append((offers[-1] - offers[0]) * 1e6)
            seen.held.append(max(later - earlier for earlier, later in pairwise(offers)) * 1e6)

    thread = threading.Thread(target=scraper)
    thread.start()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        before, was_running = done[0], running.is_set()
        began = time.perf_counter()
        busy_step()
        publish()
        took = (time.perf_counter() - began) * 1e6
        is_beside = was_running or running.is_set() or done[0] != before
        (seen.beside if is_beside else seen.alone).append(took)
    stop.set()
    thread.join()
    return seen


@contextmanager
def counted_beside() -> Iterator[tuple[Exposition, Callable[[], None]]]:
    """What shows the metrics that a worker counts, and what hands it the next event of a recording, round and round."""
    kept = RecordingSink()
    run = CoreRun(engine_config(num_pages=640, page_size=16, max_running_requests=32), kept)
    for at in range(32):
        run.add(f"request-{at}", 64, 50, ignore_eos=True)
    run.run()
    metrics = MetricsSink(clock=VirtualClock(), in_batches=True)
    shared = SharedSink([("metrics", metrics)])
    metrics.catch_up = lambda: shared.catch_up(CATCH_UP_S)
    events = chain(kept.events, cycle(kept.events[1:]))  # only one engine starts
    shared.emit(next(events))
    exposition = Exposition(metrics)
    exposition.warm()
    yield exposition, lambda: shared.emit(next(events))
    shared.close()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=5.0, help="for each format")
    seconds = parser.parse_args().seconds
    metrics = MetricsSink(clock=VirtualClock())
    run = CoreRun(engine_config(num_pages=640, page_size=16, max_running_requests=32), metrics)
    for at in range(32):
        run.add(f"request-{at}", 64, 50, ignore_eos=True)
    run.run()
    exposition = Exposition(metrics)
    exposition.warm()
    formats: dict[str, Callable[[], object] | None] = {
        "none": None,
        "text": lambda: exposition.render("text/plain"),
        "openmetrics": lambda: exposition.render("application/openmetrics-text"),
        "sglang": lambda: exposition.render("text/plain", as_sglang=True),
        "library": lambda: generate_latest(exposition.registry),
    }
    print(f"{count_samples()} samples on /metrics, {count_samples(sglang(''))} on /metrics/sglang; all in microseconds")
    head = ("scrape", "cpu", "held: p50", "max", "step alone: p50", "p99", "beside: p50", "p99")
    print(f"{head[0]:<13}" + "".join(f"{name:>{width}}" for name, width in zip(head[1:], WIDTHS, strict=True)))
    with counted_beside() as (behind, publish):
        rows = [(name, measure(scrape, seconds)) for name, scrape in formats.items()]
        rows.append(("worker", measure(None, seconds, publish)))
        rows.append(("text+worker", measure(lambda: behind.render("text/plain"), seconds, publish)))
    for name, seen in rows:
        scrapes, held, beside = seen.scrapes or [0.0], seen.held or [0.0], seen.beside or [0.0]
        row: tuple[float, ...] = (statistics.median(scrapes), statistics.median(held), max(held))
        row += (statistics.median(seen.alone), quantile(seen.alone), statistics.median(beside), quantile(beside))
        print(f"{name:<13}" + "".join(f"{value:>{width}.0f}" for value, width in zip(row, WIDTHS, strict=True)))


def quantile(values: list[float], q: float = 0.99) -> float:
    """The `q` quantile, without interpolation."""
    return sorted(values)[min(len(values) - 1, int(q * len(values)))]


if __name__ == "__main__":
    main()
