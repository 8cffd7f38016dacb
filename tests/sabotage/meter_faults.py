"""Faults of what listeners count. Owns: one method of the metrics or of the timelines broken at a time."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from engine.events import AdmissionDecided, AnyEvent, PagesMoved
from engine.request import RequestState
from telemetry.metrics import MetricsSink
from telemetry.queue_watch import QueueWatch
from telemetry.request_timeline import QUEUE, RequestTimeline
from telemetry.timeline import TimelineTracker
from tests.sabotage.scenario import FAULTS, Fault

Break = Callable[[MetricsSink, pytest.MonkeyPatch], None]


def miscounts(law: str, name: str) -> Callable[[Break], Break]:
    """Register a function that breaks the metrics."""

    def register(function: Break) -> Break:
        FAULTS.append(Fault(law, name, metrics=function))
        return function

    return register


def _after(metrics: MetricsSink, patch: pytest.MonkeyPatch, change: Callable[[AnyEvent], None]) -> None:
    """`change` runs after each event that the metrics took."""
    original = metrics.emit

    def broken(event: AnyEvent) -> None:
        original(event)
        change(event)

    patch.setattr(metrics, "emit", broken)


# -- gauges ----------------------------------------------------------------------------------------------------------


@miscounts("INV-METER-01", "a gauge that forgets who left the queue")
def leaves_uncounted(metrics: MetricsSink, patch: pytest.MonkeyPatch) -> None:
    original = QueueWatch.leave

    def broken(self: QueueWatch, request: RequestTimeline, t_ns: int, *, is_admitted: bool = False) -> None:
        blocker = request.blocker
        original(self, request, t_ns, is_admitted=is_admitted)
        if blocker is not None:
            self.counts[blocker] += 1

    patch.setattr(QueueWatch, "leave", broken)


@miscounts("INV-METER-01", "a gauge of decodes that drifts with each way back")
def decodes_drift(metrics: MetricsSink, patch: pytest.MonkeyPatch) -> None:
    original = TimelineTracker._back_to_queue

    def broken(self: TimelineTracker, request: RequestTimeline, t_ns: int) -> None:
        original(self, request, t_ns)
        self.decoding += 1

    patch.setattr(TimelineTracker, "_back_to_queue", broken)


@miscounts("INV-METER-01", "pages counted twice as they move")
def pages_twice(metrics: MetricsSink, patch: pytest.MonkeyPatch) -> None:
    original = metrics._moved
    patch.setattr(metrics, "_pages", lambda pages: None)

    def broken(event: PagesMoved) -> None:
        original(event)
        original(event)

    patch.setitem(metrics._handlers, PagesMoved, broken)


# -- counters --------------------------------------------------------------------------------------------------------


@miscounts("INV-METER-02", "a counter that is reset")
def counter_reset(metrics: MetricsSink, patch: pytest.MonkeyPatch) -> None:
    cell = metrics.at["generation_tokens_total", ""]

    def reset(event: AnyEvent) -> None:
        if event.step == 20:
            metrics._books.cells[cell] = 0

    _after(metrics, patch, reset)


@miscounts("INV-METER-02", "hits counted at the attempt")
def hits_at_the_attempt(metrics: MetricsSink, patch: pytest.MonkeyPatch) -> None:
    def attempt(event: AnyEvent) -> None:
        if type(event) is AdmissionDecided:
            metrics._add("prompt_tokens_total", event.prefix_len, "cached")

    _after(metrics, patch, attempt)


@miscounts("INV-METER-02", "an end that is not counted")
def end_uncounted(metrics: MetricsSink, patch: pytest.MonkeyPatch) -> None:
    original = metrics.on_finished

    def broken(request: RequestTimeline) -> None:
        if request.rid != "r4":
            original(request)

    patch.setattr(metrics, "on_finished", broken)


# -- histograms ------------------------------------------------------------------------------------------------------


@miscounts("INV-METER-03", "a wait observed at each admission")
def wait_twice(metrics: MetricsSink, patch: pytest.MonkeyPatch) -> None:
    original = TimelineTracker._admitted

    def broken(self: TimelineTracker, request: RequestTimeline, t_ns: int) -> None:
        again = request.is_retracted
        original(self, request, t_ns)
        if again:
            metrics._books.observe(metrics.at["queue_time_seconds", ""], 0)

    patch.setattr(TimelineTracker, "_admitted", broken)


@miscounts("INV-METER-03", "a gap from the prompt to the first token")
def gap_before_the_first(metrics: MetricsSink, patch: pytest.MonkeyPatch) -> None:
    original = metrics.on_first_token

    def broken(request: RequestTimeline) -> None:
        original(request)
        metrics.on_gaps(1_000_000, 1)

    patch.setattr(metrics, "on_first_token", broken)


@miscounts("INV-METER-03", "one component of TTFT left out")
def component_missing(metrics: MetricsSink, patch: pytest.MonkeyPatch) -> None:
    cell = metrics.at["ttft_component_seconds", "commit"]
    original = metrics._books.observe

    def broken(at: int, value: int, count: int = 1) -> None:
        if at != cell:
            original(at, value, count)

    patch.setattr(metrics._books, "observe", broken)


# -- times -----------------------------------------------------------------------------------------------------------


@miscounts("INV-TIME-02", "a part of TTFT counted twice")
def part_twice(metrics: MetricsSink, patch: pytest.MonkeyPatch) -> None:
    original = RequestTimeline.mark

    def broken(self: RequestTimeline, part: int, t_ns: int) -> None:
        before = self.parts[part]
        original(self, part, t_ns)
        if part == QUEUE:
            self.parts[part] += self.parts[part] - before

    patch.setattr(RequestTimeline, "mark", broken)


@miscounts("INV-TIME-02", "a stay in the queue charged to two blockers")
def stay_twice(metrics: MetricsSink, patch: pytest.MonkeyPatch) -> None:
    original = QueueWatch._close

    def broken(self: QueueWatch, request: RequestTimeline, t_ns: int) -> None:
        since = request.blocker_since_ns
        original(self, request, t_ns)
        request.blockers[0] += request.blocker_since_ns - since

    patch.setattr(QueueWatch, "_close", broken)


@miscounts("INV-TIME-02", "a negative wait after a way back")
def negative_wait(metrics: MetricsSink, patch: pytest.MonkeyPatch) -> None:
    original = TimelineTracker._back_to_queue

    def broken(self: TimelineTracker, request: RequestTimeline, t_ns: int) -> None:
        original(self, request, t_ns)
        request.late_blockers[0] -= 1_000

    patch.setattr(TimelineTracker, "_back_to_queue", broken)


@miscounts("INV-TIME-02", "an admission told at the attempt")
def admitted_early(metrics: MetricsSink, patch: pytest.MonkeyPatch) -> None:
    original = TimelineTracker.decided

    def broken(self: TimelineTracker, event: AdmissionDecided) -> None:
        original(self, event)
        request = self.live.get(event.rid)
        if request is not None and request.state is RequestState.WAITING and request.admitted_ns is None:
            request.admitted_ns = event.t_ns

    patch.setattr(TimelineTracker, "decided", broken)
