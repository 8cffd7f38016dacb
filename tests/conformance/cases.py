"""Recorded cases on disk. Owns: finding, unpacking and playing them, and the verdict on each."""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from engine.scheduler.guards import GUARDS
from tests.conformance.build import unsupported
from tests.conformance.single import run_pass
from tests.conformance.trace import run_trace

#: The files of this repository.
RECORDED: Final = Path(__file__).resolve().parents[1] / "golden" / "conformance"

#: Recorded cases that the reference decides in a way that a guard forbids: id -> the guard. They are played again
#: with guards off, and docs/reference/guards.md has the reason for each. A test finds this list again by playing.
NEEDS_GUARDS_OFF: Final[dict[str, str]] = {case_id: entry.guard.value for entry in GUARDS for case_id in entry.vectors}

Status = Literal["passed", "failed", "unsupported"]


class Verdict(NamedTuple):
    """What came of one case; `detail` is the first difference, or why it cannot run."""

    case_id: str
    status: Status
    detail: str = ""


def files_of(folder: Path) -> list[Path]:
    """Every case file of a folder, by name."""
    return sorted([*folder.glob("*.jsonl"), *folder.glob("*.jsonl.xz")], key=lambda path: path.name)


def stem(path: Path) -> str:
    """The name without its endings."""
    return path.name.removesuffix(".xz").removesuffix(".jsonl")


def cases_of(path: Path) -> Iterator[dict[str, Any]]:
    """The cases of one file, in order."""
    text = lzma.decompress(path.read_bytes()).decode() if path.suffix == ".xz" else path.read_text("utf-8")
    for line in text.splitlines():
        if line.strip():
            yield json.loads(line)


def play(case: dict[str, Any], *, guards: bool | None = None) -> Verdict:
    """Run one case. `guards` None: on; where one acted and the case then differs, off, and the verdict says so."""
    scenario = case["scenario"]
    case_id = str(scenario["id"])
    reason = unsupported(scenario)
    if reason is not None:
        return Verdict(case_id, "unsupported", reason)
    run = run_trace if scenario["kind"] == "trace" else run_pass
    acted: set[str] = set()
    difference = run(case, guards=guards is not False, acted=acted)
    detail = ""
    if guards is None and difference is not None and acted:
        difference = run(case, guards=False, acted=set())
        detail = "guards off: " + ", ".join(sorted(acted))
    return Verdict(case_id, "passed", detail) if difference is None else Verdict(case_id, "failed", str(difference))
