"""What checking costs: `python bench/checker_cost.py [--running 32] [--page-size 16] [--steps 300] [--json]`.

The checker listens to the simulated engine, several runs of the same requests; the best time of each step counts. So
events are judged as in a server: just built, with the engine's own work in between. The garbage collector is off,
because a collection would be charged to whichever event it falls on. Tier 1 is the price of every event, tier 2 of one
audit of a whole snapshot.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import time

from engine.clock import VirtualClock
from engine.config import EngineConfig
from engine.events import AnyEvent, StepPlanned
from engine.executor.simulated import SimulatedExecutor
from engine.kvcache.snapshot import SchedulerSnapshot
from engine.llm_engine import EngineRequest, LLMEngine
from engine.sampling_params import SamplingParams
from invariants import InvariantChecker

REPEATS = 5
PROMPT_TOKENS = 64


class Stopwatch:
    """A listener that times the checker, and remembers which steps decode a full batch and nothing else."""

    def __init__(self, running: int) -> None:
        self.checker = InvariantChecker()
        self.step_ns: dict[int, int] = {}
        self.full: set[int] = set()
        self.events = 0
        self._running = running

    def emit(self, event: AnyEvent) -> None:
        started = time.perf_counter_ns()
        self.checker.emit(event)
        took = time.perf_counter_ns() - started
        self.events += 1
        self.step_ns[event.step] = self.step_ns.get(event.step, 0) + took
        if isinstance(event, StepPlanned) and len(event.decodes) == self._running and not event.prefills:
            self.full.add(event.step)


def run(running: int, page_size: int, steps: int) -> tuple[Stopwatch, SchedulerSnapshot]:
    """`running` requests that prefill in pieces and then decode, and a snapshot of the last step."""
    tokens = running * (PROMPT_TOKENS + steps + 64)
    config = EngineConfig.model_validate(
        {
            "scheduler": {"max_running_requests": running, "chunked_prefill_size": 512, "schedule_policy": "fcfs"},
            "cache": {"page_size": page_size, "num_pages": 2 * tokens // page_size},
            "executor": {"kind": "simulated"},
            "model": {"max_context_tokens": 1 << 20},
        }
    )
    watch = Stopwatch(running)
    engine = LLMEngine(config, executor=SimulatedExecutor(config), clock=VirtualClock(), sink=watch)
    for index in range(running):
        prompt = tuple((17 * index + place) % 500 for place in range(PROMPT_TOKENS))
        params = SamplingParams(max_new_tokens=steps, ignore_eos=True)
        engine.add_request(EngineRequest(rid=f"request-{index}", prompt_ids=prompt, params=params))
    for _ in range(steps - 1):
        engine.step()
    return watch, engine.snapshot()


def measure(running: int, page_size: int, steps: int) -> dict[str, float]:
    """Microseconds a step (decode steps of the full batch, and all others) and a whole audit."""
    watches, audits = [], []
    for _ in range(REPEATS):
        gc.collect()
        gc.disable()
        watch, snapshot = run(running, page_size, steps)
        started = time.perf_counter_ns()
        watch.checker.audit(snapshot)
        audits.append((time.perf_counter_ns() - started) / 1e3)
        gc.enable()
        watches.append(watch)
    best = {step: min(watch.step_ns[step] for watch in watches) / 1e3 for step in watches[0].step_ns}
    full = [cost for step, cost in best.items() if step in watches[0].full]
    other = [cost for step, cost in best.items() if step not in watches[0].full]
    return {
        "decode_step_us_mean": round(statistics.fmean(full), 1),
        "decode_step_us_p50": round(statistics.median(full), 1),
        "decode_step_us_max": round(max(full), 1),
        "other_step_us_mean": round(statistics.fmean(other), 1),
        "events_per_step": round(watches[0].events / len(best), 1),
        "audit_us": round(min(audits), 1),
        "pages": snapshot.kv.num_pages,
    }


def main() -> None:
    """Print one line per configuration."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--running", type=int, nargs="+", default=[8, 32, 256], help="requests in decode (default: 8 32 256)"
    )
    parser.add_argument("--page-size", type=int, nargs="+", default=[16, 1], help="tokens per page (default: 16 1)")
    parser.add_argument("--steps", type=int, default=300, help="steps of each run (default: 300)")
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    arguments = parser.parse_args()
    if not arguments.json:
        print(f"{platform.processor() or platform.machine()}, Python {platform.python_version()}")
    for page_size in arguments.page_size:
        for running in arguments.running:
            figures = measure(running, page_size, arguments.steps)
            if arguments.json:
                print(json.dumps({"page_size": page_size, "running": running, **figures}))
                continue
            print(
                f"page {page_size:>2}, {running:>3} rows: tier 1 {figures['decode_step_us_mean']:>6} us a decode step "
                f"(p50 {figures['decode_step_us_p50']}, max {figures['decode_step_us_max']}), "
                f"{figures['other_step_us_mean']} us others; tier 2 {figures['audit_us'] / 1e3:.2f} ms an audit of "
                f"{figures['pages']} pages"
            )


if __name__ == "__main__":
    main()
