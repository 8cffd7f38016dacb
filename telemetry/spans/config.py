"""Settings of traces. Owns: where spans go, how, and which are worth it; the OTLP exporter for them."""

from __future__ import annotations

import logging
from typing import Final, Literal
from urllib.parse import urlsplit

from opentelemetry.sdk.trace.export import SpanExporter
from pydantic import BaseModel, ConfigDict, Field, field_validator

from engine.errors import ConfigError
from telemetry.spans.export import SpanExport
from telemetry.spans.keep import KeepRule
from telemetry.spans.sink import SpanSink

_NS: Final = 1_000_000_000
#: One attempt, its retries included. The worker thread waits for it, nobody else.
_TIMEOUT_S: Final = 10.0


class TraceConfig(BaseModel):
    """Traces of requests and steps, sent to an OpenTelemetry collector over OTLP."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    endpoint: str | None = None
    """Collector, as `http://host:4318` for `http` or `http://host:4317` for `grpc`. `none` sends no traces.
    Headers and certificates come from the standard `OTEL_EXPORTER_OTLP_*` environment names."""
    protocol: Literal["http", "grpc"] = "http"
    """OTLP over HTTP with protobuf bodies, or over gRPC."""
    sample_ratio: float = Field(0.01, ge=0, le=1)
    """Share of ordinary requests whose trace is kept. Errors, aborts, retracted, late and long ones always are."""
    max_traces_per_s: float = Field(50.0, gt=0, le=10_000)
    """Traces of requests that may leave per second, on average; what is beyond is counted, not sent."""
    ttft_objective_s: float = Field(1.0, gt=0, le=86_400)
    """A first token later than this keeps the trace."""
    gap_objective_s: float = Field(0.25, gt=0, le=86_400)
    """A token that comes later than this after the one before it keeps the trace, and is an event on it."""

    @field_validator("endpoint")
    @classmethod
    def _is_a_url(cls, value: str | None) -> str | None:
        if value is None:
            return None
        try:
            parts = urlsplit(value)
            known = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
        except ValueError:  # a port that is no number
            known = False
        if not known:
            raise ValueError("must look like http://host:port or https://host:port")
        return value.rstrip("/")


def keep_rule(config: TraceConfig) -> KeepRule:
    """Which traces are kept, by these settings."""
    return KeepRule(
        sample_ratio=config.sample_ratio,
        ttft_ns=round(config.ttft_objective_s * _NS),
        gap_ns=round(config.gap_objective_s * _NS),
    )


def build_span_sink(
    config: TraceConfig, *, expects_responses: bool, version: str
) -> tuple[SpanSink, SpanExport] | None:
    """The sink that builds spans and the export that sends them; None when traces are off.

    Raises ConfigError when the exporter is not installed.
    """
    if config.endpoint is None:
        return None
    export = SpanExport(otlp_exporter(config.endpoint, config.protocol), version=version)
    sink = SpanSink(
        export,
        expects_responses=expects_responses,
        sample_ratio=config.sample_ratio,
        max_traces_per_s=config.max_traces_per_s,
        ttft_ns=round(config.ttft_objective_s * _NS),
        gap_ns=round(config.gap_objective_s * _NS),
    )
    return sink, export


def otlp_exporter(endpoint: str, protocol: Literal["http", "grpc"]) -> SpanExporter:
    """The SDK's exporter to `endpoint`. Raises ConfigError when it is not installed."""
    # It logs every failed attempt with a traceback; failures are counted here, and show in /metrics.
    logging.getLogger("opentelemetry.exporter").setLevel(logging.CRITICAL)
    logging.getLogger("opentelemetry.sdk").setLevel(logging.CRITICAL)
    try:
        if protocol == "grpc":
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

            return GrpcExporter(endpoint, insecure=endpoint.startswith("http://"), timeout=_TIMEOUT_S)
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

        path = "" if urlsplit(endpoint).path else "/v1/traces"
        return HttpExporter(endpoint + path, timeout=_TIMEOUT_S)
    except ImportError as error:
        raise ConfigError(
            f"traces.protocol={protocol!r} needs the package opentelemetry-exporter-otlp-proto-{protocol}"
        ) from error
