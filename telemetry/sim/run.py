"""One simulation, put together. Owns: workload, configuration, cost model, checker and journal of a simulated run."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from engine.clock import VirtualClock
from engine.config import EngineConfig
from engine.events import AnyEvent, EventSink, FanOut
from invariants.checker import InvariantChecker
from telemetry.folding import EventHash
from telemetry.journal import JournalSink, new_journal_path
from telemetry.settings import UsageError
from telemetry.sim.arrivals import Arrivals, ClosedLoop, OpenLoop, poisson
from telemetry.sim.commands import SimCommand
from telemetry.sim.cost_fit import StepSamples, fit
from telemetry.sim.cost_model import CostError, CostModel, Estimator, load_cost
from telemetry.sim.inputs import is_journal, trace_format
from telemetry.sim.journal_workload import JournalWorkload, Missing, Recorded, recording_of
from telemetry.sim.loop import Loop
from telemetry.sim.measure import Measure
from telemetry.sim.overrides import changed, pages_of, parse_settings, with_pages
from telemetry.sim.progress import Meter
from telemetry.sim.results import SimResult, Totals, result_of
from telemetry.sim.traces import PACKAGED, TraceError
from telemetry.sim.workload import Workload

#: Of a trace, which names no pool: as many tokens as an 8B model finds room for on one large GPU.
DEFAULT_POOL_TOKENS: Final = 524_288
DEFAULT_COST: Final = "smollm2-cpu"


@dataclass
class Plan:
    """What is to be simulated.

    config, num_pages   of the simulated engine
    base, base_pages    as the journal has them; for a trace, the defaults
    journal             where the workload was recorded; None for a trace
    known               ids of requests that ended by themselves in the record; others are not compared. None: all are
    """

    workload: Workload
    config: EngineConfig
    num_pages: int
    base: EngineConfig
    base_pages: int
    cost: CostModel
    settings: dict[str, str]
    model: str = "simulated"
    wall_ns: int = 0
    notes: list[str] = field(default_factory=list)
    journal: Path | None = None
    known: frozenset[str] | None = None


def plan_of(command: SimCommand) -> Plan:
    """What `command` asks for. Raises UsageError, TraceError, JournalError or CostError."""
    settings = parse_settings(command.set)
    path = PACKAGED.get(command.trace, Path(command.trace))
    plan = _journal_plan(path, settings, command) if is_journal(path) else _trace_plan(path, settings, command)
    if "scheduler.random_seed" not in settings and command.seed:
        scheduler = plan.config.scheduler.model_copy(update={"random_seed": command.seed})
        plan.config = plan.config.model_copy(update={"scheduler": scheduler})
    return plan


def _trace_plan(path: Path, settings: dict[str, str], command: SimCommand) -> Plan:
    if not path.is_file():
        raise TraceError(f"{path}: no such file; traces that come with this program: {', '.join(PACKAGED)}")
    workload = trace_format(path)(path, limit=command.limit, ask_for=command.ask_for)
    base = EngineConfig()
    config = changed({}, settings)
    pages = DEFAULT_POOL_TOKENS // config.cache.page_size if config.cache.num_pages is None else config.cache.num_pages
    return Plan(
        workload=workload,
        config=with_pages(config, pages),
        num_pages=pages,
        base=base,
        base_pages=pages,
        cost=load_cost(command.cost or DEFAULT_COST),
        settings=settings,
        notes=list(workload.notes),
    )


def _journal_plan(path: Path, settings: dict[str, str], command: SimCommand) -> Plan:
    workload = JournalWorkload(path, limit=command.limit)
    recorded = workload.recorded
    config = changed(recorded.raw_config, settings)
    pages = pages_of(config, was=recorded.config, was_pages=recorded.started.num_pages, settings=settings)
    return Plan(
        workload=workload,
        config=with_pages(config, pages),
        num_pages=pages,
        base=with_pages(recorded.config, recorded.started.num_pages),
        base_pages=recorded.started.num_pages,
        cost=load_cost(command.cost) if command.cost else fit_journal(path),
        settings=settings,
        model=recorded.started.model,
        wall_ns=recorded.started.wall_ns,
        notes=[*workload.notes, *config_notes(config, recorded)],
        journal=path,
    )


def config_notes(config: EngineConfig, recorded: Recorded) -> list[str]:
    """What of the recorded engine the simulated one, with `config`, does not do as it did."""
    notes, size, was = [], config.cache.page_size, recorded.started.page_size
    if size % was:
        notes.append(
            f"prefixes are known in whole pages of {was} tokens, as recorded: with pages of {size} the cache may find "
            "a little less than it would"
        )
    if recorded.config.executor.overlap:
        notes.append(
            "steps overlapped where this was recorded (executor.overlap): simulated ones follow one another, and take "
            "the time that a step held up the next"
        )
    return notes


def fit_journal(path: Path, *, name: str = "journal") -> CostModel:
    """The cost model of a journal's own steps. Raises CostError when it has too few."""
    samples = StepSamples()
    for event in recording_of(path).events():
        if not isinstance(event, Missing):
            samples.emit(event)
    try:
        return fit(samples, name=name, source=str(path.name))
    except CostError as error:
        raise CostError(f"{error} ({DEFAULT_COST} is one that comes with this program)") from error


def arrivals_of(command: SimCommand, workload: Workload) -> Arrivals:
    """When the requests come."""
    asks = workload.asks()
    if command.concurrency is not None:
        return ClosedLoop(asks, concurrency=command.concurrency)
    if command.rate is not None:
        return OpenLoop(poisson(asks, rate=command.rate, seed=command.seed))
    return OpenLoop(asks, scale=command.rate_scale)


class Hash:
    """The hash of all events, where no journal makes one."""

    def __init__(self) -> None:
        import msgspec

        self._encode = msgspec.json.Encoder().encode
        self._hash = EventHash()

    def emit(self, event: AnyEvent) -> None:
        self._hash.add(self._encode(event))

    def hexdigest(self) -> str:
        return self._hash.hexdigest()


def journal_sink(folder: Path, *, flag: str = "--journal") -> JournalSink:
    """A fresh journal in `folder`. Its clock stands: lines are written by number, equal runs are equal files.

    Raises UsageError, with the `flag` that named the folder, where nothing can be written to it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return JournalSink(new_journal_path(folder, time.time_ns()), clock=VirtualClock())
    except OSError as error:
        raise UsageError(f"{flag} {folder}: no journal can be written there: {error.strerror}") from error


def simulate(
    command: SimCommand, plan: Plan, progress: Meter, *, version: str = "", watch: EventSink | None = None
) -> SimResult:
    """Run it, with `watch` hearing every event. Raises TraceError or JournalError for a line that cannot be read."""
    began = time.monotonic()
    total = plan.workload.total()
    if not total:
        raise TraceError(f"{command.trace}: no request is in it; there is nothing to simulate")
    totals = Totals()
    measure = Measure(totals.add)
    checker = InvariantChecker(on_violation="record") if command.check else None
    journal = journal_sink(command.journal) if command.journal is not None else None
    event_hash = Hash() if command.hash and journal is None else None
    estimator = Estimator(plan.cost)
    loop = Loop(
        plan.config,
        num_pages=plan.num_pages,
        arrivals=arrivals_of(command, plan.workload),
        cost=estimator,
        sink=_fan_out(measure, checker, journal, event_hash, watch),
        version=version,
        model=plan.model,
        wall_ns=plan.wall_ns,
    )
    progress.phase("simulating", total)
    try:
        while loop.step():
            progress.tell(loop.ended)
    finally:
        if journal is not None:
            journal.close()
    return result_of(
        workload=plan.workload.name,
        settings=plan.settings,
        loop=loop,
        measure=measure,
        totals=totals,
        estimator=estimator,
        violations=None if checker is None else checker.violations_by_id,
        journal=None if journal is None else str(journal.path),
        event_hash=journal.event_hash if journal is not None else event_hash.hexdigest() if event_hash else None,
        wall_s=time.monotonic() - began,
        notes=(*plan.notes, *_notes(plan, loop)),
    )


def _fan_out(*sinks: EventSink | None) -> EventSink:
    return FanOut(tuple(sink for sink in sinks if sink is not None))


def _notes(plan: Plan, loop: Loop) -> list[str]:
    notes = []
    if loop.refused:
        notes.append(
            f"{loop.refused} requests could never fit the pool of {plan.num_pages * plan.config.cache.page_size:,} "
            "tokens and were refused; cache.num_pages sets it"
        )
    return notes + (gaps_of(plan.workload) if isinstance(plan.workload, JournalWorkload) else [])


def gaps_of(workload: JournalWorkload) -> list[str]:
    """What the journal lacks, after it was read."""
    notes = []
    if workload.unfinished:
        notes.append(f"{workload.unfinished} requests had not ended where the record ends: their answers end there too")
    if workload.missing:
        notes.append(f"{workload.missing} events never reached the journal: requests may be missing, or end too early")
    return notes


def base_config(plan: Plan) -> Mapping[str, Any]:
    """The sections of the base configuration."""
    return plan.base.model_dump(mode="json", exclude={"server"})
