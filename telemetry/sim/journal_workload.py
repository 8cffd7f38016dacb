"""Recording as workload. Owns: the requests of a recorded run, in order of arrival, with what became of their length.

A request's length and the keys of its answer stand behind its arrival, so each is held until its end was read; what
is held at one time is what was open at one time. Nothing else of a journal is kept.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec
import numpy as np
from pydantic import ValidationError

from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.events import (
    AbortRequested,
    AdmissionDecided,
    EngineStarted,
    RequestArrived,
    RequestTransitioned,
    StepCompleted,
    StepPlanned,
)
from engine.request import TURNED_AWAY, Cause, RequestState
from telemetry.journal import JournalError
from telemetry.journal_reader import JournalReader
from telemetry.replay import MOST_PAGES
from telemetry.schema import DEEP, NOT_TAKEN, RecordError, faults
from telemetry.sim.traces import MOST_TOKENS
from telemetry.sim.workload import Ask, Blocks, digest64


class Missing(msgspec.Struct, tag_field="type", tag="events_missing"):
    """A hole in the journal."""

    missing: int


Heard = (
    Missing
    | EngineStarted
    | RequestArrived
    | AbortRequested
    | RequestTransitioned
    | AdmissionDecided
    | StepPlanned
    | StepCompleted
)
_DECODER: Final = msgspec.json.Decoder(Heard)
_HEARD: Final = frozenset(
    f'{{"type":"{name}'.encode()
    for name in (
        "events_missing",
        *(
            kind.__name__
            for kind in (
                EngineStarted,
                RequestArrived,
                AbortRequested,
                RequestTransitioned,
                AdmissionDecided,
                StepPlanned,
                StepCompleted,
            )
        ),
    )
)
#: Of one hash of a page.
_KEY_BYTES: Final = 8
_ARRIVED: Final = b'{"type":"RequestArrived"'
#: Ends after which a request would have gone on, had nothing happened to it.
_CUT_SHORT: Final = frozenset({Cause.ABORT, *TURNED_AWAY})


def read_events(reader: JournalReader) -> Iterator[Heard]:
    """The events that a workload, its times and its costs follow from. Raises JournalError."""
    for _, event in reader.read(_decoded):
        if event is not None:
            yield event


def _decoded(raw: bytes) -> Heard | None:
    if raw[: raw.find(b'"', 9)] not in _HEARD and raw.endswith(b"}"):
        return None
    try:
        return _DECODER.decode(raw)
    except msgspec.MsgspecError as error:
        raise RecordError(str(error)) from error
    except RecursionError as error:
        raise RecordError(DEEP) from error


class Recording(Protocol):
    """Where recorded events come from: a journal, or the tables made of it.

    name   of the file or folder
    notes  what a reader of a result has to know of it
    """

    name: str
    notes: list[str]

    def arrivals(self) -> int:
        """How many requests there are."""
        ...

    def events(self) -> Iterator[Heard]:
        """What a workload, its times and its costs follow from. Raises JournalError."""
        ...


class JournalRecording:
    """The journal at `path`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        reader = JournalReader(path)
        self.name = reader.files[0].name
        self.notes: list[str] = []
        if (source := reader.header.source) is not None and "RequestArrived.page_keys" in source.absent:
            self.notes.append(f"{source.version} decided this, and its record has no page keys: nobody shares a prefix")

    def arrivals(self) -> int:
        return sum(raw for _, raw in JournalReader(self._path).read(lambda raw: raw.startswith(_ARRIVED)))

    def events(self) -> Iterator[Heard]:
        return read_events(JournalReader(self._path))


def recording_of(path: Path) -> Recording:
    """The recording at `path`: a journal, or tables. Raises JournalError; ConfigError where pyarrow is missing."""
    from telemetry.sim.tables import TableRecording, is_tables

    return TableRecording(path) if is_tables(path) else JournalRecording(path)


class Recorded(msgspec.Struct, frozen=True):
    """How the recorded engine began, and its own configuration, with the real size of its pool."""

    started: EngineStarted
    config: EngineConfig
    raw_config: dict[str, dict[str, Any]]


def recorded_of(path: Path, recording: Recording | None = None) -> Recorded:
    """The start of the recording at `path`. Raises JournalError."""
    for event in (recording or recording_of(path)).events():
        if not isinstance(event, EngineStarted):
            break
        try:
            raw = msgspec.json.decode(event.config, type=dict[str, dict[str, Any]])
            raw.pop("server", None)
            _believable(path, event, raw)
            return Recorded(event, EngineConfig.model_validate(raw), raw)
        except msgspec.MsgspecError as error:
            raise JournalError(f"{path}: the recorded configuration cannot be read: {error}") from error
        except RecursionError as error:
            raise JournalError(f"{path}: the recorded configuration cannot be read: {DEEP}") from error
        except ValidationError as error:
            raise JournalError(f"{path}: {NOT_TAKEN}: {faults(error)}") from error
    raise JournalError(f"{path}: a simulation needs the engine's first event, EngineStarted; this begins later")


def _believable(path: Path, started: EngineStarted, raw: dict[str, dict[str, Any]]) -> None:
    """Raise JournalError for sizes that no engine has: an altered number would break the simulation, or fill memory."""
    _within(path, "num_pages", started.num_pages, 1, MOST_PAGES)
    # The pool's real measures are checked as the settings that they come from.
    CacheConfig.model_validate(raw.get("cache", {}) | {"page_size": started.page_size})
    SchedulerConfig.model_validate(raw.get("scheduler", {}) | {"max_running_requests": started.max_running_requests})


def _believable_arrival(path: Path, arrived: RequestArrived) -> None:
    """Raise JournalError for lengths that no request has."""
    _within(path, f"prompt_len of {arrived.rid[:80]!r}", arrived.prompt_len, 1, MOST_TOKENS)
    _within(path, f"requested_new_tokens of {arrived.rid[:80]!r}", arrived.requested_new_tokens, 1, MOST_TOKENS)
    if len(arrived.page_keys) % _KEY_BYTES:
        raise JournalError(
            f"{path}: page_keys of {arrived.rid[:80]!r} has {len(arrived.page_keys)} bytes; a key has {_KEY_BYTES}"
        )


def _within(path: Path, name: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise JournalError(f"{path}: the recorded {name} is {value}; {least} to {most} are possible")


class _Open:
    """A request whose end was not read yet."""

    __slots__ = ("abort_ns", "arrived", "cause", "detail", "head", "is_over", "keys", "output_len")

    def __init__(self, arrived: RequestArrived) -> None:
        self.arrived = arrived
        self.keys: list[int] = []
        self.head = arrived.head32_key
        self.output_len = 0
        self.abort_ns: int | None = None
        self.cause: Cause | None = None
        self.detail = ""
        self.is_over = False


#: Seconds of the engine's life, (from, to): from there on, and before that. None: no such bound.
Window = tuple[float | None, float | None]


class JournalWorkload:
    """The requests of the journal, or of the tables, at `path`.

    limit        at most so many requests
    window       only those that came in these seconds of the run, (from, to); the engine begins without the others
    unfinished   after a reading: requests whose end is not in the journal; they end where the record does
    missing      after a reading: events that the journal lacks; requests may be among them
    """

    def __init__(self, path: Path, *, limit: int | None = None, window: Window = (None, None)) -> None:
        self.path = path
        self._window = window
        self._recording = recording_of(path)
        self.name = self._recording.name
        self.notes = self._recording.notes
        self.recorded = recorded_of(path, self._recording)
        self.unfinished = 0
        self.missing = 0
        self._limit = limit

    def total(self) -> int:
        if self._window == (None, None):
            found = self._recording.arrivals()
        else:
            found = sum(isinstance(event, RequestArrived) and self._is_in(event) for event in self._recording.events())
        return found if self._limit is None else min(found, self._limit)

    def asks(self) -> Iterator[Ask]:
        self.unfinished = self.missing = 0
        line: deque[_Open] = deque()
        live: dict[str, _Open] = {}
        over: list[_Open] = []
        taken = 0
        for event in self._recording.events():
            match event:
                case Missing():
                    self.missing += event.missing
                case RequestArrived() if taken != self._limit and self._is_in(event):
                    taken += 1
                    _believable_arrival(self.path, event)
                    opened = _Open(event)
                    line.append(opened)
                    live[event.rid] = opened
                case AbortRequested() if event.rid in live:
                    live[event.rid].abort_ns = event.t_ns
                    live[event.rid].cause = event.cause
                case RequestTransitioned() if event.target is RequestState.FINISHED and event.rid in live:
                    live[event.rid].cause = event.cause
                    live[event.rid].detail = event.detail
                    over.append(live[event.rid])
                case StepCompleted():
                    self._completed(event, live, over)
                    while line and line[0].is_over:
                        yield self._ask(line.popleft())
                    if taken == self._limit and not line:
                        return
        self.unfinished = sum(not each.is_over and each not in over for each in line)
        for opened in line:
            yield self._ask(opened)

    def _is_in(self, arrived: RequestArrived) -> bool:
        came_s = self._since_start(min(arrived.accepted_ns or arrived.t_ns, arrived.t_ns)) / 1e9
        begins, ends = self._window
        return (begins is None or came_s >= begins) and (ends is None or came_s < ends)

    def _completed(self, event: StepCompleted, live: dict[str, _Open], over: list[_Open]) -> None:
        """The last token of a request is told after its end."""
        for row in event.rows:
            opened = live.get(row.rid)
            if opened is not None:
                opened.output_len += 1
                if row.new_page_key is not None:
                    opened.keys.append(row.new_page_key)
                if row.head32_key is not None:
                    opened.head = row.head32_key
        for opened in over:
            opened.is_over = True
            if live.get(opened.arrived.rid) is opened:
                del live[opened.arrived.rid]
        over.clear()

    def _ask(self, opened: _Open) -> Ask:
        arrived, size = opened.arrived, self.recorded.started.page_size
        keys = np.concatenate(
            [np.frombuffer(arrived.page_keys, dtype="<i8").astype(np.int64), np.array(opened.keys, dtype=np.int64)]
        ).view(np.uint64)
        cut = opened.cause in _CUT_SHORT
        length = arrived.requested_new_tokens if cut else max(opened.output_len, 1)
        return Ask(
            rid=arrived.rid,
            arrival_ns=self._since_start(min(arrived.accepted_ns or arrived.t_ns, arrived.t_ns)),
            prompt_len=arrived.prompt_len,
            output_len=length,
            max_new_tokens=arrived.requested_new_tokens,
            blocks=Blocks(size=size, keys=keys, known=len(keys) * size, own=digest64(arrived.rid)),
            head32_key=opened.head,
            ignore_eos=arrived.ignore_eos,
            priority=arrived.priority,
            routing_key=arrived.routing_key,
            stops=opened.cause is Cause.STOP,
            stop_detail=opened.detail if opened.cause is Cause.STOP else "",
            abort_ns=None if not cut or opened.abort_ns is None else self._since_start(opened.abort_ns),
            abort_cause=opened.cause if cut and opened.cause is not None else Cause.ABORT,
        )

    def _since_start(self, t_ns: int) -> int:
        return max(t_ns - self.recorded.started.t_ns, 0)
