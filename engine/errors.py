"""Every exception this engine raises on purpose.

AdmitscopeError
├── ConfigError            a setting, or two that contradict each other
├── RequestRefused         a request the engine will not take (carries a RefusalCause)
├── ModelFormatError       a model file that is malformed or not supported
├── EngineDead             the engine stopped after a failure; it takes no more steps
└── LawBroken              a programming fault: a law of the core does not hold
    ├── IllegalTransition  request state machine
    ├── PageStateError     a page was not where a move said it was
    └── StalePlan          a plan was committed on another state than it was made on
"""

from __future__ import annotations

from enum import StrEnum


class AdmitscopeError(Exception):
    """Root of the tree."""


class ConfigError(AdmitscopeError):
    """A setting is wrong. The message names the field or fields, the value and the limit."""


class RefusalCause(StrEnum):
    """Why a request was turned away at the door (`requests_rejected_total{cause}`)."""

    QUEUE_FULL = "queue_full"
    TOO_LONG = "too_long"
    INVALID = "invalid"
    NEVER_FITS = "never_fits"
    SHUTTING_DOWN = "shutting_down"


class RequestRefused(AdmitscopeError):
    """The engine will not take this request.

    `cause` is machine-readable; `field`, `value` and `limit` say what to change.
    """

    def __init__(self, cause: RefusalCause, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.cause = cause
        self.field = field


class ModelFormatError(AdmitscopeError):
    """A model file is malformed, incomplete, or of a kind that is not supported."""


class EngineDead(AdmitscopeError):
    """A step failed after its first write. Nothing further runs; the evidence has been published."""


class LawBroken(AdmitscopeError):
    """A law of the core does not hold: a programming fault, never bad input."""


class IllegalTransition(LawBroken):
    """A request was asked to move between states that the table does not connect."""

    def __init__(self, rid: str, source: str, target: str, cause: str) -> None:
        super().__init__(f"request {rid}: no transition {source} -> {target} by {cause}")


class PageStateError(LawBroken):
    """Pages were moved from a state they are not in."""


class StalePlan(LawBroken):
    """A plan met another state version at commit than the one it was made on."""
