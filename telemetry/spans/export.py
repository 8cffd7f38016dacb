"""SpanExport. Owns: the way of finished spans to a collector: OTLP over HTTP or gRPC, never waiting, all counted.

The OpenTelemetry SDK batches, retries and encodes, on threads of its own. What it does not tell is counted at the
exporter: its `force_flush` answers True although an export failed. A full queue refuses the newest spans.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Final

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from engine.events import EngineStarted
from telemetry.spans.draft import SpanDraft

QUEUE: Final = 65_536
BATCH: Final = 4_096
#: An export costs some milliseconds of Python whatever is in it, which the engine may have to wait for.
DELAY_MS: Final = 1_000.0
_SAMPLED: Final = TraceFlags(TraceFlags.SAMPLED)


class CountingExporter(SpanExporter):
    """Counts what the exporter behind it did."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self.ok = 0
        self.failed = 0

    @property
    def left(self) -> int:
        """Spans that have left the queue, delivered or lost."""
        return self.ok + self.failed

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Hand a batch over and count it."""
        try:
            result = self._exporter.export(spans)
        except Exception:  # whatever an exporter raises loses its batch, which is counted, not the thread
            self.failed += len(spans)
            return SpanExportResult.FAILURE
        if result is SpanExportResult.SUCCESS:
            self.ok += len(spans)
        else:
            self.failed += len(spans)
        return result

    def shutdown(self) -> None:
        """Pass on."""
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Pass on."""
        return self._exporter.force_flush(timeout_millis)


class SpanExport:
    """Sends spans to `exporter` from a thread of its own.

    capacity  spans that may wait for the collector; beyond it new ones are dropped and counted
    """

    def __init__(
        self, exporter: SpanExporter, *, version: str = "", capacity: int = QUEUE, delay_ms: float = DELAY_MS
    ) -> None:
        self._counting = CountingExporter(exporter)
        self._version = version
        self._capacity = capacity
        self._processor = BatchSpanProcessor(
            self._counting,
            max_queue_size=capacity,
            schedule_delay_millis=delay_ms,
            max_export_batch_size=min(BATCH, capacity),
        )
        self._scope = InstrumentationScope("admitscope", version)
        self._resource = Resource.create({"service.name": "admitscope", "service.version": version})
        self._offset_ns = 0
        self._sent = 0
        self._dropped = 0
        self._closed = threading.Event()

    def counts(self) -> dict[str, int]:
        """Spans by outcome: ok, failed, dropped."""
        return {"ok": self._counting.ok, "failed": self._counting.failed, "dropped": self._dropped}

    def numbers(self) -> Iterator[tuple[str, str, int]]:
        """(family, label value, number) of what `/metrics` shows about it."""
        for outcome, count in self.counts().items():
            yield "spans_exported_total", outcome, count

    @property
    def waiting(self) -> int:
        """Spans handed to the SDK that have not left yet."""
        return self._sent - self._counting.left

    def start(self, engine: EngineStarted) -> None:
        """A new engine: from now on its clock is the one that times are told on."""
        self._offset_ns = engine.wall_ns - engine.t_ns
        self._resource = Resource.create(
            {
                "service.name": "admitscope",
                "service.version": engine.version,
                "service.instance.id": engine.engine_id,
                "gen_ai.request.model": engine.model,
            }
        )

    def send(self, spans: list[SpanDraft]) -> None:
        """Queue all of `spans`, or drop all: half a tree explains nothing."""
        if self._closed.is_set() or self.waiting + len(spans) > self._capacity:
            self._dropped += len(spans)
            return
        self._sent += len(spans)
        for span in spans:
            self._processor.on_end(self._readable(span))

    def refuse(self, spans: int) -> None:
        """Count spans that the rate did not allow."""
        self._dropped += spans

    def flush(self, timeout_ms: int = 5_000) -> bool:
        """Try to send what waits."""
        return self._processor.force_flush(timeout_ms)

    def close(self) -> None:
        """Send what waits, once, and stop; what cannot be sent counts as dropped."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._processor.shutdown()  # type: ignore[no-untyped-call]  # the SDK leaves it without annotations
        self._dropped += max(0, self.waiting)

    def _readable(self, span: SpanDraft) -> ReadableSpan:
        def context(trace_id: int, span_id: int, *, remote: bool = False) -> SpanContext:
            return SpanContext(trace_id, span_id, is_remote=remote, trace_flags=_SAMPLED)

        attributes = dict(span.attributes)
        if span.error is not None:
            attributes["error.type"] = span.error
        parent = None
        if span.parent_id is not None:
            parent = context(span.trace_id, span.parent_id, remote=span.is_server)
        return ReadableSpan(
            name=span.name,
            context=context(span.trace_id, span.span_id),
            parent=parent,
            resource=self._resource,
            attributes=attributes,
            events=[
                Event(event.name, attributes=dict(event.attributes), timestamp=event.t_ns + self._offset_ns)
                for event in span.events
            ],
            links=[Link(context(trace_id, span_id)) for trace_id, span_id in span.links],
            kind=SpanKind.SERVER if span.is_server else SpanKind.INTERNAL,
            status=Status(StatusCode.ERROR, span.error) if span.error is not None else Status(StatusCode.UNSET),
            start_time=span.start_ns + self._offset_ns,
            end_time=span.end_ns + self._offset_ns,
            instrumentation_scope=self._scope,
        )
