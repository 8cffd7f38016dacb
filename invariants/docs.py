"""The reference page. Owns: docs/reference/invariants.md, generated from the catalogue.

`python -m invariants.docs` rewrites it; a test fails when it is not current.
"""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Final

from invariants.catalog import CATALOG, Group, Law

PAGE: Final = Path(__file__).resolve().parent.parent / "docs" / "reference" / "invariants.md"

_HEAD: Final = """\
# Invariants

Generated from `invariants/catalog.py` by `python -m invariants.docs`. Do not edit.

The checker is a listener on the engine's events. It keeps a second set of books, built from events alone, and compares
every decision, plan, outcome and page move with them. What a law needs to know about the configuration, it reads from
`EngineStarted`.

| Tier | When | Cost |
|---|---|---|
| 0 | `assert` inside the core, always | constant |
| 1 | at every event, in the engine thread | constant per event, or per row or page it names |
| 2 | `InvariantChecker.audit(snapshot)`: every page, node, lease, row and list recounted and compared | \
pages + nodes + leases |

A law of tier 2 is checked at its events too; the audit adds what no single event can show, such as a page in two places
while every sum balances.

`on_violation="raise"` stops at the step that broke the law. `"record"` never stops the loop: the violation is counted
in `violations_by_id`, kept, and handed to the listener, with the numbers of the events that show it; the last 2,000
events are at hand as evidence. Single laws may be told otherwise with `overrides`.

Each law has at least one sabotage in `tests/sabotage/` that breaks it on purpose, and a run without faults that breaks
none.
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
}


def _section(law: Law) -> str:
    return (
        f"### {law.id}\n\n**{law.sentence}**\n\n"
        f"- Tier {law.tier}, {law.cost}.\n- Applies: {law.applies}.\n- A violation: {law.fails}\n"
    )


def render() -> str:
    """The whole page."""
    parts = [_HEAD]
    for group, laws in groupby(CATALOG, key=lambda law: law.group):
        parts.append(f"## {_TITLES[group]} (`{group}`)\n")
        parts.extend(_section(law) for law in laws)
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    PAGE.write_text(render(), encoding="utf-8")
