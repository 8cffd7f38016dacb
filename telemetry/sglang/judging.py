"""Judging. Owns: how a journal that SGLang's decisions made is laid before the laws.

Laws that it cannot be held to are off, each with its reason in the report. Where SGLang overlaps its steps, a plan is
heard after the outcome of the step before it: so it was not made, but so each law sees one step at a time.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

from engine.events import AnyEvent, StepCompleted, StepPlanned
from telemetry.journal_reader import Line
from telemetry.schema import LineUnion
from telemetry.schema_parts import SourcePart
from telemetry.sglang.support import NOT_JUDGED, NOT_JUDGED_OVERLAPPED

Entry = tuple[Line, AnyEvent | LineUnion]


class Lines(Protocol):
    """Lines of a journal with a look at the next one."""

    def peek(self) -> Entry | None: ...

    def pop(self) -> None: ...


def not_judged(source: SourcePart) -> dict[str, str]:
    """Law -> why a journal of this source is not held to it."""
    return NOT_JUDGED | (NOT_JUDGED_OVERLAPPED if source.overlaps else {})


def notes(source: SourcePart) -> list[str]:
    """What the report says of all this: laws by reason, and what the record does not tell."""
    by_reason: dict[str, list[str]] = {}
    for law, why in not_judged(source).items():
        by_reason.setdefault(why, []).append(law)
    found = [f"{source.version} decided this, so no replay was made"]
    found += [f"not judged: {', '.join(laws)}: {why}" for why, laws in by_reason.items()]
    return found


class OneByOne:
    """`lines`, with each plan after the outcome of the step before it."""

    def __init__(self, lines: Lines) -> None:
        self._lines = lines
        self._ready: deque[Entry] = deque()
        self._held: deque[Entry] = deque()
        self._in_flight: int | None = None

    def peek(self) -> Entry | None:
        """The next line; None at the end."""
        while not self._ready:
            entry = self._lines.peek()
            if entry is None:
                self._ready.extend(self._held)  # the outcome never came
                self._held.clear()
                break
            self._lines.pop()
            self._put(entry)
        return self._ready[0] if self._ready else None

    def pop(self) -> None:
        self._ready.popleft()

    def _put(self, entry: Entry) -> None:
        event = entry[1]
        if isinstance(event, LineUnion) or not self._waits(event):
            self._ready.append(entry)
            self._follow(event)
        else:
            self._held.append(entry)

    def _waits(self, event: AnyEvent) -> bool:
        return self._in_flight is not None and event.step > self._in_flight

    def _follow(self, event: AnyEvent | LineUnion) -> None:
        if isinstance(event, StepPlanned):
            self._in_flight = event.step
        elif isinstance(event, StepCompleted) and event.step == self._in_flight:
            self._in_flight = None
            held, self._held = self._held, deque()
            for entry in held:
                self._put(entry)
