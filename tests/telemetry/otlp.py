"""Real OTLP receivers for tests. Owns: oteltap (HTTP) and a gRPC service, and keeping what they receive."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from oteltap import OtelTapHttpProtobufReceiver, OtelTapHttpProtobufReceiverSettings

from telemetry.ports import free_port


class Received:
    """Spans that arrived so far."""

    def __init__(self, port: int = 0) -> None:
        self.port = port or free_port("127.0.0.1", 0)
        self.spans: list[Span] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def wait_for(self, enough: Callable[[list[Span]], bool], timeout_s: float = 60.0) -> list[Span]:
        """The spans received, once `enough` says so."""
        deadline = time.monotonic() + timeout_s
        while not enough(self.spans):
            assert time.monotonic() < deadline, f"only {len(self.spans)} spans: {[span.name for span in self.spans]}"
            time.sleep(0.02)
        return list(self.spans)


class Receiver(Received):
    """OTLP over HTTP: oteltap, listening while it is entered."""

    def __init__(self, port: int = 0) -> None:
        super().__init__(port)
        self._ready = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(20), "the receiver did not start"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._loop is not None
        assert self._stop is not None
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(20)

    async def _run(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        async with OtelTapHttpProtobufReceiver(OtelTapHttpProtobufReceiverSettings(http_port=self.port)) as receiver:
            reading = asyncio.create_task(self._read(receiver))
            self._ready.set()
            await self._stop.wait()
            reading.cancel()

    async def _read(self, receiver: OtelTapHttpProtobufReceiver) -> None:
        async for span in receiver.stream_traces():
            self.spans.append(span)


class _Service(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self, spans: list[Span]) -> None:
        self._spans = spans

    def Export(self, request: Any, context: Any) -> Any:
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                self._spans.extend(scope.spans)
        return trace_service_pb2.ExportTraceServiceResponse()


class GrpcReceiver(Received):
    """OTLP over gRPC: the protocol's own service, listening while it is entered."""

    def __enter__(self) -> Self:
        self._server = grpc.server(ThreadPoolExecutor(2))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(_Service(self.spans), self._server)
        assert self._server.add_insecure_port(f"127.0.0.1:{self.port}") == self.port
        self._server.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.stop(0).wait(10)


def attributes(span: Span) -> dict[str, object]:
    """Attributes as plain values; an array as a tuple."""
    found: dict[str, object] = {}
    for pair in span.attributes:
        kind = pair.value.WhichOneof("value")
        value = getattr(pair.value, str(kind))
        found[pair.key] = tuple(item.string_value for item in value.values) if kind == "array_value" else value
    return found
