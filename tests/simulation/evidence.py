"""Evidence of a failing seed. Owns: scenario and journal on disk, and the text that says what to do with them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import NamedTuple

from engine.events import AnyEvent, RequestArrived
from telemetry.journal import JournalSink
from tests.simulation.scenario import Scenario, save
from tests.simulation.shrink import Shrinker
from tests.simulation.simulate import Breaker, Failure, simulate

SHRINK_S = 60.0


class Evidence(NamedTuple):
    """Files, and what was found. `rid`: whose life tells most, None when nobody arrived."""

    folder: Path
    scenario: Scenario
    failure: Failure
    rid: str | None
    tries: int

    @property
    def journal(self) -> Path:
        return self.folder / "run.jsonl"

    @property
    def scenario_file(self) -> Path:
        return self.folder / "scenario.json"

    def text(self) -> str:
        """For a terminal."""
        size = f"{self.scenario.steps} steps and {len(self.scenario.ops)} operations"
        lines = [
            f"seed {self.scenario.seed}: {self.failure.what}",
            *(f"  {line}" for line in self.failure.text.strip().splitlines()),
            f"  shrunk to {size} in {self.tries} tries; it fails in step {self.failure.step}. See it again with",
            f"    python -m tests.simulation.run --scenario {self.scenario_file}",
            f"    admitscope replay {self.journal}",
        ]
        if self.rid is not None:
            lines.append(f"    admitscope explain {self.journal} {self.rid}")
        return "\n".join(lines)


class _Recorder:
    """A journal, and who arrived last."""

    def __init__(self, path: Path) -> None:
        self.journal = JournalSink(path)
        self.last_rid: str | None = None

    def emit(self, event: AnyEvent) -> None:
        if isinstance(event, RequestArrived):
            self.last_rid = event.rid
        self.journal.emit(event)


def gather(
    scenario: Scenario,
    failure: Failure,
    folder: Path,
    *,
    audit_every: int = 1,
    breaker: Breaker | None = None,
    budget_s: float = SHRINK_S,
) -> Evidence:
    """Shrink, run the small scenario once more with a journal, and write both to `folder`, which is emptied first."""
    shrinker = Shrinker(
        scenario,
        failure,
        lambda one, most: simulate(one, audit_every=audit_every, breaker=breaker, most_steps=most).failure,
        budget_s=budget_s,
    )
    small = shrinker.shrink()
    shutil.rmtree(folder, ignore_errors=True)  # of an earlier run, if there was one
    folder.mkdir(parents=True)
    save(small, folder / "scenario.json")
    recorder = _Recorder(folder / "run.jsonl")
    report = simulate(small, audit_every=audit_every, sink=recorder, breaker=breaker)
    recorder.journal.close()
    found = report.failure or shrinker.failure
    evidence = Evidence(folder, small, found, found.rid or recorder.last_rid, shrinker.tries)
    (folder / "failure.txt").write_text(evidence.text() + "\n", encoding="utf-8")
    return evidence
