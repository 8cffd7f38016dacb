"""What if. Owns: one recorded run, simulated twice in step — as it was configured, and otherwise — and compared.

The baseline is simulated too, so that a difference is one of configuration and not of the model; how far the baseline
is from the recorded times stands beside the answer.
"""

from __future__ import annotations

import time
from pathlib import Path

from engine.config import EngineConfig
from engine.events import FanOut
from invariants.checker import InvariantChecker
from telemetry.journal import JournalError, JournalSink
from telemetry.settings import UsageError
from telemetry.sim.arrivals import OpenLoop
from telemetry.sim.commands import WhatifCommand
from telemetry.sim.cost_fit import StepSamples, fit
from telemetry.sim.cost_model import CostError, CostModel, Estimator, load_cost
from telemetry.sim.differences import Differences
from telemetry.sim.journal_workload import JournalWorkload, Missing, Recorded, recording_of
from telemetry.sim.loop import Loop
from telemetry.sim.measure import Measure, Served
from telemetry.sim.overrides import changed, pages_of, parse_settings, with_pages
from telemetry.sim.progress import Meter
from telemetry.sim.results import cost_used
from telemetry.sim.run import DEFAULT_COST, config_notes, gaps_of, journal_sink
from telemetry.sim.whatif_figures import Paired, checks_of, ended_of, with_errors
from telemetry.sim.whatif_result import Setting, WhatifResult
from telemetry.sim.whatif_words import sentence_of


class Side:
    """One of the two runs: its loop, and each request as it ended.

    known  requests that ended by themselves in the record; the others run too, but nothing is compared of them
    """

    def __init__(
        self,
        config: EngineConfig,
        pages: int,
        workload: JournalWorkload,
        cost: CostModel,
        journal: JournalSink | None,
        version: str,
        known: frozenset[str],
    ) -> None:
        self.workload = workload
        self._known = known
        self.served: dict[str, Served] = {}
        self.measure = Measure(self._ended)
        self.checker = InvariantChecker(on_violation="record")
        self.estimator = Estimator(cost)
        self.journal = journal
        started = workload.recorded.started
        self.loop = Loop(
            config,
            num_pages=pages,
            arrivals=OpenLoop(workload.asks()),
            cost=self.estimator,
            sink=FanOut((self.measure, self.checker, *([journal] if journal is not None else []))),
            version=version,
            model=started.model,
            wall_ns=started.wall_ns,
        )
        self.is_over = False

    def advance(self) -> None:
        """Go on to the end of the next step that is one; over when there is none."""
        while not self.is_over:
            self.is_over = not self.loop.step()
            if self.loop.plan is not None:
                return

    def close(self) -> None:
        if self.journal is not None:
            self.journal.close()

    def _ended(self, served: Served) -> None:
        served.is_whole = served.is_whole and served.rid in self._known
        self.served[served.rid] = served


def compare(command: WhatifCommand, progress: Meter, *, version: str = "") -> WhatifResult:
    """The whole comparison. Raises UsageError, JournalError or CostError."""
    began = time.monotonic()
    settings = parse_settings(command.set)
    workload = JournalWorkload(command.journal, limit=command.limit, window=(command.from_s, command.to_s))
    recorded = workload.recorded
    config = changed(recorded.raw_config, settings)
    pages = pages_of(config, was=recorded.config, was_pages=recorded.started.num_pages, settings=settings)
    changes = _changes(settings, recorded, config)
    same = [f"--set {one.name}={one.after}: the recorded run has this value" for one in changes if not one.is_change]
    if len(same) == len(changes):
        raise UsageError("\n".join((*same, "nothing would be changed: there is nothing to compare")))
    progress.phase("reading", 0)
    happened, samples = recorded_run(command.journal)
    cost = load_cost(command.cost) if command.cost else _fitted(samples, command.journal)
    known = ended_of(happened)
    before = _side(command, "before", recorded.config, recorded.started.num_pages, cost, version, known)
    after = _side(command, "after", config, pages, cost, version, known)
    total = workload.total()
    if not total:
        when = "in this run" if (command.from_s, command.to_s) == (None, None) else "in these seconds"
        raise JournalError(f"{command.journal}: no request arrived {when}; there is nothing to compare")
    differences = _run(before, after, progress, total)
    paired = Paired(before.served, after.served)
    progress.phase("comparing", 0)
    checks, error = checks_of(happened, before.served, after.served) if _is_whole(command) else ((), None)
    compared = with_errors(paired.compared(before, after, resamples=command.resamples, seed=command.seed), checks)
    faster, slower = paired.faster_and_slower()
    return WhatifResult(
        journal=str(workload.path),
        settings=tuple(one for one in changes if one.is_change),
        sentence=sentence_of(tuple(one for one in changes if one.is_change), compared, misfit=cost.misfit),
        requests=paired.count,
        left_out=total - paired.count,
        unfinished=before.workload.unfinished,
        refused_before=before.loop.refused,
        refused_after=after.loop.refused,
        resamples=command.resamples,
        compared=compared,
        curves=paired.curves(),
        pairs=paired.pairs(),
        faster=faster,
        slower=slower,
        fairness=paired.deciles(),
        reasons_before=_counts(before),
        reasons_after=_counts(after),
        first_difference=differences.found[0] if differences.found else None,
        differences=tuple(differences.found),
        model_checks=checks,
        model_error=error,
        cost_before=cost_used(before.estimator),
        cost_after=cost_used(after.estimator),
        violations=before.checker.total_violations + after.checker.total_violations,
        journal_before=_written(before),
        journal_after=_written(after),
        wall_s=round(time.monotonic() - began, 2),
        notes=tuple(_notes(before, after, [*same, *_own_notes(command, config, recorded)])),
    )


def _is_whole(command: WhatifCommand) -> bool:
    """Whether all of the recorded run is simulated, so that its times and the simulated ones are of the same."""
    return not command.from_s and command.to_s is None and command.limit is None


def _own_notes(command: WhatifCommand, config: EngineConfig, recorded: Recorded) -> list[str]:
    notes = config_notes(config, recorded)
    if not _is_whole(command):
        notes.insert(
            0,
            "only a part of the run is simulated: the recorded times have other requests beside these, so the "
            "simulator's error is not known here; compare the whole run to see it",
        )
    if command.from_s:
        notes.insert(
            0, f"both runs begin at {command.from_s:g} s with an empty engine: who waited or ran then is not in them"
        )
    return notes


def _side(
    command: WhatifCommand,
    name: str,
    config: EngineConfig,
    pages: int,
    cost: CostModel,
    version: str,
    known: frozenset[str],
) -> Side:
    folder = command.write_journals
    journal = journal_sink(folder / name, flag="--write-journals") if folder is not None else None
    workload = JournalWorkload(command.journal, limit=command.limit, window=(command.from_s, command.to_s))
    return Side(with_pages(config, pages), pages, workload, cost, journal, version, known)


def recorded_run(path: Path) -> tuple[dict[str, Served], StepSamples]:
    """The recorded run: its requests as they ended, and its steps."""
    happened: dict[str, Served] = {}
    samples = StepSamples()

    def ended(served: Served) -> None:
        happened[served.rid] = served

    measure = Measure(ended)
    for event in recording_of(path).events():
        if not isinstance(event, Missing):
            measure.emit(event)
            samples.emit(event)
    return happened, samples


def _fitted(samples: StepSamples, path: Path) -> CostModel:
    try:
        return fit(samples, name="journal", source=f"fitted from the steps of {path.name}")
    except CostError as error:
        raise CostError(f"{error} ({DEFAULT_COST} is one that comes with this program)") from error


def _run(before: Side, after: Side, progress: Meter, total: int) -> Differences:
    """Both to their ends, step by step beside each other."""
    differences = Differences()
    progress.phase("simulating", 2 * total)
    try:
        while not (before.is_over and after.is_over):
            before.advance()
            after.advance()
            if not differences.is_full:
                differences.compare(before.loop.plan, after.loop.plan)
            progress.tell(before.loop.ended + after.loop.ended)
    finally:
        before.close()
        after.close()
    return differences


def _changes(settings: dict[str, str], recorded: Recorded, config: EngineConfig) -> tuple[Setting, ...]:
    found = []
    for name in settings:
        section, _, field = name.partition(".")
        values = [str(getattr(getattr(one, section), field)) for one in (recorded.config, config)]
        if name == "cache.num_pages" and recorded.config.cache.num_pages is None:
            values[0] = str(recorded.started.num_pages)
        found.append(Setting(name=name, before=values[0], after=values[1]))
    return tuple(found)


def _counts(side: Side) -> dict[str, int]:
    return {str(reason): count for reason, count in side.measure.reasons.most_common()}


def _written(side: Side) -> str | None:
    return None if side.journal is None else str(side.journal.path)


def _notes(before: Side, after: Side, notes: list[str]) -> list[str]:
    for name, side in (("before", before), ("after", after)):
        if side.loop.refused:
            notes.append(f"{name}: {side.loop.refused} requests could never fit the pool and were refused")
    return notes + gaps_of(before.workload)
