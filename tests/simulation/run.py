"""`python -m tests.simulation.run`: many seeds, many processes. Owns: the command line, the bar, the verdict.

Exit status 0 only when every seed ran clean. One seed always gives one hash, whatever the process, the number of jobs
and the order in which they finish; the last line's hash is that of all of them in the order of their seeds.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from hashlib import blake2b
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from tests.simulation.evidence import gather
from tests.simulation.generate import scenario_of
from tests.simulation.scenario import load
from tests.simulation.seen import UNREACHABLE, not_seen
from tests.simulation.simulate import Report, simulate

OUT = Path("artifacts/sim")
#: Seeds that are shrunk when many fail: the first few are nearly always one fault.
MOST_SHRUNK = 3


class Summary(NamedTuple):
    """All seeds of a run, by seed."""

    reports: tuple[Report, ...]
    wall_s: float

    @property
    def failed(self) -> list[Report]:
        return [report for report in self.reports if report.failure is not None]

    @property
    def steps(self) -> int:
        return sum(report.steps for report in self.reports)

    @property
    def seen(self) -> Counter[str]:
        seen: Counter[str] = Counter()
        for report in self.reports:
            seen.update(report.seen)
        return seen

    @property
    def hash(self) -> str:
        """One for all seeds."""
        total = blake2b(digest_size=8)
        for report in self.reports:
            total.update(f"{report.seed} {report.hash}\n".encode())
        return total.hexdigest()

    def cost(self) -> str:
        """What it took."""
        cpu_us = 1e6 * sum(report.cpu_s for report in self.reports) / self.steps
        return f"{self.wall_s:,.1f} s, {self.steps / self.wall_s:,.0f} steps/s, {cpu_us:,.0f} us of a core a step"

    def line(self) -> str:
        """The last line of the command."""
        clean = len(self.reports) - len(self.failed)
        return (
            f"sim: {clean} of {len(self.reports)} seeds clean, {self.steps} steps, {len(self.failed)} violations, "
            f"hash {self.hash}"
        )


def run_seed(seed: int, steps: int, audit_every: int) -> Report:
    """One seed, in whatever process."""
    return simulate(scenario_of(seed, steps), audit_every=audit_every)


def run_seeds(
    seeds: Sequence[int], *, steps: int, audit_every: int, jobs: int, console: Console | None = None
) -> Summary:
    """All seeds, `jobs` at a time; with a bar when there is a console."""
    started = time.monotonic()
    reports: list[Report] = []
    with _bar(console, len(seeds)) as advance:
        if jobs == 1:
            for seed in seeds:
                reports.append(run_seed(seed, steps, audit_every))
                advance(reports)
        else:
            for report in _in_processes(seeds, steps, audit_every, jobs):
                reports.append(report)
                advance(reports)
    reports.sort(key=lambda report: report.seed)
    return Summary(tuple(reports), time.monotonic() - started)


def _in_processes(seeds: Sequence[int], steps: int, audit_every: int, jobs: int) -> Iterator[Report]:
    """Reports as they come. Spawned, not forked: the parent may have threads, and who starts anew proves more."""
    pool = ProcessPoolExecutor(
        jobs,
        mp_context=get_context("spawn"),
        initializer=signal.signal,
        initargs=(signal.SIGINT, signal.SIG_IGN),  # Ctrl-C is the parent's business
    )
    try:
        for future in as_completed([pool.submit(run_seed, seed, steps, audit_every) for seed in seeds]):
            yield future.result()
    finally:
        pool.shutdown(cancel_futures=True)


class _Advance:
    """Moves the bar; without a terminal says every tenth of the way; without a console does nothing."""

    def __init__(self, console: Console | None, progress: Progress | None, total: int) -> None:
        self._console = console
        self._progress = progress
        self._total = total
        self._tenths = 0
        self._task = progress.add_task("sim", total=total) if progress is not None else None

    def __call__(self, reports: Sequence[Report]) -> None:
        last = reports[-1]
        if self._console is not None and last.failure is not None:  # at once: it may be a long way to the end
            self._console.print(f"seed {last.seed} fails: {last.failure.what}", markup=False, highlight=False)
        failed = sum(report.failure is not None for report in reports)
        words = "simulating" + (f", {failed} failed" if failed else "")
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=len(reports), description=words)
        elif self._console is not None and 10 * len(reports) // self._total > self._tenths:
            self._tenths = 10 * len(reports) // self._total
            self._console.print(f"{words}: {len(reports)} of {self._total} seeds", highlight=False)


@contextmanager
def _bar(console: Console | None, total: int) -> Iterator[_Advance]:
    if console is None or not console.is_terminal:
        yield _Advance(console, None, total)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        yield _Advance(console, progress, total)


def _print_coverage(console: Console, seen: Counter[str]) -> None:
    for key, count in sorted(seen.items()):
        console.print(f"{count:>10}  {key}", markup=False, highlight=False)
    for key, why in sorted(UNREACHABLE.items()):
        console.print(f"{'-':>10}  {key}: {why}", markup=False, highlight=False)
    missing = not_seen(seen)
    console.print(f"not seen: {', '.join(missing) or 'nothing'}", markup=False, highlight=False)


def _again(path: Path, audit_every: int, console: Console) -> int:
    """One saved scenario."""
    report = simulate(load(path), audit_every=audit_every)
    if report.failure is not None:
        where = f" of {report.failure.rid}" if report.failure.rid else ""
        console.print(f"step {report.failure.step}: {report.failure.what}{where}", markup=False, highlight=False)
        console.print(report.failure.text, markup=False, highlight=False)
    clean = report.failure is None
    console.print(
        f"sim: {path} {'clean' if clean else 'fails'}, {report.steps} steps, hash {report.hash}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    return 0 if clean else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.run", description=__doc__)
    parser.add_argument("--seeds", type=int, default=50, help="how many (default 50)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (default 0)")
    parser.add_argument("--steps", type=int, default=300, help="steps with operations, a seed (default 300)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: all cores)")
    parser.add_argument("--audit-every", type=int, default=1, help="audit a snapshot every so many steps (default 1)")
    parser.add_argument("--coverage", action="store_true", help="print what the seeds reached")
    parser.add_argument("--hashes", action="store_true", help="print the hash of each seed")
    parser.add_argument("--scenario", type=Path, help="run this saved scenario instead")
    parser.add_argument("--out", type=Path, default=OUT, help=f"folder for failing seeds (default {OUT})")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print, and return the exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    for name in ("seeds", "steps", "jobs", "audit_every"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(options, name)}; at least 1 is needed")
    console = Console()
    if options.scenario is not None:
        return _again(options.scenario, options.audit_every, console)
    seeds = range(options.first, options.first + options.seeds)
    summary = run_seeds(
        seeds, steps=options.steps, audit_every=options.audit_every, jobs=min(options.jobs, len(seeds)), console=console
    )
    if options.hashes:
        for report in summary.reports:
            console.print(f"seed {report.seed}: {report.steps} steps, hash {report.hash}", highlight=False)
    if options.coverage:
        _print_coverage(console, summary.seen)
    for report in summary.failed[:MOST_SHRUNK]:
        assert report.failure is not None
        console.print(f"seed {report.seed} fails ({report.failure.what}); shrinking", markup=False, highlight=False)
        evidence = gather(
            scenario_of(report.seed, options.steps),
            report.failure,
            options.out / f"seed-{report.seed}",
            audit_every=options.audit_every,
        )
        console.print(evidence.text(), markup=False, highlight=False, soft_wrap=True)
    for report in summary.failed[MOST_SHRUNK:]:
        assert report.failure is not None
        console.print(f"seed {report.seed}: {report.failure.what}", markup=False, highlight=False)
    console.print(summary.cost(), highlight=False)
    console.print(summary.line(), highlight=False, soft_wrap=True)
    return 1 if summary.failed else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
