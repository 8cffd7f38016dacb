"""Answers about the checker. Owns: what `/observe/laws` and `/observe/evidence` say."""

from __future__ import annotations

from pydantic import Field

from telemetry.observe_base import Head, Value


class LastViolation(Value):
    """The latest time a law broke.

    by        event | audit: what showed it
    expected  what the second set of books says; `found` what the engine reported
    """

    step: int
    t_wall_s: float
    rid: str | None = None
    by: str = "event"
    expected: str = ""
    found: str = ""


class LawRow(Value):
    """One law of the catalogue.

    mode        off | record | raise: what a violation does
    cost        what one check grows with, in words
    applies     under which configuration it holds
    fails       what a violation looks like, and what usually causes it
    properties  what a user relies on that this law guards
    judged      each: at every event it is about; recount: so, and again by the audits; audits: by the audits only,
                which are samples in time; never: it is off, or no audit is made
    audit_every its part of the audit is made in every n-th audit
    family_checks  checks of its family (`group`): single laws are not counted apart
    violations  of this law
    """

    id: str
    sentence: str
    tier: int
    group: str
    cost: str
    applies: str
    fails: str
    properties: tuple[str, ...] = ()
    mode: str
    judged: str
    audit_every: int = 1
    family_checks: int = 0
    violations: int = 0
    last: LastViolation | None = None


class LawsAnswer(Head):
    """Every law, and what checking them costs.

    is_checked      whether any law is judged; False: the checker is off on purpose, or this is a recording
    words           modes and audits in one line
    laws            in the order of the catalogue
    events_ns       engine-thread time of the laws of tier 1, over `observe_seq` events
    audits_ns       the same of the audits (tier 2), `audits` of them
    audit_period_s  between two audits, while steps are made; None: none is made
    uptime_s        since the engine started: the two times above are shares of it
    internal_errors faults of the checker itself; with one, an event may not have been judged
    bundles         evidence bundles of this run by outcome: written, limited, full, failed; empty: none is kept
    """

    is_checked: bool
    words: str
    laws: tuple[LawRow, ...]
    events_ns: int = 0
    audits_ns: int = 0
    audits: int = 0
    audit_period_s: float | None = None
    uptime_s: float = 0.0
    internal_errors: int = 0
    last_internal_error: str = ""
    bundles: dict[str, int] = Field(default_factory=dict)


class EvidenceRow(Value):
    """One evidence bundle: what broke, where and when.

    id           name of its folder
    at           ISO time; "" when the bundle cannot be read
    error        what of it cannot be read, and why; the rest is shown
    is_this_run  of the engine that answers; else of an earlier one that wrote to the same folder
    """

    id: str
    law: str = ""
    step: int = 0
    rid: str | None = None
    at: str = ""
    found_by: str = ""
    mode: str = ""
    expected: str = ""
    found: str = ""
    size_bytes: int = 0
    is_this_run: bool = False
    error: str = ""


class EvidenceAnswer(Head):
    """Bundles on disk, newest first, at most 100; `total` counts all.

    is_kept  whether this run writes bundles; `why` says why not
    """

    rows: tuple[EvidenceRow, ...]
    total: int
    is_kept: bool
    why: str = ""


class EvidenceRecord(Value):
    """One record before, or at, the violation.

    before_ms     how long before the offending record, in milliseconds
    text          its fields as `name=value`; page lists as their first pages and how many they are
    is_evidence   named by the violation as showing it; is_offending: the one at which it was found
    """

    seq: int
    step: int
    before_ms: float
    type: str
    text: str
    is_evidence: bool = False
    is_offending: bool = False


class StateRow(Value):
    """One difference: what should be so, and what was found. `law` is empty for a plain number of the state."""

    law: str
    expected: str
    found: str
    rid: str | None = None


class EvidenceDetail(Head):
    """One bundle, opened.

    sentence     the law
    records      the records of the steps around the violation, oldest first, at most 160; `records_total` in the bundle
    differences  of the violation itself first, then what a recount of the state in the bundle finds, at most 60
    taken        how the state was taken, or why there is none
    commands     what to run to see it again: (why, command)
    """

    row: EvidenceRow
    sentence: str
    version: str
    model: str
    records: tuple[EvidenceRecord, ...]
    records_total: int
    differences: tuple[StateRow, ...]
    taken: str
    commands: tuple[tuple[str, str], ...]
