"""Composition root. Owns: the one place that builds an engine, its listeners and its HTTP routes, and runs them."""

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
from engine.kvcache.page_keys import HEAD_TOKENS
from engine.llm_engine import LLMEngine
from engine.server.app import create_app
from engine.server.engine_thread import EngineThread
from engine.server.intake import ServedModel
from engine.server.serve import build_server
from engine.text.grammar import Grammars
from engine.text.stops import stop_watchers
from engine.text.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from invariants.checker import InvariantChecker
from telemetry.checking import Checking
from telemetry.evidence import FOLDER
from telemetry.journal import new_journal_path
from telemetry.journal_cap import CappedJournal
from telemetry.law_answers import LawBook
from telemetry.listeners import Listeners
from telemetry.logs import set_up
from telemetry.ports import bind_listener, make_room_for_files, port_of
from telemetry.program import program
from telemetry.read_api import create_router
from telemetry.settings import ServeCommand

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Instance:
    """One built engine with everything around it."""

    engine: LLMEngine
    engine_thread: EngineThread
    app: FastAPI
    listeners: Listeners
    journal: CappedJournal | None
    executor: Executor

    @property
    def checking(self) -> Checking:
        return self.listeners.checking

    @property
    def checker(self) -> InvariantChecker:
        return self.checking.checker

    def close(self) -> bool:
        """After the engine thread has ended: write what waits, give memory back. False: a file lacks some of it."""
        is_whole = self.listeners.close()
        if self.engine_thread.is_alive:
            # Its step outlasts every limit of a stop: the files lack the ends behind it, and its memory is in use.
            _log.error("the last step did not end in time: requests that were in it have no end in the journal")
            return False
        self.executor.close()
        return is_whole


def build_instance(command: ServeCommand, *, executor: Executor | None = None, clock: Clock | None = None) -> Instance:
    """Load the model and put everything together; nothing runs yet.

    Raises ConfigError or ModelFormatError. The caller closes the instance.
    """
    config = command.engine_config()
    clock = clock or MonotonicClock()
    executor = executor or build_executor(config)
    info = executor.info()
    tokenizer = tokenizer_for(config, info)
    # Made-up tokens follow no grammar.
    grammars = None if config.executor.kind == "simulated" else Grammars(tokenizer, info.vocab_size)
    journal = _journal(command)
    engine_id = uuid.uuid4().hex[:12]
    listeners = Listeners(command, clock=clock, journal=journal, engine_id=engine_id, version=version())
    engine = LLMEngine(
        config,
        executor=executor,
        clock=clock,
        sink=listeners.hears,
        stop_watcher=stop_watchers(tokenizer),
        grammars=None if grammars is None else grammars.state_of,
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
        # Without a tree there is nothing to share; below a page, nothing of it.
        share_from=max(HEAD_TOKENS, config.cache.page_size + 1) if config.cache.enable_radix else None,
        clock=clock,
    )

    laws = LawBook(
        listeners.read_model,
        listeners.checking,
        config=command.checker,
        folder=None if journal is None else journal.path.parent / FOLDER,
        run=engine_id if journal is None else journal.path.stem,
    )
    app = create_app(
        engine_thread=engine_thread,
        tokenizer=tokenizer,
        model=ServedModel(info.model, info.max_context_tokens, info.vocab_size, created=int(time.time())),
        config=config.server,
        grammars=grammars,
        clock=clock,
        observer=listeners.metrics.front_end,
        routers=(create_router(listeners.read_model, listeners.exposition, sglang=command.sglang_metrics, laws=laws),),
        version=version(),
    )
    listeners.read_model.journal = None if journal is None else str(journal.path.absolute())
    listeners.attach(engine, engine_thread)
    listeners.borrow_from(executor)
    return Instance(engine, engine_thread, app, listeners, journal, executor)


def tokenizer_for(config: EngineConfig, info: ExecutorInfo) -> Tokenizer:
    """The model's tokenizer; readable bytes for made-up tokens."""
    if config.executor.kind == "simulated":
        return ByteTokenizer(info.vocab_size, eos_token_ids=info.eos_token_ids)
    from engine.models.packaged import packaged_gguf_path

    return load_tokenizer(config.model.path or packaged_gguf_path())


def version() -> str:
    """This distribution's version; "0" when it runs from an uninstalled tree."""
    try:
        return importlib.metadata.version("admitscope")
    except importlib.metadata.PackageNotFoundError:
        return "0"


def serve(command: ServeCommand) -> int:
    """Serve until SIGINT or SIGTERM. Raises ConfigError or ModelFormatError before that.

    Returns the exit status: 0 after a drain, 1 when a second signal cut it short, the engine had stopped by itself, or
    a journal or table could not be written to its end.
    """
    correlation = set_up(command.log_format)
    server = command.server
    make_room_for_files(server.max_connections)
    # The port comes first: a taken one is said at once, not after the model has loaded.
    with bind_listener(server.host, server.port, pick=command.pick_port) as listener:
        if server.port not in {0, port_of(listener)}:
            print(f"port {server.port} is taken: taking {port_of(listener)}", flush=True)
        instance = build_instance(command)
        collector = instance.listeners.collector
        try:
            correlation.trace_of = instance.listeners.trace_of
            _announce(instance, command, listener)
            instance.checking.start()
            collector.start()
            uvicorn_server = build_server(instance.app, server, instance.engine_thread)
            with _signals_left_to_the_server():
                uvicorn_server.run(sockets=[listener])
        finally:
            collector.stop()
            is_whole = instance.close()
    return int(not is_whole or uvicorn_server.was_hurried or bool(instance.engine_thread.status.dead))


def _announce(instance: Instance, command: ServeCommand, listener: socket.socket) -> None:
    host = f"[{command.server.host}]" if ":" in command.server.host else command.server.host
    url = f"http://{host}:{port_of(listener)}"
    info = instance.engine.info
    form = f"{info.dtype}, {info.kernels}" if info.kernels else info.dtype
    if command.executor.kind == "simulated":
        form = "made-up tokens"
    if command.executor.overlap:
        form += ", steps overlap"
    print(f"{info.model} on {url}  ({info.num_pages} pages of {info.page_size} tokens, {form})")
    print(f"  API      {url}/v1")
    print(f"  metrics  {url}/metrics")
    if command.sglang_metrics:
        print(f"  sglang   {url}/metrics/sglang")
    if instance.journal is not None:
        print(f"  journal  {instance.journal.path}")
    if command.parquet is not None:
        print(f"  tables   {command.parquet}")
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
