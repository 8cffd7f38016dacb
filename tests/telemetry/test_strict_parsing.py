"""Journals and settings are read strictly: what is not exactly right is refused by name, and nothing else happens.

Damage is drawn: bytes, lines, keys, values. A reader ends with records or a JournalError, the command line with a
command or a UsageError; never with another exception, a hang, or memory without bound.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.errors import AdmitscopeError, ConfigError
from telemetry.explain import explain
from telemetry.journal_reader import JournalReader
from telemetry.replay import replay
from telemetry.settings import ServeCommand, UsageError, environment_name, parse

#: The folder of a test is used again by all its examples: each writes its file anew.
EFFORT = settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
ODD = st.one_of(
    st.sampled_from(
        ["NaN", "Infinity", "-Infinity", "1e400", "-1", "0.5", "true", "null", '"x"', "[]", "{}", "1" * 400]
    ),
    st.sampled_from(['"' + "a" * 10_000 + '"', "[" * 2_000 + "]" * 2_000, '"\\ud800"', '"\\u0000"', '"AAAA"']),
)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory, simulated_run: Any) -> list[bytes]:
    path = tmp_path_factory.mktemp("journal") / "run.jsonl"
    simulated_run(path, 3).play(6, stop_after=40)
    return path.read_bytes().splitlines()


def ends_well(folder: Path, lines: list[bytes]) -> None:
    """Everything that reads a journal reads it or says what is wrong with it."""
    path = folder / "damaged.jsonl"
    path.write_bytes(b"\n".join(lines) + b"\n")
    for read in (lambda: list(JournalReader(path).records()), lambda: replay(path), lambda: explain(path, "r0")):
        with contextlib.suppress(AdmitscopeError):
            read()


@EFFORT
@given(data=st.data())
def test_a_journal_with_damaged_lines(tmp_path: Path, recorded: list[bytes], data: st.DataObject) -> None:
    lines = list(recorded)
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(lines) - 1))
        match data.draw(st.sampled_from(["flip", "garbage", "cut", "drop", "twice", "swap"])):
            case "flip" if lines[place]:
                line = bytearray(lines[place])
                line[data.draw(st.integers(0, len(line) - 1))] = data.draw(st.integers(0, 255))
                lines[place] = bytes(line)
            case "garbage":
                lines.insert(place, data.draw(st.binary(max_size=200)))
            case "cut":
                lines[place] = lines[place][: data.draw(st.integers(0, len(lines[place])))]
            case "drop" if len(lines) > 1:
                del lines[place]
            case "twice":
                lines.insert(place, lines[place])
            case "swap":
                lines[place], lines[-1] = lines[-1], lines[place]
    ends_well(tmp_path, lines)


@EFFORT
@given(data=st.data())
def test_a_journal_with_odd_values(tmp_path: Path, recorded: list[bytes], data: st.DataObject) -> None:
    """One field of one record gets a value that it never has, or the record a field that it has not."""
    lines = list(recorded)
    place = data.draw(st.integers(0, len(lines) - 1))
    record = json.loads(lines[place])
    field = data.draw(st.sampled_from([*sorted(record), "unknown"]))
    record[field] = "PLACE-OF-THE-VALUE"
    lines[place] = json.dumps(record).encode().replace(b'"PLACE-OF-THE-VALUE"', data.draw(ODD).encode())
    ends_well(tmp_path, lines)


@pytest.mark.parametrize("value", ["NaN", "Infinity", "1e400", '"7"', "7.5", "true", "null"])
def test_a_number_that_is_none_is_refused_by_name(tmp_path: Path, recorded: list[bytes], value: str) -> None:
    record = json.loads(recorded[2])
    record["seq"] = 0
    line = json.dumps(record).replace('"seq": 0', f'"seq": {value}')
    path = tmp_path / "damaged.jsonl"
    path.write_bytes(b"\n".join([*recorded[:2], line.encode(), *recorded[3:]]) + b"\n")
    with pytest.raises(AdmitscopeError, match=r"damaged\.jsonl:3"):
        list(JournalReader(path).records())


# -- settings ----------------------------------------------------------------------------------------------------------

#: A command line takes 50 ms to build.
FEW = settings(max_examples=50)
FLAGS = [
    f"--{group}.{name}".replace("_", "-")
    for group in ("scheduler", "cache", "model", "executor", "server")
    for name in type(getattr(ServeCommand(), group)).model_fields
]
VALUES = st.one_of(
    st.sampled_from(
        ["", "nan", "inf", "-inf", "-1", "0", "1e400", "9" * 400, "none", "true", "[]", "{}", "\x00", "\ud800"]
    ),
    st.text(max_size=20),
    st.integers(-(2**70), 2**70).map(str),
    st.floats().map(str),
)


@FEW
@given(flag=st.sampled_from(FLAGS), value=VALUES)
def test_a_flag_with_any_value_is_a_command_or_a_usage_error(flag: str, value: str) -> None:
    try:
        command = parse(["serve", f"{flag}={value}"], {})
    except (UsageError, SystemExit):
        return
    assert isinstance(command, ServeCommand)
    with contextlib.suppress(ConfigError):
        command.engine_config()


@FEW
@given(flag=st.sampled_from(FLAGS), value=VALUES.filter(lambda text: "\x00" not in text and "\ud800" not in text))
def test_an_environment_name_with_any_value_is_a_command_or_a_usage_error(flag: str, value: str) -> None:
    name = environment_name(flag)
    with pytest.MonkeyPatch.context() as patch:
        try:
            patch.setenv(name, value)
        except ValueError:  # no such text in an environment
            return
        with contextlib.suppress(UsageError):
            parse(["serve"], dict(os.environ))


@pytest.mark.parametrize(
    "key", ["short", "with a space in it", "ümlaut-schlüssel", "tab\there-in-it", "nul\x00in-the-key"]
)
def test_a_key_that_no_header_carries_is_refused_and_not_repeated(key: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(["serve", f"--server.api-key={key}"], {})
    assert key not in str(caught.value)
    assert "--server.api-key" in str(caught.value)
