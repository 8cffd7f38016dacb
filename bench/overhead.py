"""What watching costs in all: everything on against everything off, in one run. Prints figures, asserts none.

    python -m bench.overhead [--only step paced demo two] [--steps 400] [--json]

On: records to a journal on disk, metrics, checker tier 1, read model, and spans (1 % of ordinary requests, all that are
late or retracted) sent to a receiver of this process. Off: nobody listens. The real engine runs both, with two requests
ending and two admitted in every step. Costs are CPU time of the engine's thread; the work of the threads beside it is
told apart.

Without a model (0 ms) nobody can run beside the engine but in its place: the worst case, the least of the repeats
counts. `held`: the same while the workers stand, which leaves what they cost without their company. With a model of
5 ms, which waits as a GPU's does, in short windows that take turns, so that a machine with other work slows both down;
medians. And with SmolLM2 on this machine's processors, where the other threads' work competes with the model's: there
the processor time of the whole process counts. That is done with the requests of `admitscope demo` (lengths of its
trace rows), and once more with two requests ending in every step.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import platform
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final, NamedTuple

from engine.clock import MonotonicClock
from engine.config import EngineConfig
from engine.events import EventSink, NullSink
from engine.executor.factory import build_executor
from engine.llm_engine import EngineRequest, LLMEngine
from engine.sampling_params import SamplingParams
from telemetry.demo.questions import CONTEXT, GENERATED
from telemetry.demo.trace import TraceRow, load_rows, scaled
from telemetry.journal import new_journal_path
from telemetry.journal_cap import CappedJournal
from telemetry.listeners import Listeners
from telemetry.settings import ServeCommand, parse

REPEATS: Final = 5
PROMPT_TOKENS: Final = 64
ENDS_A_STEP: Final = 2
#: The read model keeps 512 steps: until it is full, every step needs new memory from the system.
WARM_UP_STEPS: Final = 550
#: Aims: running requests -> microseconds a step.
AIMS_US: Final = {32: 50, 256: 120}
AIM_SHARE: Final = 0.025
AIM_MODEL_SHARE: Final = 0.01
#: Of the simulated steps that leave time to others, and the windows that take turns.
STEP_MS: Final = 5.0
WINDOW_S: Final = 0.4
#: New containers before Python looks for cycles if nobody sets it.
PYTHON_THRESHOLD: Final = (700, 10, 10)
MODEL_RUNNING: Final = 32
DEMO_ROWS: Final = 400
MODEL_WINDOW_S: Final = 4.0
#: What is measured: steps without a model, with one that waits, SmolLM2 with the demo's requests, and with two ending.
PARTS: Final = ("step", "paced", "demo", "two")


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
    """Tokens a second of wall time, the median step's CPU time on the engine's thread, and the process's a token."""

    tokens_per_s: float
    cpu_us: float
    process_us: float


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
        self.engine = LLMEngine(config, executor=build_executor(config), clock=MonotonicClock(), sink=sink)
        self.steps = 0
        self._lengths = lengths or (TraceRow(PROMPT_TOKENS, running // ENDS_A_STEP),)
        self._made = 0
        self._on_first_byte = on_first_byte
        self._first_bytes_ns: dict[str, int] = {}
        # The first ones end one after another, so that from then on some end in every step.
        for number in range(running):
            self.add((1 + number) / running)

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

    def window(self, seconds: float) -> Window:
        """A stretch of about `seconds` of wall time."""
        tokens, spent, began, process = 0, [], time.perf_counter(), time.process_time_ns()
        while time.perf_counter() - began < seconds:
            before = time.thread_time_ns()
            tokens += self.step()
            spent.append(time.thread_time_ns() - before)
        lasted, used_us = time.perf_counter() - began, (time.process_time_ns() - process) / 1e3
        return Window(tokens / lasted, statistics.median(spent) / 1e3, used_us / tokens)


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


def step_cost(running: int, steps: int, traces: str, *, held: bool) -> dict[str, Any]:
    """Microseconds a step, on and off, with nothing between two steps. `held`: the workers stand meanwhile."""
    on_us, off_us, beside_us = [], [], []
    for _ in range(REPEATS):
        load = Load(running, NullSink())
        load.cpu_ns(WARM_UP_STEPS)
        off_us.append(statistics.median(load.cpu_ns(steps)) / 1e3)
        with everything(traces) as listeners:
            load = Load(running, listeners.hears, on_first_byte=listeners.metrics.front_end.on_first_byte)
            load.cpu_ns(WARM_UP_STEPS)
            before, gate = worker_ns(listeners), threading.Event()
            for queue in listeners.queues if held else ():
                queue.call(gate.wait)
            on_us.append(statistics.median(load.cpu_ns(steps)) / 1e3)
            gate.set()
            beside_us.append((worker_ns(listeners) - before) / steps / 1e3)
            assert listeners.checking.checker.total_violations == 0, "a broken law makes the figures worthless"
    least = min(range(REPEATS), key=on_us.__getitem__)
    return {
        "bench": "overhead_step",
        "running": running,
        "model": "0 ms, held" if held else "0 ms",
        "on_us": round(min(on_us), 1),
        "off_us": round(min(off_us), 1),
        "cost_us": round(min(on_us) - min(off_us), 1),
        "aim_us": AIMS_US[running],
        "beside_us": round(beside_us[least], 1),
    }


def taking_turns(
    off_load: Load, on_load: Load, listeners: Listeners, turns: int, window_s: float = WINDOW_S
) -> tuple[list[Window], list[Window]]:
    """(off, on): windows of both in turn, each as often first as second."""
    off: list[Window] = []
    on: list[Window] = []
    for load in (off_load, on_load):
        load.window(window_s)
    for turn in range(turns):
        for load, windows in ((off_load, off), (on_load, on)) if turn % 2 else ((on_load, on), (off_load, off)):
            windows.append(load.window(window_s))
            worker_ns(listeners)  # what one window left to do is not done in the next
    assert listeners.checking.checker.total_violations == 0, "a broken law makes the figures worthless"
    return off, on


def paced_cost(running: int, traces: str, seconds: float, *, python_collector: bool = False) -> dict[str, Any]:
    """The same with a model of STEP_MS, as a served engine has one, and what it costs of the tokens a second."""
    off_load = Load(running, NullSink(), step_ms=STEP_MS)
    with everything(traces, python_collector=python_collector) as listeners:
        on_load = Load(
            running, listeners.hears, step_ms=STEP_MS, on_first_byte=listeners.metrics.front_end.on_first_byte
        )
        on_load.cpu_ns(WARM_UP_STEPS)
        before, made, stood_ns = worker_ns(listeners), on_load.steps, listeners.collector.spent_ns
        off, on = taking_turns(off_load, on_load, listeners, max(2, round(seconds / WINDOW_S)))
        stood = (listeners.collector.spent_ns - stood_ns) / (on_load.steps - made) / 1e3
        beside = (worker_ns(listeners) - before) / (on_load.steps - made) / 1e3
    cpu_on, cpu_off = (statistics.median(window.cpu_us for window in windows) for windows in (on, off))
    rate_on, rate_off = (statistics.median(window.tokens_per_s for window in windows) for windows in (on, off))
    return {
        "bench": "overhead_step",
        "running": running,
        "model": f"{STEP_MS:g} ms",
        "on_us": round(cpu_on, 1),
        "off_us": round(cpu_off, 1),
        "cost_us": round(cpu_on - cpu_off, 1),
        "aim_us": AIMS_US[running],
        "beside_us": round(beside, 1),
        "share": round(1 - rate_on / rate_off, 4),
        "share_of_cpu": round((cpu_on - cpu_off) / (STEP_MS * 1e3 + cpu_on), 4),
        "collector_us": round(stood, 1),
        "windows": len(on),
    }


def model_share(traces: str, turns: int, lengths: Sequence[TraceRow]) -> dict[str, Any]:
    """Share of tokens a second, and of the whole process's processor time a token, with SmolLM2 at 32 running."""
    most = max((row.context_tokens + row.generated_tokens for row in lengths), default=None)
    config = config_of(MODEL_RUNNING, kind="torch", most_tokens=most)
    off_load = Load(MODEL_RUNNING, NullSink(), config=config, lengths=lengths)
    with everything(traces) as listeners:
        on_load = Load(
            MODEL_RUNNING,
            listeners.hears,
            config=config,
            lengths=lengths,
            on_first_byte=listeners.metrics.front_end.on_first_byte,
        )
        before, made = worker_ns(listeners), on_load.steps
        off, on = taking_turns(off_load, on_load, listeners, turns, MODEL_WINDOW_S)
        beside = (worker_ns(listeners) - before) / (on_load.steps - made) / 1e3
    rate_on, rate_off = (statistics.median(window.tokens_per_s for window in windows) for windows in (on, off))
    all_on, all_off = (statistics.median(window.process_us for window in windows) for windows in (on, off))
    return {
        "bench": "overhead_model",
        "requests": "of the demo" if lengths else f"{ENDS_A_STEP} ending in every step",
        "running": MODEL_RUNNING,
        "share": round(1 - rate_on / rate_off, 4),
        "share_of_cpu": round(1 - all_off / all_on, 4),
        "off_us_a_token": round(all_off, 1),
        "on_us_a_token": round(all_on, 1),
        "beside_us": round(beside, 1),
        "windows": len(on),
        "aim": AIM_MODEL_SHARE,
    }


def main() -> int:
    """Print the table, or JSON lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seconds", type=float, default=10.0, help="of paced steps, with everything on and off")
    parser.add_argument("--model-turns", type=int, default=8, help="windows of SmolLM2 with everything on; 0: none")
    parser.add_argument(
        "--only", nargs="+", choices=PARTS, default=PARTS, help="which rows: no model, a model of 5 ms, SmolLM2's two"
    )
    parser.add_argument(
        "--python-collector", action="store_true", help="seek cycles as Python does by default, paced steps"
    )
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with receiver() as traces:
        rows = []
        if "step" in args.only:
            rows += [step_cost(running, args.steps, traces, held=held) for held in (False, True) for running in AIMS_US]
        if "paced" in args.only:
            rows += [
                paced_cost(running, traces, args.seconds, python_collector=args.python_collector) for running in AIMS_US
            ]
        wanted = [part for part in ("demo", "two") if part in args.only and args.model_turns]
        loads = [demo_lengths() if part == "demo" else () for part in wanted]
        models = [model_share(traces, args.model_turns, lengths) for lengths in loads]
    if args.json:
        for row in (*rows, *models):
            print(json.dumps(row))
        return 0
    print(f"{platform.processor() or platform.machine()}, Python {platform.python_version()}")
    print(
        "us a step of the engine thread's CPU; beside: of other threads; share: of tokens a second, and by CPU time; "
        "collector: us a step in which Python looked for cycles"
    )
    print(
        "".join(
            f"{name:>11}"
            for name in ("running", "model", "off", "on", "cost", "aim", "beside", "share", "by CPU", "collector")
        )
    )
    for row in rows:
        keys = ("running", "model", "off_us", "on_us", "cost_us", "aim_us", "beside_us")
        shares = "".join(f"{row[key]:>11.1%}" if key in row else f"{'':>11}" for key in ("share", "share_of_cpu"))
        print("".join(f"{row[key]:>11}" for key in keys) + shares + f"{row.get('collector_us', ''):>11}")
    print(f"aim of the share at 256 running: {AIM_SHARE:.1%}")
    for model in models:
        print(
            f"SmolLM2-135M at {model['running']} running, requests {model['requests']}: "
            f"{model['share']:.1%} fewer tokens a second, "
            f"{model['share_of_cpu']:.1%} more processor time a token (medians of {model['windows']} windows; "
            f"aim {AIM_MODEL_SHARE:.1%})"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
