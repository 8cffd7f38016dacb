"""Checking. Owns: what is around one engine's checker — its modes, who hears of violations, evidence, audits.

Where a law is to raise, the checker judges on the engine thread, before the next thing happens. Where all are only
recorded, nobody waits for the verdict: a worker judges beside the engine, a few steps later (ADR 0019).

Who hears of a violation, on the thread that judges and in this order: the log, the evidence recorder, and whoever is
added to `listeners`. With every law off there is a checker, but nobody calls it: it is no sink, and costs nothing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from typing import Final

from engine.clock import Clock
from engine.errors import EngineDead
from engine.events import AnyEvent, EngineStarted
from engine.kvcache.snapshot import SchedulerSnapshot
from engine.llm_engine import LLMEngine
from engine.server.engine_thread import EngineThread
from invariants.audit import unaccounted
from invariants.checker import InvariantChecker
from invariants.modes import OnViolation
from invariants.violation import InvariantViolation, Violation
from telemetry.auditor import Auditor
from telemetry.checker_settings import CheckerConfig
from telemetry.error_log import LOG_EVERY_S
from telemetry.evidence import FOLDER, EvidenceRecorder
from telemetry.evidence_bundle import Picture
from telemetry.isolation import IsolatedSink
from telemetry.journal_cap import CappedJournal
from telemetry.metric_catalog import NS
from telemetry.metrics import MetricsSink
from telemetry.spans.sink import SpanSink

_log = logging.getLogger(__name__)
_ANSWER_S: Final = 10.0
_END_S: Final = 5.0


class Checking:
    """One engine's checker and what belongs to it. `attach` once the engine exists; `start` and `close` as it runs.

    journal    the run's journal, beside which evidence goes; None: there is none, and so no evidence
    listeners  told of each violation after log and evidence
    """

    def __init__(
        self, config: CheckerConfig, *, on_violation: OnViolation, journal: CappedJournal | None, run: str, clock: Clock
    ) -> None:
        self._config = config
        self.listeners: list[Callable[[Violation], None]] = []
        self.checker = InvariantChecker(
            on_violation=on_violation,
            overrides=config.modes(),
            progress_steps=config.progress_steps,
            gap_steps=config.gap_steps,
            audit_every=config.parts(),
            time_ns=time.perf_counter_ns,
            listener=self._tell,
        )
        self._counted: SchedulerSnapshot | None = None
        self._unaccounted = 0
        self._silent_until_ns = 0
        self._unlogged = 0
        self._engine: LLMEngine | None = None
        self._engine_thread: EngineThread | None = None
        self.auditor: Auditor | None = None
        self.evidence: EvidenceRecorder | None = None
        if journal is not None and config.evidence and not self.checker.is_off:
            self.evidence = EvidenceRecorder(
                folder=journal.path.parent / FOLDER,
                run=run,
                # One that is full does not reach the violation.
                journal=lambda: None if journal.is_full else journal.path,
                look=self._look,
                picture=self._picture,
                mode_of=self.checker.mode_of,
                per_law=config.evidence_per_law,
                interval_s=config.evidence_interval_s,
                max_mib=config.evidence_max_mib,
                clock=clock,
            )

    @property
    def is_beside(self) -> bool:
        """Whether a worker feeds the checker, because no law is to stop a step."""
        return self.checker.may_be_behind and not self.checker.is_off

    @property
    def sinks(self) -> tuple[IsolatedSink, ...]:
        """The checker as a listener on the engine thread; none when every law is off, or a worker feeds it."""
        if self.checker.is_off or self.is_beside:
            return ()
        return (IsolatedSink(self.checker, "checker", lets_through=(InvariantViolation,)),)

    def attach(
        self,
        engine: LLMEngine,
        engine_thread: EngineThread,
        metrics: MetricsSink | None = None,
        spans: SpanSink | None = None,
        behind: Callable[[Callable[[], None]], None] | None = None,
    ) -> None:
        """Name the engine that is checked, and the metrics and spans that audits compare with the checker's books.

        `behind` hands work to the worker that feeds the checker, where there is one: see `Auditor`.
        """
        self._engine, self._engine_thread = engine, engine_thread
        self.auditor = Auditor(
            engine,
            engine_thread,
            self.checker,
            period_s=self._config.audit_period_s,
            metrics=metrics,
            spans=spans,
            behind=behind if self.is_beside else None,
        )

    def start(self) -> None:
        """Begin to audit."""
        if self.auditor is not None and not self.checker.is_off:
            self.auditor.start()

    def stop_audits(self) -> None:
        """Audit no more."""
        if self.auditor is not None:
            self.auditor.close()

    def close(self) -> None:
        """Once nothing is judged any more: write the evidence that waits."""
        if self.evidence is not None:
            self.evidence.close()

    def words(self) -> str:
        """For the lines that a server begins with."""
        if self.checker.is_off:
            return "off: no law is judged"
        if self.checker.is_blind:
            return f"blind: events were lost on the way to it ({self.checker.lost()}); only recounts judge this run"
        modes = ", ".join(f"{laws} {mode}" for mode, laws in self.checker.laws_by_mode.items() if laws)
        period_s = self._config.audit_period_s
        audits = "no audits" if period_s is None else f"an audit every {period_s:g} s"
        return f"laws: {modes}; {audits}"

    def numbers(self) -> Iterator[tuple[str, str, int]]:
        """(family, label value, number) of what `/metrics` shows about all this."""
        for mode, laws in self.checker.laws_by_mode.items():
            yield "invariant_laws", mode, laws
        audits = self.auditor is not None and not self.checker.is_off
        yield "invariant_audit_period_seconds", "", round((self._config.audit_period_s or 0) * NS) if audits else 0
        yield "kv_pages_unaccounted", "", self._unaccounted_pages()
        for part, made in self.checker.audits_by_part.items():
            yield "invariant_audits_total", part, made
        for outcome, count in (self.evidence.counts if self.evidence is not None else {}).items():
            yield "evidence_bundles_total", outcome, count

    def _unaccounted_pages(self) -> int:
        """Of the last snapshot that was audited; counted once for each, by whoever scrapes first."""
        snapshot = self.checker.audited
        if snapshot is not None and snapshot is not self._counted:
            self._unaccounted, self._counted = unaccounted(snapshot.kv), snapshot
        return self._unaccounted

    def _tell(self, violation: Violation) -> None:
        self._say(violation)
        if self.evidence is not None:
            self.evidence(violation)
        for listener in self.listeners:
            listener(violation)

    def _say(self, violation: Violation) -> None:
        """Log it, at a bounded rate: a broken law may break in every step."""
        now_ns = time.monotonic_ns()
        if now_ns < self._silent_until_ns:
            self._unlogged += 1
            return
        also, self._unlogged, self._silent_until_ns = self._unlogged, 0, now_ns + round(LOG_EVERY_S * NS)
        mode, context = self.checker.mode_of(violation.id), {"rid": violation.rid, "step": violation.step}
        _log.error("broken law (%s): %s %d more since the last such line", mode, violation, also, extra=context)

    def _look(self) -> tuple[EngineStarted | None, tuple[AnyEvent, ...], SchedulerSnapshot | None]:
        return self.checker.started, self.checker.evidence(), self.checker.audited

    def _picture(self) -> Picture:
        """A snapshot for evidence, on the recorder's thread: between two steps, or of an engine that stands still."""
        engine, engine_thread = self._engine, self._engine_thread
        if engine is None or engine_thread is None:
            return Picture(None, "none: the engine was not built yet")
        try:
            snapshot = engine_thread.call(engine.snapshot).result(_ANSWER_S)
        except TimeoutError:
            return Picture(None, f"none: the engine did not come to the end of a step within {_ANSWER_S:g} s")
        except EngineDead:
            return self._last_picture(engine, engine_thread)
        return Picture(snapshot, f"between two steps, after step {snapshot.step}, once the step at fault had ended")

    def _last_picture(self, engine: LLMEngine, engine_thread: EngineThread) -> Picture:
        deadline_s = time.monotonic() + _END_S
        while not engine_thread.status.stopped:
            if time.monotonic() > deadline_s:
                return Picture(None, "none: the engine was ending, and did not end in time")
            time.sleep(0.01)
        try:
            snapshot = engine.snapshot()
        except Exception as error:  # a state that broke in the middle of a step may be beyond a picture
            return Picture(None, f"none: the state of the stopped engine cannot be pictured ({type(error).__name__})")
        if engine_thread.status.dead:
            return Picture(snapshot, f"of the engine that stopped, maybe inside step {snapshot.step}")
        return Picture(snapshot, f"after the engine had ended in order, with step {snapshot.step}")
