"""Settings of the checker. Owns: which laws are judged how, how often state is recounted, and what evidence is kept."""

from __future__ import annotations

from typing import Final, cast

from pydantic import BaseModel, ConfigDict, Field, field_validator

from invariants.audit import AuditPart
from invariants.catalog import LAWS
from invariants.modes import MODES, OnViolation

_MAX_EVERY: Final = 1_000_000


class CheckerConfig(BaseModel):
    """The checker of invariants: `on_violation` says what a broken law does."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    overrides: str = ""
    """Laws treated unlike `on_violation`: INV-PROG-01=raise,INV-STEP-04=off."""
    progress_steps: int = Field(64, ge=1)
    """Steps in a row without work, while requests are unfinished, that INV-PROG-01 allows."""
    gap_steps: int = Field(1_024, ge=1)
    """Steps in a row that may compute prompts while running requests wait for their next token (INV-REQ-01)."""
    audit_period_s: float | None = Field(5.0, ge=0.05, le=86_400)
    """Seconds between two recounts of the whole state (tier 2), while steps are made. None: no recount."""
    audit_every: str = ""
    """Parts of the recount made in every n-th one only: page_tables=4,order=10 (docs/reference/invariants.md)."""
    evidence: bool = True
    """Write a bundle under the journal folder when a law breaks. Without a journal none is written."""
    evidence_per_law: int = Field(3, ge=1, le=1_000)
    """Bundles that the first violations of each law get at once; later ones wait for `evidence_interval_s`."""
    evidence_interval_s: float = Field(600.0, ge=0, le=31_536_000)
    """Seconds between two later bundles of one law."""
    evidence_max_mib: int = Field(64, ge=1, le=1_048_576)
    """Size of all bundles of one run, in MiB; beyond it none is written, and the violation is only counted."""

    @field_validator("overrides")
    @classmethod
    def _known_laws(cls, text: str) -> str:
        for law, mode in _pairs(text):
            if law not in LAWS:
                raise ValueError(f"{law!r} is no law; docs/reference/invariants.md lists them")
            if mode not in MODES:
                raise ValueError(f"{law}={mode}: a mode is one of {', '.join(MODES)}")
        return text

    @field_validator("audit_every")
    @classmethod
    def _known_parts(cls, text: str) -> str:
        for part, every in _pairs(text):
            if part not in set(AuditPart):
                raise ValueError(f"{part!r} is no part of the audit; there are {', '.join(AuditPart)}")
            if not (every.isascii() and every.isdigit() and 1 <= int(every) <= _MAX_EVERY):
                raise ValueError(f"{part}={every}: an integer from 1 to {_MAX_EVERY} is needed")
        return text

    def modes(self) -> dict[str, OnViolation]:
        """Law → mode, of `overrides`."""
        return {law: cast("OnViolation", mode) for law, mode in _pairs(self.overrides)}

    def parts(self) -> dict[AuditPart, int]:
        """Part → n, of `audit_every`."""
        return {AuditPart(part): int(every) for part, every in _pairs(self.audit_every)}


def _pairs(text: str) -> list[tuple[str, str]]:
    """`a=1,b=2` as pairs. Raises ValueError for anything else, and for a name given twice."""
    pairs: list[tuple[str, str]] = []
    for word in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = (piece.strip() for piece in word.partition("="))
        if not (name and equals and value):
            raise ValueError(f"{word!r} is not of the form name=value")
        if name in dict(pairs):
            raise ValueError(f"{name!r} is named twice")
        pairs.append((name, value))
    return pairs
