"""An engine that always runs as many requests, watched by everything or by nobody: what `bench.overhead` compares."""

from __future__ import annotations

import gc
import math
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final, NamedTuple

from bench.step_pairs import Step
from engine.clock import MonotonicClock
from engine.config import EngineConfig
from engine.events import EventSink
from engine.executor.factory import build_executor
from engine.llm_engine import EngineRequest, LLMEngine
from engine.sampling_params import SamplingParams
from telemetry.demo.questions import CONTEXT, GENERATED
from telemetry.demo.trace import TraceRow, load_rows, scaled
from telemetry.journal import new_journal_path
from telemetry.journal_cap import CappedJournal
from telemetry.listeners import Listeners
from telemetry.settings import ServeCommand, parse

PROMPT_TOKENS: Final = 64
ENDS_A_STEP: Final = 2
#: New containers before Python looks for cycles if nobody sets it.
PYTHON_THRESHOLD: Final = (700, 10, 10)
DEMO_ROWS: Final = 400


class _Receiver(BaseHTTPRequestHandler):
    """Takes spans and says so."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the library's word
        """Nothing."""


@contextmanager
def receiver() -> Iterator[str]:
    """The URL of something that takes spans."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Receiver)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class Window(NamedTuple):
    """Tokens a second of wall time, the median step's CPU time on the engine's thread, the process's a token; steps."""

    tokens_per_s: float
    cpu_us: float
    process_us: float
    steps: list[Step]


def demo_lengths() -> list[TraceRow]:
    """Prompt and answer lengths of what `admitscope demo` asks."""
    return [scaled(row, context=CONTEXT, generated=GENERATED) for row in load_rows(DEMO_ROWS)]


def config_of(
    running: int, *, kind: str = "simulated", step_ms: float = 0.0, most_tokens: int | None = None
) -> EngineConfig:
    """An engine for `running` requests of up to `most_tokens` each; None: ENDS_A_STEP of them end in every step."""
    most_tokens = most_tokens or PROMPT_TOKENS + running // ENDS_A_STEP
    return EngineConfig.model_validate(
        {
            "scheduler": {
                "max_running_requests": running,
                "chunked_prefill_size": 2048,
                "enable_mixed_chunk": True,
                "schedule_policy": "lpm",
            },
            "cache": {"page_size": 16, "num_pages": running * most_tokens // 4},
            "executor": {"kind": kind, "simulated_step_ms": step_ms},
        }
    )


class Load:
    """An engine that always runs `running` requests, of which two end in every step."""

    def __init__(
        self,
        running: int,
        sink: EventSink,
        *,
        step_ms: float = 0.0,
        config: EngineConfig | None = None,
        lengths: Sequence[TraceRow] = (),
        on_first_byte: Callable[[str, int], None] | None = None,
    ) -> None:
        config = config or config_of(running, step_ms=step_ms)
        self.executor: Any = build_executor(config)
        self.engine = LLMEngine(config, executor=self.executor, clock=MonotonicClock(), sink=sink)
        self.steps = 0
        self._lengths = lengths or (TraceRow(PROMPT_TOKENS, running // ENDS_A_STEP),)
        self._made = 0
        self._on_first_byte = on_first_byte
        self._first_bytes_ns: dict[str, int] = {}
        # The first ones end one after another, so that from then on some end in every step.
        for number in range(running):
            self.add((1 + number) / running)

    def share_memory(self, other: Load) -> None:
        """Compute with the weights and in the K/V of `other`: a step's time depends on where these lie.

        What one of them leaves in a page is garbage to the other, but which steps are made depends on no number in it.
        """
        mine, its = self.executor, other.executor
        mine.model, mine.kv_cache = its.model, its.kv_cache
        mine._layer_caches = its._layer_caches  # an executor in use never changes its memory; only this comparison does

    def add(self, part: float = 1.0) -> None:
        """One more request, with `part` of its answer; every eighth shares its prompt's first half."""
        length = self._lengths[self._made % len(self._lengths)]
        half, outputs = length.context_tokens // 2, math.ceil(length.generated_tokens * part)
        self._made += 1
        shared = range(self._made % 8 * 1000, self._made % 8 * 1000 + half)
        own = range(self._made << 10, (self._made << 10) + half)
        self.engine.add_request(
            EngineRequest(
                rid=f"cmpl-{self._made:032x}",
                prompt_ids=(*(token % 512 for token in shared), *(token % 512 for token in own)),
                params=SamplingParams(max_new_tokens=outputs, ignore_eos=True),
            )
        )

    def step(self) -> int:
        """One step; its answers are written at once, and who ended is replaced. Returns the tokens it made."""
        outputs = self.engine.step()
        self.steps += 1
        now_ns = time.monotonic_ns()
        for output in outputs:
            if output.output_index == 0:
                self._first_bytes_ns[output.rid] = now_ns
                if self._on_first_byte is not None:
                    self._on_first_byte(output.rid, now_ns)
            if output.finish is not None:
                # Without a response nobody lets go of a request, and its spans are never made.
                first_ns = self._first_bytes_ns.pop(output.rid)
                self.engine.record_response(output.rid, first_ns, now_ns, 512, 20_000, False)
                self.add()
        return len(outputs)

    def cpu_ns(self, steps: int) -> list[int]:
        """CPU time of this thread in each of `steps` steps."""
        spent = []
        for _ in range(steps):
            began = time.thread_time_ns()
            self.step()
            spent.append(time.thread_time_ns() - began)
        return spent

    def window(
        self, *, seconds: float = math.inf, steps: float = math.inf, beside: Callable[[], int] = lambda: 0
    ) -> Window:
        """A stretch of about `seconds` of wall time, or of `steps`.

        beside   processor time of the threads beside, in nanoseconds
        """
        tokens, spent, made = 0, [], list[Step]()
        began, process = time.perf_counter(), time.process_time_ns()
        while time.perf_counter() - began < seconds and len(spent) < steps:
            others, wall, before = beside(), time.perf_counter_ns(), time.thread_time_ns()
            tokens += self.step()
            spent.append(time.thread_time_ns() - before)
            made.append(Step((time.perf_counter_ns() - wall) / 1e3, (beside() - others) / 1e3))
        lasted, used_us = time.perf_counter() - began, (time.process_time_ns() - process) / 1e3
        return Window(tokens / lasted, statistics.median(spent) / 1e3, used_us / tokens, made)


@contextmanager
def everything(traces: str, *, python_collector: bool = False) -> Iterator[Listeners]:
    """All listeners of a served engine, with a journal on disk. `python_collector`: cycles are sought as by default."""
    command = parse(["serve", "--traces.endpoint", traces, "--on-violation", "record"])
    assert isinstance(command, ServeCommand)
    with tempfile.TemporaryDirectory() as folder:
        journal = CappedJournal(new_journal_path(Path(folder), time.time_ns()), max_mib=512)
        listeners = Listeners(command, clock=MonotonicClock(), journal=journal, engine_id="bench", version="bench")
        listeners.collector.start()
        if python_collector:
            gc.unfreeze()
            gc.set_threshold(*PYTHON_THRESHOLD)
        try:
            yield listeners
        finally:
            listeners.collector.stop()
            listeners.close()


def worker_ns(listeners: Listeners) -> int:
    """Processor time of the threads beside the engine's, once they have done what there is."""
    for queue in listeners.queues:
        queue.flush()
    return sum(queue.cpu_ns for queue in listeners.queues)


def beside_ns(listeners: Listeners) -> int:
    """The same up to now, without waiting for them. None of them has ended."""
    return sum(queue.thread_ns for queue in listeners.queues)
