"""A live server for tests: real engine, scheduler, cache and uvicorn; the simulated executor unless a test says so."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx

from bench.tiny_model import write_tiny_model
from engine.clock import MonotonicClock
from engine.config import CacheConfig, EngineConfig, ExecutorConfig, ModelConfig, SchedulerConfig, ServerConfig
from engine.errors import RefusalCause
from engine.events import FanOut, RecordingSink
from engine.executor.background import BackgroundExecutor
from engine.executor.base import ForwardBatch, SampledToken, StepResult, TokenLogprobs
from engine.executor.factory import build_executor
from engine.executor.simulated import SimulatedExecutor
from engine.kvcache.snapshot import SchedulerSnapshot
from engine.llm_engine import LLMEngine
from engine.server.app import create_app
from engine.server.engine_thread import EngineThread
from engine.server.intake import ServedModel
from engine.server.observer import CutCause
from engine.server.serve import build_server
from engine.text.grammar import Grammars
from engine.text.stops import stop_watchers
from engine.text.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from invariants.checker import InvariantChecker

DEADLINE_S = 60.0


def until(condition: Callable[[], Any], what: str = "condition") -> None:
    """Poll until `condition` holds; a hang is a failure, not an endless test."""
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, f"never came true: {what}"
        time.sleep(0.005)


class GatedExecutor(SimulatedExecutor):
    """A simulated executor that holds each step while the gate is shut, and may fail on demand."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.gate = threading.Event()
        self.gate.set()
        self.fail_next = False
        self.batches: list[ForwardBatch] = []

    def execute(self, batch: ForwardBatch) -> StepResult:
        self.batches.append(batch)
        assert self.gate.wait(DEADLINE_S)
        if self.fail_next:
            self.fail_next = False
            raise RuntimeError("made to fail")
        return super().execute(batch)


class ScriptedExecutor(SimulatedExecutor):
    """Answers a fixed list of tokens, by output index; the last one for ever."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.script: Sequence[int] = (0,)

    def execute(self, batch: ForwardBatch) -> StepResult:
        tokens = []
        for row in batch.sampling:
            token = self.script[min(row.output_index, len(self.script) - 1)]
            logprobs = None
            if row.params.logprobs is not None:
                logprobs = TokenLogprobs(token, -0.5, tuple((32 + i, -1.0 - i) for i in range(row.params.logprobs)))
            tokens.append(SampledToken(row.rid, token, logprobs))
        return StepResult(batch.step, tuple(tokens))


class CountingObserver:
    """Counts what the front end reports."""

    def __init__(self) -> None:
        self.received = 0
        self.rejected: Counter[RefusalCause] = Counter()
        self.disconnects = 0
        self.cuts: Counter[CutCause] = Counter()
        self.sends = 0
        self.first_bytes: dict[str, int] = {}

    def on_received(self) -> None:
        self.received += 1

    def on_rejected(self, cause: RefusalCause) -> None:
        self.rejected[cause] += 1

    def on_disconnect(self) -> None:
        self.disconnects += 1

    def on_cut(self, cause: CutCause) -> None:
        self.cuts[cause] += 1

    def on_first_byte(self, rid: str, t_ns: int) -> None:
        self.first_bytes[rid] = t_ns

    def on_stream_send(self, ns: int) -> None:
        assert ns >= 0
        self.sends += 1


class LiveServer:
    """A running server and everything a test may look into."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        make_executor: Callable[[EngineConfig], Any] = SimulatedExecutor,
        tokenizer: Tokenizer | None = None,
        with_grammars: bool = False,
        routers: Sequence[Any] = (),
        wrap_engine: Callable[[LLMEngine], Any] = lambda engine: engine,
    ) -> None:
        self.config = config
        self.sink = RecordingSink()
        self.checker = InvariantChecker(on_violation="record", time_ns=time.perf_counter_ns)
        self.observer = CountingObserver()
        self.executor = make_executor(config)
        info = self.executor.info()
        self.tokenizer = tokenizer or ByteTokenizer(info.vocab_size, eos_token_ids=info.eos_token_ids)
        grammars = self.grammars = Grammars(self.tokenizer, info.vocab_size) if with_grammars else None
        self.engine = LLMEngine(
            config,
            executor=BackgroundExecutor(self.executor) if config.executor.overlap else self.executor,
            clock=MonotonicClock(),
            sink=FanOut((self.sink, self.checker)),
            stop_watcher=stop_watchers(self.tokenizer),
            grammars=None if grammars is None else grammars.state_of,
        )
        self.thread = EngineThread(
            wrap_engine(self.engine),
            max_queued_requests=config.server.max_queued_requests,
            max_running_requests=config.scheduler.max_running_requests,
            queue_timeout_s=config.server.queue_timeout_s,
            displaces=config.scheduler.enable_priority_scheduling,
        )
        app = create_app(
            engine_thread=self.thread,
            tokenizer=self.tokenizer,
            model=ServedModel(info.model, info.max_context_tokens, info.vocab_size),
            config=config.server,
            grammars=grammars,
            observer=self.observer,
            routers=routers,
        )
        self.server = build_server(app, config.server, self.thread)
        self._runner = threading.Thread(target=self._run, name="test-http")
        self._runner.start()
        until(lambda: self.server.started, "server start")
        self.port = self.server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.http = httpx.Client(base_url=self.url, timeout=DEADLINE_S)

    def _run(self) -> None:
        asyncio.run(self.server.serve())

    def snapshot(self) -> SchedulerSnapshot:
        return self.thread.call(self.engine.snapshot).result(DEADLINE_S)

    def post(self, path: str = "/v1/completions", **body: Any) -> httpx.Response:
        """A completion with neutral defaults."""
        default: dict[str, Any] = {"model": "simulated", "temperature": 0}
        default |= {"messages": [{"role": "user", "content": "hi"}]} if "chat" in path else {"prompt": "hello"}
        return self.http.post(path, json=default | body)

    def assert_nothing_held(self) -> None:
        """No request, page, lock or row is held by anybody."""
        self.assert_nothing_held_by_the_engine()
        until(lambda: self.thread.open_replies == 0, "every reply ended")

    def assert_nothing_held_by_the_engine(self) -> None:
        """The same, whatever clients have yet to read."""
        until(lambda: not self.snapshot().requests, "every request ended")
        state = self.snapshot()
        self.thread.call(lambda: self.checker.audit(self.engine.snapshot())).result(DEADLINE_S)
        assert (self.checker.total_violations, self.checker.internal_errors) == (0, 0), list(self.checker.violations)
        assert state.waiting == ()
        assert state.running == ()
        assert state.continuation is None
        free, private, protected, evictable = state.kv.counts
        assert (private, protected) == (0, 0)
        assert free + evictable == state.kv.num_pages
        assert state.kv.leases == ()
        assert all(node.lock_count == 0 for node in state.kv.nodes if node.node != node.parent)
        assert len(state.kv.free_rows) == self.config.scheduler.max_running_requests
        assert len(self.engine.tokens) == 0

    def begin_stop(self) -> None:
        self.server.should_exit = True

    def stop(self) -> None:
        self.http.close()
        self.begin_stop()
        self._runner.join(DEADLINE_S)
        assert not self._runner.is_alive()


def tiny_server(folder: Path, *, num_pages: int = 256, conservativeness: float = 1.0) -> LiveServer:
    """A server of a real model of 60 KB, written into `folder`: its tokens are bytes, its answers make no sense."""
    write_tiny_model(folder)
    config = EngineConfig(
        scheduler=SchedulerConfig(
            chunked_prefill_size=32, max_running_requests=16, schedule_conservativeness=conservativeness
        ),
        cache=CacheConfig(num_pages=num_pages, page_size=4),
        model=ModelConfig(path=folder, name="tiny"),
        # What a prompt computed again in other pieces adds up to is near enough the same only here (ADR 0025).
        executor=ExecutorConfig(threads=1, dtype="float32"),
        server=ServerConfig(port=0, drain_timeout_s=1.0),
    )
    return LiveServer(config, make_executor=build_executor, tokenizer=load_tokenizer(folder), with_grammars=True)
