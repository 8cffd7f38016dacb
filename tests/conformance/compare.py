"""Compares recorded with played values. Owns: exact for decisions, 1e-6 for fractions."""

from __future__ import annotations

from typing import Any, NamedTuple


class Difference(NamedTuple):
    """The first field that differs, with both values."""

    field: str
    recorded: Any
    played: Any

    def __str__(self) -> str:
        return f"{self.field}: recorded {self.recorded!r}, here {self.played!r}"


def first_difference(recorded: Any, played: Any, where: str) -> Difference | None:
    """Walk both values in parallel; the first place where they part, None when they agree."""
    if isinstance(recorded, list | tuple) and isinstance(played, list | tuple):
        for index, (left, right) in enumerate(zip(recorded, played, strict=False)):
            difference = first_difference(left, right, f"{where}[{index}]")
            if difference is not None:
                return difference
        if len(recorded) != len(played):
            return Difference(f"{where}.length", len(recorded), len(played))
        return None
    if isinstance(recorded, float) or isinstance(played, float):
        close = recorded is not None and played is not None and abs(recorded - played) <= 1e-6
        return None if close else Difference(where, recorded, played)
    return None if recorded == played else Difference(where, recorded, played)
