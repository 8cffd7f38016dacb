"""What watching costs: microseconds a step for each listener, and milliseconds a scrape. Asserts nothing.

    python -m bench.telemetry_cost

The events are those of a real scheduler that decodes with 32, then 256 requests, admissions and ends included. CPU
time, best of five runs, so that a busy machine does not decide. `queue` is the engine thread's share; all others run on
worker threads, under the same interpreter lock. `together` is the read model and the spans with one timeline, as a
served engine has them where traces are on. There they find their data in no cache, and take twice as long
(`bench.overhead`, column `beside`).
"""

from __future__ import annotations

import platform
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from pathlib import Path

from engine.clock import VirtualClock
from engine.events import AnyEvent, EngineStarted, EventSink, RecordingSink
from telemetry.buffered import BufferedSink
from telemetry.exposition import Exposition
from telemetry.isolation import IsolatedSink
from telemetry.journal import JournalSink
from telemetry.metering import MeteredFanOut
from telemetry.metrics import MetricsSink
from telemetry.read_model import ReadModel
from telemetry.shared_sink import BATCH
from telemetry.shared_timeline import SharedTimeline
from telemetry.spans.draft import SpanDraft
from telemetry.spans.sink import SpanSink
from telemetry.takers import TakesMany
from tests.builders import CoreRun, engine_config

RUNS = 5


class Nowhere:
    """Takes spans and drops them."""

    def start(self, engine: EngineStarted) -> None:
        """Nothing."""

    def send(self, spans: list[SpanDraft]) -> None:
        """Nothing."""

    def refuse(self, spans: int) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class Queues:
    """As many queues as a server has, whose workers come later."""

    def __init__(self) -> None:
        kept = RecordingSink()
        queues = [BufferedSink(kept, name, capacity=10_000_000, period_s=60.0) for name in ("journal", "shared")]
        self.emit = MeteredFanOut([], time.perf_counter_ns, queues=queues).emit


def recorded(rows: int) -> tuple[Sequence[AnyEvent], int]:
    """Events of `rows` requests of 64 tokens in and 200 out, all at once; and the steps they took."""
    config = engine_config(num_pages=rows * 20, page_size=16, max_running_requests=rows, max_prefill_tokens=8192)
    sink = RecordingSink()
    run = CoreRun(config, sink)
    for at in range(rows):
        run.add(f"request-{at:04d}", 64, 200, ignore_eos=True)
    return sink.events, run.run()


def best(work: Callable[[], object], runs: int = RUNS) -> float:
    """CPU seconds of the quickest of `runs`."""
    quickest = float("inf")
    for _ in range(runs):
        began = time.thread_time()
        work()
        quickest = min(quickest, time.thread_time() - began)
    return quickest


class Together:
    """The read model and the spans, with one timeline."""

    def __init__(self) -> None:
        model = ReadModel(clock=VirtualClock())
        self.take = SharedTimeline(model, SpanSink(Nowhere(), expects_responses=False), expects_responses=False).take

    def emit(self, event: AnyEvent) -> None:
        self.take((event,))


def feed(make: Callable[[], EventSink], events: Sequence[AnyEvent]) -> EventSink:
    """A fresh listener that has heard everything, the queues event by event, the others as a worker feeds them."""
    sink = make()
    if isinstance(sink, Queues):
        for event in events:
            sink.emit(event)
        return sink
    take = sink.take if isinstance(sink, TakesMany) else IsolatedSink(sink, "bench").take
    for at in range(0, len(events), BATCH):
        take(events[at : at + BATCH])
    return sink


def main() -> None:
    """Print the table."""
    print(f"{platform.processor() or platform.machine()}, Python {platform.python_version()}, best of {RUNS}")
    print(f"{'listener':<12}{'rows':>6}{'events/step':>13}{'us/step':>10}")
    folder = tempfile.TemporaryDirectory()
    names = count()
    makers: dict[str, Callable[[], EventSink]] = {
        "queue": Queues,
        "metrics": lambda: MetricsSink(clock=VirtualClock(), in_batches=True),
        "read_model": lambda: ReadModel(clock=VirtualClock()),
        "spans": lambda: SpanSink(Nowhere(), expects_responses=False),
        "together": Together,
        "journal": lambda: JournalSink(Path(folder.name) / f"{next(names)}.jsonl"),
    }
    for rows in (32, 256):
        events, steps = recorded(rows)
        for name, make in makers.items():
            took = best(partial(feed, make, events))
            print(f"{name:<12}{rows:>6}{len(events) / steps:>13.1f}{took / steps * 1e6:>10.1f}")
    metrics = MetricsSink(clock=VirtualClock())
    for event in recorded(32)[0]:
        metrics.emit(event)
    exposition = Exposition(metrics)
    for accept in ("text/plain", "application/openmetrics-text"):
        took = best(partial(exposition.render, accept), 20)
        print(f"scrape as {accept}: {took * 1e3:.2f} ms, {len(exposition.render(accept)[0]) // 1024} KiB")


if __name__ == "__main__":
    main()
