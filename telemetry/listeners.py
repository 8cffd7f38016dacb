"""Listeners. Owns: everything that hears one engine of this process, in which order, and how it is shown.

On the engine thread, in order: the queues of the workers (first, so that what the checker refuses is on record), then
the checker where it may stop a step. Workers: one for metrics, read model, request log, spans and a checker that only
records; one each for the journal and for tables, which wait on a disk. `hears` is the engine's sink; once the
engine exists, `attach` names it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Final

from engine.clock import Clock
from engine.events import EventSink, FanOut
from engine.executor.base import Executor, LendingExecutor
from engine.llm_engine import LLMEngine
from engine.server.engine_thread import EngineThread
from telemetry.buffered import BufferedSink
from telemetry.checking import Checking
from telemetry.exemplars import Exemplars
from telemetry.exposition import Exposition
from telemetry.heap import QuietCollector
from telemetry.journal_cap import CappedJournal
from telemetry.latency_book import Objectives
from telemetry.logs import RequestLog
from telemetry.metering import MeteredFanOut
from telemetry.metric_catalog import NS
from telemetry.metrics import MetricsSink
from telemetry.read_model import ReadModel
from telemetry.settings import ServeCommand
from telemetry.shared_sink import SharedSink
from telemetry.shared_timeline import SharedTimeline
from telemetry.spans.config import build_span_sink, keep_rule
from telemetry.spans.sink import SpanSink
from telemetry.takers import SinkStats

#: Longest that a scrape, a question, or an audit of metrics, waits for what was published before it.
CATCH_UP_S: Final = 0.1
#: Longest that the end waits for each file to be written, as long as it grows.
WRITE_OUT_S: Final = 60.0
#: How long workers rest beside a model that computes on all of their processors: each time that they wake up they find
#: nothing of theirs in any cache, which takes them as long as what a tenth of a second brought. The second is what a
#: killed engine loses of its files.
LISTENERS_S: Final = 2.0
FILES_S: Final = 1.0
#: Events that the journal encodes at once, which is quick: about a step's.
JOURNAL_BATCH: Final = 32


class Listeners:
    """All listeners of one engine.

    journal    where records go; None: nowhere
    engine_id  names the run where there is no journal to name it
    version    of this build, for traces
    """

    def __init__(
        self, command: ServeCommand, *, clock: Clock, journal: CappedJournal | None, engine_id: str, version: str
    ) -> None:
        self._clock = clock
        self._engine_thread: EngineThread | None = None
        self.metrics = MetricsSink(
            clock=clock,
            expects_responses=True,
            late_ns=round(command.traces.gap_objective_s * NS),
            ttft_ns=round(command.traces.ttft_objective_s * NS),
            exemplars=Exemplars(keep_rule(command.traces)) if command.traces.endpoint is not None else None,
            in_batches=True,
        )
        self.checking = Checking(
            command.checker,
            on_violation=command.on_violation,
            journal=journal,
            run=journal.path.stem if journal is not None else engine_id,
            clock=clock,
        )
        checker = self.checking.checker
        self.read_model = ReadModel(
            clock=clock,
            expects_responses=True,
            checker=None if checker.is_off else checker,
            rejected=self._rejected,
            objectives=Objectives(
                ttft_ns=round(command.traces.ttft_objective_s * NS), gap_ns=round(command.traces.gap_objective_s * NS)
            ),
            heartbeat=self._heartbeat_ns,
            audited=lambda: checker.audited,
        )
        # Metrics come first, spans last: see `SharedSink`.
        shared: list[tuple[str, EventSink]] = [("metrics", self.metrics)]
        self._request_log = RequestLog(expects_responses=True) if command.log_requests else None
        logs = () if self._request_log is None else (self._request_log,)
        self._traces = None
        self._span_sink: SpanSink | None = None
        traces = build_span_sink(command.traces, expects_responses=True, version=version)
        if self.checking.is_beside:
            shared.append(("checker", checker))
        together = None
        if traces is not None:
            self._span_sink, self._traces = traces
            together = SharedTimeline(self.read_model, self._span_sink, expects_responses=True, others=logs)
            self.checking.listeners.append(self._span_sink.note_violation)
        else:
            shared.append(("read_model", FanOut((self.read_model, *logs)) if logs else self.read_model))
        disks = [] if journal is None else [BufferedSink(journal, "journal", batch=JOURNAL_BATCH)]
        if command.parquet is not None:
            from telemetry.export.parquet_sink import ParquetSink, parquet_folder

            tables = ParquetSink(parquet_folder(command.parquet), expects_responses=True)
            disks.append(BufferedSink(tables, "parquet"))
        #: Started by whoever owns the process.
        self.collector = QuietCollector(self._is_busy)
        self._shared = SharedSink(shared, together=together)
        self.metrics.catch_up = self.read_model.asked.catch_up = lambda: self._shared.catch_up(CATCH_UP_S)
        checker.lost = lambda: self._shared.dropped
        # Files first: a collector that does not answer takes seconds, in which a second signal may end the process.
        self.queues: tuple[BufferedSink | SharedSink, ...] = (*disks, self._shared)
        self._judging = self.checking.sinks
        self.hears = MeteredFanOut(
            [("check", sink) for sink in self._judging],
            time.perf_counter_ns,
            queues=(*disks, self._shared.queue),
        )
        self.exposition = Exposition(
            self.metrics, checker=checker, sinks=self.stats, heartbeat=self._heartbeat_wall_ns, others=self._numbers
        )

    def attach(self, engine: LLMEngine, engine_thread: EngineThread) -> None:
        """Name the engine that is heard."""
        self._engine_thread = engine_thread
        self.checking.attach(engine, engine_thread, self.metrics, self._span_sink, self._shared.call)
        self.exposition.warm()

    def borrow_from(self, executor: Executor) -> None:
        """Where `executor` computes on all processors: workers ask for one, and wake up less often. Before a step."""
        lend_core = executor.lend_core if isinstance(executor, LendingExecutor) else None
        if lend_core is None:
            return
        for queue in self.queues:
            queue.share_processors(lend_core, period_s=LISTENERS_S if isinstance(queue, SharedSink) else FILES_S)

    def settle(self, timeout_s: float = 30.0) -> bool:
        """Wait until all that was published before is heard, and judged. False after `timeout_s`, for any queue."""
        return all(queue.flush(timeout_s) for queue in self.queues)

    def close(self) -> bool:
        """After the engine thread has ended: write what waits. False when a file lacks some of it; the log says so."""
        self.checking.stop_audits()
        is_whole = True
        for queue in self.queues:
            if isinstance(queue, SharedSink):
                queue.close()
            else:
                # A disk that is slow but writes is waited for: the record is what remains of the run.
                is_whole &= queue.close(most_s=WRITE_OUT_S)
        self.checking.close()
        if self._request_log is not None:
            self._request_log.close()
        return is_whole

    def trace_of(self, rid: str) -> str:
        """Trace id of a request that lives or whose response is on the way; "" of any other. Any thread."""
        timeline = self.metrics.timeline
        request = timeline.live.get(rid) or timeline.emitting.get(rid)
        return request.trace_id if request is not None else ""

    def stats(self) -> Iterator[SinkStats]:
        """The counters of every listener now. Any thread."""
        for queue in self.queues:
            if isinstance(queue, SharedSink):
                yield from queue.stats()
            else:
                yield queue.stats()
        yield from (sink.stats() for sink in self._judging)

    def _numbers(self) -> Iterator[tuple[str, str, int]]:
        yield from self.checking.numbers()
        yield from self.hears.numbers()
        yield "telemetry_seconds_total", "worker", sum(queue.cpu_ns for queue in self.queues)
        yield "telemetry_seconds_total", "lent", sum(queue.lent_ns for queue in self.queues)
        yield "telemetry_seconds_total", "collector", self.collector.spent_ns
        if self._traces is not None:
            yield from self._traces.numbers()

    def _heartbeat_ns(self) -> int:
        """When the loop last turned, by the engine's clock; before it did, now."""
        return self._clock.now_ns() if self._engine_thread is None else self._engine_thread.status.heartbeat_ns

    def _is_busy(self) -> bool:
        return self._engine_thread is None or self._engine_thread.status.has_work

    def _heartbeat_wall_ns(self) -> int:
        return time.time_ns() - (self._clock.now_ns() - self._heartbeat_ns())

    def _rejected(self) -> dict[str, int]:
        """Requests turned away at the door, by cause."""
        front = self.metrics.front_end
        cells = front.snapshot()
        return {value: cells[cell] for (name, value), cell in front.at.items() if name == "requests_rejected_total"}
