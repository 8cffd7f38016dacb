"""Exposition. Owns: `/metrics` and `/metrics/sglang` as text, and the former as a collector for the client library.

Both routes, in either format, go through `telemetry.rendering`, which is many times quicker than the library's encoder
and holds the interpreter lock that much shorter; the collector is for tests and tools. A test holds them to the same
samples.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final, NamedTuple

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as LibraryFamily
from prometheus_client.registry import Collector

from telemetry.metric_books import CheckerCounts, SinkCounts
from telemetry.metric_catalog import BUILD_LABELS, COMPONENTS, FRONT_END, NS, SINKS
from telemetry.metrics import MetricsSink
from telemetry.rendering import Family, compile_views, render
from telemetry.views import Readout, Source, View, build_info, gen_ai, native, sglang

PLAIN: Final = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS: Final = "application/openmetrics-text; version=1.0.0; charset=utf-8"
#: A rate is taken over at least so long.
_RATE_NS: Final = NS
_OUTPUT: Final = Source("generation_tokens_total")
_CACHED: Final = Source("selected_tokens_total", "cached")
_COMPUTED: Final = Source("selected_tokens_total", "computed")


class _Program(NamedTuple):
    """Both views, compiled for one engine."""

    views: tuple[View, ...]
    metrics: tuple[Family, ...]
    sglang: tuple[Family, ...]


class _Rates:
    """What an SGLang server shows as a gauge over its last steps: here, over the time since a scrape a while ago."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: deque[tuple[int, int, int, int]] = deque()
        self._hit_rate = 0.0

    def take(self, now_ns: int, output: int, cached: int, computed: int) -> tuple[float, float]:
        """(output tokens a second, cached share) up to now; 0 where nothing was seen yet."""
        with self._lock:
            seen = self._seen
            # The youngest that is old enough stays first.
            while len(seen) > 1 and seen[1][0] <= now_ns - _RATE_NS:
                seen.popleft()
            throughput = 0.0
            if seen and seen[0][0] <= now_ns - _RATE_NS:
                then, output_then, cached_then, computed_then = seen[0]
                throughput = (output - output_then) * NS / (now_ns - then)
                hits, misses = cached - cached_then, computed - computed_then
                if hits + misses > 0:
                    self._hit_rate = hits / (hits + misses)
            if not seen or now_ns - seen[-1][0] >= _RATE_NS // 10:
                seen.append((now_ns, output, cached, computed))
            return throughput, self._hit_rate


class Exposition(Collector):
    """Reads a `MetricsSink` and what else counts, and shows it. Any thread.

    checker    the invariant checker, when one runs
    sinks      the engine's other listeners, asked at each scrape
    heartbeat  Unix nanoseconds when the engine loop last turned; None: when it last completed a step
    others     (family, label value, number) of what is counted elsewhere, asked at each scrape
    """

    def __init__(
        self,
        sink: MetricsSink,
        *,
        checker: CheckerCounts | None = None,
        sinks: Callable[[], Iterable[SinkCounts]] = tuple,
        heartbeat: Callable[[], int] | None = None,
        others: Callable[[], Iterable[tuple[str, str, int]]] = tuple,
    ) -> None:
        self._sink = sink
        self._checker = checker
        self._sinks = sinks
        self._heartbeat = heartbeat
        self._others = others
        self._lock = threading.Lock()
        self._idle_shown_ns = 0
        self._front_at = sink.front_end.at
        self._rates = _Rates()
        self._front_from = len(sink.snapshot())
        self._program_of: tuple[Mapping[str, str] | None, _Program] = (None, self._compile({}))
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)

    def render(self, accept: str = "", *, as_sglang: bool = False) -> tuple[bytes, str]:
        """The body and content type for a scrape whose Accept header is `accept`."""
        is_open = choose_encoder(accept)[1].startswith("application/openmetrics-text")
        text = self.text(openmetrics=is_open, as_sglang=as_sglang)
        return text.encode(), OPENMETRICS if is_open else PLAIN

    def text(self, *, openmetrics: bool = False, as_sglang: bool = False) -> str:
        """The Prometheus text format, version 0.0.4, or OpenMetrics 1.0.0, which has exemplars."""
        numbers, program = self._numbers(), self._program()
        exemplars = self._sink.exemplars
        return render(
            program.sglang if as_sglang else program.metrics,
            numbers,
            self._readout(numbers, rates=as_sglang),
            openmetrics=openmetrics,
            exemplars=exemplars.snapshot() if openmetrics and exemplars is not None else None,
        )

    def warm(self) -> None:
        """Make what is made once, which takes a while, before anybody is kept waiting by it."""
        self._sink.catch_up()  # it is made for the engine that has started
        self._program()

    def collect(self) -> Iterator[LibraryFamily]:
        """The numbers of `/metrics` as families of the client library."""
        numbers, program = self._numbers(), self._program()
        read = self._readout(numbers)
        for view, family in zip(program.views, program.metrics, strict=True):
            yield _library_family(view, family, numbers, read)

    def _program(self) -> _Program:
        """For the engine that is heard now; until it has started, for one without a name."""
        build = self._sink.build
        made_for, program = self._program_of
        if build is not made_for:
            program = self._compile(build or {})
            self._program_of = (build, program)
        return program

    def _compile(self, build: Mapping[str, str]) -> _Program:
        model = build.get("model", "")
        views = (build_info({label: build.get(label, "") for label in BUILD_LABELS}), *native(), *gen_ai(model))
        return _Program(views, compile_views(views, self._locate), compile_views(sglang(model), self._locate))

    def _locate(self, source: Source) -> int:
        """Where the front end's numbers follow the engine's."""
        if source.family in FRONT_END:
            return self._front_from + self._front_at[source.family, source.value]
        return self._sink.at[source.family, source.value]

    def _readout(self, numbers: list[int], *, rates: bool = False) -> Readout:
        def of(source: Source) -> int:
            return numbers[self._locate(source)]

        page_size = int((self._sink.build or {}).get("page_size", 1))
        if not rates:
            return Readout(of, page_size, 0.0, 0.0)
        now = self._sink.clock.now_ns()
        return Readout(of, page_size, *self._rates.take(now, of(_OUTPUT), of(_CACHED), of(_COMPUTED)))

    def _numbers(self) -> list[int]:
        """All numbers now, the front end's behind the engine's.

        The published ones, brought up to this moment where they are ages or others' counts.
        """
        sink = self._sink
        sink.catch_up()  # beside a live engine; where that takes too long, what was counted by now is shown
        cells = list(sink.snapshot())
        at = sink.at
        now = sink.clock.now_ns()
        oldest = sink.oldest_waiting_ns
        cells[at["waiting_oldest_seconds", ""]] = max(now - oldest, 0) if oldest is not None else 0
        self._idle(cells, now)
        if self._heartbeat is not None:
            cells[at["heartbeat_timestamp_seconds", ""]] = self._heartbeat()
        cells[at["telemetry_errors_total", "metrics"]] += sink.refused_increments
        for counts in self._sinks():
            if counts.component in SINKS:
                cells[at["telemetry_events_total", counts.component]] += counts.accepted
                cells[at["telemetry_dropped_total", counts.component]] += counts.dropped
                cells[at["telemetry_queue_depth", counts.component]] += counts.queued
            if counts.component in COMPONENTS:
                cells[at["telemetry_errors_total", counts.component]] += counts.errors
        if self._checker is not None:
            self._fill(cells, "invariant_checks_total", self._checker.checks_by_group)
            self._fill(cells, "violations_total", self._checker.violations_by_id)
            tiers = {str(tier): ns for tier, ns in self._checker.ns_by_tier.items()}
            self._fill(cells, "invariant_check_seconds_total", tiers)
            cells[at["telemetry_errors_total", "checker"]] += self._checker.internal_errors
        for family, value, number in self._others():
            cells[at[family, value]] = number
        cells.extend(sink.front_end.snapshot())
        return cells

    def _fill(self, cells: list[int], name: str, counts: Mapping[str, int]) -> None:
        at = self._sink.at
        for value, count in counts.items():
            cell = at.get((name, value))
            if cell is not None:
                cells[cell] = count

    def _idle(self, cells: list[int], now: int) -> None:
        """Add the idling that is not over yet. What was shown once is never taken back: counters do not fall."""
        cell = self._sink.at["idle_seconds_total", ""]
        since = self._sink.idle_since_ns
        shown = cells[cell] + (max(now - since, 0) if since is not None else 0)
        with self._lock:
            self._idle_shown_ns = shown = max(shown, self._idle_shown_ns)
        cells[cell] = shown


def _library_family(view: View, family: Family, numbers: list[int], read: Readout) -> LibraryFamily:
    names = list(dict.fromkeys(name for series in view.series for name, _ in series.labels))
    kinds = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily}
    shown = HistogramMetricFamily if view.kind == "histogram" else kinds[view.kind]
    made: LibraryFamily = shown(view.name, view.help, labels=names)
    for series, child in zip(view.series, family.children, strict=True):
        labels = dict(series.labels)
        if view.kind != "histogram":
            number = sum(numbers[cell] for cell in child.cells[0]) / view.scale
            value = child.made(read) if child.made is not None else number
            made.add_sample(view.name, labels, value)
            continue
        total = 0
        for bound, cells in zip([*map(repr, view.bounds), "+Inf"], child.cells, strict=True):
            total += sum(numbers[cell] for cell in cells)
            made.add_sample(f"{view.name}_bucket", labels | {"le": bound}, total)
        seen = sum(numbers[cell] for cell in child.total) / view.scale
        made.add_sample(f"{view.name}_count", labels, total)
        made.add_sample(f"{view.name}_sum", labels, seen)
    return made
