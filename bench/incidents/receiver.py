"""An OTLP receiver. Owns: taking spans over HTTP, and drawing the tree of one request from what arrived."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue

#: Attributes worth a line, by span; `blocked_by.*` are shown wherever they are.
_SHOWN: Final[Mapping[str, tuple[str, ...]]] = {
    "engine.prefill.chunk": ("step", "selected_extend", "decode_rows", "chunk.before", "chunk.after", "forward_ms"),
    "engine.retracted": ("cause", "tokens_lost"),
    "engine.decode": ("tokens", "late_tokens", "worst_gap_ms", "worst_gap_cause"),
}
_ROOT_SHOWN: Final = (
    "gen_ai.usage.input_tokens",
    "gen_ai.usage.output_tokens",
    "admitscope.kept_because",
    "admitscope.chunks",
    "admitscope.retractions",
)
#: Longer runs of one kind of child are cut to their first and last.
_MOST_ALIKE: Final = 4
_NAME_WIDTH: Final = 24


class ReceivedSpan(NamedTuple):
    """One span as it came over the wire; ids in hex, times in Unix nanoseconds."""

    trace_id: str
    span_id: str
    parent_id: str
    name: str
    start_ns: int
    end_ns: int
    attributes: Mapping[str, Any]
    events: tuple[str, ...]

    @property
    def ms(self) -> float:
        return (self.end_ns - self.start_ns) / 1e6


class Receiver:
    """Listens on a free port of 127.0.0.1 while it is entered."""

    def __init__(self) -> None:
        spans: list[ReceivedSpan] = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                spans.extend(_spans(ExportTraceServiceRequest.FromString(body)))
                self.send_response(200)
                self.send_header("content-type", "application/x-protobuf")
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the library's word
                """Nothing."""

        self.spans = spans
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()

    def roots(self) -> dict[str, ReceivedSpan]:
        """Root spans of requests, by rid."""
        return {
            str(span.attributes["gen_ai.response.id"]): span
            for span in sorted(self.spans, key=lambda span: span.start_ns)
            if "gen_ai.response.id" in span.attributes
        }

    def of(self, rid: str) -> list[ReceivedSpan]:
        """All spans of one request's trace."""
        root = self.roots().get(rid)
        return [] if root is None else [span for span in self.spans if span.trace_id == root.trace_id]

    def tree(self, rid: str) -> list[str]:
        """The spans of one request, a line each: when it began, how long it took, what is worth a word."""
        root = self.roots().get(rid)
        if root is None:
            return [f"no trace of {rid} was kept"]
        lines = [_line(root, root, 0)]
        self._children(root, root, 1, lines)
        return lines

    def _children(self, parent: ReceivedSpan, root: ReceivedSpan, depth: int, lines: list[str]) -> None:
        children = [s for s in self.spans if s.trace_id == root.trace_id and s.parent_id == parent.span_id]
        children.sort(key=lambda span: (span.start_ns, span.end_ns))
        counts: dict[str, int] = {}
        for child in children:
            counts[child.name] = counts.get(child.name, 0) + 1
        seen: dict[str, int] = {}
        for child in children:
            nth = seen[child.name] = seen.get(child.name, 0) + 1
            left_out = counts[child.name] - 2
            if counts[child.name] > _MOST_ALIKE and 1 < nth < counts[child.name]:
                if nth == 2:
                    lines.append(f"{'':>23}{'  ' * depth}… {left_out} more of {child.name}")
                continue
            lines.append(_line(child, root, depth))
            self._children(child, root, depth + 1, lines)


def _spans(request: ExportTraceServiceRequest) -> Iterator[ReceivedSpan]:
    for resource in request.resource_spans:
        for scope in resource.scope_spans:
            for span in scope.spans:
                yield ReceivedSpan(
                    span.trace_id.hex(),
                    span.span_id.hex(),
                    span.parent_span_id.hex(),
                    span.name,
                    span.start_time_unix_nano,
                    span.end_time_unix_nano,
                    {pair.key: _plain(pair.value) for pair in span.attributes},
                    tuple(event.name for event in span.events),
                )


def _plain(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return tuple(_plain(item) for item in value.array_value.values)
    return getattr(value, str(kind))


def _line(span: ReceivedSpan, root: ReceivedSpan, depth: int) -> str:
    shown = _ROOT_SHOWN if span is root else _SHOWN.get(span.name, ())
    words = [
        f"{name.rpartition('.')[2] if span is root else name}={_short(span.attributes[name])}"
        for name in shown
        if name in span.attributes
    ]
    blocked = [(ms, name) for name, ms in span.attributes.items() if name.startswith("blocked_by.") and ms >= 0.05]
    words += [f"{name}={_short(ms)}" for ms, name in sorted(blocked, reverse=True)]
    began = f"+{(span.start_ns - root.start_ns) / 1e6:,.1f}"
    name = f"{'  ' * depth}{span.name}"
    return f"{began:>10}{span.ms:>10,.1f} ms  {name:<{_NAME_WIDTH}} {' '.join(words)}".rstrip()


def _short(value: Any) -> str:
    return f"{value:,.1f}".removesuffix(".0") if isinstance(value, float) else str(value)
