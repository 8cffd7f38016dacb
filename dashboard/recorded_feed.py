"""The page's view of one journal. Owns: looks at a recording by what an address says of the moment, and the last few.

The same answers as of a live engine, so that no view knows the difference. Viewers at different moments share one
reading position; what was looked at lately is kept, so that two of them do not make each other wait.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

from dashboard.feed import ASKS, Asked, Detail, Look
from dashboard.words import ENGLISH, Lang
from telemetry.client import Source
from telemetry.recorded import Moment, Progress, Recording
from telemetry.recorded_steps import RecordedSteps

_A = TypeVar("_A")

_MAX_LOOKS: Final = 8
_MAX_ASKED: Final = 32


class RecordedFeed:
    """Answers from one journal, shared by all viewers of this process. Safe between threads."""

    def __init__(self, path: Path) -> None:
        self.recording = Recording(path)
        self._steps = RecordedSteps(self.recording)
        self._lock = threading.Lock()
        self._looks: OrderedDict[tuple[int, frozenset[str]], Look] = OrderedDict()
        self._asked: OrderedDict[tuple[object, ...], Asked[Any]] = OrderedDict()

    def progress(self) -> Progress:
        """How far the journal is read."""
        return self.recording.progress()

    def moment(self, at: str | None) -> Moment | None:
        """The moment that `at` names: a step ("120"), seconds from the first event ("12.5s"), "fullest" for the step
        after which most requests wait, "slowest" for the first token that took longest; else the last one.

        None while nothing is read yet.
        """
        found = {"fullest": self.recording.highlights.fullest, "slowest": self.recording.highlights.slowest}
        named = found.get(at or "")
        try:
            if named is not None:
                return self.recording.at_step(named.step)
            if at is not None and at.endswith("s"):
                return self.recording.at_time(min(float(at[:-1]), 1e9))
            if at is not None:
                return self.recording.at_step(min(int(at), 2**62))
            return self.recording.moment(self.recording.progress().moments - 1)
        except (ValueError, OverflowError):
            return self.moment(None)
        except LookupError:
            return None

    def look(self, parts: frozenset[str], at: str | None) -> Look:
        """A look with `parts` at the moment that `at` names. Never raises for a journal that cannot be read."""
        told = self.progress()
        moment = self.moment(at)
        if moment is None:
            return Look(error=told.error, error_kind=self._kind() if told.error else None, held=parts)
        key = self.recording.events_until(moment), parts
        with self._lock:
            look = self._looks.get(key)
            if look is None:
                look = self._looks[key] = self._taken(parts, moment)
            self._looks.move_to_end(key)
            while len(self._looks) > _MAX_LOOKS:
                self._looks.popitem(last=False)
            return look

    def detail(self, rid: str, at: str | None, lang: Lang = ENGLISH) -> Detail:
        """One request as it was at the moment, explained in `lang`."""
        moment = self.moment(at)
        if moment is None:
            return Detail(rid, 0.0, error=self.progress().error, lang=lang)
        with self._lock:
            source = self._steps.at(moment)
            return Detail(rid, 0.0, source.request(rid), source.explain(rid, lang), lang=lang)

    def ask(self, key: tuple[object, ...], question: Callable[[Source], _A | None], at: str | None) -> Asked[_A]:
        """What the journal says to `question` at the moment; `key` names it with its parameters."""
        moment = self.moment(at)
        if moment is None:
            return Asked(0.0, error=self.progress().error)
        place = (self.recording.events_until(moment), *key)
        with self._lock:
            known: Asked[_A] | None = self._asked.get(place)
            if known is None:
                known = self._asked[place] = Asked(0.0, question(self._steps.at(moment)))
            while len(self._asked) > _MAX_ASKED:
                self._asked.popitem(last=False)
            return known

    def _kind(self) -> str:
        """What a person can do about a journal of which nothing can be read: one that is there can be checked."""
        try:
            has_something = bool(self.recording.path.stat().st_size)
        except OSError:
            has_something = False
        return "journal" if has_something else "no_journal"

    def _taken(self, parts: frozenset[str], moment: Moment) -> Look:
        source = self._steps.at(moment)
        status = source.status()
        answers = {part: ASKS[part](source) for part in parts}
        return Look(contact_wall_s=status.t_wall_s, moment=moment, held=parts, status=status, **answers)

    def close(self) -> None:
        """Read no further."""
        self._steps.close()
        self.recording.close()
