"""Spans arrive at a real collector, say what the records say, and a collector that is away costs nobody anything."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import rotel
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from pydantic import ValidationError

from telemetry.ports import free_port
from telemetry.spans.config import TraceConfig, build_span_sink, otlp_exporter
from telemetry.spans.draft import SpanDraft
from telemetry.spans.export import SpanExport
from telemetry.spans.sink import SpanSink
from tests.builders import engine_config
from tests.telemetry.live_run import MS, TimedRun
from tests.telemetry.otlp import GrpcReceiver, Received, Receiver, attributes


def draft(number: int) -> SpanDraft:
    return SpanDraft("s", 1, number + 1, None, 0, 1, {})


@pytest.fixture
def rotel_agent() -> Iterator[tuple[Received, str, str]]:
    """A real collector between us and a receiver: what arrives, its gRPC endpoint, its HTTP endpoint."""
    with GrpcReceiver() as receiver:
        grpc, http = free_port("127.0.0.1", 0), free_port("127.0.0.1", 0)
        binary = Path(rotel.__file__).parent / "rotel-agent"
        process = subprocess.Popen(
            [
                *(str(binary), "start", "--otlp-grpc-endpoint", f"127.0.0.1:{grpc}"),
                *("--otlp-http-endpoint", f"127.0.0.1:{http}", "--exporter", "otlp"),
                *("--otlp-exporter-protocol", "grpc", "--otlp-exporter-endpoint", receiver.url),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            wait_for_port(grpc)
            wait_for_port(http)
            yield receiver, f"http://127.0.0.1:{grpc}", f"http://127.0.0.1:{http}"
        finally:
            process.terminate()
            process.wait(10)


def wait_for_port(port: int) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise AssertionError(f"nothing listens on port {port}")


def run_two_chunks(endpoint: str, protocol: str) -> tuple[TimedRun, SpanSink, SpanExport]:
    config = TraceConfig.model_validate({"endpoint": endpoint, "protocol": protocol, "sample_ratio": 1.0})
    built = build_span_sink(config, expects_responses=False, version="1.2.3")
    assert built is not None
    sink, export = built
    run = TimedRun(engine_config(chunked_prefill_size=32), sink)
    run.add("r1", 48, 3, ignore_eos=True)
    run.finish_all((0, 0, 0, 0, 0, 7 * MS, 0))
    return run, sink, export


def check_arrived(receiver: Received, run: TimedRun) -> None:
    spans = receiver.wait_for(lambda spans: len(spans) >= 7)
    root = next(span for span in spans if span.kind == Span.SPAN_KIND_SERVER)
    told = attributes(root)
    assert told["gen_ai.usage.input_tokens"] == 48
    assert told["gen_ai.response.finish_reasons"] == ("length",)
    chunks = sorted((s for s in spans if s.name == "engine.prefill.chunk"), key=lambda s: s.start_time_unix_nano)
    assert [attributes(chunk)["selected_extend"] for chunk in chunks] == [32, 16]
    assert [chunk.end_time_unix_nano - chunk.start_time_unix_nano for chunk in chunks] == [7 * MS, 7 * MS]
    assert {chunk.parent_span_id for chunk in chunks} == {root.span_id}
    arrived = next(event for event in run.recorded.events if type(event).__name__ == "RequestArrived")
    finished = run.now_ns
    assert root.end_time_unix_nano - root.start_time_unix_nano == finished - arrived.t_ns


def test_http_spans_arrive_and_last_as_long_as_the_records_say() -> None:
    with Receiver() as receiver:
        run, sink, export = run_two_chunks(receiver.url, "http")
        sink.close()
        check_arrived(receiver, run)
        assert export.counts()["failed"] == export.counts()["dropped"] == 0
        assert export.counts()["ok"] >= 7
        assert export.waiting == 0


def test_grpc_spans_arrive_as_well() -> None:
    with GrpcReceiver() as receiver:
        run, sink, export = run_two_chunks(receiver.url, "grpc")
        sink.close()
        check_arrived(receiver, run)
        assert export.counts()["failed"] == 0


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_spans_go_through_a_real_collector(rotel_agent: tuple[Received, str, str], protocol: str) -> None:
    receiver, over_grpc, over_http = rotel_agent
    run, sink, export = run_two_chunks(over_grpc if protocol == "grpc" else over_http, protocol)
    sink.close()
    check_arrived(receiver, run)
    assert export.counts()["failed"] == 0


def test_a_collector_that_comes_back_gets_what_still_waits() -> None:
    port = free_port("127.0.0.1", 0)
    run, sink, export = run_two_chunks(f"http://127.0.0.1:{port}", "http")
    with Receiver(port) as receiver:
        check_arrived(receiver, run)
    sink.close()
    assert export.counts()["failed"] == 0


class Stuck(SpanExporter):
    """A collector that takes its time, or answers in its own way."""

    def __init__(self, result: SpanExportResult | Exception) -> None:
        self.result = result
        self.seen = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.seen += len(spans)
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


@pytest.mark.parametrize("result", [SpanExportResult.FAILURE, RuntimeError("broken")])
def test_spans_that_are_lost_are_counted(result: SpanExportResult | Exception) -> None:
    export = SpanExport(Stuck(result), delay_ms=10)
    export.send([draft(number) for number in range(5)])
    export.close()
    assert export.counts() == {"ok": 0, "failed": 5, "dropped": 0}


def test_a_full_queue_drops_whole_trees_and_sending_never_waits() -> None:
    export = SpanExport(Stuck(SpanExportResult.SUCCESS), capacity=8, delay_ms=60_000)
    export.send([draft(number) for number in range(5)])
    export.send([draft(number) for number in range(5, 10)])
    export.send([draft(number) for number in range(10, 12)])
    counts = export.counts()
    assert counts["dropped"] == 5
    assert counts["ok"] + export.waiting == 7
    export.refuse(4)
    export.close()
    assert export.counts() == {"ok": 7, "failed": 0, "dropped": 9}
    export.send([draft(99)])
    export.close()
    assert export.counts() == {"ok": 7, "failed": 0, "dropped": 10}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("endpoint", "localhost:4318"),
        ("endpoint", "ftp://x:1"),
        ("endpoint", "http://"),
        ("endpoint", "http://x:0"),
        ("endpoint", "http://x:99999"),
        ("endpoint", "http://x:abc"),
        ("protocol", "udp"),
        ("sample_ratio", 1.01),
        ("sample_ratio", -0.01),
        ("sample_ratio", float("nan")),
        ("max_traces_per_s", 0),
        ("ttft_objective_s", 0),
        ("gap_objective_s", -1),
        ("unknown", 1),
    ],
)
def test_bad_settings_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ValidationError) as refused:
        TraceConfig.model_validate({field: value})
    assert refused.value.errors()[0]["loc"] == (field,)


def test_no_endpoint_builds_nothing() -> None:
    assert build_span_sink(TraceConfig(), expects_responses=True, version="") is None


def test_the_endpoint_may_name_its_path() -> None:
    for endpoint, wanted in (
        ("http://h:1", "http://h:1/v1/traces"),
        ("http://h:1/otlp/v1/traces", "http://h:1/otlp/v1/traces"),
    ):
        exporter = otlp_exporter(endpoint, "http")
        assert exporter._endpoint == wanted  # the only place it is kept
        exporter.shutdown()
    assert "OTEL_EXPORTER_OTLP_ENDPOINT" not in os.environ
