"""Evidence. Owns: which violations get a bundle on disk, and the thread that writes it, so that the engine never waits.

The thread that judges decides and hands over references; everything slow happens on the recorder's own. A bundle
appears whole or not at all. Limits: the first violations of each law at once, later ones at most one per interval, and
a size for all bundles of the run. What is left out, or fails (a full disk), is counted by outcome and stops nothing.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from engine.clock import Clock
from engine.events import AnyEvent, EngineStarted
from engine.kvcache.snapshot import SchedulerSnapshot
from invariants.violation import Violation
from telemetry.error_log import ErrorLog
from telemetry.evidence_bundle import (
    SNAPSHOT_FILE,
    VIOLATION_FILE,
    Case,
    Picture,
    description,
    encoded_snapshot,
    write_events,
)
from telemetry.metric_catalog import EVIDENCE_OUTCOMES
from telemetry.program import program

_log = logging.getLogger(__name__)
FOLDER: Final = "evidence"
_MIB: Final = 1024 * 1024
#: Cases that may wait for the disk. One fault often breaks several laws in one step.
_WAITING: Final = 32
_MAX_SAME_NAME: Final = 1_000


class EvidenceRecorder:
    """Call it with each violation, on the thread that judges: always the same one.

    folder     where bundles go, one folder each; made with the first
    run        name of the run: bundles are `<run>-<law>-<step>`
    journal    the run's journal, which commands name, as long as it takes events; None when there is none
    look       (first event of the life, last events, snapshot of the audit under way) at the moment of a violation
    picture    takes a snapshot between two steps; called on the recorder's thread, may take its time
    mode_of    law → what its violation does
    per_law, interval_s, max_mib   the limits

    counts     violations by EVIDENCE_OUTCOMES; read from any thread
    """

    def __init__(  # noqa: PLR0913 - each is a seam or a limit, named once at the composition root
        self,
        *,
        folder: Path,
        run: str,
        journal: Callable[[], Path | None],
        look: Callable[[], tuple[EngineStarted | None, tuple[AnyEvent, ...], SchedulerSnapshot | None]],
        picture: Callable[[], Picture],
        mode_of: Callable[[str], str],
        per_law: int,
        interval_s: float,
        max_mib: int,
        clock: Clock,
    ) -> None:
        # Absolute, for commands are pasted elsewhere and later.
        self._folder = folder.absolute()
        self._run_name = run
        self._journal = journal
        self._look = look
        self._picture = picture
        self._mode_of = mode_of
        self._per_law = per_law
        self._interval_ns = round(interval_s * 1e9)
        self._left = max_mib * _MIB
        self._clock = clock
        self.counts: dict[str, int] = dict.fromkeys(EVIDENCE_OUTCOMES, 0)
        self._errors = ErrorLog("evidence")
        #: Of the thread that judges: bundles of each law so far, the step of its last, and when its next may be.
        self._given: dict[str, int] = {}
        self._last_step: dict[str, int] = {}
        self._next_ns: dict[str, int] = {}
        #: Written by the recorder's thread, read by the thread that judges: the run's size is used up.
        self._is_full = False
        self._lock = threading.Lock()
        self._cases: queue.Queue[Case | None] = queue.Queue(_WAITING)
        self._thread = threading.Thread(target=self._work, name="admitscope-evidence", daemon=True)
        self._thread.start()

    # -- the thread that judges --------------------------------------------------------------------------------------

    def __call__(self, violation: Violation) -> None:
        """Take one violation. Never blocks, never raises for want of room."""
        if self._is_full:
            self._count("full")
            return
        if not self._may(violation.id, violation.step):
            self._count("limited")
            return
        started, events, audited = self._look()
        picture = None
        if violation.by == "audit" and audited is not None:
            picture = Picture(audited, f"by the audit itself, between two steps, after step {audited.step}")
        case = Case(violation, self._mode_of(violation.id), time.time_ns(), started, events, picture)
        try:
            self._cases.put_nowait(case)
        except queue.Full:
            self._count("limited")

    def _may(self, law: str, step: int) -> bool:
        """Whether this law gets a bundle now, which is at most one in a step; if so, it counts as given."""
        now, given = self._clock.now_ns(), self._given.get(law, 0)
        if self._last_step.get(law) == step or (given >= self._per_law and now < self._next_ns[law]):
            return False
        self._given[law] = given + 1
        self._last_step[law] = step
        self._next_ns[law] = now + self._interval_ns
        return True

    def _count(self, outcome: str) -> None:
        with self._lock:
            self.counts[outcome] += 1

    # -- any thread --------------------------------------------------------------------------------------------------

    def close(self, timeout_s: float = 30.0) -> bool:
        """Write what waits and end the thread. False when that took longer than `timeout_s`."""
        deadline_s = time.monotonic() + timeout_s
        with contextlib.suppress(queue.Full):  # then the thread has not kept up: the answer below says so
            self._cases.put(None, timeout=timeout_s)
        self._thread.join(max(deadline_s - time.monotonic(), 0))
        return not self._thread.is_alive()

    # -- the recorder's thread ---------------------------------------------------------------------------------------

    def _work(self) -> None:
        while (case := self._cases.get()) is not None:
            try:
                self._count(self._write(case))
            except Exception as error:  # a full disk, a state that cannot be pictured: counted, and the engine goes on
                self._count("failed")
                self._errors.record(error, f"writing evidence of {case.violation.id} at step {case.violation.step}")

    def _write(self, case: Case) -> str:
        """Write one bundle; its outcome. Raises OSError."""
        picture = case.picture if case.picture is not None else self._picture()
        self._folder.mkdir(parents=True, exist_ok=True)
        target = self._free_name(case.violation)
        partial = target.with_name(f".{target.name}.partial")
        partial.mkdir()
        try:
            size = write_events(partial, case)
            snapshot, taken = encoded_snapshot(picture), picture.taken
            if snapshot and size + len(snapshot) > self._left:
                taken = f"left out: {len(snapshot):,} bytes are more than this run may still write"
                snapshot = b""
            if snapshot:
                (partial / SNAPSHOT_FILE).write_bytes(snapshot)
            name = SNAPSHOT_FILE if snapshot else None
            journal = self._journal()
            about = description(
                case,
                folder=target,
                journal=journal.absolute() if journal is not None else None,
                snapshot=name,
                taken=taken,
                program=program(),
            )
            text = msgspec.json.format(msgspec.json.encode(about), indent=1) + b"\n"
            (partial / VIOLATION_FILE).write_bytes(text)
            size += len(snapshot) + len(text)
            if size > self._left:
                self._is_full = True
                shutil.rmtree(partial)
                return "full"
            partial.rename(target)
        except BaseException:  # an interrupt too must leave no half bundle
            shutil.rmtree(partial, ignore_errors=True)  # a disk that fails may fail here too: the first error counts
            raise
        self._left -= size
        broken, context = case.violation, {"rid": case.violation.rid, "step": case.violation.step}
        _log.error("%s at step %d: evidence in %s", broken.id, broken.step, target, extra=context)
        for entry in about["commands"]:
            _log.error("  %s", entry["command"], extra=context)
        return "written"

    def _free_name(self, violation: Violation) -> Path:
        """A name that no bundle of this run has. Raises FileExistsError after many of one step."""
        plain = self._folder / f"{self._run_name}-{violation.id}-{violation.step}"
        for number in range(1, _MAX_SAME_NAME):
            path = plain if number == 1 else plain.with_name(f"{plain.name}.{number}")
            if not path.exists():
                return path
        raise FileExistsError(f"{plain}: {_MAX_SAME_NAME} bundles have this name")
