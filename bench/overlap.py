"""What overlapping hides: milliseconds a step, with `executor.overlap` and without, over an executor that only waits.

    make bench-overlap ARGS="--rows 64 256 --forward-ms 2 5 --steps 300"

The executor sleeps as long as a forward pass would take on another device, so what a step takes beyond that is the
host's. Prints a table; the two ways take turns, and the median of three turns counts.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence

from engine.clock import MonotonicClock
from engine.config import EngineConfig
from engine.events import NullSink
from engine.executor.factory import build_executor
from engine.llm_engine import EngineRequest, LLMEngine
from engine.sampling_params import SamplingParams

_TURNS = 3
_WARM_STEPS = 20


def step_ms(*, rows: int, forward_ms: float, overlap: bool, steps: int) -> float:
    """Milliseconds of a decode step of `rows` requests."""
    config = EngineConfig.model_validate(
        {
            "scheduler": {"max_running_requests": rows},
            "cache": {"num_pages": rows * (steps + 200) // 16},
            "executor": {"kind": "simulated", "overlap": overlap, "simulated_step_ms": forward_ms},
        }
    )
    engine = LLMEngine(config, executor=build_executor(config), clock=MonotonicClock(), sink=NullSink())
    params = SamplingParams(max_new_tokens=steps + 2 * _WARM_STEPS, ignore_eos=True, temperature=0.0)
    for row in range(rows):
        engine.add_request(EngineRequest(rid=f"r{row}", prompt_ids=tuple(range(32, 72)), params=params))
    for _ in range(_WARM_STEPS):
        engine.step()
    began = time.perf_counter()
    for _ in range(steps):
        engine.step()
    spent = time.perf_counter() - began
    engine.close()
    return spent / steps * 1e3


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--forward-ms", type=float, nargs="+", default=[2.0, 5.0])
    parser.add_argument("--steps", type=int, default=300)
    asked = parser.parse_args(argv)
    print("| rows | forward ms | step without overlap, ms | with | hidden |")
    print("|---:|---:|---:|---:|---:|")
    for rows in asked.rows:
        for forward_ms in asked.forward_ms:
            found: dict[bool, list[float]] = {False: [], True: []}
            for _ in range(_TURNS):
                for overlap, times in found.items():
                    times.append(step_ms(rows=rows, forward_ms=forward_ms, overlap=overlap, steps=asked.steps))
            serial, overlapped = (statistics.median(found[overlap]) for overlap in (False, True))
            hidden = (serial - overlapped) / max(serial - forward_ms, 1e-9)
            print(f"| {rows} | {forward_ms:g} | {serial:.2f} | {overlapped:.2f} | {hidden:.0%} of the host's time |")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
