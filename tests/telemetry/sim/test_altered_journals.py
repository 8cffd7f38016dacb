"""Journals whose numbers were altered: `sim` and `whatif` refuse them by field, value and limit."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from telemetry.cli import main
from tests.telemetry.sim.recordings import config_of, cost_file, record


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return record(tmp_path_factory.mktemp("run"), config_of(), requests=4).read_bytes()


@pytest.mark.parametrize("command", ["sim", "whatif"])
@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("page_size", "0", "page_size"),
        ("page_size", "-16", "page_size"),
        ("max_running_requests", "0", "max_running_requests"),
        ("num_pages", "0", "the recorded num_pages is 0; 1 to 16777216 are possible"),
        ("num_pages", str(2**31), f"the recorded num_pages is {2**31}; 1 to 16777216 are possible"),
        ("prompt_len", "-5", "the recorded prompt_len of 'r0' is -5; 1 to 16777216 are possible"),
        ("prompt_len", str(2**50), f"the recorded prompt_len of 'r0' is {2**50}"),
        ("requested_new_tokens", "0", "the recorded requested_new_tokens of 'r0' is 0"),
    ],
)
def test_an_altered_number_is_named(
    command: str,
    field: str,
    value: str,
    expected: str,
    recorded: bytes,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # The last of this name in EngineStarted, behind its configuration, or the first of an arrival.
    lines = recorded.split(b"\n")
    place = next(at for at, line in enumerate(lines) if b"header" not in line[:20] and f'"{field}":'.encode() in line)
    head, name, rest = lines[place].rpartition(f'"{field}":'.encode())
    lines[place] = head + name + re.sub(rb"^-?\d+", value.encode(), rest)
    altered = b"\n".join(lines)
    assert altered != recorded
    journal = tmp_path / "altered.jsonl"
    journal.write_bytes(altered)
    words = [command, str(journal), "--cost", cost_file(tmp_path)]
    assert main([*words, *(["--set", "chunked_prefill_size=64"] if command == "whatif" else [])]) == 2
    said = capsys.readouterr().err
    assert expected in said.replace("\n", " ")
    assert "Traceback" not in said
    assert "None" not in said
