"""The run that every fault is put into. Owns: a workload that has all that can be broken, and the fault type."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

from engine.clock import VirtualClock
from engine.config import EngineConfig
from engine.errors import LawBroken
from engine.events import AnyEvent, EngineStarted, FanOut
from engine.kvcache.snapshot import SchedulerSnapshot
from invariants import InvariantChecker
from telemetry.metrics import MetricsSink
from telemetry.readings import readings_of
from telemetry.request_timeline import RequestTimeline
from telemetry.spans.draft import SpanDraft
from telemetry.spans.sink import SpanSink
from tests.builders import CoreRun, Tap, engine_config

Edit = Callable[[AnyEvent], Sequence[AnyEvent]]
PROGRESS_STEPS = 8
GAP_STEPS = 3
MAX_STEPS = 600


def same(event: AnyEvent) -> Sequence[AnyEvent]:
    """The edit that edits nothing."""
    return (event,)


@dataclass(frozen=True)
class Fault:
    """One thing broken on purpose.

    law      the law that must notice
    edit     makes an edit of the event stream; None leaves it alone
    engine   breaks the engine before it runs; None leaves it alone
    metrics  breaks the metrics that listen beside the checker; None leaves them alone
    spans    breaks the sink that builds spans beside the checker; None leaves it alone
    renumber whether gaps that the edit leaves in `seq` are closed
    """

    law: str
    name: str
    edit: Callable[[], Edit] | None = None
    engine: Callable[[CoreRun, pytest.MonkeyPatch], None] | None = None
    metrics: Callable[[MetricsSink, pytest.MonkeyPatch], None] | None = None
    spans: Callable[[SpanSink, pytest.MonkeyPatch], None] | None = None
    renumber: bool = True
    settings: dict[str, object] = field(default_factory=dict)


FAULTS: list[Fault] = []


def config(**changes: object) -> EngineConfig:
    """Page 16, four rows, chunks of 64, a pool too small for all: chunks, mixing, refusals, evictions, retractions."""
    settings: dict[str, object] = {
        "num_pages": 24,
        "chunked_prefill_size": 64,
        "max_prefill_tokens": 64,
        "max_running_requests": 4,
        "schedule_policy": "lpm",
        "schedule_conservativeness": 0.05,
        "clip_max_new_tokens": 4,
    }
    return engine_config(**(settings | changes))


class Nowhere:
    """Takes spans and forgets them."""

    def start(self, engine: EngineStarted) -> None:
        """Nothing."""

    def send(self, spans: list[SpanDraft]) -> None:
        """Nothing."""

    def refuse(self, spans: int) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


def workload(run: CoreRun) -> None:
    """Twelve requests with shared beginnings, arriving while others run; one is aborted, one step fails."""
    for index in range(12):
        common = range(1000, 1000 + (0, 40, 72, 100)[index % 4])
        own = range(10_000 * (index + 1), 10_000 * (index + 1) + (30, 150, 9, 61, 47)[index % 5])
        run.add(f"r{index}", [*common, *own], (9, 30, 60)[index % 3], ignore_eos=index % 4 == 3)
        run.step()
        if index == 7:
            run.step(fail=True)
        if index == 9:
            run.abort("r8")
    while run.has_work and run.steps < MAX_STEPS:
        run.step()


def run_with(fault: Fault | None, checker: InvariantChecker, patch: pytest.MonkeyPatch | None = None) -> None:
    """The workload, with `fault` in it. The engine's own asserts may stop it once it is broken.

    Metrics and spans listen to the true events, as in a server; a lie is told to the checker alone.
    """
    edit = fault.edit() if fault is not None and fault.edit is not None else same
    metrics = MetricsSink(clock=VirtualClock())
    ended: list[RequestTimeline] = []
    patch = patch or pytest.MonkeyPatch()
    if fault is not None and fault.metrics is not None:
        fault.metrics(metrics, patch)
    spans = SpanSink(Nowhere(), expects_responses=False, sample_ratio=1.0, max_traces_per_s=10_000.0)
    if fault is not None and fault.spans is not None:
        fault.spans(spans, patch)
    told = metrics.on_finished
    patch.setattr(metrics, "on_finished", lambda request: (ended.append(request), told(request)))
    is_lie = fault is not None and fault.edit is not None

    def audit(snapshot: SchedulerSnapshot) -> None:
        checker.audit(snapshot)
        if not is_lie:
            checker.audit_readings(readings_of(metrics, also=ended))
            reading = spans.reading()
            assert reading is not None
            checker.audit_spans(reading)
        ended.clear()

    sink = FanOut((Tap(checker, edit, renumber=fault is None or fault.renumber), metrics, spans))
    run = CoreRun(config(**(fault.settings if fault is not None else {})), sink, after_step=audit)
    if fault is None:
        workload(run)
        return
    if fault.engine is not None:
        fault.engine(run, patch)
    try:
        workload(run)
    except (LawBroken, AssertionError, LookupError, ValueError):
        return
