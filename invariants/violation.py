"""Violations. Owns: one broken law as a value, and the exception that carries it."""

from __future__ import annotations

from typing import Literal, Protocol

import msgspec


class Violation(msgspec.Struct, frozen=True):
    """One law that did not hold.

    id        law of the catalogue, as in `violations_total{id}`
    law       the law in one sentence
    expected  what the second set of books says
    found     what the engine reported
    step      step of the event that showed it
    rid       request concerned, None when the law is about no single request
    evidence  `seq` of the events that show it, the offending one last
    by        what showed it: the event at hand, or an audit between two steps
    """

    id: str
    law: str
    expected: str
    found: str
    step: int
    rid: str | None
    evidence: tuple[int, ...]
    by: Literal["event", "audit"] = "event"

    def __str__(self) -> str:
        who = f", request {self.rid}" if self.rid is not None else ""
        seqs = ",".join(map(str, self.evidence))
        where = f"{self.id} at step {self.step}{who} (event {seqs})"
        return f"{where}: {self.law} Expected {self.expected}; found {self.found}."


class InvariantViolation(Exception):
    """A law did not hold and the checker was told to raise. `violation` is the value."""

    def __init__(self, violation: Violation) -> None:
        super().__init__(str(violation))
        self.violation = violation


class Report(Protocol):
    """How a law says that it does not hold; the checker adds the event at hand."""

    def __call__(
        self, law: str, expected: str, found: str, *, rid: str | None = None, seqs: tuple[int, ...] = ()
    ) -> None: ...
