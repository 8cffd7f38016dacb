"""What no simulation can take is told in words, with status 2; and a number that is nothing is printed as 0."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from telemetry.cli import main
from telemetry.sim.report import change, duration
from telemetry.sim.whatif_report import _signed
from telemetry.sim.whatif_words import signed
from tests.telemetry.sim.recordings import config_of, record

MOONCAKE = '{"timestamp": 0, "input_length": 5, "output_length": 5, "hash_ids": [1]}'
DEEP = "[" * 200_000
YEAR_1 = (
    '{"timestamp": "0001-01-01T00:00:00", "event": "request.received", "rid": "a"}\n'
    '{"timestamp": "0001-01-01T00:00:01", "event": "request.finished", "rid": "a", "obj": {}, "out": {'
    '"meta_info": {"prompt_tokens": 5, "completion_tokens": 5, "e2e_latency": 1.0}}}'
)


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["sim", *words]) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f'{MOONCAKE}\n{{"timestamp": 0, "input_length": 5, "extra": {DEEP}', ":2: no JSON object: "),
        (f'{{"event": "request.finished", "timestamp": {DEEP}', ":1: "),
        (
            YEAR_1,
            ":1: timestamp is 0001-01-01T00:00:00; a moment from 1970 on is needed",
        ),
    ],
    ids=["nested trace", "nested log", "year 1"],
)
def test_lines_that_cannot_be_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, said: str
) -> None:
    file = tmp_path / "odd.jsonl"
    file.write_text(text + "\n", encoding="utf-8")
    assert said in refused(capsys, str(file))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("azure-conv", "--limit", "5", "--rate", "1e-300"), "--rate 1e-300: request 1 would come more than"),
        (("azure-conv", "--limit", "5", "--rate-scale", "1e-300"), "--rate-scale 1e-300: L3 would come more than"),
        (("azure-conv", "--limit", "5", "--journal", "/proc/x"), "--journal /proc/x: no journal can be written there"),
        (("a" * 5_000,), "… (5000 characters): File name too long"),
    ],
)
def test_arguments_that_cannot_be_are_told(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str
) -> None:
    assert said in refused(capsys, *words)


def test_a_bad_recorded_configuration_is_told_by_field(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    journal = record(tmp_path, config_of(), requests=3)
    header, started, *rest = journal.read_text(encoding="utf-8").splitlines()
    event = json.loads(started)
    config = json.loads(event["config"])
    config["scheduler"]["max_prefill_tokens"] = -1
    event["config"] = json.dumps(config)
    journal.write_text("\n".join([header, json.dumps(event, separators=(",", ":")), *rest]) + "\n", encoding="utf-8")
    said = refused(capsys, str(journal))
    assert "this version cannot take the recorded configuration: max_prefill_tokens: Input should be" in said
    assert said.rstrip().endswith("got -1")
    assert "pydantic" not in said


def test_what_is_nothing_is_printed_as_nothing() -> None:
    assert (change(-0.0001), change(0.0), change(0.12), change(-0.5)) == ("0%", "0%", "+12%", "-50%")
    assert (signed(-1e-9), signed(4e-8), duration(-1e-9)) == ("0 s", "0 s", "0 µs")
    assert (_signed(0.0, "share"), _signed(-1e-5, "share"), _signed(-0.6605, "1/s")) == ("0.0%", "0.0%", "-0.6605 1/s")
    assert (_signed(0.0, "count"), _signed(3.0, "count")) == ("0", "+3")


@pytest.mark.parametrize("command", ["sim", "whatif", "tune", "export", "dashboard"])
def test_help_names_no_types_of_python(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    said = capsys.readouterr().out
    assert "tuple[" not in said
    assert "list[" not in said
    assert "factory" not in said
    assert "(default: ())" not in said
