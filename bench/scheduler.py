"""What scheduling costs: `make bench-scheduler`, or `python -m bench.scheduler [--quick] [--long 1000000]`.

Prints the machine, a table (median and least of the repeats, beside the reference's figure and this project's aim), and
one JSON line per measurement, median only, with those of these keys that apply: bench, policy, waiting, page_size,
first_ms, steady_ms, admit_us, pass_us, insert_us, match_us, evict_us, records, checker. Asserts nothing.

Reference: SGLang 0.5.23's own classes on one core of this kind of machine, 1,024-token prompts, 8 shared prefixes of
512 tokens, no records written.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import numpy as np
from rich.console import Console
from rich.table import Table

from bench import scheduler_plot
from bench.scheduler_load import ALL, NONE, Watch
from bench.scheduler_plot import Line
from bench.scheduler_runs import Row, Spread, admission, long_run, order, radix, rekey, waiting_bytes

POLICIES: Final = ("lpm", "shortest-prefill-first", "dfs-weight")
SIZES: Final = (128, 1_024, 8_192, 65_536)
MEASURES: Final = ("first_ms", "steady_ms", "admit_us", "pass_us", "insert_us", "match_us", "evict_us")
MEMORY_AIM_BYTES: Final = 16 * 1024

#: (bench, waiting, page size, measure) -> the reference's figure; None stands for any.
REFERENCE: Final[dict[tuple[str, int | None, int, str], float]] = {
    ("order", 128, 1, "steady_ms"): 1.8,
    ("order", 1_024, 1, "steady_ms"): 15.0,
    ("order", 8_192, 1, "steady_ms"): 128.0,
    ("order", 8_192, 16, "steady_ms"): 150.0,
    ("admit", None, 1, "admit_us"): 49.0,
    ("admit", None, 16, "admit_us"): 49.0,
    ("admit", None, 1, "pass_us"): 106.0,
    ("admit", None, 16, "pass_us"): 106.0,
    ("radix", None, 1, "insert_us"): 60.0,
    ("radix", None, 1, "match_us"): 30.0,
    ("radix", None, 1, "evict_us"): 1_787.0,
    ("radix", None, 16, "insert_us"): 36.0,
    ("radix", None, 16, "match_us"): 34.0,
    ("radix", None, 16, "evict_us"): 32.0,
}
#: (bench, waiting, measure) -> at most this.
AIMS: Final[dict[tuple[str, int | None, str], float]] = {
    ("order", 8_192, "steady_ms"): 2.0,
    ("order", 65_536, "steady_ms"): 4.0,
    ("rekey", 8_192, "first_ms"): 20.0,
    ("admit", None, "admit_us"): 25.0,
    ("admit", None, "pass_us"): 60.0,
}


def machine() -> str:
    """Processor, cores, load, versions."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = info.read_text("utf-8", "replace").splitlines()
        model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), model)
    load = os.getloadavg()[0]
    return (
        f"{model}, {os.cpu_count()} cores (load {load:.1f} at the start), Python {platform.python_version()}, "
        f"numpy {np.__version__}"
    )


def json_line(row: Row) -> str:
    """The row's keys that apply."""
    fields: dict[str, object] = {"bench": row.bench}
    for name in ("policy", "waiting", "page_size"):
        if getattr(row, name) is not None:
            fields[name] = getattr(row, name)
    for name in MEASURES:
        spread: Spread | None = getattr(row, name)
        if spread is not None:
            fields[name] = round(spread.median, 3)
    return json.dumps(fields | {"records": row.watch.records, "checker": row.watch.checker})


def table_of(rows: Sequence[Row]) -> Table:
    """One line per measured figure."""
    table = Table(title="Scheduler: CPU time of one thread", title_justify="left")
    for name in ("bench", "policy", "waiting", "page", "records", "checker", "measure"):
        table.add_column(name, no_wrap=True)
    for name in ("median", "least", "reference", "times faster", "aim", "met"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        for name in MEASURES:
            spread: Spread | None = getattr(row, name)
            if spread is None:
                continue
            reference = None
            if row.policy in {"lpm", None}:
                reference = _lookup(REFERENCE, row, row.page_size, name)
            aim = AIMS.get((row.bench, row.waiting, name), AIMS.get((row.bench, None, name)))
            if row.bench == "radix" and reference is not None:
                aim = reference
            met = "" if aim is None else "yes" if spread.median <= aim else "least" if spread.least <= aim else "no"
            table.add_row(
                row.bench,
                row.policy or "",
                "" if row.waiting is None else f"{row.waiting:,}",
                str(row.page_size),
                "on" if row.watch.records else "off",
                "on" if row.watch.checker else "off",
                name,
                f"{spread.median:,.2f}",
                f"{spread.least:,.2f}",
                "" if reference is None else f"{reference:,g}",
                "" if reference is None else f"{reference / spread.median:.1f}",
                "" if aim is None else f"{aim:,g}",
                met,
            )
    return table


def _lookup(
    figures: dict[tuple[str, int | None, int, str], float], row: Row, page_size: int, name: str
) -> float | None:
    exact = figures.get((row.bench, row.waiting, page_size, name))
    return exact if exact is not None else figures.get((row.bench, None, page_size, name))


def measured(*, quick: bool) -> Iterator[Row]:
    """Everything the table shows, one row after another."""
    sizes = SIZES[:2] if quick else SIZES
    for watch in (ALL, NONE):
        for policy in POLICIES:
            for page_size in (16, 1):
                for waiting in sizes:
                    yield order(policy, waiting, page_size, watch)
        for policy in POLICIES:
            for page_size in (16, 1):
                yield rekey(policy, sizes[-1] if quick else 8_192, page_size, watch)
        for page_size in (16, 1):
            yield admission(page_size, watch, candidates=64 if quick else 512, repeats=1 if quick else 5)
        for page_size in (16, 1):
            yield radix(page_size, watch)


def draw(folder: Path, rows: Sequence[Row]) -> None:
    """The three curves of docs/scheduler-cost.md. The first is of `rows`; the others are measured here."""
    steady = [row for row in rows if row.bench == "order" and row.page_size == 16 and row.watch == ALL]
    queue = [
        Line(
            policy,
            [(row.waiting or 1, row.steady_ms.median) for row in steady if row.policy == policy and row.steady_ms],
        )
        for policy in POLICIES
    ]
    first = [(row.waiting or 1, row.first_ms.median) for row in steady if row.policy == "lpm" and row.first_ms]
    queue.append(Line("lpm, first ordering", first))
    queue.append(Line("SGLang lpm, page 1", [(128, 1.8), (1_024, 15.0), (8_192, 128.0)], dashed=True))
    scheduler_plot.write(
        folder,
        "scheduler-queue",
        scheduler_plot.chart("A step against queue length, page 16", "requests waiting", "ms per step", queue),
    )
    lengths = (128, 512, 2_048, 8_192)
    prompt = []
    for page_size in (16, 1):
        admits = [admission(page_size, ALL, candidates=64, prompt_tokens=length, repeats=2) for length in lengths]
        trees = [radix(page_size, NONE, tokens=length, repeats=10) for length in lengths]
        prompt.append(Line(f"match + admit, page {page_size}", _points(lengths, [row.admit_us for row in admits])))
        prompt.append(Line(f"tree match, page {page_size}", _points(lengths, [row.match_us for row in trees])))
        prompt.append(Line(f"tree insert, page {page_size}", _points(lengths, [row.insert_us for row in trees])))
    scheduler_plot.write(
        folder,
        "scheduler-prompt",
        scheduler_plot.chart("One request against prompt length", "prompt tokens", "microseconds", prompt),
    )
    cached = (64, 512, 4_096)
    trees = [radix(16, NONE, tokens=1_024, cached=count) for count in cached]
    steps = [order("lpm", 1_024, 16, ALL, cached=count).steady_ms for count in cached]
    tree = [
        Line("match 1,024 tokens", _points(cached, [row.match_us for row in trees])),
        Line("insert 1,024 tokens", _points(cached, [row.insert_us for row in trees])),
        Line("evict a leaf", _points(cached, [row.evict_us for row in trees])),
        Line("step, 1,024 waiting", [(x, y * 1e3) for x, y in _points(cached, steps)]),
    ]
    scheduler_plot.write(
        folder,
        "scheduler-tree",
        scheduler_plot.chart("Tree work against tree size, page 16", "cached prompts", "microseconds", tree),
    )


def _points(xs: Sequence[int], spreads: Sequence[Spread | None]) -> list[tuple[float, float]]:
    return [(x, spread.median) for x, spread in zip(xs, spreads, strict=True) if spread is not None]


def _memory(console: Console, *, quick: bool) -> None:
    for name, watch in (("everything on", ALL), ("off", NONE)):
        spent = waiting_bytes(watch, prompts=256 if quick else 4_096)
        console.print(
            f"memory: {spent:,.0f} bytes for a waiting 8,192-token prompt at page 16, beyond its token ids ({name}; "
            f"aim at most {MEMORY_AIM_BYTES:,})"
        )


def _growth(console: Console, total: int) -> None:
    """Memory each time the simulated engine ran empty."""
    slices = list(long_run(total, Watch()))
    for part in slices:
        console.print(
            f"long run: {part.requests:>9,} requests, {part.objects:,} objects, {part.resident_kib:,} KiB resident, "
            f"{part.microseconds:,.0f} us a request"
        )
    first, last = slices[len(slices) // 2], slices[-1]
    console.print(
        f"long run: {last.objects - first.objects:+,} objects and {last.resident_kib - first.resident_kib:+,} KiB from "
        f"request {first.requests:,} to {last.requests:,}"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes: does it run")
    parser.add_argument("--long", type=int, default=20_000, metavar="N", help="requests of the long run (0: none)")
    parser.add_argument("--plot", type=Path, metavar="FOLDER", help="write the curves as SVG there")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the JSON lines there too")
    options = parser.parse_args(arguments)
    console = Console(width=None if Console().is_terminal else 150)
    console.print(machine(), highlight=False)
    console.print(
        "CPU time, which a busy machine still raises: caches and cores are shared. `least` is nearest to quiet."
    )
    rows = list(measured(quick=options.quick))
    console.print(table_of(rows))
    _memory(console, quick=options.quick)
    if options.long:
        _growth(console, options.long)
    if options.plot is not None and not options.quick:  # curves of small sizes would replace the real ones
        draw(options.plot, rows)
    lines = [json_line(row) for row in rows]
    print("\n".join(lines))
    if options.json is not None:
        options.json.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
