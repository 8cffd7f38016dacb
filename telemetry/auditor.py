"""Auditor. Owns: recounting a live engine's whole state now and then (tier 2 of the checker), between two steps."""

from __future__ import annotations

import logging
import threading
from typing import Final

from engine.errors import EngineDead
from engine.llm_engine import LLMEngine
from engine.server.engine_thread import EngineThread
from invariants.audit import AuditPart
from invariants.checker import InvariantChecker
from invariants.violation import InvariantViolation

_log = logging.getLogger(__name__)
_ANSWER_S: Final = 30.0


class Auditor:
    """Asks the engine thread for an audit every `period_s` seconds, when steps have been made since the last one.

    A violation is counted by the checker and logged by its listener; here it ends nothing, since no step is under way.
    """

    def __init__(
        self, engine: LLMEngine, engine_thread: EngineThread, checker: InvariantChecker, *, period_s: float
    ) -> None:
        self._engine = engine
        self._engine_thread = engine_thread
        self._checker = checker
        self._period_s = period_s
        self._audited_steps = 0
        self._order_from = 0
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="admitscope-audit", daemon=True)

    def start(self) -> None:
        """Begin asking; once."""
        self._thread.start()

    def close(self) -> None:
        """Ask no more. Safe without `start`."""
        self._ending.set()
        if self._thread.is_alive():
            self._thread.join(self._period_s + 1)

    def audit(self) -> None:
        """One audit, on the calling thread, which must be the engine's."""
        self._audited_steps = self._engine.steps_done
        snapshot = self._engine.snapshot(order_from=self._order_from)
        sampled = self._checker.audits_by_part[AuditPart.ORDER]
        try:
            self._checker.audit(snapshot)
        except InvariantViolation:
            # Told to raise, but there is no step to end: counters, log and the exit status of a demo say it.
            _log.exception("the audit after step %d found a broken law", self._audited_steps)
        if snapshot.order is not None and self._checker.audits_by_part[AuditPart.ORDER] > sampled:
            self._order_from = snapshot.order.next_start  # a stretch that was not looked at comes again

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
