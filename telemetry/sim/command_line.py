"""`sim` and `whatif` at a terminal. Owns: running them, what is printed, and the exit status."""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import TYPE_CHECKING

from rich.console import Console

from telemetry.settings import UsageError
from telemetry.sim.commands import SimCommand, WhatifCommand
from telemetry.sim.cost_model import save_cost
from telemetry.sim.progress import meter
from telemetry.sim.report import show_result
from telemetry.sim.run import plan_of, simulate

if TYPE_CHECKING:
    from telemetry.sim.plots import Watch


def run_simulation(command: SimCommand | WhatifCommand) -> int:
    """Run either. Returns the exit status; raises AdmitscopeError for what a person must change."""
    return run_sim(command) if isinstance(command, SimCommand) else run_whatif(command)


def run_sim(command: SimCommand) -> int:
    """Simulate and print. 0, or 1 when a law broke."""
    plan = plan_of(command)
    if command.save_cost is not None:
        save_cost(plan.cost, command.save_cost)
    watch = None if command.plot is None else _watch()
    with meter(quiet=command.json_output, lines=command.progress_lines) as progress:
        result = simulate(command, plan, progress, version=_version(), watch=watch)
    if watch is not None and command.plot is not None:
        from telemetry.sim.plots import write_plots

        title = f"{result.workload}, {result.policy}"
        result = result.model_copy(update={"plots": tuple(map(str, write_plots(watch, command.plot, title)))})
    if command.json_output:
        print(result.model_dump_json(indent=1))
    else:
        show_result(result, Console())
    return 1 if result.violations else 0


def run_whatif(command: WhatifCommand) -> int:
    """Compare and print. 0, or 1 when a law broke."""
    from telemetry.sim.limits import give_way, limit_memory
    from telemetry.sim.whatif import compare
    from telemetry.sim.whatif_report import show_comparison

    limit_memory(command.memory_mib)
    give_way(command.niceness)
    try:
        with meter(quiet=command.json_output, lines=command.progress_lines) as progress:
            result = compare(command, progress, version=_version())
    except MemoryError:
        allowed = "this machine's memory" if command.memory_mib is None else f"--memory-mib {command.memory_mib}"
        raise UsageError(
            f"{allowed} is not enough for this run: allow more, or compare fewer requests with --limit"
        ) from None
    if command.json_output:
        print(result.model_dump_json(indent=1))
    else:
        show_comparison(result, Console())
    return 1 if result.violations else 0


def _watch() -> Watch:
    """What plots are drawn from. A package that is missing is missed now, not after the run."""
    for package in ("altair", "vl_convert"):
        importlib.import_module(package)
    from telemetry.sim.plots import Watch

    return Watch()


def _version() -> str:
    try:
        return importlib.metadata.version("admitscope")
    except importlib.metadata.PackageNotFoundError:
        return "0"
