"""Kept states. Owns: where a read model stands, as bytes, and the way back.

A kept state holds no events: they are named by `seq` and taken from the recording again. Of two seconds of folding it
saves nearly all; what remains is its reading, a tenth of a second for a model of ten thousand requests. Most of these
wait and have hardly a past: of a request only what a fresh one has not is written.
"""

from __future__ import annotations

import gc
import io
import pickle
import threading
from collections.abc import Callable
from typing import Any, Final

import msgspec

from engine.events import AnyEvent, RequestArrived
from telemetry.read_model import ReadModel
from telemetry.request_timeline import RequestTimeline

_LOCK_TYPE: Final = type(threading.Lock())


#: A request that only just came; nobody's, but what most have at most of their fields.
_ARRIVED: Final = RequestArrived(0, 0, 0, "", 0, 0, 0, b"", None, False, None, None, 0)


def _fresh() -> RequestTimeline:
    return RequestTimeline(_ARRIVED)


_FRESH: Final = _fresh()


def _own(request: RequestTimeline) -> dict[str, Any]:
    """The fields of a request that are not those of a fresh one."""
    own = {}
    for name in RequestTimeline.__slots__:
        value, usual = getattr(request, name), getattr(_FRESH, name)
        if value is not usual and (type(value) is not type(usual) or value != usual):
            own[name] = value
    return own


class _Uncollected:
    """No collection of cycles within: none arise there, and to look for them doubles the time of reading a state.

    What was made within is at once among the old objects: the next collection would else go through all of it, thrice.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._was_on = False

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._was_on = gc.isenabled()
                gc.disable()
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside and self._was_on:
                # Both move a list, however long: out of the young ones, and to the oldest.
                gc.freeze()
                gc.unfreeze()
                gc.enable()


#: For whoever reads states or folds many events.
UNCOLLECTED: Final = _Uncollected()


class RecordedClock:
    """The engine's clock as of the last event that was folded: ages are those of that moment."""

    def __init__(self) -> None:
        self.t_ns = 0

    def now_ns(self) -> int:
        return self.t_ns


class _Keeper(pickle.Pickler):
    """Writes a read model without its events, its locks and its clock."""

    def __init__(self, file: io.BytesIO, clock: RecordedClock) -> None:
        super().__init__(file, protocol=5)
        self._clock = clock

    def persistent_id(self, obj: Any) -> tuple[str, int] | None:
        """What stands for `obj` in the kept state; None keeps it as it is."""
        if isinstance(obj, msgspec.Struct):
            seq = getattr(obj, "seq", None)
            return None if seq is None else ("event", seq)
        if obj is self._clock:
            return "clock", 0
        return ("lock", 0) if isinstance(obj, _LOCK_TYPE) else None

    def reducer_override(self, obj: Any) -> Any:
        """How a request is written; all else as pickle does it."""
        return (_fresh, (), (None, _own(obj))) if type(obj) is RequestTimeline else NotImplemented


class _Restorer(pickle.Unpickler):
    """Reads what `_Keeper` wrote: only states of this process are ever read."""

    def __init__(self, state: bytes, event_of: Callable[[int], AnyEvent], clock: RecordedClock) -> None:
        super().__init__(io.BytesIO(state))
        self._event_of = event_of
        self._clock = clock
        # One event, one object: the model compares some by identity.
        self._events: dict[int, AnyEvent] = {}

    def persistent_load(self, pid: tuple[str, int]) -> Any:
        """What `pid` stands for."""
        kind, seq = pid
        if kind == "clock":
            return self._clock
        if kind == "lock":
            return threading.Lock()
        event = self._events.get(seq)
        if event is None:
            event = self._events[seq] = self._event_of(seq)
        return event


def kept(model: ReadModel, clock: RecordedClock) -> bytes:
    """Where `model` stands."""
    buffer = io.BytesIO()
    _Keeper(buffer, clock).dump(model)
    return buffer.getvalue()


def restored(state: bytes, event_of: Callable[[int], AnyEvent], clock: RecordedClock) -> ReadModel:
    """A model that stands there, with `clock`; `event_of` finds an event by its seq."""
    model = _Restorer(state, event_of, clock).load()
    assert isinstance(model, ReadModel), "a kept state is a read model"
    return model
