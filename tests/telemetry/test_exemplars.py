"""An exemplar names a trace that will be there, at most one per bucket and second, and only where it may be shown."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.samples import Sample

from engine.clock import VirtualClock
from engine.events import AnyEvent, EventSink, FanOut, RequestArrived
from grafana.servers import prometheus_config, start_prometheus
from telemetry.exemplars import Exemplars
from telemetry.exposition import Exposition
from telemetry.metric_catalog import NS, PREFIX
from telemetry.metrics import MetricsSink
from telemetry.ports import free_port
from telemetry.spans.draft import SpanDraft
from telemetry.spans.keep import KeepRule
from telemetry.spans.sink import SpanSink
from tests.builders import engine_config
from tests.grafana.needs import needs
from tests.telemetry.live_run import MS, TimedRun
from tests.telemetry.otlp import Receiver
from tests.telemetry.served import served

OPEN = "application/openmetrics-text; version=1.0.0"
TTFT_NS, GAP_NS = 500 * MS, 100 * MS
FAST = (0, 0, 0, 0, 0, 10 * MS, 0)


@dataclass
class Kept:
    """Traces that a real span sink kept."""

    traces: set[int] = field(default_factory=set)

    def start(self, engine: object) -> None:
        """Nothing to do."""

    def send(self, spans: list[SpanDraft]) -> None:
        self.traces |= {span.trace_id for span in spans if span.is_server}

    def refuse(self, spans: int) -> None:
        raise AssertionError("the rate refused a trace")

    def close(self) -> None:
        """Nothing to do."""


class Tracing:
    """Gives requests trace ids on their way to `sink`; those in `sampled` are wanted by their caller."""

    def __init__(self, sink: EventSink) -> None:
        self._sink = sink
        self.sampled: set[str] = set()
        self.trace_of: dict[str, str] = {}

    def emit(self, event: AnyEvent) -> None:
        if isinstance(event, RequestArrived):
            trace = f"{len(self.trace_of) + 1:032x}"
            self.trace_of[event.rid] = trace
            event = msgspec.structs.replace(event, trace_id=trace, trace_sampled=event.rid in self.sampled)
        self._sink.emit(event)


class Traced:
    """A run with metrics, exemplars and the sink that keeps traces."""

    def __init__(self, *, ratio: float = 0.0, exemplars: bool = True) -> None:
        rule = KeepRule(sample_ratio=ratio, ttft_ns=TTFT_NS, gap_ns=GAP_NS)
        self.clock, self.kept = VirtualClock(), Kept()
        self.metrics = MetricsSink(
            clock=self.clock, late_ns=GAP_NS, ttft_ns=TTFT_NS, exemplars=Exemplars(rule) if exemplars else None
        )
        spans = SpanSink(
            self.kept,
            expects_responses=False,
            sample_ratio=ratio,
            max_traces_per_s=10_000,
            ttft_ns=TTFT_NS,
            gap_ns=GAP_NS,
        )
        self.tracing = Tracing(FanOut((self.metrics, spans)))
        self.run = TimedRun(engine_config(num_pages=200, page_size=4, max_running_requests=4), self.tracing)
        self.exposition = Exposition(self.metrics)

    def shown(self) -> list[Sample]:
        return exemplars_of(self.exposition.render(OPEN)[0].decode())

    def traces(self) -> set[int]:
        return {int(one.exemplar.labels["trace_id"], 16) for one in self.shown() if one.exemplar}


def exemplars_of(text: str) -> list[Sample]:
    """Samples with an exemplar, as the client library reads them."""
    families = openmetrics.text_string_to_metric_families(text)
    return [sample for family in families for sample in family.samples if sample.exemplar]


def ordinary(traced: Traced, count: int = 12) -> None:
    for at in range(count):
        traced.run.add(f"r{at}", 8, 4, ignore_eos=True)
        traced.run.finish_all(FAST)
        traced.run.now_ns += 2 * NS


def test_ordinary_requests_have_none_and_without_traces_nobody_has() -> None:
    traced = Traced()
    ordinary(traced)
    assert not traced.shown()
    off = Traced(ratio=1.0, exemplars=False)
    ordinary(off)
    assert " # {" not in off.exposition.render(OPEN)[0].decode()


def test_the_callers_flag_is_enough() -> None:
    traced = Traced()
    traced.tracing.sampled = {"r3"}
    ordinary(traced)
    shown = traced.shown()
    assert {sample.name for sample in shown} == {
        f"{PREFIX}time_to_first_token_seconds_bucket",
        f"{PREFIX}queue_time_seconds_bucket",
    }
    wanted = traced.tracing.trace_of["r3"]
    assert all(sample.exemplar is not None and sample.exemplar.labels == {"trace_id": wanted} for sample in shown)
    assert traced.kept.traces == {int(wanted, 16)}


def test_a_late_first_token_a_long_wait_and_a_late_token_name_their_request() -> None:
    traced = Traced()
    for at in range(5):  # four rows: the last one waits
        traced.run.add(f"r{at}", 8, 3, ignore_eos=True)
    traced.run.timed_step((0, 0, 0, 0, 0, 400 * MS, 0))
    traced.run.timed_step((0, 0, 0, 0, 0, 400 * MS, 0))
    traced.run.finish_all(FAST)
    by_name = {sample.name.removeprefix(PREFIX).removesuffix("_seconds_bucket"): sample for sample in traced.shown()}
    assert set(by_name) == {"time_to_first_token", "queue_time", "inter_token_latency"}
    late = traced.tracing.trace_of["r4"]
    for name in ("time_to_first_token", "queue_time"):
        exemplar = by_name[name].exemplar
        assert exemplar is not None
        assert exemplar.labels == {"trace_id": late}
        assert exemplar.value > TTFT_NS / NS
    assert traced.traces() <= traced.kept.traces


def test_a_late_token_of_those_that_go_on_names_one_of_them() -> None:
    traced = Traced()
    for rid, outputs in (("ends", 2), ("goes-on", 5), ("goes-on-too", 5)):
        traced.run.add(rid, 8, outputs, ignore_eos=True)
    for forward_ms in (10, 10, 150, 10):
        traced.run.timed_step((0, 0, 0, 0, 0, forward_ms * MS, 0))
    traced.run.finish_all(FAST)
    [late] = traced.shown()
    assert late.exemplar is not None
    assert late.exemplar.labels["trace_id"] in {traced.tracing.trace_of[rid] for rid in ("goes-on", "goes-on-too")}
    assert late.exemplar.value == 0.15


@pytest.mark.parametrize("ratio", [0.2, 1.0])
def test_every_trace_named_is_one_that_the_sink_keeps_and_values_lie_in_their_bucket(ratio: float) -> None:
    traced = Traced(ratio=ratio)
    traced.tracing.sampled = {"r7", "r11"}
    for at in range(40):
        traced.run.add(f"r{at}", 8 + at, 1 + at % 7, ignore_eos=True)
        traced.run.timed_step((0, 0, 0, 0, 0, (at * 37 % 11) * 30 * MS, 0))
    traced.run.finish_all(FAST)
    named = traced.traces()
    assert named
    assert named <= traced.kept.traces
    buckets: dict[str, float] = {}
    families = openmetrics.text_string_to_metric_families(traced.exposition.render(OPEN)[0].decode())
    for sample in (sample for family in families for sample in family.samples if "le" in sample.labels):
        below = buckets.get(sample.name + str(sorted(set(sample.labels.items()) - {("le", sample.labels["le"])})), -1)
        if sample.exemplar:
            assert below < sample.exemplar.value <= float(sample.labels["le"])
            assert sum(len(name) + len(value) for name, value in sample.exemplar.labels.items()) <= 128
            assert sample.exemplar.timestamp is not None
        buckets[sample.name + str(sorted(set(sample.labels.items()) - {("le", sample.labels["le"])}))] = float(
            sample.labels["le"]
        )


def test_a_bucket_takes_one_a_second_and_then_the_newest() -> None:
    rule = KeepRule(sample_ratio=1.0, ttft_ns=TTFT_NS, gap_ns=GAP_NS)
    traced = Traced(ratio=1.0)
    for at in range(3):
        traced.run.add(f"r{at}", 8, 1)
        traced.run.finish_all(FAST)
    [first] = {one.exemplar.labels["trace_id"] for one in traced.shown() if one.exemplar and "token" in one.name}
    assert first == traced.tracing.trace_of["r0"]
    traced.run.now_ns += NS
    traced.run.add("r3", 8, 1)
    traced.run.finish_all(FAST)
    [newest] = {one.exemplar.labels["trace_id"] for one in traced.shown() if one.exemplar and "token" in one.name}
    assert newest == traced.tracing.trace_of["r3"]
    assert rule.is_drawn(int(newest, 16))


def test_the_text_format_and_the_sglang_view_have_none() -> None:
    traced = Traced(ratio=1.0)
    ordinary(traced)
    assert traced.shown()
    assert " # {" not in traced.exposition.render("text/plain")[0].decode()
    assert not exemplars_of(traced.exposition.render(OPEN, as_sglang=True)[0].decode())


# -- a real Prometheus ---------------------------------------------------------------------------------------------


@contextmanager
def watched(folder: Path, url: str) -> Iterator[httpx.Client]:
    """A Prometheus that scrapes the engine at `url` five times a second."""
    rules = folder / "rules.yml"
    rules.write_text("groups: []\n", encoding="utf-8")
    config = prometheus_config([url.removeprefix("http://")], rules=rules, alertmanager=None, scrape_s=0.2)
    with start_prometheus(config, folder=folder, port=free_port("127.0.0.1", 0)) as server:
        server.wait_ready()
        with httpx.Client(base_url=server.url, timeout=20, trust_env=False) as client:
            yield client


@needs("prometheus")
def test_a_real_prometheus_stores_exemplars_of_traces_that_arrive(tmp_path: Path) -> None:
    wanted = os.urandom(16).hex()
    flags = ("--executor.kind", "simulated", "--traces.sample-ratio", "0")
    with (
        Receiver() as receiver,
        served(tmp_path, *flags, "--traces.endpoint", receiver.url) as url,
        watched(tmp_path, url) as prometheus,
        httpx.Client(base_url=url, timeout=60, trust_env=False) as engine,
    ):
        model = engine.get("/v1/models").json()["data"][0]["id"]
        for flag, trace in ((0, os.urandom(16).hex()), (1, wanted)):
            reply = engine.post(
                "/v1/completions",
                json={"model": model, "prompt": "a few words", "max_tokens": 4},
                headers={"traceparent": f"00-{trace}-b7ad6b7169203331-0{flag}"},
            )
            assert reply.status_code == httpx.codes.OK
        spans = receiver.wait_for(lambda spans: any(span.trace_id.hex() == wanted for span in spans))
        found = queried(prometheus, f"{PREFIX}time_to_first_token_seconds_bucket")
    assert {one["labels"]["trace_id"] for series in found for one in series["exemplars"]} == {wanted}
    assert {span.trace_id.hex() for span in spans if span.parent_span_id and span.kind == 2} == {wanted}


def queried(prometheus: httpx.Client, selector: str) -> list[dict[str, Any]]:
    """Series with exemplars of `selector`, once there are any."""
    for _ in range(300):
        now = float(prometheus.get("/api/v1/query", params={"query": "time()"}).json()["data"]["result"][1])
        window = {"query": selector, "start": str(now - 3_600), "end": str(now + 60)}
        found: list[dict[str, Any]] = prometheus.get("/api/v1/query_exemplars", params=window).json()["data"]
        if found:
            return found
        time.sleep(0.1)
    raise AssertionError(f"no exemplars of {selector}")
