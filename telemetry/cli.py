"""The `admitscope` command. Owns: which command runs what, and the exit status.

0: done. 1: it ran, and the answer is no (a replay that differs, a request that is unknown, a demo with failures, a
server that was not let finish what it had accepted).
2: bad usage, or something that a person must change first. Parts are imported where they are used: `--help` and
`explain` need neither torch nor a web server.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from engine.errors import AdmitscopeError
from telemetry.lessons.command import LessonCommand
from telemetry.settings import (
    CheckCommand,
    Command,
    ExplainCommand,
    ExportCommand,
    ReplayCommand,
    ServeCommand,
    TopCommand,
    UsageError,
    parse,
)
from telemetry.settings_page import DashboardCommand, DemoCommand
from telemetry.sim.commands import SimCommand, SweepCommand, TuneCommand, WhatifCommand

USAGE_STATUS = 2
#: Refusals of a name as such, wherever it is first looked at.
_BAD_NAMES = frozenset({errno.ENAMETOOLONG, errno.ELOOP})
#: There is no room where it writes, be that a file or what it prints to.
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_MOST_SHOWN = 80

#: Live and finished requests of an engine among which a shortened id is looked up: as many as it tells at once.
_MOST_REQUESTS = 5_000


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit status; SystemExit after help and unknown words."""
    if not __debug__:
        print(
            "admitscope: refuses to run under python -O or PYTHONOPTIMIZE: the laws of the core are assertions",
            file=sys.stderr,
        )
        return USAGE_STATUS
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        # A terminal without the letter is shown its number, as Python does on stderr: not a traceback in its place.
        sys.stdout.reconfigure(errors="backslashreplace")
    words = list(sys.argv[1:] if argv is None else argv)
    if words == ["--version"]:
        import importlib.metadata

        print(f"admitscope {importlib.metadata.version('admitscope')}")
        return 0
    try:
        status = run(parse(words))
        sys.stdout.flush()  # here a full disk is told of in a sentence; at the exit Python would show its own
        return status
    except AdmitscopeError as error:
        for line in str(error).splitlines():
            print(f"admitscope: {line}", file=sys.stderr)
        return USAGE_STATUS
    except ModuleNotFoundError as error:
        print(f"admitscope: {error.name} is not installed: this command needs an extra (see README)", file=sys.stderr)
        return USAGE_STATUS
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # `admitscope explain … | head`: whoever read has seen enough. Python would complain again at exit.
        sys.stderr.close()
        return 1
    except OSError as error:
        if error.errno not in _BAD_NAMES | _FULL:
            raise
        if error.errno in _FULL:
            with contextlib.suppress(OSError):
                sys.stdout.close()  # or what is still to be printed fails once more at the exit
        name = "its output" if error.filename is None else str(error.filename)
        shown = name if len(name) <= _MOST_SHOWN else f"{name[:_MOST_SHOWN]}… ({len(name)} characters)"
        print(f"admitscope: {shown}: {error.strerror}", file=sys.stderr)
        return USAGE_STATUS


def run(command: Command) -> int:  # noqa: PLR0911 - one return for each command
    """Run a parsed command."""
    match command:
        case ServeCommand():
            from telemetry.launch import serve

            return serve(command)
        case ExplainCommand():
            return _explain(command)
        case TopCommand():
            return _top(command)
        case ReplayCommand():
            return _replay(command)
        case CheckCommand():
            return _check(command)
        case ExportCommand():
            from telemetry.export.command import run_export

            _say_which_run(command.journal)
            return run_export(command)
        case SimCommand() | SweepCommand() | WhatifCommand() | TuneCommand():
            from telemetry.sim.command_line import run_simulation, source_of

            _say_which_run(source_of(command))
            return run_simulation(command)
        case DashboardCommand():
            from telemetry.page import run_page

            return run_page(command)
        case DemoCommand():
            from rich.console import Console

            from telemetry.demo.orchestrator import run_demo

            return run_demo(command, Console())
        case LessonCommand():
            from telemetry.lessons.terminal import run_lesson

            return run_lesson(command, read=input, out=sys.stdout, is_interactive=sys.stdin.isatty())


def _explain(command: ExplainCommand) -> int:
    from telemetry.explain import AmbiguousRequest, UnknownRequest, explain
    from telemetry.explain_tables import explain_tables
    from telemetry.recorded_tables import is_tables, refuse_one_table

    if command.journal.startswith(("http://", "https://")):
        return _explain_live(command)
    path = Path(command.journal)
    refuse_one_table(path)
    _say_which_run(path)
    try:
        if is_tables(path):
            explanation, lacks = explain_tables(path, command.rid, command.lang)
            for lack in lacks:
                print(f"admitscope: {lack}", file=sys.stderr)
        else:
            explanation = explain(path, command.rid, command.lang)
    except (UnknownRequest, AmbiguousRequest) as error:
        for line in str(error).splitlines():
            print(f"admitscope: {line}", file=sys.stderr)
        return 1
    print(explanation.model_dump_json(indent=1) if command.json_output else explanation.text(command.lang))
    return 0


def _say_which_run(journal: Path) -> None:
    """A folder may hold several runs, of which the newest is read: whoever reads the answer must know."""
    from telemetry.journal_reader import runs_in

    runs = runs_in(journal) if journal.is_dir() else []
    if len(runs) > 1:
        print(f"admitscope: {journal} holds {len(runs)} runs; this is the newest, {runs[-1]}", file=sys.stderr)


def _explain_live(command: ExplainCommand) -> int:
    from telemetry.client import LiveSource, SourceError
    from telemetry.explain import AmbiguousRequest
    from telemetry.short_ids import meant

    with LiveSource(command.journal, os.environ.get("ADMITSCOPE_API_KEY")) as source:
        try:
            explanation = source.explain(command.rid, command.lang)
            if explanation is None:
                # This raises where no engine is: "unknown" would be said of any web server.
                told = source.requests(_MOST_REQUESTS)
                ids = meant(command.rid, (row.rid for row in (*told.live, *told.finished)))
                if len(ids) > 1:
                    raise AmbiguousRequest(command.rid, ids)
                explanation = source.explain(ids[0], command.lang) if ids else None
        except (SourceError, AmbiguousRequest) as error:
            print(f"admitscope: {error}", file=sys.stderr)
            return 1
    if explanation is None:
        print(
            f"admitscope: {command.rid}: no live or recently finished request has this id; "
            f"`admitscope top {command.journal}` shows those that wait and run, an older one is in the journal",
            file=sys.stderr,
        )
        return 1
    print(explanation.model_dump_json(indent=1) if command.json_output else "\n".join(explanation.sentences))
    return 0


def _top(command: TopCommand) -> int:
    from rich.console import Console

    from telemetry.client import LiveSource
    from telemetry.top import run_top

    with LiveSource(command.url, os.environ.get("ADMITSCOPE_API_KEY")) as source:
        return run_top(command, source, Console())


def _check(command: CheckCommand) -> int:
    from telemetry.check import check
    from telemetry.check_report import render
    from telemetry.export.source import survey
    from telemetry.sim.limits import give_way, limit_memory
    from telemetry.sim.progress import meter

    _say_which_run(command.journal)
    limit_memory(command.memory_mib)
    give_way(command.niceness)
    try:
        with meter(quiet=True, lines=command.progress_lines) as progress:
            progress.phase("judging", survey(command.journal).steps[1] if command.progress_lines else 0)
            report = check(
                command.journal,
                until_step=command.until_step,
                until_seq=command.until_seq,
                snapshot=command.snapshot,
                limit=command.limit,
                tell=progress.tell if command.progress_lines else None,
            )
    except MemoryError:
        allowed = "this machine's memory" if command.memory_mib is None else f"--memory-mib {command.memory_mib}"
        raise UsageError(f"{allowed} is not enough to judge this journal: allow more") from None
    print(report.model_dump_json(indent=1) if command.json_output else render(report))
    return report.exit_code


def _replay(command: ReplayCommand) -> int:
    from telemetry.replay import replay
    from telemetry.replay_report import render

    _say_which_run(command.journal)
    report = replay(command.journal)
    print(report.model_dump_json(indent=1) if command.json_output else render(report))
    return report.exit_code


if __name__ == "__main__":
    sys.exit(main())
