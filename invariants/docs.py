"""The reference page. Owns: docs/reference/invariants.md, generated from the catalogue.

`python -m invariants.docs` rewrites it; a test fails when it is not current.
"""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Final

from invariants.audit import GROUPS, AuditPart
from invariants.catalog import CATALOG, Group, Law
from invariants.properties import PROPERTIES

PAGE: Final = Path(__file__).resolve().parent.parent / "docs" / "reference" / "invariants.md"

_HEAD: Final = """\
# Invariants

Generated from `catalog.py`, `catalog_watch.py` and `properties.py` by `python -m invariants.docs`. Do not edit.

The checker is a listener on the engine's events. It keeps a second set of books, built from events alone, and compares
every decision, plan, outcome and page move with them. What a law needs to know about the configuration, it reads from
`EngineStarted`.

| Tier | When | Cost |
|---|---|---|
| 0 | `assert` inside the core, always | constant |
| 1 | at every event; beside the engine thread where no law is to raise | \
constant per event, or per row or page it names |
| 2 | `InvariantChecker.audit(snapshot)`: every page, node, lease, row and list recounted and compared; \
`audit_readings`: what a listener shows, against the same books | pages + nodes + leases; numbers shown |

A law of tier 2 is checked at its events too; the audit adds what no single event can show, such as a page in two places
while every sum balances.

## What a broken law does

| `--on-violation` | | default of |
|---|---|---|
| `record` | counted (`admitscope_violations_total{id}`), logged at a bounded rate, a bundle of evidence on disk; \
the loop never stops. Where no law is set to `raise`, judged beside the engine thread, usually within 50 ms \
| `admitscope serve` |
| `raise` | all of that, and the engine stops: at the very step, with its traceback; for what an audit found, at the \
next step, which is due at once. Every client is told, `/ready` says 503, the exit status is 1 | `admitscope demo`, \
tests, simulations |
| `off` | nothing is judged; the checker is not among the engine's listeners and costs nothing | |

`--checker.overrides INV-PROG-01=raise,INV-STEP-04=off` treats single laws otherwise. `admitscope_invariant_laws{mode}`
says how many laws are in each mode, so that an engine that judges nothing is seen to. All flags, with their environment
names, are in [configuration.md](configuration.md).

## What is sampled

Tier 1 sees every event, always. Audits are made every `--checker.audit-period-s` seconds while steps are made, after
every step in tests and simulations. Their parts can be made less often: `--checker.audit-every page_tables=4` makes
that one in every fourth audit.

| Part | Family | Cost |
|---|---|---|
{parts}

`admitscope_invariant_audit_period_seconds`, `admitscope_invariant_audits_total{part}` and
`admitscope_invariant_checks_total{group}` say what was really made.

## Evidence

A bundle is a folder `evidence/<run>-<law>-<step>` beside the run's journal. It appears whole or not at all.

| File | |
|---|---|
| `violation.json` | the law, what was expected and found, step, request, event numbers, time, configuration, and \
the commands that show it again |
| `events.jsonl` | the last 2,000 events, the offending one last, in the journal's format |
| `snapshot.json` | the engine's whole state; `violation.json` says when it was taken |

The snapshot is never taken inside a step. What an audit found comes with the snapshot it looked at. What an event
showed comes with one of the moment between the step at fault and the next, or, where the engine stopped, with the state
it stopped in.

When the 2,000 events reach back to the start, `events.jsonl` is a journal of its own and the command reads it;
otherwise it reads the run's journal up to the offending event; where there is neither, no command is promised.

Limits: at most one bundle per law and step, `--checker.evidence-per-law` at once, then one per
`--checker.evidence-interval-s`; `--checker.evidence-max-mib` for all bundles of a run. The thread that
judges hands over references and never waits for the disk. `admitscope_evidence_bundles_total{outcome}` counts what was
`written`, left out by the rate (`limited`) or for the size (`full`), and `failed`, such as for a full disk, which stops
nothing. No prompt text: events and snapshots hold lengths and salted keys.

## Judging a journal

`admitscope check JOURNAL` runs every law over a recorded run, whoever wrote it: exit status 0 when all held, 1 when one
broke, 2 when the journal lacks events: by a line of its own that says so, or because lines of the file are gone, which
the first sentence says; what comes behind is not judged. Refusals that a journal only counts are made again by a
replay, as long as record and replay agree; the replayed state is audited every 16 steps. From where they part, the
record is heard alone, and the report names the laws that could not be judged any more. `--snapshot` audits the state
that a bundle holds. What listeners counted, and their spans, are not in a journal.

## Sabotage

Each law has at least one sabotage in `tests/sabotage/` that breaks it on purpose, and a run without faults that breaks
none. `make sabotage` runs all of them, says which law noticed each, how many steps after it could, and whether events
alone (tier 1) were enough; it fails when one is missed, and when a law has none.

## What users rely on

Public fault reports sort under these properties. A law guards the properties it names; what no law can see says how it
is held instead.

| Property | | Laws | Besides |
|---|---|---|---|
{properties}
"""

_TITLES: Final = {
    Group.CHUNK: "Pieces of prompts",
    Group.BUDGET: "Ledgers",
    Group.LOCK: "What a request holds",
    Group.PAGE: "Pages",
    Group.STEP: "Steps and lives",
    Group.INDEX: "The waiting order",
    Group.REQUEST: "Single requests",
    Group.FLAG: "Derived values",
    Group.TIME: "Times",
    Group.METER: "What listeners count",
    Group.SPAN: "Spans of requests",
}


_PART_COSTS: Final = {
    AuditPart.OWNERSHIP: "pages",
    AuditPart.LOCKS: "nodes + leases x depth",
    AuditPart.PAGE_TABLES: "pages in use by requests + nodes",
    AuditPart.ROWS: "rows + requests",
    AuditPart.LISTS: "requests",
    AuditPart.ORDER: "at most 64 waiting requests",
    AuditPart.BOOKS: "pages + nodes + requests",
}


def _parts() -> str:
    return "\n".join(f"| `{part}` | `{GROUPS[part]}` | {_PART_COSTS[part]} |" for part in AuditPart)


def _properties() -> str:
    rows = []
    for entry in PROPERTIES:
        laws = ", ".join(law.id for law in CATALOG if entry.id in law.properties)
        rows.append(f"| {entry.id} | {entry.sentence} | {laws} | {entry.beside} |")
    return "\n".join(rows)


def _section(law: Law) -> str:
    return (
        f"### {law.id}\n\n**{law.sentence}**\n\n"
        f"- Tier {law.tier}, {law.cost}.\n- Applies: {law.applies}.\n- A violation: {law.fails}\n"
        f"- Guards: {', '.join(law.properties)}.\n"
    )


def render() -> str:
    """The whole page."""
    parts = [_HEAD.replace("{parts}", _parts()).replace("{properties}", _properties())]
    for group, laws in groupby(CATALOG, key=lambda law: law.group):
        parts.append(f"## {_TITLES[group]} (`{group}`)\n")
        parts.extend(_section(law) for law in laws)
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    PAGE.write_text(render(), encoding="utf-8")
