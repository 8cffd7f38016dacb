"""The command line is the configuration tree: every field a flag and an environment name, every fault named."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import BaseModel

from engine.config import EngineConfig, Policy
from engine.errors import ConfigError
from invariants.audit import AuditPart
from telemetry.settings import (
    CheckCommand,
    DashboardCommand,
    DemoCommand,
    ExplainCommand,
    ReplayCommand,
    ServeCommand,
    UsageError,
    environment_name,
    parse,
)


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in [name for name in os.environ if name.startswith("ADMITSCOPE_")]:
        monkeypatch.delenv(name)


def serve(*flags: str) -> ServeCommand:
    command = parse(["serve", *flags])
    assert isinstance(command, ServeCommand)
    return command


def leaves(model: type[BaseModel], head: str = "--") -> dict[str, object]:
    """Flag → default of every field of a configuration tree."""
    found: dict[str, object] = {}
    for name, field in model.model_fields.items():
        flag = head + name.replace("_", "-")
        if isinstance(field.default, BaseModel):
            found |= leaves(type(field.default), flag + ".")
        else:
            found[flag] = field.default
    return found


def test_serve_without_flags_is_the_default_configuration() -> None:
    assert serve().engine_config() == EngineConfig()


def test_every_field_of_the_engine_is_a_flag_with_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        parse(["serve", "--help"])
    assert exit_.value.code == 0
    text = capsys.readouterr().out
    flags = leaves(EngineConfig)
    assert len(flags) > 25
    for flag in flags:
        assert f"  {flag}" in text, flag
    assert "examples:" in text
    assert "ADMITSCOPE_CACHE__PAGE_SIZE" in text


def test_flag_beats_environment_beats_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ADMITSCOPE_SCHEDULER__CHUNKED_PREFILL_SIZE", "512")
    monkeypatch.setenv("ADMITSCOPE_CACHE__PAGE_SIZE", "32")
    command = serve("--scheduler.chunked-prefill-size", "256", "--scheduler.max-prefill-tokens", "1024")
    assert command.scheduler.chunked_prefill_size == 256
    assert command.scheduler.max_prefill_tokens == 1024
    assert command.cache.page_size == 32
    assert command.scheduler.max_running_requests == EngineConfig().scheduler.max_running_requests


def test_the_name_that_help_teaches_is_the_name_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    for flag, default in leaves(EngineConfig).items():
        if type(default) is int and flag not in {"--cache.page-size", "--executor.cuda-graph-rows"}:
            monkeypatch.setenv(environment_name(flag), str(default + 1))
            config = serve().engine_config()
            section, name = flag.removeprefix("--").replace("-", "_").split(".")
            assert getattr(getattr(config, section), name) == default + 1, flag
            monkeypatch.delenv(environment_name(flag))


def test_none_is_a_word_where_it_is_one_of_several(monkeypatch: pytest.MonkeyPatch) -> None:
    assert serve("--executor.quantization", "none").executor.quantization == "none"
    monkeypatch.setenv("ADMITSCOPE_EXECUTOR__QUANTIZATION", "none")
    assert serve().executor.quantization == "none"


def test_words_for_nothing_and_for_policies() -> None:
    command = serve(
        "--scheduler.chunked-prefill-size",
        "none",
        "--journal",
        "none",
        "--scheduler.schedule-policy",
        "shortest-prefill-first",
    )
    assert command.scheduler.chunked_prefill_size is None
    assert command.journal is None
    assert command.scheduler.schedule_policy is Policy.SHORTEST_PREFILL_FIRST


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (
            ["--scheduler.max-prefill-tokens", "0"],
            ["--scheduler.max-prefill-tokens", "greater than or equal to 1", "'0'"],
        ),
        (["--cache.page-size", "many"], ["--cache.page-size", "valid integer", "'many'"]),
        (["--server.port", "70000"], ["--server.port", "65535", "'70000'", "ADMITSCOPE_SERVER__PORT"]),
        (["--scheduler.schedule-policy", "best"], ["--scheduler.schedule-policy", "'fcfs'", "'lpm'", "'best'"]),
        (["--scheduler.schedule-conservativeness", "nan"], ["--scheduler.schedule-conservativeness", "finite"]),
        (
            ["--cache.page-size", "64", "--scheduler.chunked-prefill-size", "8"],
            ["scheduler.chunked_prefill_size=8", "cache.page_size=64"],
        ),
        (["--server.host", "0.0.0.0"], ["server.host='0.0.0.0'", "server.api_key"]),
        (["--traces.ttft-objective-s", "1e300"], ["--traces.ttft-objective-s", "86400", "'1e300'"]),
        (["--traces.gap-objective-s", "1e300"], ["--traces.gap-objective-s", "86400", "'1e300'"]),
    ],
)
def test_a_value_out_of_range_names_field_value_and_limit(flags: list[str], parts: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        serve(*flags)
    assert isinstance(caught.value, ConfigError)
    for part in parts:
        assert part in str(caught.value)


def test_a_key_is_not_repeated_in_a_message() -> None:
    with pytest.raises(UsageError) as caught:
        serve("--server.api-key", "hunter2")
    assert "at least 8" in str(caught.value)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    "argv",
    [
        ["serve", "--scheduler.chunk-size", "5"],
        ["serve", "extra"],
        ["serve", "--port", "1"],
        ["fly"],
        ["explain", "only-a-journal"],
        ["demo", "--checker.evidence-per-law", "9"],
    ],
)
def test_unknown_words_are_refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        parse(argv)
    assert exit_.value.code == 2
    assert "error:" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["ADMITSCOPE_CACHE__PAGESIZE", "ADMITSCOPE_CASH__PAGE_SIZE", "ADMITSCOPE_PAGE_SIZE"])
def test_a_misspelt_environment_name_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    monkeypatch.setenv(name, "32")
    with pytest.raises(UsageError) as caught:
        parse(["serve"], os.environ)
    assert name in str(caught.value)


def test_no_words_teach(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        parse([])
    assert exit_.value.code == 0
    text = capsys.readouterr().out
    for command in ("serve", "explain", "replay", "check", "dashboard", "demo"):
        assert f"    {command} " in text
    assert "start here:" in text
    # Each command is listed by its sentence; examples are for its own help.
    assert "examples:" not in text


@pytest.mark.parametrize("command", ["serve", "explain", "replay", "check", "dashboard", "demo"])
def test_each_help_has_examples(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        parse([command, "--help"])
    assert exit_.value.code == 0
    assert f"admitscope {command}" in capsys.readouterr().out.split("examples:")[1]


def test_the_other_commands() -> None:
    assert parse(["explain", "j", "r1", "--json"]) == ExplainCommand(journal="j", rid="r1", json=True)
    assert parse(["replay", "j"]) == ReplayCommand(journal=Path("j"))
    assert parse(["check", "j", "--until-seq", "9"]) == CheckCommand(journal=Path("j"), until_seq=9)
    assert parse(["dashboard"]) == DashboardCommand()
    assert parse(["dashboard", "http://10.0.0.1:9", "--port", "0"]) == DashboardCommand(
        address="http://10.0.0.1:9", port=0
    )
    assert parse(["demo", "--duration", "60", "--no-dashboard"]) == DemoCommand(duration=60, dashboard=False)


# --- the checker ------------------------------------------------------------------------------------------------------


def test_laws_and_parts_are_named_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    checker = serve("--checker.overrides", "INV-PROG-01=raise, INV-PAGE-02=off").checker
    assert checker.modes() == {"INV-PROG-01": "raise", "INV-PAGE-02": "off"}
    monkeypatch.setenv("ADMITSCOPE_CHECKER__OVERRIDES", "INV-STEP-04=record")
    monkeypatch.setenv("ADMITSCOPE_CHECKER__AUDIT_EVERY", "page_tables=4,order=10")
    monkeypatch.setenv("ADMITSCOPE_CHECKER__AUDIT_PERIOD_S", "none")
    monkeypatch.setenv("ADMITSCOPE_ON_VIOLATION", "off")
    command = serve()
    assert command.on_violation == "off"
    assert command.checker.modes() == {"INV-STEP-04": "record"}
    assert command.checker.parts() == {AuditPart.PAGE_TABLES: 4, AuditPart.ORDER: 10}
    assert command.checker.audit_period_s is None
    assert serve("--checker.overrides", "").checker.modes() == {}


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (["--checker.overrides", "INV-NONE-01=raise"], ["--checker.overrides", "INV-NONE-01", "is no law"]),
        (["--checker.overrides", "INV-PROG-01=stop"], ["INV-PROG-01=stop", "off, record, raise"]),
        (["--checker.overrides", "INV-PROG-01"], ["name=value"]),
        (["--checker.overrides", "INV-PROG-01=off,INV-PROG-01=off"], ["named twice"]),
        (["--checker.audit-every", "attic=2"], ["--checker.audit-every", "attic", "ownership"]),
        (["--checker.audit-every", "locks=0"], ["locks=0", "1 to 1000000"]),
        (["--checker.audit-every", "locks=\u0662"], ["1 to 1000000"]),
        (["--checker.evidence-per-law", "0"], ["--checker.evidence-per-law", "greater than or equal to 1"]),
        (["--on-violation", "panic"], ["--on-violation", "'record'", "'panic'"]),
    ],
)
def test_a_senseless_checker_setting_is_named(flags: list[str], parts: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        serve(*flags)
    for part in parts:
        assert part in str(caught.value)
