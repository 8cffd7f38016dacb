"""Law. Owns: what an entry of the catalogue says, and the families of laws."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class Group(StrEnum):
    """Families of laws (`invariant_checks_total{group}`)."""

    CHUNK = "chunk"
    BUDGET = "budget"
    LOCK = "lock"
    PAGE = "page"
    STEP = "step"
    INDEX = "index"
    REQUEST = "request"
    FLAG = "flag"
    TIME = "time"
    METER = "meter"
    SPAN = "span"


@dataclass(frozen=True, slots=True)
class Law:
    """One law.

    tier     1: per event, on shadow counters; 2: also recounted by the audit of a whole snapshot
    cost     what one check grows with
    applies  configuration under which the law holds
    fails    what a violation looks like and what usually causes it
    properties  what a user relies on, of `invariants.properties`, that this law guards
    """

    id: str
    sentence: str
    tier: int
    group: Group
    cost: str
    applies: str
    fails: str
    properties: tuple[str, ...] = ()


ALWAYS: Final = "always"
