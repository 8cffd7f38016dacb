"""invariants: the laws of the engine, checked online from its events, and by audits of whole snapshots."""

from invariants.audit import AuditPart
from invariants.catalog import CATALOG, LAWS, Group, Law
from invariants.checker import InvariantChecker
from invariants.modes import OnViolation
from invariants.violation import InvariantViolation, Violation

__all__ = [
    "CATALOG",
    "LAWS",
    "AuditPart",
    "Group",
    "InvariantChecker",
    "InvariantViolation",
    "Law",
    "OnViolation",
    "Violation",
]
