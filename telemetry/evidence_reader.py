"""The evidence reader. Owns: bundles on disk as answers: the list of a folder, and one bundle opened.

A bundle is named by its folder, which must lie right in the folder of evidence: a name comes from strangers. Files are
bounded before they are read; what cannot be read says why, and the rest is shown all the same.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from engine.kvcache.snapshot import SchedulerSnapshot
from invariants import audit
from telemetry.evidence_bundle import EVENTS_FILE, SNAPSHOT_FILE, VIOLATION_FILE
from telemetry.observe import PAGE_STATES, Head
from telemetry.observe_laws import EvidenceDetail, EvidenceRecord, EvidenceRow, StateRow

_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")
LISTED: Final = 100
_RECORDS: Final = 160
_DIFFERENCES: Final = 60
_MAX_TEXT: Final = 500
_MAX_ABOUT: Final = 1024 * 1024
_MAX_EVENTS: Final = 32 * 1024 * 1024
#: A larger state is not recounted: that would hold up the engine's process for long.
_MAX_SNAPSHOT: Final = 16 * 1024 * 1024
_PAGES_SHOWN: Final = 6
#: Fields of records that say nothing to a reader.
_LEFT_OUT: Final = frozenset({"type", "seq", "step", "t_ns", "page_keys", "config", "times"})


class EvidenceReader:
    """Bundles in `folder`; those of `run` are this run's. The list is read again when the folder changes."""

    def __init__(self, folder: Path, run: str) -> None:
        self._folder = folder
        self._run = run
        self._seen: tuple[int, tuple[EvidenceRow, ...], int] | None = None

    def rows(self) -> tuple[tuple[EvidenceRow, ...], int]:
        """(the newest LISTED bundles, how many there are). Nothing when there is no folder."""
        try:
            changed = self._folder.stat().st_mtime_ns
        except OSError:
            return (), 0
        if self._seen is None or self._seen[0] != changed:
            dated = [(_changed(path), path.name) for path in self._folder.iterdir() if _NAME.fullmatch(path.name)]
            dated.sort(reverse=True)
            rows = tuple(self._row(name) for _, name in dated[:LISTED])
            self._seen = (changed, rows, len(dated))
        return self._seen[1], self._seen[2]

    def detail(self, head: Head, name: str) -> EvidenceDetail | None:
        """One bundle; None when there is none of this name."""
        if not _NAME.fullmatch(name) or not (self._folder / name / VIOLATION_FILE).is_file():
            return None
        row, about = self._row(name), _about(self._folder / name) or {}
        records, total = _records(self._folder / name / EVENTS_FILE, about)
        own = StateRow(law=row.law, expected=row.expected, found=row.found, rid=row.rid)
        found, taken = _recount(self._folder / name / SNAPSHOT_FILE, about)
        return EvidenceDetail(
            **head.model_dump(),
            row=row,
            sentence=str(about.get("law", "")),
            version=str(about.get("version", "")),
            model=str(about.get("model", "")),
            records=tuple(records),
            records_total=total,
            differences=(own, *found)[:_DIFFERENCES],
            taken=taken,
            commands=tuple((str(c.get("why", "")), str(c.get("command", ""))) for c in about.get("commands", ())),
        )

    def _row(self, name: str) -> EvidenceRow:
        folder = self._folder / name
        about = _about(folder)
        if about is None:
            return EvidenceRow(id=name, error=f"{VIOLATION_FILE} cannot be read")
        return EvidenceRow(
            id=name,
            law=str(about.get("id", "")),
            step=int(about.get("step", 0)),
            rid=about.get("rid"),
            at=str(about.get("at", "")),
            found_by=str(about.get("found_by", "")),
            mode=str(about.get("mode", "")),
            expected=str(about.get("expected", "")),
            found=str(about.get("found", "")),
            size_bytes=sum(_size(folder / file) for file in (VIOLATION_FILE, EVENTS_FILE, SNAPSHOT_FILE)),
            is_this_run=name.startswith(f"{self._run}-"),
        )


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _about(folder: Path) -> dict[str, Any] | None:
    path = folder / VIOLATION_FILE
    try:
        if path.stat().st_size > _MAX_ABOUT:
            return None
        about = msgspec.json.decode(path.read_bytes())
    except (OSError, msgspec.DecodeError):
        return None
    return about if isinstance(about, dict) else None


def _records(path: Path, about: dict[str, Any]) -> tuple[list[EvidenceRecord], int]:
    """(those of the steps around the violation, how many the bundle has); nothing when they cannot be read."""
    try:
        if path.stat().st_size > _MAX_EVENTS:
            return [], 0
        lines = [msgspec.json.decode(line) for line in path.read_bytes().splitlines() if line]
    except (OSError, msgspec.DecodeError):
        return [], 0
    events = [line for line in lines if isinstance(line, dict) and "seq" in line and "t_ns" in line]
    if not events:
        return [], 0
    shown_by = [int(seq) for seq in about.get("event_seqs", ())] or [int(events[-1]["seq"])]
    offending = next((event for event in events if event["seq"] == shown_by[-1]), events[-1])
    kept = [event for event in events if event["seq"] <= offending["seq"]][-_RECORDS:]
    named = [event for event in events if event["seq"] in shown_by and event["seq"] < kept[0]["seq"]][:20]
    made = [_record(event, offending, frozenset(shown_by)) for event in (*named, *kept)]
    return made[-_RECORDS:], len(events)


def _record(event: dict[str, Any], offending: dict[str, Any], shown_by: frozenset[int]) -> EvidenceRecord:
    fields = (f"{name}={_value(name, value)}" for name, value in event.items() if name not in _LEFT_OUT)
    return EvidenceRecord(
        seq=event["seq"],
        step=event["step"],
        before_ms=(offending["t_ns"] - event["t_ns"]) / 1e6,
        type=str(event.get("type", "")),
        text=" ".join(fields)[:_MAX_TEXT],
        is_evidence=event["seq"] in shown_by,
        is_offending=event["seq"] == offending["seq"],
    )


def _value(name: str, value: Any) -> str:
    """One field, short: packed pages as numbers, rows of a plan as how many they are."""
    if isinstance(value, str) and name in {"pages", "owners"}:
        try:
            pages = np.frombuffer(base64.b64decode(value), dtype="<i4").tolist()
        except ValueError:
            return "?"
        rest = f"…({len(pages)})" if len(pages) > _PAGES_SHOWN else ""
        return ",".join(map(str, pages[:_PAGES_SHOWN])) + rest
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return f"[{len(value)}]"
    return msgspec.json.encode(value).decode()


def _recount(path: Path, about: dict[str, Any]) -> tuple[Sequence[StateRow], str]:
    """(what a recount of the bundle's state finds, how the state was taken)."""
    told = about.get("snapshot")
    taken = str(told.get("taken", "")) if isinstance(told, dict) else ""
    try:
        if path.stat().st_size > _MAX_SNAPSHOT:
            return (), f"{taken}; it is too large to be recounted here"
        snapshot = msgspec.json.decode(path.read_bytes(), type=SchedulerSnapshot)
    except OSError:
        return (), taken
    except msgspec.DecodeError as error:
        return (), f"{taken}; it cannot be read: {error}"
    rows: list[StateRow] = []

    def report(law: str, expected: str, found: str, *, rid: str | None = None, seqs: tuple[int, ...] = ()) -> None:  # noqa: ARG001 - of the protocol
        rows.append(StateRow(law=law, expected=expected, found=found, rid=rid))

    audit.run(None, snapshot, report)
    return (*_numbers(snapshot), *rows), taken


def _numbers(snapshot: SchedulerSnapshot) -> list[StateRow]:
    """Counters of the pool against a count of its pages, where they differ."""
    states = np.bincount(np.frombuffer(snapshot.kv.states, dtype=np.uint8), minlength=len(PAGE_STATES)).tolist()
    pairs = zip(PAGE_STATES, states, snapshot.kv.counts, strict=False)
    return [
        StateRow(law="", expected=f"{counted} {name} pages, counted", found=f"{kept}, by the engine's counter")
        for name, counted, kept in pairs
        if counted != kept
    ]
