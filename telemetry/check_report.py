"""Report of a check. Owns: what the laws found in a journal, as a value and as text."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

from telemetry.journal_gaps import Gap


class Found(BaseModel):
    """One violation. `seq`: the event at which it showed; `by`: that event, or an audit after it.

    t_wall_s  Unix seconds of that event, by the record
    """

    model_config = ConfigDict(frozen=True)

    id: str
    law: str
    step: int
    t_wall_s: float = 0.0
    seq: int | None
    rid: str | None
    expected: str
    found: str
    by: Literal["event", "audit"]


class CheckReport(BaseModel):
    """What the laws found.

    verdict     held: no violation, as far as the notes go. incomplete: none up to where the journal lacks events.
                broken: at least one
    counts      violations by law
    violations  the first ones
    last        of each law that broke, the latest one
    unjudged    laws that a record of this kind is not held to at all
    notes       what was not judged, and why
    gap         events that the middle of the journal lacks without a line that says so: nothing behind it was judged
    """

    model_config = ConfigDict(frozen=True)

    verdict: Literal["held", "incomplete", "broken"]
    events: int
    steps: int
    audits: int
    checks: dict[str, int]
    counts: dict[str, int]
    violations: tuple[Found, ...]
    last: dict[str, Found] = {}
    unjudged: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    gap: Gap | None = None

    @property
    def exit_code(self) -> int:
        """0 held, 1 broken, 2 incomplete."""
        return {"held": 0, "broken": 1, "incomplete": 2}[self.verdict]


def render(report: CheckReport) -> str:
    """The report for a terminal."""
    made = sum(report.checks.values())
    head = f"{report.events:,} events of {report.steps:,} steps, {made:,} checks, {report.audits:,} audits"
    total = sum(report.counts.values())
    up_to = " up to there" if report.gap is not None else ""
    lines = [f"{total:,} violations: {head}" if total else f"every law held{up_to}: {head}"]
    if report.gap is not None:
        lines.insert(0, report.gap.judged_text())
    lines += [f"  {law}: {count:,}" for law, count in sorted(report.counts.items())]
    for found in report.violations:
        who = f", request {found.rid}" if found.rid is not None else ""
        lines.append(f"{found.id} at step {found.step}{who} (event {found.seq}, by {found.by})")
        lines.append(f"  {found.law}")
        lines.append(f"  expected {found.expected}")
        lines.append(f"  found    {found.found}")
    if total > len(report.violations):
        lines.append(f"{total - len(report.violations):,} more are not shown")
    lines += [f"note: {note}" for note in report.notes]
    return "\n".join(lines)
