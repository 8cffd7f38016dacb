"""`sim`, `sweep`, `whatif` and `tune` at a terminal. Owns: running them, what is printed, and the exit status."""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rich.console import Console

from telemetry.settings import UsageError
from telemetry.sim.commands import SimCommand, SweepCommand, TuneCommand, WhatifCommand
from telemetry.sim.cost_model import save_cost
from telemetry.sim.progress import meter
from telemetry.sim.report import show_result
from telemetry.sim.run import plan_of, simulate

if TYPE_CHECKING:
    from telemetry.sim.plots import Watch

#: As a shell tells of a command that Ctrl-C ended.
INTERRUPTED: Final = 130
_DRAWING: Final = ("altair", "vl_convert")


def run_simulation(command: SimCommand | SweepCommand | WhatifCommand | TuneCommand) -> int:
    """Run one. Returns the exit status; raises AdmitscopeError for what a person must change."""
    match command:
        case SimCommand():
            return run_sim(command)
        case SweepCommand():
            return run_sweep(command)
        case WhatifCommand():
            return run_whatif(command)
        case TuneCommand():
            return run_tune(command)


def source_of(command: SimCommand | SweepCommand | WhatifCommand | TuneCommand) -> Path:
    """What it reads: a file, or a folder that may hold several runs."""
    match command:
        case SimCommand() | SweepCommand():
            return Path(command.trace)
        case WhatifCommand():
            return command.journal
        case TuneCommand():
            return Path(command.source)


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


def run_sweep(command: SweepCommand) -> int:
    """Simulate each load and print. 0, or 1 when a law broke."""
    if command.plot is not None:
        _need(*_DRAWING)
    from telemetry.sim.sweep import sweep
    from telemetry.sim.sweep_report import draw_sweep, show_sweep

    with meter(quiet=command.json_output, lines=command.progress_lines) as progress:
        result = sweep(command, progress, version=_version())
    if command.plot is not None:
        result = result.model_copy(update={"plot": str(draw_sweep(result, command.plot))})
    if command.json_output:
        print(result.model_dump_json(indent=1))
    else:
        show_sweep(result, Console())
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


def run_tune(command: TuneCommand) -> int:
    """Search and print. 0, 1 when a law broke, 130 when interrupted."""
    _need("optuna", *(_DRAWING if command.plot is not None else ()))
    from telemetry.sim.tune import Stopped, tune
    from telemetry.sim.tune_report import draw, show_tuned

    try:
        with meter(quiet=command.json_output, lines=command.progress_lines) as progress:
            result = tune(command, progress, version=_version())
    except Stopped as stopped:
        print(f"admitscope: {stopped}", file=sys.stderr)
        return INTERRUPTED
    if command.plot is not None:
        result = result.model_copy(update={"plot": str(draw(result, command.plot))})
    if command.json_output:
        print(result.model_dump_json(indent=1))
    else:
        show_tuned(result, Console())
    return 1 if result.violations else 0


def _need(*packages: str) -> None:
    """A package that is missing is missed now, not after a long run."""
    for package in packages:
        importlib.import_module(package)


def _watch() -> Watch:
    """What plots are drawn from."""
    _need(*_DRAWING)
    from telemetry.sim.plots import Watch

    return Watch()


def _version() -> str:
    try:
        return importlib.metadata.version("admitscope")
    except importlib.metadata.PackageNotFoundError:
        return "0"
