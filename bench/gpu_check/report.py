"""Report. Owns: what a section found, as JSON and as a markdown table, and the exit status that follows.

Speed never fails a run: a figure is recorded beside its aim. A check that fails counts one in the exit status.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

SCHEMA: Final = 1
#: Exit statuses are one byte, and the highest are the shell's own.
MAX_STATUS: Final = 120


class Status(StrEnum):
    """How a section ended."""

    DONE = "done"
    TIME_LIMIT = "time limit"
    FAILED = "failed"
    HUNG = "hung"
    NOT_RUN = "not run"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line: a check (`ok` says how it went) or a figure (`ok` None).

    value   measured, in `unit`; None for a check that is a yes or no
    limit   what the value may not pass (a check), or should reach (a figure)
    note    what else is worth knowing
    """

    name: str
    ok: bool | None = None
    value: float | None = None
    unit: str = ""
    limit: float | None = None
    note: str = ""


@dataclass(slots=True)
class SectionReport:
    """One section; `counts` says whether an error in it fails the run."""

    number: int
    title: str
    limit_s: float
    counts: bool
    status: Status = Status.NOT_RUN
    seconds: float = 0.0
    error: str = ""
    findings: list[Finding] = field(default_factory=list)

    @property
    def failed(self) -> int:
        """Checks that failed; a section that ended early by an error counts as one more."""
        broke = self.status in {Status.FAILED, Status.HUNG} and self.counts
        return sum(finding.ok is False for finding in self.findings) + broke


@dataclass(slots=True)
class Report:
    """The whole run. `left_out`: what this program does not check, and why."""

    machine: dict[str, Any] = field(default_factory=dict)
    sections: list[SectionReport] = field(default_factory=list)
    left_out: list[tuple[str, str]] = field(default_factory=list)

    @property
    def exit_status(self) -> int:
        """The number of failed checks."""
        return min(sum(section.failed for section in self.sections), MAX_STATUS)

    def as_json(self) -> str:
        content = {
            "schema": SCHEMA,
            "machine": self.machine,
            "failed_checks": sum(section.failed for section in self.sections),
            "sections": [asdict(section) | {"failed": section.failed} for section in self.sections],
            "left_out": [{"what": what, "why": why} for what, why in self.left_out],
        }
        return json.dumps(content, indent=1) + "\n"

    def as_markdown(self) -> str:
        lines = ["# gpu_check", ""]
        lines += [f"- {name}: {value}" for name, value in self.machine.items()]
        lines += ["", "| | section | how it ended | s | checks | failed |", "|---|---|---|---:|---:|---:|"]
        for section in self.sections:
            checks = sum(finding.ok is not None for finding in section.findings)
            ended = f"{section.status}: {_cell(section.error)}" if section.error else section.status
            cells = (section.number, section.title, ended, f"{section.seconds:.1f}", checks, section.failed)
            lines.append(f"| {' | '.join(map(str, cells))} |")
        for section in self.sections:
            if section.findings:
                lines += ["", f"## {section.number}. {section.title}", "", *table(section.findings)]
        if self.left_out:
            lines += ["", "## Left out", "", "| | why |", "|---|---|"]
            lines += [f"| {_cell(what)} | {_cell(why)} |" for what, why in self.left_out]
        return "\n".join(lines) + "\n"

    def write(self, folder: Path) -> None:
        """Both forms; called after every section, so that what ends a run early costs only what was not done yet."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in (("gpu_check.json", self.as_json()), ("gpu_check.md", self.as_markdown())):
            fresh = folder / f"{name}.new"
            fresh.write_text(text, encoding="utf-8")
            fresh.replace(folder / name)


def table(findings: list[Finding]) -> list[str]:
    """Markdown lines, one for each finding."""
    lines = ["| | | value | limit or aim | |", "|---|---|---:|---:|---|"]
    for finding in findings:
        verdict = "" if finding.ok is None else "ok" if finding.ok else "**FAILED**"
        lines.append(
            f"| {_cell(finding.name)} | {verdict} | {_number(finding.value, finding.unit)} | "
            f"{_number(finding.limit, finding.unit)} | {_cell(finding.note)} |"
        )
    return lines


def _number(value: float | None, unit: str) -> str:
    if value is None:
        return ""
    text = f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.3g}"
    return f"{text} {unit}".strip()


def _cell(text: str) -> str:
    """One line that breaks no table."""
    return " ".join(text.replace("|", "\\|").split())
