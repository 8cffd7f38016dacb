"""What the dashboard costs at size: 100,000 pages, 10,000 waiting, 200,000 records.

    python -m bench.dashboard_cost [--pages N] [--waiting N] [--records N] [--repeat N]
    python -m bench.dashboard_cost --arrivals N     event to screen in a real browser: bench/screen_delay.py

A read model is filled through the events that an engine of that size would publish. Printed: how long an event takes
until it can be read, the time and the bytes of each answer of the read API, how long each view needs for a rerun of its
script (`AppTest`, no browser) with the bytes that it sends, and how long a step takes in a recording of that size
(bench/recording_cost.py). Times are median, 95th percentile and worst, in wall clock; the last column is the median of
the processor's time, which does not count what else the machine does. Budget of an interaction: 300 ms.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import uvicorn
from fastapi import FastAPI
from streamlit.testing.v1 import AppTest

from bench import recording_cost
from bench.screen_delay import measure
from engine.clock import MonotonicClock
from engine.config import EngineConfig
from engine.events import AnyEvent, EngineStarted, LockChanged, PagesMoved, RequestArrived, RequestTransitioned
from engine.request import Cause, RequestState
from telemetry.buffered import BufferedSink
from telemetry.read_api import create_router
from telemetry.read_model import ReadModel

_APP = Path(__file__).resolve().parent.parent / "dashboard" / "app.py"
_BUDGET_S = 0.3
_PAGE = 16
_VIEWS = ("now", "admission", "requests", "latency", "kv", "invariants")


class Filler:
    """Publishes what an engine with a full pool and a long queue would."""

    def __init__(self, hear: Callable[[AnyEvent], None], pages: int) -> None:
        self._hear, self._pages = hear, pages
        self._random = random.Random(1)
        self.seq = 0
        self.now = time.monotonic_ns

    def head(self) -> tuple[int, int, int]:
        self.seq += 1
        return self.seq, self.seq // 40, self.now()

    def start(self) -> None:
        """The first event."""
        config = EngineConfig().model_dump_json()
        start = time.time_ns()
        self._hear(
            EngineStarted(*self.head(), 2, "bench", config, "bench", "none", _PAGE, self._pages, 256, start, "bench")
        )

    def arrive(self, number: int) -> None:
        """One request that waits."""
        rid, length = f"req-{number}", self._random.randint(20, 2_000)
        seq, step, now = self.head()
        self._hear(RequestArrived(seq, step, now, rid, length, 64, 64, b"", None, False, None, None, now))
        self._hear(self._moved_to(rid, None, RequestState.WAITING, Cause.ARRIVE, length, None))

    def cache(self, first: int, count: int, node: int, row: int) -> None:
        """`count` pages are computed by a request in `row`, and left in the tree as `node`."""
        packed = np.arange(first, first + count, dtype="<i4").tobytes()
        rid = f"run-{row}"
        self._hear(PagesMoved(*self.head(), packed, "free", "private", f"r:{row}", "claim"))
        self._hear(PagesMoved(*self.head(), packed, "private", "protected", f"n:{node}", "insert"))
        self._hear(LockChanged(*self.head(), node, rid, 1, 1))
        if node % 8:
            self._hear(LockChanged(*self.head(), node, rid, -1, 0))
            self._hear(PagesMoved(*self.head(), packed, "protected", "evictable", f"n:{node}", "unlock"))

    def _moved_to(
        self, rid: str, source: RequestState | None, target: RequestState, cause: Cause, length: int, row: int | None
    ) -> RequestTransitioned:
        return RequestTransitioned(*self.head(), rid, source, target, cause, length, 0, 0, row)

    def touch(self, node: int) -> None:
        """A request takes a node and leaves it: four records."""
        packed = np.arange((node - 1) * 8, node * 8, dtype="<i4").tobytes()
        self._hear(PagesMoved(*self.head(), packed, "evictable", "protected", f"n:{node}", "lock"))
        self._hear(LockChanged(*self.head(), node, "guest", 1, 1))
        self._hear(LockChanged(*self.head(), node, "guest", -1, 0))
        self._hear(PagesMoved(*self.head(), packed, "protected", "evictable", f"n:{node}", "unlock"))


def _filled(pages: int, waiting: int, records: int) -> tuple[ReadModel, Filler]:
    model = ReadModel(clock=MonotonicClock())
    filler = Filler(model.emit, pages)
    filler.start()
    nodes = pages * 9 // 10 // 8
    for node in range(1, nodes + 1):
        filler.cache((node - 1) * 8, 8, node, node % 256)
    for number in range(waiting):
        filler.arrive(number)
    free = [node for node in range(1, nodes + 1) if node % 8]
    at = 0
    while filler.seq < records:
        filler.touch(free[at % len(free)])
        at += 1
    return model, filler


class Took(NamedTuple):
    """How often it was done, and how long that took: wall clock and processor, in seconds, shortest first."""

    wall_s: list[float]
    cpu_s: list[float]
    size: int

    @classmethod
    def of(cls, work: Callable[[], int], repeat: int) -> Took:
        """Do `work` so often. `size` is what the last one returned."""
        took = cls([], [], 0)
        for _ in range(repeat):
            took = took.and_once(work)
        return took

    def and_once(self, work: Callable[[], int], cpu_now: Callable[[], float] = time.process_time) -> Took:
        """These and one more; `cpu_now` of this thread alone, where others work beside."""
        wall, cpu = time.perf_counter(), cpu_now()
        size = work()
        walls = sorted([*self.wall_s, time.perf_counter() - wall])
        return Took(walls, sorted([*self.cpu_s, cpu_now() - cpu]), size)

    @property
    def median_s(self) -> float:
        return statistics.median(self.wall_s)

    def p95_s(self) -> float:
        """Nearest rank."""
        return self.wall_s[-(-95 * len(self.wall_s) // 100) - 1]


def _print(name: str, took: Took, sent: str = "") -> None:
    times = (took.median_s, took.p95_s(), took.wall_s[-1], statistics.median(took.cpu_s))
    cells = "".join(f"{each * 1e3:8.1f} ms" for each in times)
    sys.stdout.write(f"{name:<28}{cells} {sent or f'{took.size / 1024:8.0f} KiB'}\n")
    sys.stdout.flush()


def _served(model: ReadModel) -> tuple[uvicorn.Server, str]:
    app = FastAPI()
    app.include_router(create_router(model))
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", lifespan="off", access_log=False))
    threading.Thread(target=server.run, daemon=True).start()
    while not server.started:
        time.sleep(0.01)
    return server, f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"


def _view_times(url: str, repeat: int, pages: int) -> bool:
    os.environ["ADMITSCOPE_URL"] = url
    logging.getLogger("httpx").setLevel(logging.WARNING)
    is_quick = True
    for view in _VIEWS:
        at = AppTest.from_file(str(_APP), default_timeout=120)
        at.query_params["view"] = view
        if view == "kv":
            at.query_params["page"], at.query_params["node"] = str(pages // 2), "9"
        at.run()
        if at.exception:
            raise SystemExit(f"view {view}: {at.exception[0].value}")

        def rerun(at: AppTest = at) -> int:
            at.run()
            return sum(len(element.proto.json) for element in at.get("bidi_component"))

        took = Took.of(rerun, repeat)
        is_quick = is_quick and took.median_s < _BUDGET_S
        _print(f"view {view}", took)
    return is_quick


def _recording_times(pages: int, waiting: int, records: int) -> bool:
    """Steps in a recording of that size; whether the median step back is within the budget."""
    with tempfile.TemporaryDirectory(prefix="admitscope-bench-") as folder:
        journal = recording_cost.record(Path(folder), pages=pages, waiting=waiting, records=records)
        feed, read_s = recording_cost.opened(journal)
        told = feed.progress()
        took: dict[str, Took] = defaultdict(lambda: Took([], [], 0))
        most = 0
        for name, step in recording_cost.steps(feed):
            took[name] = took[name].and_once(step, time.thread_time)
            most = max(most, took[name].size)
        feed.close()
    sys.stdout.write(
        f"recording: {told.events:,} records, {told.moments:,} steps, up to {most:,} waiting; read in {read_s:.0f} s\n"
    )
    for name, times in took.items():
        _print(name, times, f"n {len(times.wall_s)}")
    return took["step back"].median_s < _BUDGET_S


def main() -> int:
    """Print the figures; 1 when the median rerun of a view, or the median step back, is over the budget."""
    parser = argparse.ArgumentParser(description="What the dashboard costs at size.")
    parser.add_argument("--pages", type=int, default=100_000)
    parser.add_argument("--waiting", type=int, default=10_000)
    parser.add_argument("--records", type=int, default=200_000)
    parser.add_argument("--repeat", type=int, default=40)
    parser.add_argument("--arrivals", type=int, default=0, help="measure event to screen of so many, and nothing else")
    asked = parser.parse_args()
    if asked.arrivals:
        return measure(asked.arrivals)
    start = time.perf_counter()
    model, filler = _filled(asked.pages, asked.waiting, asked.records)
    each = (time.perf_counter() - start) / filler.seq
    sys.stdout.write(
        f"{asked.pages:,} pages, {asked.waiting:,} waiting, {filler.seq:,} records: {each * 1e6:.1f} us a record\n"
    )
    buffered = BufferedSink(model, "bench")
    lags = []
    for _ in range(20):
        began = time.perf_counter()
        buffered.emit(LockChanged(*filler.head(), 1, "late", 0, 0))
        while model.status().observe_seq <= filler.seq:
            time.sleep(0.001)
        lags.append(time.perf_counter() - began)
    buffered.close()
    sys.stdout.write(
        f"event to answer: median {statistics.median(lags) * 1e3:.0f} ms, worst {max(lags) * 1e3:.0f} ms; to the "
        f"screen: one refresh (1 s) and one rerun more\n"
        f"{'':28}{'median':>11}{'p95':>11}{'worst':>11}{'CPU':>11} {'sent':>12}\n"
    )
    answers: dict[str, Callable[[], object]] = {
        "status": model.status,
        "queue (500)": lambda: model.queue(500),
        "lanes (80)": lambda: model.lanes(80),
        "breakdown": model.breakdown,
        "requests (500)": lambda: model.requests(500),
        "pages": model.page_map,
        "tree (top 20, a node)": lambda: model.tree(node=9, opened=(), top=20),
        "pool": model.pool_over_time,
    }
    for name, answer in answers.items():
        work = lambda answer=answer: len(answer().model_dump_json())  # noqa: E731 - bound per row
        _print(f"answer {name}", Took.of(work, asked.repeat))
    # The engine is another process than the page: its memory is not what the page's collector of cycles walks.
    gc.collect()
    gc.freeze()
    server, url = _served(model)
    try:
        is_quick = _view_times(url, asked.repeat, asked.pages)
    finally:
        server.should_exit = True
    return 0 if _recording_times(asked.pages, asked.waiting, asked.records) and is_quick else 1


if __name__ == "__main__":
    raise SystemExit(main())
