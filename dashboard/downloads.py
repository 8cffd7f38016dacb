"""Download of what is shown. Owns: which tables the open view has drawn in this run, and their CSV.

The frame begins a run, views draw tables as ever, and afterwards the frame offers what was drawn. Nothing is turned
into text before somebody asks for it.
"""

from __future__ import annotations

import csv
import io
from contextvars import ContextVar
from typing import Any

from dashboard.tables import Table

_drawn: ContextVar[dict[str, Table] | None] = ContextVar("drawn", default=None)


def begin() -> None:
    """Forget the tables of the run before."""
    _drawn.set({})


def note(name: str, table: Table) -> None:
    """This table is drawn in this run, under its key."""
    drawn = _drawn.get()
    if drawn is not None:
        drawn[name] = table


def drawn() -> dict[str, Table]:
    """The tables of this run, by key, in the order drawn."""
    return dict(_drawn.get() or {})


def csv_of(table: Table) -> str:
    """The rows as sent to the browser. Heads carry the units; a cell is its plain value where it has one."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([f"{c['label']} ({c['unit']})" if c["unit"] else c["label"] for c in table.columns])
    for row in table.rows:
        writer.writerow([_plain(cell) for cell in row["cells"]])
    return out.getvalue()


def _plain(cell: Any) -> str:
    """The sort value of a cell, which is the number or the full id behind what is drawn; else its text."""
    if not isinstance(cell, list):
        return _safe(str(cell))
    value = cell[1] if len(cell) > 1 and cell[1] is not None else cell[0]
    if isinstance(value, float) and abs(value) >= 1e300:
        return ""  # a missing number sorts before all others
    return _safe(value) if isinstance(value, str) else str(value)


def _safe(text: str) -> str:
    """A text that a spreadsheet does not take for a formula: ids of requests come from strangers."""
    return f"'{text}" if text[:1] in {"=", "+", "-", "@", "\t", "\r"} else text
