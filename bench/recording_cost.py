"""What a recording costs the page at size: reading it, and a step back or forward in it.

A long run is simulated first: short requests of so many clients that thousands wait, over a large pool. The steps are
asked for as the page asks: a look with the parts of a view at the place before, or after, the one that was shown.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from bench.simulation import short_requests
from dashboard.recorded_feed import RecordedFeed
from telemetry.cli import main as admitscope

#: Records that such a run writes for one request, about.
_RECORDS_EACH: Final = 13
_ROWS: Final = 256
#: Places that steps are taken from, by chance.
PLACES: Final = 15
#: Between two of them: somebody looks at what is shown.
PAUSE_S: Final = 0.7
_SEED: Final = 7
#: What the head of the page and its first view ask for.
NOW_PARTS: Final = frozenset({"latency", "requests", "breakdown", "queue", "passes", "pages"})


def record(folder: Path, *, pages: int, waiting: int, records: int) -> Path:
    """Simulate until there are about so many records; returns the journal. Raises RuntimeError when that fails."""
    trace = folder / "trace.jsonl"
    requests = max(records // _RECORDS_EACH, waiting)
    with trace.open("w", encoding="ascii") as file:
        file.writelines(short_requests(requests))
    words = ["sim", str(trace), "--cost", "h200-8b", "--concurrency", str(waiting + _ROWS), "--no-check", "--json"]
    words += ["--set", f"cache.num_pages={pages}", "--set", f"scheduler.max_running_requests={_ROWS}"]
    words += ["--journal", str(folder / "run")]
    kept, sys.stdout = sys.stdout, (folder / "said.json").open("w")
    try:
        status = admitscope(words)
    finally:
        sys.stdout.close()
        sys.stdout = kept
    if status:
        raise RuntimeError(f"admitscope {' '.join(words)}: status {status}")
    return min((folder / "run").glob("*.jsonl"))


def opened(journal: Path) -> tuple[RecordedFeed, float]:
    """The journal as the page holds it, read to its end, and the seconds that took."""
    began = time.perf_counter()
    feed = RecordedFeed(journal)
    while not feed.progress().is_read:
        time.sleep(0.01)
    if (error := feed.progress().error) is not None:
        raise RuntimeError(error)
    return feed, time.perf_counter() - began


def steps(feed: RecordedFeed, parts: frozenset[str] = NOW_PARTS) -> Iterator[tuple[str, Callable[[], int]]]:
    """(what is done, doing it): from PLACES by chance, three steps back and three forward, after a jump there."""
    places = random.Random(_SEED)
    last = feed.progress().moments - 1

    def at(index: int) -> int:
        step = feed.recording.moment(index).step
        look = feed.look(parts, str(step))
        assert look.status is not None, "a place that is read"
        return look.status.waiting

    for _ in range(PLACES):
        index = places.randrange(min(4, last), max(last - 3, 1))
        time.sleep(PAUSE_S)
        yield "jump", lambda index=index: at(index)
        for by in (-1, -2, -3):
            time.sleep(PAUSE_S)
            name = "step back" if by == -1 else "step back again"
            yield name, lambda index=index + by: at(index)
        # Places that were shown lately are kept: forward begins where none is.
        for by in (1, 2, 3):
            time.sleep(PAUSE_S)
            yield "step forward", lambda index=index + by: at(index)
