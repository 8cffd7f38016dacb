"""The evidence reader. Owns: bundles on disk as answers: the list of a folder, and one bundle opened.

A bundle is named by its folder, which must lie right in the folder of evidence: a name comes from strangers. Files are
bounded before they are read; what cannot be read says why, and the rest is shown all the same.
"""

from __future__ import annotations

import base64
import errno
import os
import re
import stat
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
_INT64: Final = 2**63
_SHORT: Final = 40
#: Longest text of a bundle that an answer repeats: a list of a hundred has to stay an answer.
_LONGEST: Final = 8_192
#: What tells where a record stands; a line without them is no event.
_PLACE: Final = ("seq", "step", "t_ns")
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
            try:
                names = [path.name for path in self._folder.iterdir() if _NAME.fullmatch(path.name)]
            except OSError:  # no folder, or none that may be read
                return (), 0
            dated = [(_changed(self._folder / name), name) for name in names]
            dated.sort(reverse=True)
            rows = tuple(self._row(name) for _, name in dated[:LISTED])
            self._seen = (changed, rows, len(dated))
        return self._seen[1], self._seen[2]

    def detail(self, head: Head, name: str) -> EvidenceDetail | None:
        """One bundle; None when there is none of this name."""
        if not _NAME.fullmatch(name) or not _is_there(self._folder / name / VIOLATION_FILE):
            return None
        row, about = self._row(name), _about(self._folder / name)[0]
        records, total, why = _records(self._folder / name / EVENTS_FILE, about)
        if why:
            row = row.model_copy(update={"error": "; ".join(filter(None, (row.error, f"{EVENTS_FILE}: {why}")))})
        own = StateRow(law=row.law, expected=row.expected, found=row.found, rid=row.rid)
        found, taken = _recount(self._folder / name / SNAPSHOT_FILE, about)
        return EvidenceDetail(
            **head.model_dump(),
            row=row,
            sentence=_text(about, "law"),
            version=_text(about, "version"),
            model=_text(about, "model"),
            records=tuple(records),
            records_total=total,
            differences=(own, *found)[:_DIFFERENCES],
            taken=taken,
            commands=tuple(
                (_text(one, "why"), _text(one, "command")) for one in _list(about, "commands") if isinstance(one, dict)
            ),
        )

    def _row(self, name: str) -> EvidenceRow:
        folder = self._folder / name
        about, why = _about(folder)
        if why:
            return EvidenceRow(id=name, error=f"{VIOLATION_FILE} cannot be read: {why}")
        step, rid = about.get("step", 0), about.get("rid")
        odd = [] if _is_whole(step) else [f"step is {_short(step)}, no whole number"]
        odd += [] if rid is None or isinstance(rid, str) else [f"rid is {_short(rid)}, no text"]
        odd += [
            f"{field} is {_short(about[field])}, no list"
            for field in ("commands", "event_seqs")
            if not isinstance(about.get(field, []), list)
        ]
        return EvidenceRow(
            id=name,
            error="; ".join(odd),
            law=_text(about, "id"),
            step=step if _is_whole(step) else 0,
            rid=rid if isinstance(rid, str) else None,
            at=_text(about, "at"),
            found_by=_text(about, "found_by"),
            mode=_text(about, "mode"),
            expected=_text(about, "expected"),
            found=_text(about, "found"),
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


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a folder that may not be entered: the row says so
        return True


def _read(path: Path, most: int) -> bytes:
    """A file's content. Raises OSError, also for what is no file (a pipe would never end), and _TooLarge."""
    # Not waiting for the other end of a pipe: what was looked at by name may be another thing by the time it is opened.
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file")
        content = file.read(most + 1)
    if len(content) > most:
        raise _TooLarge(errno.EFBIG, f"it is larger than {most:,} bytes")
    return content


class _TooLarge(OSError):
    """A file beyond its bound."""


def _about(folder: Path) -> tuple[dict[str, Any], str]:
    """(what the bundle says of itself, why it cannot be read); one of them is empty."""
    try:
        about = msgspec.json.decode(_read(folder / VIOLATION_FILE, _MAX_ABOUT))
    except OSError as error:
        return {}, str(error.strerror)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        return {}, str(error)
    return (about, "") if isinstance(about, dict) else ({}, "it holds no object")


def _is_whole(value: object) -> bool:
    """Whether it is an integer that an answer can carry: JSON has longer ones, which nobody wrote here."""
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < _INT64


def _short(value: object) -> str:
    try:
        return repr(value)[:_SHORT]
    except RecursionError:
        return "nested too deeply"


def _text(told: dict[str, Any], field: str) -> str:
    """A field that is text, bounded; of another type, how it looks."""
    value = told.get(field, "")
    return value[:_LONGEST] if isinstance(value, str) else _short(value)


def _list(about: dict[str, Any], field: str) -> list[Any]:
    found = about.get(field)
    return found if isinstance(found, list) else []


def _events(path: Path) -> tuple[list[dict[str, Any]], str]:
    """(the events of a bundle, why some or all of them cannot be read)."""
    try:
        lines = _read(path, _MAX_EVENTS).splitlines()
    except OSError as error:
        return [], str(error.strerror)
    events: list[dict[str, Any]] = []
    unread = 0
    for line in filter(None, lines):
        try:
            told = msgspec.json.decode(line)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            unread += 1
            continue
        if not isinstance(told, dict):
            unread += 1
        elif "t_ns" not in told:
            continue  # a line of the journal's own
        elif all(_is_whole(told.get(name)) for name in _PLACE):
            events.append(told)
        else:
            unread += 1
    return events, f"{unread} lines cannot be read" if unread else ""


def _records(path: Path, about: dict[str, Any]) -> tuple[list[EvidenceRecord], int, str]:
    """(those of the steps around the violation, how many the bundle has, why some cannot be read)."""
    events, why = _events(path)
    if not events:
        return [], 0, why
    shown_by = [seq for seq in _list(about, "event_seqs") if _is_whole(seq)] or [int(events[-1]["seq"])]
    offending = next((event for event in events if event["seq"] == shown_by[-1]), events[-1])
    kept = [event for event in events if event["seq"] <= offending["seq"]][-_RECORDS:]
    named = [event for event in events if event["seq"] in shown_by and event["seq"] < kept[0]["seq"]][:20]
    made = [_record(event, offending, frozenset(shown_by)) for event in (*named, *kept)]
    return made[-_RECORDS:], len(events), why


def _record(event: dict[str, Any], offending: dict[str, Any], shown_by: frozenset[int]) -> EvidenceRecord:
    fields = (f"{name}={_value(name, value)}" for name, value in event.items() if name not in _LEFT_OUT)
    return EvidenceRecord(
        seq=event["seq"],
        step=event["step"],
        before_ms=(offending["t_ns"] - event["t_ns"]) / 1e6,
        type=_text(event, "type"),
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
    try:
        return msgspec.json.encode(value).decode()
    except (RecursionError, ValueError):  # ValueError: an integer beyond 64 bits
        return _short(value)


def _recount(path: Path, about: dict[str, Any]) -> tuple[Sequence[StateRow], str]:
    """(what a recount of the bundle's state finds, how the state was taken)."""
    told = about.get("snapshot")
    taken = _text(told, "taken") if isinstance(told, dict) else ""
    try:
        snapshot = msgspec.json.decode(_read(path, _MAX_SNAPSHOT), type=SchedulerSnapshot)
    except FileNotFoundError:
        return (), taken
    except _TooLarge:
        return (), f"{taken}; it is too large to be recounted here"
    except OSError as error:
        return (), f"{taken}; it cannot be read: {error.strerror}"
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        return (), f"{taken}; it cannot be read: {error}"
    rows: list[StateRow] = []

    def report(law: str, expected: str, found: str, *, rid: str | None = None, seqs: tuple[int, ...] = ()) -> None:  # noqa: ARG001 - of the protocol
        rows.append(StateRow(law=law, expected=expected, found=found, rid=rid))

    try:
        audit.run(None, snapshot, report)
        return (*_numbers(snapshot), *rows), taken
    except Exception as error:  # an altered state can break a recount anywhere: then it is shown without one
        return tuple(rows), f"{taken}; it cannot be recounted: {type(error).__name__}"


def _numbers(snapshot: SchedulerSnapshot) -> list[StateRow]:
    """Counters of the pool against a count of its pages, where they differ."""
    states = np.bincount(np.frombuffer(snapshot.kv.states, dtype=np.uint8), minlength=len(PAGE_STATES)).tolist()
    pairs = zip(PAGE_STATES, states, snapshot.kv.counts, strict=False)
    return [
        StateRow(law="", expected=f"{counted} {name} pages, counted", found=f"{kept}, by the engine's counter")
        for name, counted, kept in pairs
        if counted != kept
    ]
