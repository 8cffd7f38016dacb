"""Answers about the checker. Owns: how checker, auditor and evidence of one engine become the values of `observe_laws`.

Counters are read from another thread: each is whole, and two of them may be an event apart.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from invariants.audit import GROUPS
from invariants.catalog import CATALOG, Law
from invariants.violation import Violation
from telemetry.check_report import CheckReport, Found
from telemetry.checker_settings import CheckerConfig
from telemetry.evidence_reader import EvidenceReader
from telemetry.observe import Head
from telemetry.observe_laws import EvidenceAnswer, EvidenceDetail, LastViolation, LawRow, LawsAnswer

if TYPE_CHECKING:
    from telemetry.checking import Checking
    from telemetry.read_model import ReadModel

_NO_CHECKER: Final = "no checker runs"


class LawBook:
    """What is known of the laws of the engine that `model` watches.

    checking     its checker; None: it has none, or this is a recording
    config       how that was set up
    folder, run  where evidence lies, and the name of the run; None: none is known
    why          why no law is judged, where there is no `checking`
    """

    def __init__(
        self,
        model: ReadModel,
        checking: Checking | None = None,
        *,
        config: CheckerConfig | None = None,
        folder: Path | None = None,
        run: str = "",
        why: str = _NO_CHECKER,
    ) -> None:
        self._model = model
        self._checking = checking
        self._why = why
        self._config = config or CheckerConfig()
        self._reader = None if folder is None else EvidenceReader(folder, run)
        #: Of each law that broke: its latest violation, and when (Unix ns).
        self._last: dict[str, tuple[Violation, int]] = {}
        if checking is not None:
            checking.listeners.append(self._note)

    def laws(self) -> LawsAnswer:
        """Every law. Like the others, it raises NotStarted before the engine's first event."""
        head, checking = self._model.head(), self._checking
        if checking is None or checking.checker.is_off:
            words = self._why if checking is None else checking.words()
            return LawsAnswer(**head.model_dump(), is_checked=False, words=words, laws=tuple(map(_unjudged, CATALOG)))
        checker = checking.checker
        return LawsAnswer(
            **head.model_dump(),
            is_checked=True,
            words=checking.words(),
            laws=tuple(self._row(law, checking) for law in CATALOG),
            events_ns=checker.ns_by_tier[1],
            audits_ns=checker.ns_by_tier[2],
            audits=checker.audits,
            audit_period_s=self._config.audit_period_s,
            uptime_s=self._model.uptime_s(),
            internal_errors=checker.internal_errors,
            last_internal_error=checker.last_internal_error or "",
            bundles=dict(checking.evidence.counts) if checking.evidence is not None else {},
        )

    def evidence(self) -> EvidenceAnswer:
        """The bundles on disk."""
        head = self._model.head()
        rows, total = self._reader.rows() if self._reader is not None else ((), 0)
        is_kept = self._checking is not None and self._checking.evidence is not None
        return EvidenceAnswer(
            **head.model_dump(), rows=rows, total=total, is_kept=is_kept, why="" if is_kept else self._why_none()
        )

    def bundle(self, name: str) -> EvidenceDetail | None:
        """One bundle, opened; None when there is none of this name."""
        head: Head = self._model.head()
        return None if self._reader is None else self._reader.detail(head, name)

    def _note(self, violation: Violation) -> None:
        """Called on the thread that judges, with each violation."""
        self._last[violation.id] = (violation, time.time_ns())

    def _row(self, law: Law, checking: Checking) -> LawRow:
        checker, last = checking.checker, self._last.get(law.id)
        every = max((n for part, n in self._config.parts().items() if GROUPS[part] is law.group), default=1)
        told = {
            "mode": checker.mode_of(law.id),
            "judged": _judged(
                law, checker.mode_of(law.id), is_audited=self._config.audit_period_s is not None, has_listeners=True
            ),
            "audit_every": every if law.tier > 1 else 1,
            "family_checks": checker.checks_by_group[law.group.value],
            "violations": checker.violations_by_id[law.id],
            "last": None if last is None else _seen(*last),
        }
        return LawRow.model_validate(_words_of(law) | told)

    def _why_none(self) -> str:
        checking = self._checking
        if checking is None:
            return self._why
        if checking.checker.is_off:
            return checking.words()
        return "this run writes no journal, or `checker.evidence` is off"


def judged_laws(report: CheckReport) -> tuple[LawRow, ...]:
    """Every law as a judging of a record left it: `check` counts, audits the replayed state, and has no listeners."""
    rows = []
    for law in CATALOG:
        mode = "off" if law.id in report.unjudged else "record"
        last = report.last.get(law.id)
        told = {
            "mode": mode,
            "judged": _judged(law, mode, is_audited=report.audits > 0, has_listeners=False),
            "family_checks": report.checks.get(law.group.value, 0),
            "violations": report.counts.get(law.id, 0),
            "last": None if last is None else _seen(last, round(last.t_wall_s * 1e9)),
        }
        rows.append(LawRow.model_validate(_words_of(law) | told))
    return tuple(rows)


def _judged(law: Law, mode: str, *, is_audited: bool, has_listeners: bool) -> str:
    """When: see `LawRow.judged`."""
    if mode == "off":
        return "never"
    if law.tier == 1:
        return "each"
    # Laws about what listeners show, and about the order of the queue, are judged when somebody hands over a sample.
    is_of_listeners = "audit_readings" in law.applies or "audit_spans" in law.applies
    if is_of_listeners or "per audit" in law.cost:
        return "audits" if is_audited and (has_listeners or not is_of_listeners) else "never"
    return "recount" if is_audited else "each"


def _words_of(law: Law) -> dict[str, object]:
    names = ("id", "sentence", "tier", "cost", "applies", "fails", "properties")
    return {name: getattr(law, name) for name in names} | {"group": law.group.value}


def _unjudged(law: Law) -> LawRow:
    return LawRow.model_validate(_words_of(law) | {"mode": "off", "judged": "never"})


def _seen(violation: Violation | Found, wall_ns: int) -> LastViolation:
    return LastViolation(
        step=violation.step,
        t_wall_s=wall_ns / 1e9,
        rid=violation.rid,
        by=violation.by,
        expected=violation.expected,
        found=violation.found,
    )
