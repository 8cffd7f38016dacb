"""Auditor. Owns: recounting a live engine's whole state now and then (tier 2 of the checker), between two steps."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import Final

from engine.errors import EngineDead
from engine.kvcache.snapshot import SchedulerSnapshot
from engine.llm_engine import LLMEngine
from engine.server.engine_thread import EngineThread
from invariants.audit import AuditPart
from invariants.checker import InvariantChecker
from invariants.violation import InvariantViolation
from telemetry.metrics import MetricsSink
from telemetry.readings import LIVES, readings_of
from telemetry.spans.sink import SpanSink

_log = logging.getLogger(__name__)
_ANSWER_S: Final = 30.0


class Auditor:
    """Asks the engine thread for an audit every `period_s` seconds, when steps have been made since the last one.

    What it finds stops the engine where the law is to raise: its next step, which is due at once, raises it.

    period_s  None: never by itself
    metrics   what is shown to the world, compared with the books in the same audit; None: nothing is shown
    spans     whoever builds spans: asked in each audit, and compared in the next; None: nobody does
    behind    runs something on the thread that feeds checker and metrics, after all events published by now and before
              later ones; None: the engine thread feeds the checker
    """

    def __init__(
        self,
        engine: LLMEngine,
        engine_thread: EngineThread,
        checker: InvariantChecker,
        *,
        period_s: float | None,
        metrics: MetricsSink | None = None,
        spans: SpanSink | None = None,
        behind: Callable[[Callable[[], None]], None] | None = None,
    ) -> None:
        self._engine = engine
        self._engine_thread = engine_thread
        self._checker = checker
        self._period_s = period_s
        self._audited_steps = 0
        self._order_from = 0
        self._metrics = metrics
        self._spans = spans
        self._behind = behind
        self._lives_from = 0
        #: A snapshot waits for the thread that judges.
        self._is_under_way = False
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="admitscope-audit", daemon=True)

    def start(self) -> None:
        """Begin asking; once."""
        if self._period_s is not None:
            self._thread.start()

    def close(self) -> None:
        """Ask no more. Safe without `start`."""
        self._ending.set()
        if self._thread.is_alive():
            self._thread.join((self._period_s or 0) + 1)

    def audit(self) -> None:
        """One audit. Called on the engine's thread, where the snapshot is taken; judged where the checker is fed."""
        if self._is_under_way:
            return  # a worker that stands must not be handed one snapshot after another
        self._audited_steps = self._engine.steps_done
        snapshot = self._engine.snapshot(order_from=self._order_from)
        if self._behind is None:
            self._judge(snapshot)
            return
        self._is_under_way = True
        self._behind(partial(self._judge_behind, snapshot, self._checker.lost()))

    def _judge_behind(self, snapshot: SchedulerSnapshot, lost: int) -> None:
        """`lost`: events that had been lost when the snapshot was taken; the gap may not have shown yet."""
        self._is_under_way = False
        if lost:
            self._checker.note_loss()
        self._judge(snapshot)

    def _judge(self, snapshot: SchedulerSnapshot) -> None:
        sampled = self._checker.audits_by_part[AuditPart.ORDER]
        try:
            self._checker.audit(snapshot)
            self._audit_metrics()
            reading = None if self._spans is None else self._spans.ask()
            if reading is not None:
                self._checker.audit_spans(reading)
        except InvariantViolation as broken:
            step = snapshot.step
            _log.exception("the audit after step %d found a broken law", step, extra={"step": step})
            self._engine.condemn(broken)
        if snapshot.order is not None and self._checker.audits_by_part[AuditPart.ORDER] > sampled:
            self._order_from = snapshot.order.next_start  # a stretch that was not looked at comes again

    def _audit_metrics(self) -> None:
        """What is shown, and the times of the next LIVES live requests."""
        metrics = self._metrics
        if metrics is None:
            return
        if self._behind is not None:
            if self._checker.is_blind:
                return  # metrics missed what the checker missed
            metrics.flush()  # on the thread that feeds it, which has come as far as the snapshot
        elif not metrics.catch_up():
            return  # what is shown is not of this moment: there is nothing to compare
        if metrics.has_gaps:
            return
        if self._lives_from >= len(metrics.timeline.live):
            self._lives_from = 0
        readings = readings_of(metrics, lives_from=self._lives_from)
        self._lives_from += LIVES
        self._checker.audit_readings(readings)

    def _run(self) -> None:
        while not self._ending.wait(self._period_s):
            if self._engine.steps_done == self._audited_steps:
                continue
            try:
                self._engine_thread.call(self.audit).result(_ANSWER_S)
            except EngineDead:
                return
            except TimeoutError:
                # A step of half a minute: the next round asks again.
                continue
