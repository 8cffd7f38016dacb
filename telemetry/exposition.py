"""Exposition. Owns: `/metrics` as text, and the same numbers as a collector for the Prometheus client library.

The text renderer keeps the constant part of every line and fills in the numbers, which is many times quicker than the
library and holds the interpreter lock that much shorter; OpenMetrics, and tools, go through the library. A test holds
the two to the same samples.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from telemetry.metric_books import CheckerCounts, SinkCounts
from telemetry.metric_catalog import BUILD_INFO, BUILD_LABELS, CATALOG, COMPONENTS, FRONT_END, PREFIX, SINKS, Metric
from telemetry.metrics import MetricsSink

PLAIN = "text/plain; version=0.0.4; charset=utf-8"


def _shown(number: int, scale: int) -> str:
    return str(number) if scale == 1 else repr(number / scale)


def _bound(bound: float) -> str:
    return repr(float(bound))


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
        self._text: list[tuple[str, Metric, list[tuple[list[str], int]]]] = [self._program(m) for m in CATALOG]
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """The body and content type for a scrape whose Accept header is `accept`."""
        encode, content_type = choose_encoder(accept)
        if content_type.startswith("application/openmetrics-text"):
            return encode(self.registry), content_type
        return self.text().encode(), PLAIN

    def text(self) -> str:
        """The Prometheus text format, version 0.0.4."""
        main, front = self._read()
        lines = [self._build_text()]
        for header, metric, children in self._text:
            lines.append(header)
            cells = front if metric.name in FRONT_END else main
            for prefixes, cell in children:
                if metric.kind == "histogram":
                    total = 0
                    for offset in range(len(metric.bounds) + 1):
                        total += cells[cell + offset]
                        lines.append(f"{prefixes[offset]}{total}\n")
                    lines.append(f"{prefixes[-2]}{_shown(cells[cell + metric.width - 1], metric.scale)}\n")
                    lines.append(f"{prefixes[-1]}{total}\n")
                else:
                    lines.append(f"{prefixes[0]}{_shown(cells[cell], metric.scale)}\n")
        return "".join(lines)

    def collect(self) -> Iterator[Family]:
        """The same numbers as families of the client library."""
        main, front = self._read()
        build = GaugeMetricFamily(PREFIX + BUILD_INFO.name, BUILD_INFO.help, labels=BUILD_LABELS)
        build.add_metric([self._build()[label] for label in BUILD_LABELS], 1)
        yield build
        for metric in CATALOG:
            cells = front if metric.name in FRONT_END else main
            yield self._family(metric, cells)

    def _family(self, metric: Metric, cells: tuple[int, ...] | list[int]) -> Family:
        labels = (metric.label,) if metric.label else ()
        name, at = PREFIX + metric.name, self._at(metric)
        if metric.kind == "histogram":
            histogram = HistogramMetricFamily(name, metric.help, labels=labels)
            for value in metric.values:
                cell, total, buckets = at[metric.name, value], 0, []
                for offset, bound in enumerate([*map(_bound, metric.bounds), "+Inf"]):
                    total += cells[cell + offset]
                    buckets.append((bound, float(total)))
                seen = cells[cell + metric.width - 1] / metric.scale
                histogram.add_metric([value] if metric.label else [], buckets, seen)
            return histogram
        maker = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
        family = maker(name, metric.help, labels=labels)
        for value in metric.values:
            number = cells[at[metric.name, value]]
            family.add_metric([value] if metric.label else [], number / metric.scale)
        return family

    def _at(self, metric: Metric) -> Mapping[tuple[str, str], int]:
        return self._front_at if metric.name in FRONT_END else self._sink.at

    def _program(self, metric: Metric) -> tuple[str, Metric, list[tuple[list[str], int]]]:
        name, at = PREFIX + metric.name, self._at(metric)
        header = f"# HELP {name} {metric.help}\n# TYPE {name} {metric.kind}\n"
        children = []
        for value in metric.values:
            label = f'{metric.label}="{value}"' if metric.label else ""
            braces = f"{{{label}}}" if label else ""
            if metric.kind == "histogram":
                inner = f"{label}," if label else ""
                bounds = [*map(_bound, metric.bounds), "+Inf"]
                prefixes = [f'{name}_bucket{{{inner}le="{bound}"}} ' for bound in bounds]
                prefixes += [f"{name}_sum{braces} ", f"{name}_count{braces} "]
            else:
                prefixes = [f"{name}{braces} "]
            children.append((prefixes, at[metric.name, value]))
        return header, metric, children

    def _build(self) -> Mapping[str, str]:
        return self._sink.build or dict.fromkeys(BUILD_LABELS, "")

    def _build_text(self) -> str:
        name = PREFIX + BUILD_INFO.name
        escaped = {
            label: value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
            for label, value in self._build().items()
        }
        labels = ",".join(f'{label}="{escaped[label]}"' for label in BUILD_LABELS)
        return f"# HELP {name} {BUILD_INFO.help}\n# TYPE {name} {BUILD_INFO.kind}\n{name}{{{labels}}} 1\n"

    def _read(self) -> tuple[list[int], tuple[int, ...]]:
        """All numbers now: the published ones, brought up to this moment where they are ages or others' counts."""
        sink = self._sink
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
        return cells, sink.front_end.snapshot()

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
