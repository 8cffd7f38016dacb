"""The command line as data. Owns: every subcommand, flag, environment name and help text of `admitscope`.

One frozen pydantic-settings tree. `serve` is the engine's own configuration tree plus what surrounds an engine, so a
field added to `EngineConfig` is a flag and an environment name by itself. Order of precedence: flag, environment,
default. Bad usage raises `UsageError`; nothing here starts anything.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import Field, ValidationError, model_validator
from pydantic_settings import (
    BaseSettings,
    CliApp,
    CliPositionalArg,
    CliSettingsSource,
    CliSubCommand,
    SettingsConfigDict,
    SettingsError,
    get_subcommand,
)

from engine.config import EngineConfig
from engine.errors import ConfigError
from invariants.modes import OnViolation
from telemetry.checker_settings import CheckerConfig
from telemetry.flag_hints import guesses
from telemetry.lessons.command import LessonCommand
from telemetry.settings_page import DashboardCommand, DemoCommand, SubCommand
from telemetry.sim.commands import SimCommand, SweepCommand, TuneCommand, WhatifCommand
from telemetry.spans.config import TraceConfig
from telemetry.words import ENGLISH, TypedLang

ENV_PREFIX: Final = "ADMITSCOPE_"
ENV_DELIMITER: Final = "__"
#: Seconds of the longest stretch that can be asked for: a hundred years.
_MAX_S: Final = 3_153_600_000
#: Of the dashboard, where an engine's address and key are: names that `serve` leaves alone.
CLIENT_NAMES: Final = frozenset({"ADMITSCOPE_URL", "ADMITSCOPE_API_KEY"})


class UsageError(ConfigError):
    """The command line or the environment asks for something that is not offered."""


#: As types of several values are shown: tuple[str,...], list[Path].
_SEVERAL: Final = re.compile(r"(?:tuple|list)\[(\w+)(?:,\s*\.\.\.)?\]")


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Keeps examples as written, and lists each command by its first sentence only."""

    def _expand_help(self, action: argparse.Action) -> str:
        text = super()._expand_help(action).split("\n\n")[0]
        return re.sub(r"\s*\(default(: \(\)| factory: \w+)\)", "", text)  # of what is none until it is given

    def _metavar_formatter(self, action: argparse.Action, default_metavar: str) -> Callable[[int], tuple[str, ...]]:
        if isinstance(action.metavar, str) and action.metavar.startswith("{"):
            lower = action.metavar.lower()  # enum members are shown by name, but asked for by value
            return lambda size: (lower,) * size
        if isinstance(action.metavar, str) and (each := _SEVERAL.fullmatch(action.metavar)):
            one = each[1].lower()  # given once for each value
            return lambda size: (one,) * size
        return super()._metavar_formatter(action, default_metavar)


class ServeCommand(EngineConfig, BaseSettings):
    """Serve a model over an OpenAI-compatible API, with /metrics and /observe beside it.

    examples:
      admitscope serve                                    SmolLM2-135M on 127.0.0.1:8000
      admitscope serve --server.port 0                    a free port, printed once it listens
      admitscope serve --model.path ./model --executor.dtype bfloat16
      admitscope serve --scheduler.chunked-prefill-size 512 --scheduler.schedule-policy fcfs
      admitscope serve --journal none                     keep no records on disk
      ADMITSCOPE_CACHE__PAGE_SIZE=32 admitscope serve     the same as --cache.page-size 32

    Every flag has an environment name: ADMITSCOPE_, then the flag in capitals, "." as "__" and "-" as "_".
    Ctrl-C or SIGTERM: running requests finish, for at most --server.drain-timeout-s; a second one ends them at once.
    """

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        env_nested_delimiter=ENV_DELIMITER,
        env_parse_none_str="none",
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        nested_model_default_partial_update=True,
    )

    journal: Path | None = Path("journals")
    """Folder that journals are written to, one per run. `none` writes nothing."""
    journal_max_mib: int = Field(512, ge=4)
    """Size of one run's journal on disk, in MiB; once it is reached, the rest of the run is not recorded."""
    on_violation: OnViolation = "record"
    """A broken law: `record` counts it, keeps evidence and serves on; `raise` stops the engine; `off`: no checker."""
    checker: CheckerConfig = CheckerConfig()
    traces: TraceConfig = TraceConfig()
    parquet: Path | None = None
    """Folder that the events are also written to as Parquet tables, one file per table and hour. `none` writes none."""
    sglang_metrics: bool = False
    """Also answer `/metrics/sglang`: the same numbers under names, labels and bounds of an SGLang server."""
    log_format: Literal["text", "json"] = "text"
    """Log lines as `text`, or as `json`: an object each, with rid, trace_id and step where they are known."""
    log_requests: bool = False
    """Log one line at the end of each request: how it ended, its tokens and times. Never its text."""
    pick_port: bool = False
    """When the port is taken, take a free one and say so, instead of refusing to start."""

    def engine_config(self) -> EngineConfig:
        """The part that the engine itself gets."""
        return EngineConfig(
            scheduler=self.scheduler,
            cache=self.cache,
            model=self.model,
            executor=self.executor,
            server=self.server,
        )


class ExplainCommand(SubCommand):
    """Tell the life of one request: why it waits or waited, for whom, what it was promised. With numbers.

    examples:
      admitscope explain http://127.0.0.1:8000 chatcmpl-42      of a running engine, now
      admitscope explain journals/RUN.jsonl chatcmpl-42         of a recorded run
      admitscope explain tables chatcmpl-42                     of its Parquet tables, without the journal
      admitscope explain journals/RUN.jsonl chatcmpl-42 --json
      admitscope explain journals/RUN.jsonl chatcmpl-17...afe801    an id as pages shorten it, or how it begins
      admitscope explain journals/RUN.jsonl chatcmpl-42 --lang zh-CN
    """

    journal: CliPositionalArg[str]
    """The first file of a journal (later parts of the run are found beside it), the folder of its Parquet tables, or
    the URL of a running engine (with or without /v1), whose key, if it has one, is in ADMITSCOPE_API_KEY."""
    rid: CliPositionalArg[str]
    """The request's id: the `id` of its answer."""
    lang: TypedLang = ENGLISH
    """Language of the sentences."""
    json_output: bool = Field(False, alias="json")
    """Print one JSON object instead of sentences."""


class ReplayCommand(SubCommand):
    """Feed a journal's inputs to a fresh scheduler and compare every event it publishes with the recorded one.

    Exit status 0 when all are identical, 1 at the first that differs (both are printed).

    examples:
      admitscope replay journals/RUN.jsonl
      admitscope replay journals/RUN.jsonl --json
    """

    journal: CliPositionalArg[Path]
    """The first file of a journal; later parts of the run are found beside it."""
    json_output: bool = Field(False, alias="json")
    """Print one JSON object instead of a sentence."""


class CheckCommand(SubCommand):
    """Judge a journal: run every law over what was recorded, and say which broke, when, and for whom.

    Refusals that the journal only counted are made again by a replay, as long as the record and the replay agree.
    Exit status 0 when every law held, 1 when one broke, 2 when the journal lacks events.

    examples:
      admitscope check journals/RUN.jsonl
      admitscope check journals/RUN.jsonl --until-step 4711 --json
    """

    journal: CliPositionalArg[Path]
    """The first file of a journal; later parts of the run are found beside it."""
    until_step: int | None = Field(None, ge=0)
    """Read no further than this step. Unset: to the end."""
    until_seq: int | None = Field(None, ge=0)
    """Read no further than the event with this number."""
    snapshot: Path | None = None
    """A snapshot.json of an evidence bundle: recount it once the record was read."""
    limit: int = Field(20, ge=1, le=1_000)
    """Violations to print; all are counted."""
    memory_mib: int | None = Field(None, ge=256)
    """End with status 2 rather than use more memory than this. Unset: no limit of its own."""
    niceness: int = Field(0, ge=0, le=19)
    """Give way to other programs so much: for a judging beside a running engine."""
    progress_lines: bool = False
    """Print progress as lines on stderr, for programs."""
    json_output: bool = Field(False, alias="json")
    """Print one JSON object instead of sentences."""


class ExportCommand(SubCommand):
    """Write a journal as Parquet tables, or a stretch of it as a trace for ui.perfetto.dev.

    Torn and rotated journals are read as far as they go; notes say what is missing.
    Exit status 0 when all was written, 1 when the disk refused some of it.

    examples:
      admitscope export --parquet tables journals/RUN.jsonl       then: duckdb, pandas; docs/cookbook.md
      admitscope export --perfetto run.json journals/RUN.jsonl
      admitscope export --perfetto run.json journals/RUN.jsonl --from-s 60 --to-s 90
      admitscope export --perfetto run.json journals/RUN.jsonl --from-step 400 --to-step 500 --rid r17 --rid r18
    """

    journal: CliPositionalArg[Path]
    """The first file of a journal, or the folder of a run; later parts of the run are found beside it."""
    parquet: Path | None = None
    """Folder to write Parquet tables to; it may hold other runs already."""
    perfetto: Path | None = None
    """File to write a Chrome trace-event JSON to; an existing one is replaced when the new one is whole."""
    from_step: int | None = Field(None, ge=0)
    """First step of the trace. Unset: from the start."""
    to_step: int | None = Field(None, ge=0)
    """Last step of the trace. Unset: to the end."""
    from_s: float | None = Field(None, ge=0, le=_MAX_S)
    """The trace begins so many seconds after the engine's start."""
    to_s: float | None = Field(None, ge=0, le=_MAX_S)
    """It ends so many seconds after the engine's start."""
    rid: tuple[str, ...] = ()
    """Show this request only; may be given several times."""

    @model_validator(mode="after")
    def _fits(self) -> ExportCommand:
        if self.parquet is None and self.perfetto is None:
            raise ValueError("nothing to write: --parquet FOLDER, --perfetto FILE, or both")
        steps, seconds = (self.from_step, self.to_step), (self.from_s, self.to_s)
        if self.perfetto is None and (self.rid or any(each is not None for each in (*steps, *seconds))):
            raise ValueError("--from-step, --to-step, --from-s, --to-s and --rid choose what --perfetto shows; add it")
        if any(each is not None for each in steps) and any(each is not None for each in seconds):
            raise ValueError("a stretch is told in steps or in seconds, not in both")
        for unit, (first, last) in (("step", steps), ("s", seconds)):
            if first is not None and last is not None and last < first:
                raise ValueError(f"--to-{unit} is {last}; it must not be before --from-{unit}, which is {first}")
        return self


TopSort = Literal["place", "age", "queue", "prompt", "outputs", "gap", "passed", "retractions"]


class TopCommand(SubCommand):
    """A live table of waiting and running requests: who waits for which limit, need and have, who is ahead.

    The key of an engine that has one is in ADMITSCOPE_API_KEY.

    examples:
      admitscope top                                      the engine on 127.0.0.1:8000, until Ctrl-C
      admitscope top http://10.0.0.5:8000 --sort passed
      admitscope top --once                               one table, for a log or a ticket
    """

    url: CliPositionalArg[Annotated[str, Field(pattern=r"^https?://[^/\s]+")]] = "http://127.0.0.1:8000"
    """Where the engine listens: http://… or https://…, with or without the /v1 of its OpenAI base URL."""
    sort: TopSort = "place"
    """By place in the queue; or largest first: age, time queued, prompt or output tokens, worst gap, passed over."""
    limit: int = Field(40, ge=1, le=5_000)
    """Rows to show."""
    interval_s: float = Field(1.0, ge=0.1, le=60)
    """Seconds between two looks."""
    once: bool = False
    """Print one table and end."""


Command = (
    ServeCommand
    | ExplainCommand
    | TopCommand
    | ReplayCommand
    | CheckCommand
    | ExportCommand
    | SimCommand
    | SweepCommand
    | WhatifCommand
    | TuneCommand
    | DashboardCommand
    | DemoCommand
    | LessonCommand
)


class Root(BaseSettings):
    """admitscope: an LLM inference engine that shows why each request runs, waits, or is cut.

    start here:
      admitscope demo --duration 60       a model, a load and a dashboard on this machine, for a minute
      admitscope serve                    an OpenAI-compatible API on 127.0.0.1:8000
      admitscope top                      who waits, for which limit, and who runs
      admitscope explain JOURNAL RID      why that request was late
      admitscope check JOURNAL            whether every law of the engine held in that run
      admitscope export --perfetto run.json JOURNAL      that run in a trace viewer
      admitscope whatif JOURNAL --set chunked_prefill_size=256     what that setting would have done with that run
      admitscope tune JOURNAL --objective ttft_p99       which settings would have served it better, how surely
      admitscope lesson four-requests     admission explained, one decision at a time; no model, no server

    `admitscope COMMAND --help` teaches each one; `admitscope --version` names this build.
    """

    model_config = SettingsConfigDict(
        cli_prog_name="admitscope",
        cli_kebab_case="all",
        cli_implicit_flags=True,
        cli_parse_none_str="none",
        cli_avoid_json=True,
        cli_use_class_docs_for_groups=True,
        frozen=True,
        extra="forbid",
    )

    serve: CliSubCommand[ServeCommand]
    explain: CliSubCommand[ExplainCommand]
    top: CliSubCommand[TopCommand]
    replay: CliSubCommand[ReplayCommand]
    check: CliSubCommand[CheckCommand]
    export: CliSubCommand[ExportCommand]
    sim: CliSubCommand[SimCommand]
    sweep: CliSubCommand[SweepCommand]
    whatif: CliSubCommand[WhatifCommand]
    tune: CliSubCommand[TuneCommand]
    dashboard: CliSubCommand[DashboardCommand]
    demo: CliSubCommand[DemoCommand]
    lesson: CliSubCommand[LessonCommand]


def parse(argv: Sequence[str], environment: Mapping[str, str] = os.environ) -> Command:
    """The command that `argv` asks for.

    Raises UsageError for values out of range and for misspelt environment names; SystemExit 2 for unknown flags and
    SystemExit 0 after printing help, both by argparse.
    """
    words = list(argv)
    if not words:
        words = ["--help"]
    try:
        source = CliSettingsSource[Root](Root, formatter_class=_HelpFormatter)
        command = get_subcommand(CliApp.run(Root, cli_args=words, cli_settings_source=source), is_required=True)
    except ValidationError as error:
        raise UsageError("\n".join(_sentences(error))) from error
    except SystemExit as end:
        if end.code == 2:
            sys.stderr.writelines(f"{line}\n" for line in guesses(Root, words))
        raise
    except SettingsError as error:  # a value that is no value of its kind, before any field could say what is wrong
        told, cause = str(error), str(error.__cause__)
        raise UsageError(told if cause in told else f"{told}: {cause}") from error
    assert isinstance(command, Command)
    if isinstance(command, ServeCommand):
        _refuse_unknown_environment(environment)
    return command


def environment_name(flag: str) -> str:
    """The environment name of a `serve` flag: `--cache.page-size` is ADMITSCOPE_CACHE__PAGE_SIZE."""
    return ENV_PREFIX + flag.removeprefix("--").replace("-", "_").replace(".", ENV_DELIMITER).upper()


def _refuse_unknown_environment(environment: Mapping[str, str]) -> None:
    """Raise for a misspelt name: it would be a setting silently not applied. Deeper words are pydantic's to judge."""
    known = {name.upper() for name in ServeCommand.model_fields}
    for name in environment:
        if name.upper().startswith(ENV_PREFIX) and name not in CLIENT_NAMES:
            head = name.upper().removeprefix(ENV_PREFIX).split(ENV_DELIMITER)[0]
            if head not in known:
                raise UsageError(f"{name}: no such setting; `admitscope serve --help` lists them")


def _sentences(error: ValidationError) -> list[str]:
    """One line per fault: the flag and its environment name, the value, and the limit in pydantic's words."""
    lines: list[str] = []
    for fault in error.errors(include_url=False):
        path = [str(part) for part in fault["loc"]]
        command, fields = (path[0], path[1:]) if path else ("", [])
        message = fault["msg"].removeprefix("Value error, ")
        if not fields:
            lines.append(message)
            continue
        flag = "--" + ".".join(fields).replace("_", "-")
        name = f"{flag} (or {environment_name(flag)})" if command == "serve" else flag
        # A fault between fields has named its values already; a key stays out of terminals and logs.
        is_hidden = isinstance(fault["input"], dict) or fields[-1] == "api_key"
        lines.append(f"{name}: {message}" if is_hidden else f"{name}: {message}; got {fault['input']!r}")
    return lines
