"""Composition root. Owns: the one place that builds an engine, its listeners and its HTTP routes, and runs them.

Listeners on the engine thread, in order: queues for those with a worker of their own, journal and read model (first, so
that what the checker refuses is on record), then the invariant checker, then metrics.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import secrets
import signal
import socket
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType

from fastapi import FastAPI

from engine.clock import Clock, MonotonicClock
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.executor.base import Executor, ExecutorInfo
from engine.executor.factory import build_executor
from engine.llm_engine import LLMEngine
from engine.server.app import create_app
from engine.server.engine_thread import EngineThread
from engine.server.intake import ServedModel
from engine.server.serve import build_server
from engine.text.stops import stop_watchers
from engine.text.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from invariants.checker import InvariantChecker
from telemetry.buffered import BufferedSink, SinkStats
from telemetry.checking import Checking
from telemetry.exposition import Exposition
from telemetry.isolation import IsolatedSink
from telemetry.journal import new_journal_path
from telemetry.journal_cap import CappedJournal
from telemetry.metering import MeteredFanOut
from telemetry.metric_catalog import NS
from telemetry.metrics import MetricsSink
from telemetry.ports import bind_listener, make_room_for_files, port_of
from telemetry.program import program
from telemetry.read_api import create_router
from telemetry.read_model import ReadModel
from telemetry.settings import ServeCommand
from telemetry.spans.config import build_span_sink

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Instance:
    """One built engine with everything around it."""

    engine: LLMEngine
    engine_thread: EngineThread
    app: FastAPI
    checking: Checking
    metrics: MetricsSink
    journal: CappedJournal | None
    queues: tuple[BufferedSink, ...]
    executor: Executor

    @property
    def checker(self) -> InvariantChecker:
        return self.checking.checker

    def close(self) -> None:
        """After the engine thread has ended: write what waits, give memory back."""
        self.checking.close()
        for queue in self.queues:
            queue.close()
        self.executor.close()


def build_instance(command: ServeCommand, *, executor: Executor | None = None, clock: Clock | None = None) -> Instance:
    """Load the model and put everything together; nothing runs yet.

    Raises ConfigError or ModelFormatError. The caller closes the instance.
    """
    config = command.engine_config()
    clock = clock or MonotonicClock()
    executor = executor or build_executor(config)
    info = executor.info()
    tokenizer = tokenizer_for(config, info)
    late_ns = round(command.traces.gap_objective_s * NS)
    metrics = MetricsSink(clock=clock, expects_responses=True, late_ns=late_ns)
    journal = _journal(command)
    engine_id = uuid.uuid4().hex[:12]
    checking = Checking(
        command.checker,
        on_violation=command.on_violation,
        journal=journal,
        run=journal.path.stem if journal is not None else engine_id,
        clock=clock,
    )
    checker = checking.checker
    judging, counting = checking.sinks, IsolatedSink(metrics, "metrics")
    read_model = ReadModel(
        clock=clock,
        expects_responses=True,
        checker=None if checker.is_off else checker,
        rejected=lambda: _rejected(metrics),
        heartbeat=lambda: engine_thread.status.heartbeat_ns,
    )
    queues: tuple[BufferedSink, ...] = (BufferedSink(read_model, "read_model"),)
    if journal is not None:
        queues = (BufferedSink(journal, "journal"), *queues)
    traces = build_span_sink(command.traces, expects_responses=True, version=version())
    if traces is not None:
        span_sink, span_export = traces
        queues = (*queues, BufferedSink(span_sink, "spans"))
        checking.listeners.append(span_sink.note_violation)
    sinks: tuple[IsolatedSink | BufferedSink, ...] = (*queues, *judging, counting)
    fan_out = MeteredFanOut(
        [
            *(("publish", queue) for queue in queues),
            *(("check", sink) for sink in judging),
            ("metric", counting),
        ],
        time.perf_counter_ns,
    )
    engine = LLMEngine(
        config,
        executor=executor,
        clock=clock,
        sink=fan_out,
        stop_watcher=stop_watchers(tokenizer),
        key_secret=secrets.token_bytes(32),
        version=version(),
        engine_id=engine_id,
        wall_ns=time.time_ns(),
    )
    engine_thread = EngineThread(
        engine,
        max_queued_requests=config.server.max_queued_requests,
        max_running_requests=config.scheduler.max_running_requests,
        queue_timeout_s=config.server.queue_timeout_s,
        displaces=config.scheduler.enable_priority_scheduling,
        clock=clock,
    )

    def stats() -> Iterator[SinkStats]:
        yield from (sink.stats() for sink in sinks)

    def heartbeat() -> int:
        return time.time_ns() - (clock.now_ns() - engine_thread.status.heartbeat_ns)

    def others() -> Iterator[tuple[str, str, int]]:
        yield from checking.numbers()
        yield from fan_out.numbers()
        if traces is not None:
            yield from span_export.numbers()

    exposition = Exposition(metrics, checker=checker, sinks=stats, heartbeat=heartbeat, others=others)
    app = create_app(
        engine_thread=engine_thread,
        tokenizer=tokenizer,
        model=ServedModel(info.model, info.max_context_tokens, info.vocab_size, created=int(time.time())),
        config=config.server,
        clock=clock,
        observer=metrics.front_end,
        routers=(create_router(read_model, exposition),),
        version=version(),
    )
    checking.attach(engine, engine_thread, metrics)
    return Instance(engine, engine_thread, app, checking, metrics, journal, queues, executor)


def tokenizer_for(config: EngineConfig, info: ExecutorInfo) -> Tokenizer:
    """The model's tokenizer; readable bytes for made-up tokens."""
    if config.executor.kind == "simulated":
        return ByteTokenizer(info.vocab_size, eos_token_ids=info.eos_token_ids)
    from engine.models.packaged import packaged_gguf_path

    return load_tokenizer(config.model.path or packaged_gguf_path())


def _rejected(metrics: MetricsSink) -> dict[str, int]:
    """Requests turned away at the door, by cause."""
    front = metrics.front_end
    cells = front.snapshot()
    return {value: cells[cell] for (name, value), cell in front.at.items() if name == "requests_rejected_total"}


def version() -> str:
    """This distribution's version; "0" when it runs from an uninstalled tree."""
    try:
        return importlib.metadata.version("admitscope")
    except importlib.metadata.PackageNotFoundError:
        return "0"


def serve(command: ServeCommand) -> int:
    """Serve until SIGINT or SIGTERM. Raises ConfigError or ModelFormatError before that.

    Returns the exit status: 0 after a drain, 1 when a second signal cut it short or the engine had stopped by itself.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    server = command.server
    make_room_for_files(server.max_connections)
    # The port comes first: a taken one is said at once, not after the model has loaded.
    with bind_listener(server.host, server.port, pick=command.pick_port) as listener:
        if server.port not in {0, port_of(listener)}:
            print(f"port {server.port} is taken: taking {port_of(listener)}", flush=True)
        instance = build_instance(command)
        try:
            _announce(instance, command, listener)
            instance.checking.start()
            uvicorn_server = build_server(instance.app, server, instance.engine_thread)
            with _signals_left_to_the_server():
                uvicorn_server.run(sockets=[listener])
        finally:
            instance.close()
    return int(uvicorn_server.was_hurried or bool(instance.engine_thread.status.dead))


def _announce(instance: Instance, command: ServeCommand, listener: socket.socket) -> None:
    host = f"[{command.server.host}]" if ":" in command.server.host else command.server.host
    url = f"http://{host}:{port_of(listener)}"
    info = instance.engine.info
    print(f"{info.model} on {url}  ({info.num_pages} pages of {info.page_size} tokens, {info.attention_backend})")
    print(f"  API      {url}/v1")
    print(f"  metrics  {url}/metrics")
    if instance.journal is not None:
        print(f"  journal  {instance.journal.path}")
    if command.traces.endpoint is not None:
        print(f"  traces   {command.traces.endpoint} (OTLP, {command.traces.protocol})")
    print(f"  checker  {instance.checking.words()}")
    print(f"  page     {program()} dashboard {url}")
    sys.stdout.flush()


@contextlib.contextmanager
def _signals_left_to_the_server() -> Iterator[None]:
    """uvicorn raises its signal again once it has shut down: swallow that, or the journal would not be closed."""

    def swallow(_number: int, _frame: FrameType | None) -> None:
        return

    wanted = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, swallow) for number in wanted}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _journal(command: ServeCommand) -> CappedJournal | None:
    """The journal of this run; its folder is made. Raises ConfigError when it cannot be."""
    if command.journal is None:
        return None
    try:
        command.journal.mkdir(parents=True, exist_ok=True)
        # A folder that cannot be written to would be noticed by the worker only, after the first request.
        with tempfile.TemporaryFile(dir=command.journal):
            pass
    except OSError as error:
        raise ConfigError(f"journal={str(command.journal)!r}: {error.strerror}; `none` writes no journal") from error
    return CappedJournal(new_journal_path(command.journal, time.time_ns()), max_mib=command.journal_max_mib)
