"""What checking costs: `python bench/checker_cost.py [--running 32] [--page-size 16] [--steps 400] [--json]`.

A run of the simulated engine is recorded, then its events are fed to a fresh checker, step by step, several times; the
best time of each step counts. Tier 1 is the price of every event, tier 2 of one audit of a whole snapshot.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Sequence
from itertools import groupby

from engine.clock import VirtualClock
from engine.config import EngineConfig
from engine.events import AnyEvent, RecordingSink, StepPlanned
from engine.executor.simulated import SimulatedExecutor
from engine.kvcache.snapshot import SchedulerSnapshot
from engine.llm_engine import EngineRequest, LLMEngine
from engine.sampling_params import SamplingParams
from invariants import InvariantChecker

REPEATS = 5
PROMPT_TOKENS = 64


def record(running: int, page_size: int, steps: int) -> tuple[list[AnyEvent], SchedulerSnapshot]:
    """Events of `running` requests that prefill in pieces and then decode, and a snapshot of the last step."""
    tokens = running * (PROMPT_TOKENS + steps + 64)
    config = EngineConfig.model_validate(
        {
            "scheduler": {"max_running_requests": running, "chunked_prefill_size": 512, "schedule_policy": "fcfs"},
            "cache": {"page_size": page_size, "num_pages": 2 * tokens // page_size},
            "executor": {"kind": "simulated"},
            "model": {"max_context_tokens": 1 << 20},
        }
    )
    sink = RecordingSink()
    engine = LLMEngine(config, executor=SimulatedExecutor(config), clock=VirtualClock(), sink=sink)
    for index in range(running):
        prompt = tuple((17 * index + place) % 500 for place in range(PROMPT_TOKENS))
        params = SamplingParams(max_new_tokens=steps, ignore_eos=True)
        engine.add_request(EngineRequest(rid=f"request-{index}", prompt_ids=prompt, params=params))
    for _ in range(steps - 1):
        engine.step()
    return sink.events, engine.snapshot()


def measure(events: Sequence[AnyEvent], snapshot: SchedulerSnapshot, running: int) -> dict[str, float]:
    """Microseconds a step (decode steps of the full batch, and all others) and a whole audit."""
    steps = [list(group) for _, group in groupby(events, key=lambda event: event.step)]
    best = [float("inf")] * len(steps)
    audits = []
    for _ in range(REPEATS):
        checker = InvariantChecker()
        for index, step in enumerate(steps):
            started = time.perf_counter_ns()
            for event in step:
                checker.emit(event)
            best[index] = min(best[index], (time.perf_counter_ns() - started) / 1e3)
        started = time.perf_counter_ns()
        checker.audit(snapshot)
        audits.append((time.perf_counter_ns() - started) / 1e3)
    full, other = [], []
    for cost, step in zip(best, steps, strict=True):
        plan = next((event for event in step if type(event) is StepPlanned), None)
        (full if plan is not None and len(plan.decodes) == running and not plan.prefills else other).append(cost)
    return {
        "decode_step_us_mean": round(statistics.fmean(full), 1),
        "decode_step_us_p50": round(statistics.median(full), 1),
        "decode_step_us_max": round(max(full), 1),
        "other_step_us_mean": round(statistics.fmean(other), 1),
        "events_per_step": round(len(events) / len(steps), 1),
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
            figures = measure(*record(running, page_size, arguments.steps), running)
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
