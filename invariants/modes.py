"""Modes. Owns: what a broken law does, for all of them and for single ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal, get_args

from invariants.catalog import LAWS

OnViolation = Literal["off", "record", "raise"]
MODES: Final[tuple[OnViolation, ...]] = get_args(OnViolation)


def modes_of(on_violation: OnViolation, overrides: Mapping[str, OnViolation] | None) -> dict[str, OnViolation]:
    """Law → mode. Raises ValueError for a law that the catalogue does not have."""
    unknown = sorted(set(overrides or ()) - LAWS.keys())
    if unknown:
        raise ValueError(f"overrides names {unknown}, which the catalogue does not have")
    return dict.fromkeys(LAWS, on_violation) | dict(overrides or {})


def laws_by_mode(modes: Mapping[str, OnViolation]) -> dict[str, int]:
    """How many laws are in each mode."""
    given = list(modes.values())
    return {mode: given.count(mode) for mode in MODES}
