"""What watching costs in all: everything on against everything off, in one run. Prints figures, asserts none.

    python -m bench.overhead [--only step paced demo two] [--steps 400] [--json]

On: records to a journal on disk, metrics, checker tier 1, read model, and spans (1 % of ordinary requests, all that are
late or retracted) sent to a receiver of this process. Off: nobody listens. The real engine runs both, with two requests
ending and two admitted in every step. Costs are CPU time of the engine's thread; the work of the threads beside it is
told apart.

Without a model (0 ms) nobody can run beside the engine but in its place: the worst case, the least of the repeats
counts. `held`: the same while the workers stand, which leaves what they cost without their company. With a model of
5 ms, which waits as a GPU's does, in short windows that take turns, so that a machine with other work slows both down;
medians. And with SmolLM2 on this machine's processors, where the other threads' work competes with the model's: the
median over pairs of windows of the same steps, of wall time and of the whole process's processor time; and from pairs
of steps, which tells apart what those beside which workers worked took longer (`bench.step_pairs`). That is done
with the requests of `admitscope demo` (lengths of its trace rows), and once more with two requests ending in every
step.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

from bench import step_pairs
from bench.watched_load import (
    ENDS_A_STEP,
    Load,
    Window,
    beside_ns,
    config_of,
    demo_lengths,
    everything,
    receiver,
    worker_ns,
)
from engine.events import NullSink
from telemetry.demo.trace import TraceRow
from telemetry.listeners import Listeners

REPEATS: Final = 5
#: The read model keeps 512 steps: until it is full, every step needs new memory from the system.
WARM_UP_STEPS: Final = 550
#: Aims: running requests -> microseconds a step.
AIMS_US: Final = {32: 50, 256: 120}
AIM_SHARE: Final = 0.025
AIM_MODEL_SHARE: Final = 0.01
#: Of the simulated steps that leave time to others, and the windows that take turns.
STEP_MS: Final = 5.0
WINDOW_S: Final = 0.4
MODEL_RUNNING: Final = 32
MODEL_WINDOW_STEPS: Final = 160
#: Steps before a window, which last longer than workers may rest: it begins with as much for them to do as it leaves.
MODEL_LEAD_IN_STEPS: Final = 140
MODEL_WARM_UP_STEPS: Final = 150
#: What is measured: steps without a model, with one that waits, SmolLM2 with the demo's requests, and with two ending.
PARTS: Final = ("step", "paced", "demo", "two")


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


def taking_turns(off_load: Load, on_load: Load, listeners: Listeners, turns: int) -> tuple[list[Window], list[Window]]:
    """(off, on): windows of both in turn, each as often first as second."""
    off: list[Window] = []
    on: list[Window] = []
    for load in (off_load, on_load):
        load.window(seconds=WINDOW_S)
    for turn in range(turns):
        for load, windows in ((off_load, off), (on_load, on)) if turn % 2 else ((on_load, on), (off_load, off)):
            windows.append(load.window(seconds=WINDOW_S))
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


def model_share(traces: str, pairs: int, lengths: Sequence[TraceRow]) -> dict[str, Any]:
    """What watching costs of the tokens a second, and of the process's processor time, with SmolLM2 at 32 running.

    Both engines make the same steps, which the scheduler decides alike: each pair of windows compares the same batches.
    They share the memory of weights and K/V, too.
    """
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
        on_load.share_memory(off_load)
        listeners.borrow_from(on_load.executor)
        for load in (off_load, on_load):
            load.cpu_ns(MODEL_WARM_UP_STEPS)
        before, made = worker_ns(listeners), on_load.steps
        walls, processes, steps = [], [], []
        beside_now = partial(beside_ns, listeners)
        for pair in range(pairs):
            seconds, process_us, made_steps = {}, {}, {}
            for load in (off_load, on_load) if pair % 2 else (on_load, off_load):
                load.window(steps=MODEL_LEAD_IN_STEPS)
                window = load.window(steps=MODEL_WINDOW_STEPS, beside=beside_now)
                seconds[load], process_us[load] = 1 / window.tokens_per_s, window.process_us
                made_steps[load] = window.steps
                worker_ns(listeners)  # what one window left to do is not done in the next
            steps.append((made_steps[off_load], made_steps[on_load]))
            walls.append(seconds[on_load] / seconds[off_load])
            processes.append(process_us[on_load] / process_us[off_load])
        beside = (worker_ns(listeners) - before) / (on_load.steps - made) / 1e3
        assert listeners.checking.checker.total_violations == 0, "a broken law makes the figures worthless"
    quarters, by_step = statistics.quantiles(walls, n=4), step_pairs.step_cost(steps)
    return {
        "bench": "overhead_model",
        "requests": "of the demo" if lengths else f"{ENDS_A_STEP} ending in every step",
        "running": MODEL_RUNNING,
        "share": round(1 - 1 / quarters[1], 4),
        "quarters": [round(1 - 1 / quarters[at], 4) for at in (0, 2)],
        "share_of_cpu": round(1 - 1 / statistics.median(processes), 4),
        "beside_us": round(beside, 1),
        "by_step": {
            "share": round(by_step.share, 4),
            "quiet_us": round(by_step.quiet_us),
            "busy_us": round(by_step.busy_us),
            "beside_us": round(by_step.beside_us),
            "busy": round(by_step.busy, 3),
        },
        "pairs": pairs,
        "aim": AIM_MODEL_SHARE,
    }


def main() -> int:
    """Print the table, or JSON lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seconds", type=float, default=10.0, help="of paced steps, with everything on and off")
    parser.add_argument("--model-turns", type=int, default=12, help="pairs of windows of SmolLM2; 0: none")
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
            f"{model['share']:.1%} fewer tokens a second (quarters {model['quarters'][0]:.1%} and "
            f"{model['quarters'][1]:.1%}), {model['share_of_cpu']:.1%} more processor time a token, "
            f"{model['beside_us']:.0f} us a step of other threads ({model['pairs']} pairs; aim {AIM_MODEL_SHARE:.1%})"
        )
        steps = model["by_step"]
        print(
            f"  by step: {steps['share']:.1%} longer; {steps['busy']:.1%} of the steps had {steps['beside_us']} us of "
            f"work beside them and took {steps['busy_us']} us longer than the others, "
            f"which took {steps['quiet_us']} us longer"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
