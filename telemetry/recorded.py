"""Recorded sources. Owns: a journal, or the tables made of one, as a `Source` that answers as the engine would have
answered at any step of it.

A `Recording` reads it once, in a thread of its own: every event is kept in packed form, and folded into the
read model that a live engine has. Where that model stands is kept now and then, so that a step far back costs one of
those states and at most the events after it, never the journal from its beginning. A kept state holds no events: they
are named by `seq` and taken from the packed ones again.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from engine.errors import AdmitscopeError
from engine.events import AnyEvent, EngineStarted, StepCompleted
from telemetry.export.source import Enough, Heard, Survey, feed, survey
from telemetry.journal_gaps import Gap
from telemetry.observe import (
    EngineStatus,
    Explanation,
    LanesAnswer,
    LatencyAnswer,
    LatencyBreakdown,
    PageMap,
    PassesAnswer,
    QueueAnswer,
    RequestDetail,
    RequestsAnswer,
)
from telemetry.read_model import ReadModel
from telemetry.recorded_highlights import HighlightWatch
from telemetry.recorded_kv import RecordedMemory
from telemetry.recorded_states import UNCOLLECTED, RecordedClock, kept, restored
from telemetry.recorded_tables import Extent, TableEvents, is_tables
from telemetry.schema import LineUnion
from telemetry.words import ENGLISH, Lang

_log = logging.getLogger(__name__)

#: Events between two kept states, to begin with: a few hundredths of a second of folding.
SPACING: Final = 4_096
#: States kept at most; when there are more, every other one goes and the spacing doubles.
MAX_STATES: Final = 96

#: Events whose folding takes as long as to read a kept state: one nearer ahead spares nothing.
WORTH_A_STATE: Final = 4_096

#: Events after which the reading thread lets others run.
_BREATHE: Final = 128

_PACK: Final = msgspec.msgpack.Encoder()
_UNPACK: Final = msgspec.msgpack.Decoder(AnyEvent)


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a recording is read. `steps` and `times_s` are (first, last); times in seconds from the first event.

    wall_s  Unix time of the first event
    error   why reading ended before the end of the journal, with file and line
    notes   what the journal lacks, or why it ends early
    gap     events that the middle of the journal lacks without a line that says so
    """

    moments: int
    steps: tuple[int, int]
    times_s: tuple[float, float]
    wall_s: float
    events: int
    expected_s: float
    is_read: bool
    error: str | None
    notes: tuple[str, ...]
    gap: Gap | None = None


@dataclass(frozen=True, slots=True)
class Moment:
    """A place in a recording: after step `step` was applied. `index` counts from 0; `at_s` from the first event."""

    index: int
    step: int
    at_s: float


class Recording:
    """One journal, or one folder of tables. It is read beside, or, without `in_background`, before the constructor
    returns.

    Safe between threads: readers ask for places that are read, and those do not change any more.
    """

    def __init__(self, path: Path, *, in_background: bool = True) -> None:
        self.path = path
        self.is_tables = is_tables(path)
        self._events: list[bytes] = []
        self._seqs = array("q")
        #: Of each moment: step, time of its last event (ns), and how many events it includes.
        self._steps, self._times, self._ends = array("q"), array("q"), array("q")
        #: Where it is fullest, and who was slowest, as far as it is read.
        self.highlights = HighlightWatch()
        self._states: list[tuple[int, bytes]] = []
        self._spacing = SPACING
        self._start_ns = self._expected_ns = 0
        self._wall_ns = 0
        self._responses = False
        self._is_read = False
        self._is_closed = False
        self._error: str | None = None
        self._notes: tuple[str, ...] = ()
        self._gap: Gap | None = None
        if in_background:
            threading.Thread(target=self._read, name="recording", daemon=True).start()
        else:
            self._read()

    def close(self) -> None:
        """Read no further."""
        self._is_closed = True

    def progress(self) -> Progress:
        """How far it is read by now."""
        last = len(self._ends) - 1
        times = (self._seconds(0), self._seconds(last)) if last >= 0 else (0.0, 0.0)
        return Progress(
            moments=last + 1,
            steps=(self._steps[0], self._steps[last]) if last >= 0 else (0, 0),
            times_s=times,
            wall_s=self._wall_ns / 1e9,
            events=len(self._events),
            expected_s=max(self._expected_ns - self._start_ns, 0) / 1e9,
            is_read=self._is_read,
            error=self._error,
            notes=self._notes,
            gap=self._gap,
        )

    def moment(self, index: int) -> Moment:
        """The place `index`, moved into what is read. Raises LookupError while nothing is."""
        if not len(self._ends):
            raise LookupError(f"{self.path}: no step is read yet")
        index = min(max(index, 0), len(self._ends) - 1)
        return Moment(index, self._steps[index], self._seconds(index))

    def at_step(self, step: int) -> Moment:
        """The last place that is not after `step`; the first one when all are. Raises LookupError."""
        return self.moment(bisect_right(self._steps, step) - 1)

    def at_time(self, seconds: float) -> Moment:
        """The last place not after `seconds` from the first event. Raises LookupError; ValueError for inf and nan."""
        if not math.isfinite(seconds):
            raise ValueError(f"seconds={seconds}: a finite number is needed")
        return self.moment(bisect_right(self._times, self._start_ns + round(seconds * 1e9)) - 1)

    def event(self, index: int) -> AnyEvent:
        """One event, by its place among those read."""
        found: AnyEvent = _UNPACK.decode(self._events[index])
        return found

    def event_of(self, seq: int) -> AnyEvent:
        """One event, by its `seq`. Raises LookupError."""
        index = bisect_left(self._seqs, seq)
        if index == len(self._seqs) or self._seqs[index] != seq:
            raise LookupError(f"{self.path}: no event with seq {seq}")
        return self.event(index)

    def events_until(self, moment: Moment) -> int:
        """How many events the state at `moment` includes."""
        return self._ends[moment.index]

    def model_before(self, events: int, clock: RecordedClock) -> tuple[int, ReadModel]:
        """The nearest kept state with at most `events` events: (how many it has, the model)."""
        best: tuple[int, bytes] | None = None
        for state in tuple(self._states):
            if state[0] <= events and (best is None or state[0] > best[0]):
                best = state
        if best is None:
            return 0, ReadModel(clock=clock, expects_responses=self._responses)
        return best[0], restored(best[1], self.event_of, clock)

    def has_state_between(self, after: int, until: int) -> bool:
        """Whether a kept state spares folding the events from `after` on."""
        return any(after < at <= until for at, _ in tuple(self._states))

    def time_ns(self, moment: Moment) -> int:
        """The engine's clock at `moment`."""
        return self._times[moment.index]

    def _seconds(self, index: int) -> float:
        return (self._times[index] - self._start_ns) / 1e9

    # -- the reading thread ------------------------------------------------------------------------------------------

    def _read(self) -> None:
        try:
            if self.is_tables:
                tables = TableEvents(self.path)
                extent = tables.extent()
                self._start_ns, self._expected_ns, self._responses = (
                    extent.start_ns,
                    extent.end_ns,
                    extent.has_responses,
                )
                self._notes = self._fold(tables.tell)
                return
            self._expect(survey(self.path))
            self._notes = self._fold(self._feed)
        except (AdmitscopeError, OSError) as error:
            self._error = str(error)
        except (ValueError, ArithmeticError, LookupError) as error:
            # An altered record has values that no engine writes: whatever they break, it is the record's fault.
            self._error = f"{self.path}: a value in it cannot be read: {error}"
        except Exception as error:  # a fault of ours, in a thread that nobody joins: else the page would read for ever
            _log.exception("cannot show %s", self.path)
            self._error = f"{self.path}: a fault of admitscope, not of the file: {type(error).__name__}: {error}"
        finally:
            self._is_read = True

    def _expect(self, found: Survey | Extent) -> None:
        self._start_ns, self._expected_ns, self._responses = found.start_ns, found.end_ns, found.has_responses

    def _feed(self, hear: Callable[[Heard], None]) -> Sequence[str]:
        told = feed(self.path, hear)
        self._gap = told.gap
        return told.notes

    def _fold(self, source: Callable[[Callable[[Heard], None]], Sequence[str]]) -> tuple[str, ...]:
        clock = RecordedClock()
        model = ReadModel(clock=clock, expects_responses=self._responses)

        def hear(event: Heard) -> None:
            if self._is_closed:
                raise Enough
            if isinstance(event, LineUnion):
                return  # refusals that are only counted, and holes: `feed` has a note about both
            if isinstance(event, EngineStarted):
                self._wall_ns = event.wall_ns
            if len(self._events) % _BREATHE == _BREATHE - 1:
                time.sleep(0.001)  # whoever asks meanwhile, in another thread, must not wait for the whole journal
            self._seqs.append(event.seq)
            self._events.append(_PACK.encode(event))
            clock.t_ns = event.t_ns
            model.emit(event)
            self.highlights.hear(event)
            if isinstance(event, StepCompleted):
                self._moment(event.step, max(event.times.applied_ns, event.t_ns))
                self._keep(model, clock)

        notes = source(hear)
        if self._events and (not len(self._ends) or self._ends[-1] < len(self._events)):
            self._moment(model.step, clock.t_ns)  # what came after the last step, or a journal without one
        return tuple(notes)

    def _moment(self, step: int, t_ns: int) -> None:
        self._steps.append(step)
        self._times.append(max(t_ns, self._times[-1] if len(self._times) else t_ns))
        # Last: a place counts as read when its end is known.
        self._ends.append(len(self._events))

    def _keep(self, model: ReadModel, clock: RecordedClock) -> None:
        at = len(self._events)
        last = self._states[-1][0] if self._states else 0
        if at - last < self._spacing:
            return
        self._states.append((at, kept(model, clock)))
        if len(self._states) > MAX_STATES:
            self._states = self._states[1::2]
            self._spacing *= 2


class RecordedSource(RecordedMemory):
    """A recording at one moment, as a `Source`. Safe between threads; `seek` moves it for all who ask it."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self._path = recording.path
        self._lock = threading.RLock()
        self._clock = RecordedClock()
        self._model = ReadModel(clock=self._clock)
        self._done = 0
        self._moment: Moment | None = None

    def __enter__(self) -> RecordedSource:
        """Keep the moment until the end of the block: answers that belong together are asked in one block."""
        self._lock.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    @property
    def moment(self) -> Moment | None:
        """Where it stands; None before the first `seek`."""
        return self._moment

    def seek(self, moment: Moment) -> None:
        """Answer as of `moment` from now on."""
        with self._lock:
            wanted = self.recording.events_until(moment)
            with UNCOLLECTED:
                self._fold_to(wanted)
            self._clock.t_ns = self.recording.time_ns(moment)
            self._moment = moment

    def _fold_to(self, wanted: int) -> None:
        ahead = self.recording.has_state_between(self._done + WORTH_A_STATE, wanted)
        if wanted < self._done or not self._done or ahead:
            self._clock = RecordedClock()
            self._done, self._model = self.recording.model_before(wanted, self._clock)
        for index in range(self._done, wanted):
            self._model.emit(self.recording.event(index))
        self._done = wanted

    def status(self) -> EngineStatus:
        """One look at the engine. Like every answer, it raises NotStarted before the first `seek`."""
        with self._lock:
            return self._model.status()

    def queue(self, limit: int = 500) -> QueueAnswer:
        with self._lock:
            return self._model.queue(limit)

    def passes(self, n: int = 32) -> PassesAnswer:
        with self._lock:
            return self._model.passes(n)

    def latency(self) -> LatencyAnswer:
        with self._lock:
            return self._model.latency()

    def breakdown(self) -> LatencyBreakdown:
        """Where the time of first tokens and of gaps went until then; late is what is late by default."""
        with self._lock:
            return self._model.breakdown()

    def lanes(self, n: int = 40) -> LanesAnswer:
        with self._lock:
            return self._model.lanes(n)

    def requests(self, limit: int = 500) -> RequestsAnswer:
        with self._lock:
            return self._model.requests(limit)

    def request(self, rid: str) -> RequestDetail | None:
        """One request that was live or recently finished at the moment."""
        with self._lock:
            return self._model.request(rid)

    def pages(self) -> PageMap:
        with self._lock:
            return self._model.page_map()

    def explain(self, rid: str, lang: Lang = ENGLISH) -> Explanation | None:
        with self._lock:
            return self._model.explain(rid, lang)
