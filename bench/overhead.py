"""What watching costs in all: everything on against everything off, in one run. Prints figures, asserts none.

    python -m bench.overhead [--steps 400] [--json]

On: records to a journal on disk, metrics, checker tier 1, read model, and spans (1 % of ordinary requests, all that are
late or retracted) sent to a receiver of this process. Off: nobody listens. The real engine runs both over simulated
steps, with two requests ending and two admitted in every step; on and off take turns, and the least of the repeats
counts, in CPU time of the engine's thread. The share is measured with steps that take 5 ms: requests per second then.
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
from typing import Any, Final

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
#: Aims: running requests -> microseconds a step.
AIMS_US: Final = {32: 50, 256: 120}
AIM_SHARE: Final = 0.025


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

    def tokens_per_s(self, seconds: float) -> float:
        """Tokens a second of wall time."""
        tokens, began = 0, time.perf_counter()
        while time.perf_counter() - began < seconds:
            tokens += self.step()
        return tokens / (time.perf_counter() - began)


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


def step_cost(running: int, steps: int, traces: str) -> dict[str, Any]:
    """Microseconds a step, on and off, and what of the difference each part is."""
    on_us, off_us, parts = [], [], []
    for _ in range(REPEATS):
        load = Load(running, NullSink())
        load.cpu_ns(50)
        off_us.append(statistics.median(load.cpu_ns(steps)) / 1e3)
        with everything(traces) as listeners:
            load = Load(running, listeners.hears)
            load.cpu_ns(50)
            before = dict(listeners.hears.ns_by_part)
            on_us.append(statistics.median(load.cpu_ns(steps)) / 1e3)
            after = listeners.hears.ns_by_part
            parts.append({part: (after[part] - before[part]) / steps / 1e3 for part in after})
            assert listeners.checking.checker.total_violations == 0, "a broken law makes the figures worthless"
    least = min(range(REPEATS), key=on_us.__getitem__)
    return {
        "bench": "overhead_step",
        "running": running,
        "on_us": round(min(on_us), 1),
        "off_us": round(min(off_us), 1),
        "cost_us": round(min(on_us) - min(off_us), 1),
        "aim_us": AIMS_US[running],
        **{f"{part}_us": round(spent, 1) for part, spent in parts[least].items()},
    }


def share_of_tokens(traces: str, seconds: float) -> dict[str, Any]:
    """Share of tokens a second that watching costs at 256 running and steps of 5 ms; medians of pairs."""
    shares = []
    for _ in range(REPEATS):
        off = Load(256, NullSink(), step_ms=5.0).tokens_per_s(seconds)
        with everything(traces) as listeners:
            on = Load(256, listeners.hears, step_ms=5.0).tokens_per_s(seconds)
        shares.append(1 - on / off)
    return {
        "bench": "overhead_share",
        "running": 256,
        "step_ms": 5.0,
        "share": round(statistics.median(shares), 4),
        "least": round(min(shares), 4),
        "aim": AIM_SHARE,
    }


def main() -> int:
    """Print the table, or JSON lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each share measurement")
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
    print("us a step on the engine's thread; by part: estimated from one step in 16 of the same run")
    print(f"{'running':>8}{'off':>8}{'on':>8}{'cost':>8}{'aim':>8}{'check':>9}{'metric':>9}{'publish':>9}")
    for row in rows:
        print(
            f"{row['running']:>8}{row['off_us']:>8}{row['on_us']:>8}{row['cost_us']:>8}{row['aim_us']:>8}"
            f"{row['check_us']:>9}{row['metric_us']:>9}{row['publish_us']:>9}"
        )
    print(
        f"256 running, steps of 5 ms: {share['share']:.1%} fewer tokens a second (median of {REPEATS} pairs, "
        f"least {share['least']:.1%}; aim {AIM_SHARE:.1%})"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
