"""`python -m bench.soak`: many HTTP requests against a real server, many cut short. Owns: the run and its verdict.

A server process with a tiny model gets `--requests` requests; a share of `--leaving` of the clients goes away at a
random point. At the end nothing may be held: no page, lock, row, request or file; resident memory must not have grown
by more than 2 % after warm-up, no law may be broken, and every patient client must have its answer. Prints a table and
one closing line.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import httpx
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from bench.soak_load import LEAVING, Leave, Outcome, client_for, plan, send
from bench.tiny_server import MIB, Held, TinyServer, tiny_server

#: Shares of the run: memory is compared between the end of the warm-up and the end.
WARM_UP: Final = 0.25
_WINDOW: Final = 0.1
MOST_GROWTH: Final = 0.02
#: A small pool and few rows: requests wait, are cut into chunks, and are pushed back.
FLAGS: Final = (
    "--cache.num-pages", "160",
    "--scheduler.max-running-requests", "16",
    "--scheduler.chunked-prefill-size", "64",
    "--server.max-queued-requests", "64",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Report:
    """What a soak found. Memory in bytes: medians after warm-up and at the end."""

    requests: int
    wall_s: float
    outcome: Outcome
    files_before: int
    held: Held
    rss_warm: float
    rss_end: float

    @property
    def growth(self) -> float:
        return self.rss_end / self.rss_warm - 1

    def faults(self, most_growth: float | None = MOST_GROWTH) -> list[str]:
        """What is wrong, in words; `most_growth` None: memory is not judged."""
        held, found = self.held, []
        for name, count in (
            ("requests live", held.requests),
            ("pages owned", held.pages_private),
            ("pages locked", held.pages_locked),
            ("files more than before", max(0, held.files - self.files_before)),
            ("laws broken", held.violations),
            ("events lost or listeners failed", held.telemetry_errors),
        ):
            if count:
                found.append(f"{count} {name}")
        found += [f"{count} patient clients got {ended}" for ended, count in self.outcome.faults.items()]
        if most_growth is not None and self.growth > most_growth:
            found.append(f"memory grew by {self.growth:.1%}; {most_growth:.0%} is allowed")
        return found


async def _drive(
    server: TinyServer, requests: int, leaving: float, clients: int, seed: int
) -> tuple[Outcome, list[int]]:
    """All requests, `clients` at a time. Also resident memory after each percent."""
    outcome, memory = Outcome(), []
    numbers = iter(range(requests))
    every = max(1, requests // 100)
    columns = (TextColumn("soak"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bar = progress.add_task("soak", total=requests)
        async with client_for(server.url, clients) as client:
            model = (await client.get("/v1/models")).json()["data"][0]["id"]

            async def work() -> None:
                for index in numbers:
                    ask = plan(index, seed, leaving, model)
                    outcome.endings[ask.leave, await send(client, ask)] += 1
                    progress.advance(bar)
                    if index % every == 0:
                        memory.append(server.rss_bytes())

            await asyncio.gather(*(work() for _ in range(clients)))
    return outcome, memory


def soak(
    folder: Path, *, requests: int, leaving: float = 0.3, clients: int = 32, seed: int = 0, flags: Sequence[str] = FLAGS
) -> Report:
    """Serve, load, look. Raises RuntimeError when the server does not start or does not survive."""
    with tiny_server(folder, flags) as server:
        httpx.get(f"{server.url}/ready", timeout=30.0, trust_env=False).raise_for_status()
        files_before = server.until_nothing_is_held(files=1 << 20).files
        began = time.monotonic()
        outcome, memory = asyncio.run(_drive(server, requests, leaving, clients, seed))
        wall_s = time.monotonic() - began
        if server.child.status() is not None:
            raise RuntimeError(f"the server ended with status {server.child.status()}:\n{server.child.tail()}")
        held = server.until_nothing_is_held(files_before)
        window = max(1, round(len(memory) * _WINDOW))
        warm = round(len(memory) * WARM_UP)
        status = server.child.stop(60.0)
        if status:
            raise RuntimeError(f"the server ended with status {status}:\n{server.child.tail()}")
    return Report(
        requests=requests,
        wall_s=wall_s,
        outcome=outcome,
        files_before=files_before,
        held=held,
        rss_warm=statistics.median(memory[warm : warm + window]),
        rss_end=statistics.median(memory[-window:]),
    )


def render(report: Report) -> Table:
    """The table of a report."""
    table = Table(title=f"{report.requests:,} HTTP requests in {report.wall_s:.0f} s")
    table.add_column("what")
    table.add_column("figure", justify="right")
    outcome, held = report.outcome, report.held
    table.add_row("clients that stayed", f"{outcome.total(Leave.STAYS):,}")
    for ended, count in sorted((e, n) for (left, e), n in outcome.endings.items() if left is Leave.STAYS):
        table.add_row(f"  {ended}", f"{count:,}")
    table.add_row("clients that left", f"{sum(outcome.total(leave) for leave in LEAVING):,}")
    for leave in LEAVING:
        in_time = outcome.total(leave, "left")
        table.add_row(f"  {leave}", f"{in_time:,} of {outcome.total(leave):,}")
    table.add_section()
    table.add_row("requests live", str(held.requests))
    table.add_row("pages owned by requests (rows with them)", str(held.pages_private))
    table.add_row("pages locked", str(held.pages_locked))
    table.add_row("open files before, after", f"{report.files_before}, {held.files}")
    table.add_row("laws broken", str(held.violations))
    table.add_row("events lost, listeners failed", str(held.telemetry_errors))
    table.add_row("resident memory after warm-up", f"{report.rss_warm / MIB:.1f} MiB")
    table.add_row("resident memory at the end", f"{report.rss_end / MIB:.1f} MiB ({report.growth:+.1%})")
    return table


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 when nothing is left and nothing went wrong."""
    parser = argparse.ArgumentParser(prog="python -m bench.soak", description=__doc__)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--leaving", type=float, default=0.3, help="share of clients that go away (default 0.3)")
    parser.add_argument("--clients", type=int, default=32, help="connections at a time (default 32)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        report = soak(
            Path(folder),
            requests=options.requests,
            leaving=options.leaving,
            clients=options.clients,
            seed=options.seed,
        )
    Console().print(render(report))
    faults = report.faults()
    print(f"soak: {report.requests} requests, " + ("; ".join(faults) if faults else "nothing left, nothing lost"))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
