"""The dashboard over hours in small: `make soak-dashboard`.

    python -m bench.soak_dashboard [--hours H] [--speed X] [--phases N]

An engine is simulated in a process of its own (real scheduler, cache and read API; times from a cost model), `speed`
times as fast as it would run: two hours in two minutes. Every second phase has three viewers in a real browser, on Now,
Latency and K/V pages. Printed for each phase: what a step costs the engine, as CPU time of its thread and as wall time
(which also counts waiting for the read API's thread, and for others on a shared machine), and the memory of both
processes. At the end: the ratio of step times with and without viewers, and how much memory the page gained. The first
two phases warm up and are not counted. Streamlit keeps what it knows of a viewer that left for two minutes: a gain that
ends is that.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

import psutil
import uvicorn
from fastapi import FastAPI
from playwright.sync_api import Browser

from engine.clock import VirtualClock
from telemetry.buffered import BufferedSink
from telemetry.read_api import create_router
from telemetry.read_model import ReadModel
from telemetry.sim.commands import SimCommand
from telemetry.sim.cost_model import Estimator
from telemetry.sim.loop import Loop
from telemetry.sim.run import arrivals_of, plan_of
from tests.dashboard.browser import CHROMIUM, Visit, chromium, streamlit

VIEWS: Final = ("now", "latency", "kv")
#: Small enough that a queue stands and pages are evicted all the time.
SETTINGS: Final = ("page_size=16", "num_pages=1500", "chunked_prefill_size=256", "max_running_requests=16")
_CLIENTS: Final = 24
#: Phases before those that count, one without and one with viewers: the queue fills, modules are loaded.
_WARM: Final = 2
#: A page that is loaded for the first time on a busy machine.
_PATIENCE_MS: Final = 90_000
_MIB: Final = 2**20


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one phase: steps made, hours simulated so far, medians of a step in nanoseconds."""

    steps: int
    hours: float
    cpu_ns: float
    wall_ns: float


def engine(door: Connection, speed: float) -> None:
    """The engine's process: sends its URL, then, for each number of seconds that it is sent, the cost of that phase."""
    command = SimCommand(trace="azure-conv", set=SETTINGS, concurrency=_CLIENTS)
    plan = plan_of(command)
    clock = VirtualClock()
    model = ReadModel(clock=clock)
    sink = BufferedSink(model, "soak")
    loop = Loop(
        plan.config,
        num_pages=plan.num_pages,
        arrivals=arrivals_of(command, plan.workload),
        cost=Estimator(plan.cost),
        sink=sink,
        wall_ns=time.time_ns(),
    )
    app = FastAPI()
    app.include_router(create_router(model))
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", lifespan="off", access_log=False))
    threading.Thread(target=server.run, daemon=True).start()
    while not server.started:
        time.sleep(0.01)
    door.send(f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}")
    while (seconds := door.recv()) is not None:
        door.send(_phase(loop, clock, seconds, speed))
    sink.close()


def _phase(loop: Loop, clock: VirtualClock, seconds: float, speed: float) -> Cost:
    """Step for `seconds`, `speed` times as fast as the simulated time says."""
    cpu, wall = [], []
    began, first_ns = time.monotonic(), loop.now_ns
    while (passed := time.monotonic() - began) < seconds:
        ahead_s = (loop.now_ns - first_ns) / 1e9 / speed - passed
        if ahead_s > 0:
            time.sleep(min(ahead_s, 0.05))
            continue
        wall_0, cpu_0 = time.perf_counter_ns(), time.thread_time_ns()
        if not loop.step():
            raise RuntimeError(f"the trace ended after {loop.now_ns / 3.6e12:.2f} simulated hours")
        cpu.append(time.thread_time_ns() - cpu_0)
        wall.append(time.perf_counter_ns() - wall_0)
        clock.advance_ns(loop.now_ns - clock.now_ns())
    return Cost(len(cpu), loop.now_ns / 3.6e12, statistics.median(cpu), statistics.median(wall))


def _viewers(browser: Browser, url: str) -> list[Visit]:
    visits = []
    for view in VIEWS:
        visit = Visit(browser.new_context(viewport={"width": 1440, "height": 900}).new_page())
        visit.page.set_default_timeout(_PATIENCE_MS)
        visit.open(url, view)
        visits.append(visit)
    return visits


def _leave(visits: Sequence[Visit]) -> None:
    for visit in visits:
        visit.clean()
        visit.page.context.close()


def soak(hours: float, speed: float, phases: int) -> int:
    """Run it. Returns the exit status: 1 when the page gained more than a tenth of its memory."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=engine, args=(there, speed), daemon=True)
    process.start()
    seconds = hours * 3600 / speed / (phases + _WARM)
    quiet: list[Cost] = []
    watched: list[Cost] = []
    memory: list[float] = []
    heads = {"phase": 5, "viewers": 9, "hours": 7, "steps": 9, "CPU, us": 10, "wall, us": 10, "page, MiB": 11}
    print("".join(f"{head:>{width}}" for head, width in {**heads, "engine, MiB": 13}.items()))
    with (
        tempfile.TemporaryDirectory() as folder,
        chromium() as browser,
        streamlit(here.recv(), Path(folder) / "page.txt") as url,
    ):
        page = next(each for each in psutil.Process().children() if "streamlit" in each.cmdline())
        simulated = psutil.Process(process.pid)
        for phase in range(-_WARM, phases):
            is_watched = phase % 2 == 1
            visits = _viewers(browser, url) if is_watched else []
            here.send(seconds)
            while not here.poll(0):
                if not process.is_alive():
                    raise SystemExit(f"the simulated engine ended with {process.exitcode}")
                for visit in visits:
                    visit.page.wait_for_timeout(50)
                time.sleep(0.05)
            cost: Cost = here.recv()
            is_warm = phase >= 0
            if is_warm:
                (watched if is_watched else quiet).append(cost)
            mib, engine_mib = (each.memory_info().rss / _MIB for each in (page, simulated))
            if is_watched and is_warm:
                memory.append(mib)
            _leave(visits)
            print(
                f"{phase + 1 if is_warm else 'warm':>5}{len(visits):>9}{cost.hours:>7.2f}{cost.steps:>9,}"
                f"{cost.cpu_ns / 1e3:>10.0f}{cost.wall_ns / 1e3:>10.0f}{mib:>11.1f}{engine_mib:>13.1f}",
                flush=True,
            )
    here.send(None)
    process.join(30)
    for name in ("cpu_ns", "wall_ns"):
        with_viewers, without = (statistics.mean(getattr(c, name) for c in each) for each in (watched, quiet))
        print(f"step time with viewers / without, {name[:-3]}: {with_viewers / without:.2f}")
    print(f"memory of the page from its first to its last phase with viewers: {memory[-1] - memory[0]:+.1f} MiB")
    return 0 if memory[-1] <= 1.1 * memory[0] else 1


def main() -> int:
    """Parse the words of the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hours", type=float, default=2.0, help="of simulated time (default: 2)")
    parser.add_argument("--speed", type=float, default=60.0, help="simulated seconds in a real one (default: 60)")
    parser.add_argument("--phases", type=int, default=8, help="half of them with viewers (default: 8)")
    asked = parser.parse_args()
    if not CHROMIUM.exists():
        sys.exit(f"needs Debian's chromium ({CHROMIUM}): apt-get install chromium")
    if asked.phases < 4:
        sys.exit(f"--phases is {asked.phases}; at least 4 are needed to compare")
    return soak(asked.hours, asked.speed, asked.phases)


if __name__ == "__main__":
    raise SystemExit(main())
