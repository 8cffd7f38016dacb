"""Rendering. Owns: samples as text, in Prometheus' and in the OpenMetrics format, from flat lists of numbers.

The constant part of every line is kept, and only numbers are filled in. Between slices of families the interpreter lock
is offered to whoever waits for it: a scrape must not stand in a step's way.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

from telemetry.exemplars import Exemplar
from telemetry.metric_catalog import NS
from telemetry.views import BY_NAME, Readout, Source, View

#: Where the first cell of a source lies.
Locate = Callable[[Source], int]
#: Lines between two offers of the lock: about 0.2 milliseconds beside a busy engine thread.
_SLICE: Final = 192


class Child(NamedTuple):
    """One series. Of a histogram, `cells` has the cells of each bucket, and `total` those of the sum.

    prefixes  everything before each number
    """

    prefixes: tuple[str, ...]
    cells: tuple[tuple[int, ...], ...]
    total: tuple[int, ...]
    made: Callable[[Readout], float] | None


class Family(NamedTuple):
    """One view, ready to be filled in. `plain` and `open` are its header lines in either format."""

    plain: str
    open: str
    is_histogram: bool
    scale: int
    children: tuple[Child, ...]
    exemplars: bool


def compile_views(views: Sequence[View], locate: Locate) -> tuple[Family, ...]:
    """`views` over numbers that `locate` finds. Raises ValueError for a bound that its sources do not keep."""
    return tuple(_family(view, locate) for view in views)


def bucket_cells(view: View, source: Source, locate: Locate) -> list[range]:
    """Of one source: the cells of each bucket of `view`, the last one unbounded."""
    metric = BY_NAME[source.family]
    if not set(view.bounds) <= set(metric.kept):
        raise ValueError(f"{view.name}: bounds {sorted(set(view.bounds) - set(metric.kept))} are not kept")
    cuts = [0, *(bisect_right(metric.kept, bound) for bound in view.bounds), len(metric.kept) + 1]
    parts = range(len(metric.parts)) if source.part is None else (metric.parts.index(source.part),)
    first = [locate(source) + part * metric.child for part in parts]
    return [range(start + low, start + high) for start in first for low, high in pairwise(cuts)]


def offer_lock() -> None:
    """Let a thread that waits for the interpreter lock have it."""
    time.sleep(0)


def _family(view: View, locate: Locate) -> Family:
    children = []
    for series in view.series:
        label = ",".join(f'{name}="{_escaped(value)}"' for name, value in series.labels)
        braces = f"{{{label}}}" if label else ""
        if view.kind != "histogram":
            cells = tuple(locate(source) for source in series.sources)
            children.append(Child((f"{view.name}{braces} ",), (cells,), (), series.made))
            continue
        inner = f"{label}," if label else ""
        shown = [*map(repr, map(float, view.bounds)), "+Inf"]
        prefixes = [f'{view.name}_bucket{{{inner}le="{bound}"}} ' for bound in shown]
        prefixes += [f"{view.name}_sum{braces} ", f"{view.name}_count{braces} "]
        buckets: list[list[int]] = [[] for _ in shown]
        totals = []
        for source in series.sources:
            metric = BY_NAME[source.family]
            for at, found in enumerate(bucket_cells(view, source, locate)):
                buckets[at % len(shown)].extend(found)
            parts = range(len(metric.parts)) if source.part is None else (metric.parts.index(source.part),)
            totals += [locate(source) + part * metric.child + metric.child - 1 for part in parts]
        children.append(Child(tuple(prefixes), tuple(map(tuple, buckets)), tuple(totals), None))
    text = view.help.replace("\\", r"\\").replace("\n", r"\n")
    # OpenMetrics names a counter's family without the suffix of its samples.
    stem = view.name.removesuffix("_total") if view.kind == "counter" else view.name
    return Family(
        f"# HELP {view.name} {text}\n# TYPE {view.name} {view.kind}\n",
        f"# HELP {stem} {_escaped(view.help)}\n# TYPE {stem} {view.kind}\n",
        view.kind == "histogram",
        view.scale,
        tuple(children),
        view.exemplars,
    )


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _shown(number: int, scale: int) -> str:
    return str(number) if scale == 1 else repr(number / scale)


def render(
    families: Sequence[Family],
    numbers: Sequence[int],
    read: Readout,
    *,
    openmetrics: bool = False,
    exemplars: Mapping[int, Exemplar] | None = None,
) -> str:
    """The text of a scrape. `exemplars`, by cell, are shown in the OpenMetrics format only."""
    lines: list[str] = []
    due = _SLICE
    offer_lock()  # the caller has just copied all numbers
    for family in families:
        lines.append(family.open if openmetrics else family.plain)
        known = exemplars if openmetrics and family.exemplars and exemplars else None
        for child in family.children:
            if family.is_histogram:
                _histogram(lines, family, child, numbers, known)
            elif child.made is not None:
                lines.append(f"{child.prefixes[0]}{child.made(read)!r}\n")
            else:
                number = sum([numbers[cell] for cell in child.cells[0]])
                lines.append(f"{child.prefixes[0]}{_shown(number, family.scale)}\n")
        if len(lines) > due:
            due = len(lines) + _SLICE
            offer_lock()
    if openmetrics:
        lines.append("# EOF\n")
    return "".join(lines)


def _histogram(
    lines: list[str],
    family: Family,
    child: Child,
    numbers: Sequence[int],
    exemplars: Mapping[int, Exemplar] | None,
) -> None:
    total = 0
    prefixes = child.prefixes
    for at, cells in enumerate(child.cells):
        for cell in cells:
            total += numbers[cell]
        shown = "" if exemplars is None else _exemplar([exemplars[cell] for cell in cells if cell in exemplars])
        lines.append(f"{prefixes[at]}{total}{shown}\n")
    seen = sum([numbers[cell] for cell in child.total])
    lines.append(f"{prefixes[-2]}{_shown(seen, family.scale)}\n")
    lines.append(f"{prefixes[-1]}{total}\n")


def _exemplar(found: list[Exemplar]) -> str:
    """The latest of those that lie in one bucket."""
    if not found:
        return ""
    latest = max(found, key=lambda one: one.t_ns)
    return f' # {{trace_id="{latest.trace_id}"}} {latest.value / NS!r} {latest.wall_ns / NS:.3f}'
