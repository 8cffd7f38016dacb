"""An evidence bundle. Owns: the files that are written when a law breaks, and the command that shows it again.

    violation.json   the law, what was expected and found, when, the configuration, and `commands`
    events.jsonl     the last 2,000 events in the journal's format, up to and with the offending one
    snapshot.json    the engine's whole state, or why there is none

When the 2,000 reach back to the engine's first event, `events.jsonl` is a whole journal, folded as one, which can be
judged and replayed. Otherwise every event stands in full, and the command names the run's own journal. No prompt text:
events and snapshots hold lengths and salted keys.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from engine.events import AnyEvent, EngineStarted
from engine.kvcache.snapshot import SchedulerSnapshot
from invariants.catalog import CATALOG, Group
from invariants.violation import Violation
from telemetry.journal import JournalSink
from telemetry.schema import encode
from telemetry.schema_journal import HeaderRecord

VIOLATION_FILE: Final = "violation.json"
EVENTS_FILE: Final = "events.jsonl"
SNAPSHOT_FILE: Final = "snapshot.json"


#: Laws about numbers and times that listeners show, which no journal holds.
ABOUT_LISTENERS: Final = frozenset(
    {"INV-TIME-02"} | {law.id for law in CATALOG if law.group in (Group.METER, Group.SPAN)}
)


def is_bundle(events: Path) -> bool:
    """Whether this journal is a bundle's. A number that it lacks is no line that is gone: the engine skipped it."""
    return events.name == EVENTS_FILE and (events.parent / VIOLATION_FILE).is_file()


class Picture(NamedTuple):
    """A snapshot and how it was taken, in words; None when there is none, and then the words say why."""

    snapshot: SchedulerSnapshot | None
    taken: str


class Case(NamedTuple):
    """What is known at the moment of a violation.

    mode     what the violation does: record or raise
    events   the last ones, oldest first, the offending one last
    picture  the snapshot that an audit looked at; None: one is still to be taken
    """

    violation: Violation
    mode: str
    wall_ns: int
    started: EngineStarted | None
    events: tuple[AnyEvent, ...]
    picture: Picture | None


def is_whole(events: Sequence[AnyEvent]) -> bool:
    """Whether the events reach back to the start of the engine's life."""
    return bool(events) and isinstance(events[0], EngineStarted)


def _is_contiguous(events: Sequence[AnyEvent]) -> bool:
    """Whether no number is missing or comes twice: a journal would put a line about lost events in the place."""
    return all(after.seq == before.seq + 1 for before, after in pairwise(events))


def write_events(folder: Path, case: Case) -> int:
    """Write `events.jsonl`; its size in bytes. Raises OSError."""
    path = folder / EVENTS_FILE
    if is_whole(case.events) and _is_contiguous(case.events):
        sink = JournalSink(path)
        try:
            for event in case.events:
                sink.emit(event)
        finally:
            sink.close()
    else:
        encoder = msgspec.json.Encoder()
        lines = [] if case.started is None else [encode(_header(case.started, case.events[0].seq))]
        lines += [encoder.encode(event) for event in case.events]
        path.write_bytes(b"\n".join(lines) + b"\n")
    return path.stat().st_size


def _header(started: EngineStarted, first_seq: int) -> HeaderRecord:
    return HeaderRecord(
        schema_version=started.schema_version,
        version=started.version,
        engine_id=started.engine_id,
        segment=0,
        first_seq=first_seq,
        wall_ns=started.wall_ns,
        mono_ns=started.t_ns,
        config=msgspec.json.decode(started.config, type=dict),
    )


def encoded_snapshot(picture: Picture) -> bytes:
    """The file's content; empty without a snapshot."""
    return b"" if picture.snapshot is None else msgspec.json.encode(picture.snapshot)


def description(
    case: Case, *, folder: Path, journal: Path | None, snapshot: str | None, taken: str, program: str
) -> dict[str, Any]:
    """`violation.json` as data. `snapshot`: its file's name, None when it has none; `taken` says how, or why not."""
    violation, events, started = case.violation, case.events, case.started
    return {
        "id": violation.id,
        "law": violation.law,
        "expected": violation.expected,
        "found": violation.found,
        "step": violation.step,
        "rid": violation.rid,
        "found_by": violation.by,
        "event_seqs": list(violation.evidence),
        "mode": case.mode,
        "at": datetime.fromtimestamp(case.wall_ns / 1e9, tz=UTC).isoformat(timespec="milliseconds"),
        "engine_id": started.engine_id if started is not None else "",
        "version": started.version if started is not None else "",
        "model": started.model if started is not None else "",
        "config": msgspec.json.decode(started.config) if started is not None else {},
        "events": {
            "file": EVENTS_FILE,
            "first_seq": events[0].seq if events else None,
            "last_seq": events[-1].seq if events else None,
            "from_the_start": is_whole(events),
        },
        "snapshot": {"file": snapshot, "taken": taken},
        "journal": str(journal) if journal is not None else None,
        "commands": commands(case, folder=folder, journal=journal, snapshot=snapshot, program=program),
    }


def commands(
    case: Case, *, folder: Path, journal: Path | None, snapshot: str | None, program: str
) -> list[dict[str, str]]:
    """What to run to see the violation again; empty when neither bundle nor journal holds the run from its start."""
    whole = is_whole(case.events)
    record = folder / EVENTS_FILE if whole else journal
    if record is None or not case.events:
        return []
    until = "" if whole else f" --until-seq {case.events[-1].seq}"
    audited = case.violation.by == "audit" and snapshot is not None
    state = f" --snapshot {shlex.quote(str(folder / SNAPSHOT_FILE))}" if audited else ""
    quoted = shlex.quote(str(record))
    why = "judge the record again"
    if case.violation.id in ABOUT_LISTENERS:
        why = "what listeners counted is in no record: this says whether the engine's own laws held"
    return [
        {"why": why, "command": f"{program} check {quoted}{until}{state}"},
        {"why": "does the code of today decide the same?", "command": f"{program} replay {quoted}"},
    ]
