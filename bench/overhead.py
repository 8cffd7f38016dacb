"""What watching costs in all: everything on against everything off, in one run. Prints figures, asserts none.

    python -m bench.overhead [--steps 400] [--json]

On: records to a journal on disk, metrics, checker tier 1, read model, and spans (1 % of ordinary requests, all that are
late or retracted) sent to a receiver of this process. Off: nobody listens. The real engine runs both over simulated
steps, with two requests ending and two admitted in every step; on and off take turns, and the least of the repeats
counts, in CPU time of the engine's thread. What the cost is made of: the checker and the hand-over, both estimated
from one step in 16 of the same run, and the rest, which is what the threads beside it cost the engine's thread (the
interpreter's lock, caches, the collector). Their own work is told apart: it runs while the engine waits for a model.

The share is measured with steps that take 5 ms, in short windows that take turns, so that a machine with other work
slows both down. What it is with nobody beside them follows from the figures of that run too: the engine thread's CPU
time a step, on against off, over the time of a step.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final, NamedTuple

from engine.clock import MonotonicClock
from engine.config import EngineConfig
from engine.events import EventSink, NullSink
from engine.executor.simulated import SimulatedExecutor
from engine.llm_engine import EngineRequest, LLMEngine
from engine.sampling_params import SamplingParams
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
#: Of the simulated steps whose share is measured, and the windows that take turns.
STEP_MS: Final = 5.0
WINDOW_S: Final = 0.4


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


class Window(NamedTuple):
    """Tokens a second of wall time, and the median step's CPU time on the engine's thread."""

    tokens_per_s: float
    cpu_us: float


class Load:
    """An engine that always runs `running` requests, of which two end in every step."""

    def __init__(self, running: int, sink: EventSink, *, step_ms: float = 0.0) -> None:
        outputs = running // ENDS_A_STEP
        config = EngineConfig.model_validate(
            {
                "scheduler": {
                    "max_running_requests": running,
                    "chunked_prefill_size": 2048,
                    "enable_mixed_chunk": True,
                    "schedule_policy": "lpm",
                },
                "cache": {"page_size": 16, "num_pages": running * (PROMPT_TOKENS + outputs) // 4},
                "executor": {"kind": "simulated", "simulated_step_ms": step_ms},
            }
        )
        self.engine = LLMEngine(config, executor=SimulatedExecutor(config), clock=MonotonicClock(), sink=sink)
        self._outputs = outputs
        self._made = 0
        # The first ones end one after another, so that from then on some end in every step.
        for number in range(running):
            self.add(1 + number // ENDS_A_STEP)

    def add(self, outputs: int) -> None:
        """One more request; every eighth shares its prompt's first half with seven others."""
        self._made += 1
        shared = range(self._made % 8 * 1000, self._made % 8 * 1000 + PROMPT_TOKENS // 2)
        own = range(self._made << 10, (self._made << 10) + PROMPT_TOKENS // 2)
        self.engine.add_request(
            EngineRequest(
                rid=f"cmpl-{self._made:032x}",
                prompt_ids=(*(token % 512 for token in shared), *(token % 512 for token in own)),
                params=SamplingParams(max_new_tokens=outputs, ignore_eos=True),
            )
        )

    def step(self) -> int:
        """One step; who ended is replaced. Returns the tokens it made."""
        outputs = self.engine.step()
        for output in outputs:
            if output.finish is not None:
                self.add(self._outputs)
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
        tokens, spent, began = 0, [], time.perf_counter()
        while time.perf_counter() - began < seconds:
            before = time.thread_time_ns()
            tokens += self.step()
            spent.append(time.thread_time_ns() - before)
        return Window(tokens / (time.perf_counter() - began), statistics.median(spent) / 1e3)


@contextmanager
def everything(traces: str) -> Iterator[Listeners]:
    """All listeners of a served engine, with a journal on disk."""
    command = parse(["serve", "--traces.endpoint", traces, "--on-violation", "record"])
    assert isinstance(command, ServeCommand)
    with tempfile.TemporaryDirectory() as folder:
        journal = CappedJournal(new_journal_path(Path(folder), time.time_ns()), max_mib=512)
        listeners = Listeners(command, clock=MonotonicClock(), journal=journal, engine_id="bench", version="bench")
        try:
            yield listeners
        finally:
            listeners.close()


def worker_ns(listeners: Listeners) -> int:
    """Processor time of the threads beside the engine's, once they have done what there is."""
    for queue in listeners.queues:
        queue.flush()
    return sum(queue.cpu_ns for queue in listeners.queues)


def step_cost(running: int, steps: int, traces: str) -> dict[str, Any]:
    """Microseconds a step, on and off, and what of the difference each part is."""
    on_us, off_us, parts = [], [], []
    for _ in range(REPEATS):
        load = Load(running, NullSink())
        load.cpu_ns(WARM_UP_STEPS)
        off_us.append(statistics.median(load.cpu_ns(steps)) / 1e3)
        with everything(traces) as listeners:
            load = Load(running, listeners.hears)
            load.cpu_ns(WARM_UP_STEPS)
            before = {**listeners.hears.ns_by_part, "worker": worker_ns(listeners)}
            on_us.append(statistics.median(load.cpu_ns(steps)) / 1e3)
            after = {**listeners.hears.ns_by_part, "worker": worker_ns(listeners)}
            parts.append({part: (after[part] - before[part]) / steps / 1e3 for part in after})
            assert listeners.checking.checker.total_violations == 0, "a broken law makes the figures worthless"
    least = min(range(REPEATS), key=on_us.__getitem__)
    cost, part = min(on_us) - min(off_us), parts[least]
    return {
        "bench": "overhead_step",
        "running": running,
        "on_us": round(min(on_us), 1),
        "off_us": round(min(off_us), 1),
        "cost_us": round(cost, 1),
        "aim_us": AIMS_US[running],
        **{f"{name}_us": round(spent, 1) for name, spent in part.items()},
        "rest_us": round(cost - part["check"] - part["publish"], 1),
    }


def share_of_tokens(traces: str, seconds: float) -> dict[str, Any]:
    """Share of tokens a second that watching costs at 256 running and steps of 5 ms; medians of windows."""
    off_load = Load(256, NullSink(), step_ms=STEP_MS)
    on: list[Window] = []
    off: list[Window] = []
    with everything(traces) as listeners:
        on_load = Load(256, listeners.hears, step_ms=STEP_MS)
        for turn in range(max(2, round(seconds / WINDOW_S))):
            for load, windows in ((off_load, off), (on_load, on)) if turn % 2 else ((on_load, on), (off_load, off)):
                windows.append(load.window(WINDOW_S))
                worker_ns(listeners)  # what one window left to do is not done in the next
    cpu_on, cpu_off = (statistics.median(window.cpu_us for window in windows) for windows in (on, off))
    rate_on, rate_off = (statistics.median(window.tokens_per_s for window in windows) for windows in (on, off))
    return {
        "bench": "overhead_share",
        "running": 256,
        "step_ms": STEP_MS,
        "share": round(1 - rate_on / rate_off, 4),
        "share_of_cpu": round((cpu_on - cpu_off) / (STEP_MS * 1e3 + cpu_on), 4),
        "cpu_on_us": round(cpu_on, 1),
        "cpu_off_us": round(cpu_off, 1),
        "windows": len(on),
        "aim": AIM_SHARE,
    }


def main() -> int:
    """Print the table, or JSON lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seconds", type=float, default=10.0, help="with everything on, and as many with it off")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with receiver() as traces:
        rows = [step_cost(running, args.steps, traces) for running in AIMS_US]
        share = share_of_tokens(traces, args.seconds)
    if args.json:
        for row in (*rows, share):
            print(json.dumps(row))
        return 0
    print(f"{platform.processor() or platform.machine()}, Python {platform.python_version()}, least of {REPEATS}")
    print("us a step on the engine's thread; check and publish: estimated from one step in 16; beside: other threads")
    names = ("running", "off", "on", "cost", "aim", "check", "publish", "rest", "beside")
    print("".join(f"{name:>9}" for name in names))
    for row in rows:
        keys = ("running", "off_us", "on_us", "cost_us", "aim_us", "check_us", "publish_us", "rest_us", "worker_us")
        print("".join(f"{row[key]:>9}" for key in keys))
    print(
        f"256 running, steps of {STEP_MS:g} ms: {share['share']:.1%} fewer tokens a second (medians of "
        f"{share['windows']} windows each; aim {AIM_SHARE:.1%}); by CPU time of the engine's thread "
        f"{share['share_of_cpu']:.1%} ({share['cpu_off_us']} us a step off, {share['cpu_on_us']} on)"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
