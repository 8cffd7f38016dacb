"""Code. Owns: the base of the core's closed vocabularies (states, causes, reasons, kinds)."""

from __future__ import annotations

from enum import StrEnum


class Code(StrEnum):
    """A StrEnum that hashes as its string does.

    Tables keyed by these words are looked up several times per event, and Enum's own `__hash__` is a Python function.
    """

    __hash__ = str.__hash__
