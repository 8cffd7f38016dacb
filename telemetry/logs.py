"""Logs. Owns: how log lines look, and the one line per request that may be asked for.

One formatter for every logger of the process, uvicorn's too. A line carries `rid`, `trace_id`, `span_id` and `step`
where they are known: code that knows them says so (`extra=`), and the trace of a live request is looked up by its id.
Never the text of a prompt: of an exception that is not this engine's own, the kind and the place are written, not the
message, because it may quote what was computed.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import traceback
import types
from collections import OrderedDict
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Final, Literal

from engine.errors import AdmitscopeError
from engine.events import AnyEvent, EngineStarted, ResponseSent, StepPlanned
from invariants import InvariantViolation
from telemetry.request_timeline import RequestTimeline
from telemetry.spans.draft import request_span_id
from telemetry.timeline import TimelineTracker

LogFormat = Literal["text", "json"]
#: What ties a line to metrics, traces and records.
CONTEXT: Final = ("rid", "trace_id", "span_id", "step")
#: Name of an attribute of a record with further numbers, for `extra=`.
FACTS: Final = "facts"
_TEXT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"
#: A caller that never reports the end of its response is logged after this many others.
_ENDED_KEPT: Final = 4_096
_MS: Final = 1_000_000

_log = logging.getLogger(__name__)


class JsonFormatter(logging.Formatter):
    """One line, one object."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="microseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        for name in CONTEXT:
            value = getattr(record, name, None)
            if value not in {None, ""}:
                line[name] = value
        facts = getattr(record, FACTS, None)
        if isinstance(facts, dict):
            line |= {name: value for name, value in facts.items() if name not in line}
        if record.exc_info and record.exc_info[1] is not None:
            line["exception"] = described(record.exc_info[1])
        return json.dumps(line, ensure_ascii=False, default=str)


def described(error: BaseException) -> dict[str, Any]:
    """The kind of an exception and where it came from, innermost call first; its message when this engine made it."""
    frames = traceback.extract_tb(error.__traceback__)
    told: dict[str, Any] = {
        "type": type(error).__name__,
        "where": [f"{frame.filename}:{frame.lineno} in {frame.name}" for frame in reversed(frames)],
    }
    if isinstance(error, AdmitscopeError | InvariantViolation):
        told["message"] = str(error)
    return told


class Correlation(logging.Filter):
    """Adds the trace of a request that a line names. Drops nothing."""

    def __init__(self) -> None:
        super().__init__()
        #: Trace id of a live request, "" when it is not known.
        self.trace_of: Callable[[str], str] = lambda _: ""

    def filter(self, record: logging.LogRecord) -> bool:
        rid = getattr(record, "rid", None)
        if isinstance(rid, str) and not getattr(record, "trace_id", None):
            record.trace_id = self.trace_of(rid)
        return True


def set_up(log_format: LogFormat, level: int = logging.INFO) -> Correlation:
    """Log to standard error. Handlers that somebody has set up before are kept, with their level."""
    logging.basicConfig(level=level, format=_TEXT)
    correlation = Correlation()
    for handler in logging.getLogger().handlers:
        handler.addFilter(correlation)
        if log_format == "json":
            handler.setFormatter(JsonFormatter())
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
        # Whoever has run uvicorn with its own logging before: its lines come out like all others.
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
    if log_format == "json":
        # What would print by itself: a warning, and an exception that nobody caught.
        logging.captureWarnings(True)
        sys.excepthook = _log_uncaught
        threading.excepthook = _log_uncaught_in_thread
    return correlation


def _log_uncaught(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
    _log.critical("not caught", exc_info=(kind, error, trace))


def _log_uncaught_in_thread(told: threading.ExceptHookArgs) -> None:
    if told.exc_value is not None:
        name = told.thread.name if told.thread is not None else "?"
        _log.critical("not caught in thread %s", name, exc_info=(told.exc_type, told.exc_value, told.exc_traceback))


class RequestLog:
    """Logs each request once, when its response has ended. Feed it from a worker thread."""

    def __init__(self, *, expects_responses: bool) -> None:
        self._logger = logging.getLogger("admitscope.requests")
        self._expects_responses = expects_responses
        self._begin()

    def _begin(self) -> None:
        self._timeline = TimelineTracker(self, expects_responses=self._expects_responses)
        self._ended: OrderedDict[str, tuple[RequestTimeline, int]] = OrderedDict()
        self._step = 0

    def emit(self, event: AnyEvent) -> None:
        """Take one event."""
        if isinstance(event, EngineStarted):
            self._begin()
        elif isinstance(event, StepPlanned):
            self._step = event.step
        self._timeline.apply(event)
        if isinstance(event, ResponseSent) and event.rid in self._ended:
            self._write(*self._ended.pop(event.rid))

    def close(self) -> None:
        """Log those whose responses were not reported."""
        while self._ended:
            self._write(*self._ended.popitem(last=False)[1])

    def on_admitted(self, request: RequestTimeline) -> None:
        """Nothing to do: the end tells all."""

    def on_first_token(self, request: RequestTimeline) -> None:
        """Nothing to do."""

    def on_ttft(self, request: RequestTimeline) -> None:
        """Nothing to do."""

    def on_gaps(self, gap_ns: int, count: int, *, queued: bool = False) -> None:
        """Nothing to do."""

    def on_finished(self, request: RequestTimeline) -> None:
        """Wait for the end of its response, which has the first byte of those that are not streamed."""
        if not self._expects_responses or request.response_done:
            self._write(request, self._step)
            return
        self._ended[request.rid] = (request, self._step)
        if len(self._ended) > _ENDED_KEPT:
            self._write(*self._ended.popitem(last=False)[1])

    def _write(self, request: RequestTimeline, step: int) -> None:
        facts: dict[str, object] = {
            "finish_reason": str(request.finish or ""),
            "cause": str(request.end_cause or ""),
            "prompt_tokens": request.prompt_len,
            "cached_tokens": request.cached_len or 0,
            "output_tokens": request.output_len,
            "chunks": len(request.chunks),
            "retractions": request.num_retractions,
        }
        times = {
            "queue_ms": request.queue_ns,
            "ttft_ms": request.ttft_ns,
            "duration_ms": request.finished_ns - request.accepted_ns if request.finished_ns is not None else None,
        }
        facts |= {name: round(ns / _MS, 3) for name, ns in times.items() if ns is not None}
        context: dict[str, object] = {"rid": request.rid, "trace_id": request.trace_id, "step": step, FACTS: facts}
        if request.trace_id:
            context["span_id"] = f"{request_span_id(int(request.trace_id, 16), request.rid):016x}"
        words = ", ".join(f"{name} {value}" for name, value in facts.items())
        self._logger.info("request %s ended: %s", request.rid, words, extra=context)
