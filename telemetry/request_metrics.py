"""Metrics of requests. Owns: what is counted when a timeline says that a request was admitted, answered or ended."""

from __future__ import annotations

from typing import Final

from telemetry.exemplars import Exemplars
from telemetry.metric_books import Books, FrontEndMetrics
from telemetry.metric_catalog import CATALOG, FAILED, FRONT_END, operation_of
from telemetry.observe import BLOCKERS, TTFT_PARTS
from telemetry.request_timeline import RequestTimeline
from telemetry.stalls import STALL_CAUSES, StepLog
from telemetry.timeline import TimelineTracker

_BY_NAME: Final = {metric.name: metric for metric in CATALOG}
_FAILED_PART: Final = _BY_NAME["time_per_output_token_seconds"].parts.index(FAILED)
_SUCCESS: Final = frozenset({"stop", "length"})


class RequestMetrics:
    """The half of `MetricsSink` that a timeline tells. Engine thread.

    late_ns    a gap above it is late, and gets a cause
    ttft_ns    a first token after it is late
    exemplars  where traces of observations go; None: traces are off
    """

    def __init__(self, *, expects_responses: bool, late_ns: int, ttft_ns: int, exemplars: Exemplars | None) -> None:
        self.front_end = FrontEndMetrics()
        self.exemplars = exemplars
        self._books = Books(tuple(metric for metric in CATALOG if metric.name not in FRONT_END))
        self._timeline = TimelineTracker(self, expects_responses=expects_responses)
        self._late_ns = late_ns
        self._ttft_ns = ttft_ns
        self._applied_ns = 0
        self._steps_made = StepLog()
        at = self._books.at
        self._queue_cell = at["queue_time_seconds", ""]
        self._prompt_cells = at["prompt_tokens_total", "cached"], at["prompt_tokens_total", "computed"]
        self._chunks_cell = at["request_chunks", ""]
        self._ttft_cells = self._parts_of("time_to_first_token_seconds")
        self._mean_cells = self._parts_of("time_per_output_token_seconds")
        self._duration_cells = {
            finish: self._parts_of("request_duration_seconds", finish)
            for name, finish in at
            if name == "request_duration_seconds"
        }
        self._finish_cells = {value: cell for (name, value), cell in at.items() if name == "requests_finished_total"}
        self._cause_cells = {value: cell for (name, value), cell in at.items() if name == "request_ends_total"}
        self._ways_back_cell = at["request_retractions", ""]
        self._residual_cell = at["ttft_residual_seconds_total", ""]
        self._gap_cell = at["inter_token_latency_seconds", ""]
        self._blocked_cells = [at["queue_blocked_seconds", blocker] for blocker in BLOCKERS]
        self._part_cells = [at["ttft_component_seconds", part] for part in TTFT_PARTS]

    def _add(self, name: str, amount: int = 1, label: str = "") -> None:
        self._books.add(self._books.at[name, label], amount)

    def _parts_of(self, name: str, label: str = "") -> tuple[int, ...]:
        """Cells of each part of a family."""
        metric, first = _BY_NAME[name], self._books.at[name, label]
        return tuple(first + part * metric.child for part in range(len(metric.parts)))

    def on_admitted(self, request: RequestTimeline) -> None:
        books, (found, computed) = self._books, self._prompt_cells
        queue_ns = request.queue_ns
        if queue_ns is not None:
            books.observe(self._queue_cell, queue_ns)
            if self.exemplars is not None and request.admitted_ns is not None:
                # Whoever waits that long cannot get its first token in time.
                bucket = books.bucket(self._queue_cell, queue_ns)
                self.exemplars.note(bucket, request, queue_ns, request.admitted_ns, late=queue_ns > self._ttft_ns)
        cached = request.cached_len or 0
        for at, spent in enumerate(request.blockers):
            if spent:
                books.observe(self._blocked_cells[at], spent)
        books.add(found, cached)
        books.add(computed, request.prompt_len - cached)

    def on_first_token(self, request: RequestTimeline) -> None:
        self._books.observe(self._chunks_cell, len(request.chunks))

    def on_ttft(self, request: RequestTimeline) -> None:
        ttft_ns, cell = request.ttft_ns, self._ttft_cells[operation_of(request.rid)]
        assert ttft_ns is not None, "announced without a value"
        self._books.observe(cell, ttft_ns)
        if self.exemplars is not None:
            bucket = self._books.bucket(cell, ttft_ns)
            self.exemplars.note(bucket, request, ttft_ns, request.cursor_ns, late=ttft_ns > self._ttft_ns)
        for at, cell in enumerate(self._part_cells):
            self._books.observe(cell, request.parts[at])
        self._books.add(self._residual_cell, abs(ttft_ns - sum(request.parts)))

    def on_gaps(self, gap_ns: int, count: int, *, queued: bool = False) -> None:
        self._books.observe(self._gap_cell, gap_ns, count)
        if gap_ns > self._late_ns:
            # `planned` and `completed` have told the log of every step up to the one that ends now.
            end_ns = self._applied_ns
            cause = self._steps_made.cause(end_ns - gap_ns, end_ns, queued=queued)
            self._add("token_stalls_total", count, STALL_CAUSES[cause])
            request = self._timeline.live.get(self._timeline.gap_rid)
            if self.exemplars is not None and request is not None:
                # Gaps in time have none: which of a batch's requests will be kept is not asked for each token.
                self.exemplars.note(self._books.bucket(self._gap_cell, gap_ns), request, gap_ns, end_ns, late=True)

    def on_finished(self, request: RequestTimeline) -> None:
        assert request.finish is not None, "announced before its end"
        assert request.finished_ns is not None, "announced before its end"
        assert request.end_cause is not None, "announced before its end"
        part, books = operation_of(request.rid), self._books
        books.cells[self._finish_cells[request.finish]] += 1
        books.cells[self._cause_cells[request.end_cause]] += 1
        books.observe(self._duration_cells[request.finish][part], request.finished_ns - request.accepted_ns)
        books.observe(self._ways_back_cell, request.num_retractions)
        tokens = len(request.token_ns)
        if tokens > 1:
            mean = (request.token_ns[-1] - request.token_ns[0]) // (tokens - 1)
            if request.finish not in _SUCCESS:
                part = _FAILED_PART
            books.observe(self._mean_cells[part], mean)
