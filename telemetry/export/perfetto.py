"""Perfetto traces. Owns: which tracks and counters a trace of a journal has, and what of them a window shows.

    process "engine"    track "steps": each step with its phases; counters: ledgers, pages, requests, promises
    process "requests"  one track per request: intake, queue with each blocker in it, chunks, between chunks, decode,
                        push-backs; its response on a second one, since it overlaps with decoding

The spans are those of `telemetry.spans`, so a trace viewer behind a collector shows the same cuts. Times count from the
engine's start. A window cuts what reaches over its ends; `clipped_from_ms` then says how long it was.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from engine.events import AnyEvent, EngineStarted, RequestArrived, StepCompleted, StepPlanned
from engine.scheduler.plan import StepKind
from telemetry.export.parquet_files import ExportError
from telemetry.export.source import Enough, Heard, Survey, Told, feed, named_values, survey
from telemetry.export.trace_file import TraceFile
from telemetry.journal_reader import segment_files
from telemetry.observe import PAGE_STATES
from telemetry.schema import LineUnion
from telemetry.settings import ExportCommand
from telemetry.spans.draft import SpanDraft
from telemetry.spans.sink import SpanSink
from telemetry.spans.step_tree import step_spans

ENGINE, REQUESTS = 1, 2
STEPS: Final = 1
STEPS_TOO: Final = 2
#: Ledgers of a pass: the counter's name, and the field of a ledger view.
LEDGERS: Final = (
    ("ledger compute (tokens)", "rem_input"),
    ("ledger chunk (tokens)", "rem_chunk"),
    ("ledger kv_total (tokens)", "remaining_total"),
    ("ledger kv_now (tokens)", "remaining_current"),
)
_NO_RATE: Final = 1e12
_SECOND: Final = 1_000_000_000
_OF_THE_DISK: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})


class UnknownRid(ExportError):
    """A request that was asked for is not in the record."""


class DiskRefused(ExportError):
    """The trace could be begun, but not written whole."""


@dataclass
class Trace:
    """What was written."""

    told: Told = field(default_factory=Told)
    entries: int = 0
    requests: int = 0
    steps: int = 0
    bytes: int = 0


@dataclass(frozen=True)
class Window:
    """What is shown: [start_ns, end_ns] of the engine's clock, of these requests only when `rids` names any."""

    start_ns: int
    end_ns: int
    rids: frozenset[str] = frozenset()

    def clip(self, start_ns: int, end_ns: int) -> tuple[int, int] | None:
        """The part inside; None when there is none."""
        start, end = max(start_ns, self.start_ns), min(end_ns, self.end_ns)
        return (start, end) if start <= end else None


def window_of(command: ExportCommand, found: Survey) -> Window:
    """The window that was asked for. Raises ExportError when the record has nothing of it."""
    rids = frozenset(command.rid)
    if command.from_step is not None or command.to_step is not None:
        if found.cuts is None:
            first, last = found.steps
            raise ExportError(f"{_asked(command)}: the journal has completed steps {first} to {last}")
        return Window(*found.cuts, rids)
    start = found.start_ns + round((command.from_s or 0) * _SECOND)
    end = found.end_ns if command.to_s is None else found.start_ns + round(command.to_s * _SECOND)
    if start > found.end_ns:
        length = (found.end_ns - found.start_ns) / _SECOND
        raise ExportError(f"from-s={command.from_s}: the journal is {length:.3f} s long")
    if command.from_s is None:
        start = 0  # a caller may have taken a request before the engine's first event
    return Window(start, end if command.to_s is not None else 1 << 62, rids)


def export_trace(command: ExportCommand, path: Path, *, spill: int = 100_000) -> Trace:
    """Write the trace of `command.journal` to `path`. Raises JournalError, ExportError, UnknownRid, DiskRefused."""
    _refuse_precious(command.journal, path)
    found = survey(command.journal, from_step=command.from_step or 0, to_step=command.to_step)
    window = window_of(command, found)
    try:
        with (
            named_values(command.journal),
            TraceFile(path, {"journal": command.journal.name, "start_ns": found.start_ns}, spill=spill) as file,
        ):
            sink = TraceSink(file, window, start_ns=found.start_ns, expects_responses=found.has_responses)
            trace = Trace(told=feed(command.journal, sink.hear))
            sink.close()
            if unknown := window.rids - sink.seen:
                raise UnknownRid(f"rid={min(unknown)!r}: the journal has no such request up to the window's end")
            if not sink.requests and not sink.steps:
                raise ExportError(f"{_asked(command)}: the journal has no step and no request in that window")
            trace.bytes = file.finish()
    except OSError as error:
        kind = DiskRefused if error.errno in _OF_THE_DISK else ExportError
        raise kind(f"perfetto={str(path)!r}: {error.strerror or error}") from error
    trace.entries, trace.requests, trace.steps = file.entries, sink.requests, sink.steps
    return trace


def _asked(command: ExportCommand) -> str:
    """The window in the words of the command line."""
    ends = (("from-step", command.from_step), ("to-step", command.to_step), ("from-s", command.from_s))
    given = [(name, value) for name, value in (*ends, ("to-s", command.to_s)) if value is not None]
    return ", ".join(f"{name}={value}" for name, value in given) or str(command.journal)


def _refuse_precious(journal: Path, path: Path) -> None:
    """Raise ExportError where the trace would take the place of its own journal, or of a device or a pipe."""
    try:
        if any(path.exists() and path.samefile(file) for file in segment_files(journal)):
            raise ExportError(f"perfetto={str(path)!r}: is a file of the journal that is read: choose another name")
        if path.exists() and not path.is_file() and not path.is_dir():
            raise ExportError(f"perfetto={str(path)!r}: is no regular file, and would be replaced: choose another name")
    except OSError as error:
        raise ExportError(f"perfetto={str(path)!r}: {error.strerror or error}") from error


class TraceSink:
    """Turns events into entries of `file`. Raises Enough once nothing of the window can follow.

    seen  requests that arrived, for who asks for one
    """

    def __init__(self, file: TraceFile, window: Window, *, start_ns: int, expects_responses: bool) -> None:
        self._file = file
        self._window = window
        self._zero_ns = start_ns
        self._engine_id = ""
        self._plans: dict[int, StepPlanned] = {}
        #: When the last step on either track of steps ended.
        self._step_ends = [0, 0]
        self._number: dict[str, int] = {}
        self._open: set[str] = set()
        self._next_tid = 1
        self.seen: set[str] = set()
        self.requests = 0
        self.steps = 0
        self._spans = SpanSink(
            self, expects_responses=expects_responses, sample_ratio=1.0, max_traces_per_s=_NO_RATE, with_held=True
        )
        file.name("process_name", pid=ENGINE, tid=STEPS, name="engine")
        file.name("process_sort_index", pid=ENGINE, tid=STEPS, sort_index=0)
        file.name("thread_name", pid=ENGINE, tid=STEPS, name="steps")
        file.name("process_name", pid=REQUESTS, tid=0, name="requests")
        file.name("process_sort_index", pid=REQUESTS, tid=0, sort_index=1)

    def hear(self, event: Heard) -> None:
        """Take one event, or a line of the journal, which says nothing here."""
        if isinstance(event, LineUnion):
            return
        is_over = event.t_ns > self._window.end_ns
        if is_over and not self._open:
            raise Enough
        self._spans.emit(event)
        self._step_event(event)
        if isinstance(event, RequestArrived):
            self.seen.add(event.rid)
            self._number[event.rid] = len(self._number)
            if not is_over and (not self._window.rids or event.rid in self._window.rids):
                self._open.add(event.rid)

    def _step_event(self, event: AnyEvent) -> None:
        if isinstance(event, EngineStarted):
            self._engine_id = event.engine_id
        elif isinstance(event, StepPlanned):
            self._plans[event.step] = event
            self._plan_counters(event)
        elif isinstance(event, StepCompleted):
            plan = self._plans.pop(event.step, None)
            self._state_counters(event.t_ns, event.pages, event.num_waiting, event.num_running)
            if plan is not None and plan.kind is not StepKind.IDLE:
                self._step(plan, event)

    # -- the engine ------------------------------------------------------------------------------------------------

    def _step(self, plan: StepPlanned, event: StepCompleted) -> None:
        spans = step_spans(
            plan, event, engine_id=self._engine_id, kept_because="export", violations=[], span_of=lambda _rid: None
        )
        track = self._step_track(spans[0])
        shown = [self._span(span, ENGINE, track, "step") for span in spans]
        self.steps += any(shown)

    def _step_track(self, step: SpanDraft) -> int:
        """Steps follow each other on one track; where they overlap, they take turns on two."""
        track = STEPS if step.start_ns >= self._step_ends[0] else STEPS_TOO
        if track == STEPS_TOO and not self._step_ends[1]:
            self._file.name("thread_name", pid=ENGINE, tid=STEPS_TOO, name="steps that overlap")
        self._step_ends[track != STEPS] = step.end_ns
        return track

    def _plan_counters(self, plan: StepPlanned) -> None:
        t_ns = plan.t_ns
        self._state_counters(t_ns, plan.pages, plan.num_waiting, plan.num_running)
        self._counter("queue (tokens)", t_ns, waiting=plan.waiting_tokens)
        self._counter("promised (tokens)", t_ns, promised=plan.promised_tokens)
        self._counter("new_token_ratio", t_ns, ratio=plan.new_token_ratio)
        if plan.budget_open is None or plan.budget_close is None:
            return
        for name, ledger in LEDGERS:
            opened, closed = getattr(plan.budget_open, ledger), getattr(plan.budget_close, ledger)
            if opened is not None and closed is not None:
                self._counter(name, t_ns, open=opened, close=closed)

    def _state_counters(self, t_ns: int, pages: Iterable[int], waiting: int, running: int) -> None:
        self._counter("pages", t_ns, **dict(zip(PAGE_STATES, pages, strict=True)))
        self._counter("requests", t_ns, waiting=waiting, running=running)

    def _counter(self, name: str, t_ns: int, **values: int | float) -> None:
        if self._window.start_ns <= t_ns <= self._window.end_ns:
            self._file.counter(name, max(0, t_ns - self._zero_ns), pid=ENGINE, values=values)

    # -- requests: what the span sink hands over -------------------------------------------------------------------

    def start(self, engine: EngineStarted) -> None:
        """Nothing to do."""

    def refuse(self, spans: int) -> None:
        """The rate allows everything."""
        raise AssertionError(f"{spans} spans refused without a limit")

    def send(self, spans: list[SpanDraft]) -> None:
        """The tree of one request; steps are made here."""
        root = spans[0]
        if root.name == "engine.step":
            return
        rid = str(root.attributes["gen_ai.response.id"])
        self._open.discard(rid)
        if self._window.rids and rid not in self._window.rids:
            return
        shown = [span for span in spans if self._window.clip(span.start_ns, span.end_ns) is not None]
        if not shown:
            return
        self.requests += 1
        tids: dict[int, int] = {}
        for lane, span in lanes(shown):
            if lane not in tids:
                tids[lane] = self._track(rid, lane)
            self._span(span, REQUESTS, tids[lane], "request")

    def _track(self, rid: str, lane: int) -> int:
        tid, self._next_tid = self._next_tid, self._next_tid + 1
        name = rid if lane == 0 else f"{rid} response" if lane == 1 else f"{rid} +{lane - 1}"
        self._file.name("thread_name", pid=REQUESTS, tid=tid, name=name)
        order = self._number.get(rid, 0) * 4 + min(lane, 3)
        self._file.name("thread_sort_index", pid=REQUESTS, tid=tid, sort_index=order)
        return tid

    def close(self) -> None:
        """Show what was still open. The span sink calls it again when it has closed; that does nothing."""
        self._spans.close()

    def _span(self, span: SpanDraft, pid: int, tid: int, category: str) -> bool:
        """One span and its events, cut to the window. False when it is outside."""
        shown = self._window.clip(span.start_ns, span.end_ns)
        if shown is None:
            return False
        start, end = (max(0, t_ns - self._zero_ns) for t_ns in shown)
        args = dict(span.attributes)
        if shown != (span.start_ns, span.end_ns):
            args["clipped_from_ms"] = (span.end_ns - span.start_ns) / 1e6
        if span.error is not None:
            args["error"] = span.error
        name = span.name.removeprefix("engine.")
        if name == "held":
            name = f"held: {args['blocker']}"
        elif span.parent_id is None or (category == "request" and "gen_ai.response.id" in args):
            name = "step" if category == "step" else str(args["gen_ai.response.id"])
        self._file.span(name, category, start, end, pid=pid, tid=tid, args=args)
        for event in span.events:
            if shown[0] <= event.t_ns <= shown[1]:
                at = max(0, event.t_ns - self._zero_ns)
                self._file.instant(
                    event.name.removeprefix("engine."), category, at, pid=pid, tid=tid, args=event.attributes
                )
        return True


def lanes(spans: list[SpanDraft]) -> list[tuple[int, SpanDraft]]:
    """Each span with its lane, so that spans of one lane lie within one another or apart, never across.

    Lane 1 is the response's, which overlaps with decoding by nature; 2 and up hold what else would lie across.
    """
    depth: dict[int, int] = {}
    for span in spans:  # parents come before their children
        depth[span.span_id] = depth.get(span.parent_id or 0, -1) + 1
    ordered = sorted(spans, key=lambda span: (span.start_ns, -span.end_ns, depth[span.span_id]))
    open_ends: dict[int, list[int]] = {}
    placed = []
    for span in ordered:
        lane = 1 if span.name in {"engine.emit", "engine.stream"} else 0
        while True:
            ends = open_ends.setdefault(lane, [])
            while ends and ends[-1] <= span.start_ns:
                ends.pop()
            if not ends or span.end_ns <= ends[-1]:
                break
            lane = max(lane, 1) + 1
        ends.append(span.end_ns)
        placed.append((lane, span))
    return placed
