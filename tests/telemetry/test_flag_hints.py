"""A flag that a command does not have: what was meant, where that is likely, and the old exit status."""

from __future__ import annotations

import pytest

from telemetry.flag_hints import flags_of, guesses
from telemetry.settings import Root, ServeCommand, parse


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["serve", "--server.prot", "1"], ["--server.prot: no such flag; did you mean --server.port?"]),
        (["serve", "--port=80"], ["--port: no such flag; did you mean --server.port?"]),
        (
            ["serve", "--max_running_requests", "3"],
            ["--max_running_requests: no such flag; did you mean --scheduler.max-running-requests?"],
        ),
        (["explain", "--jsn", "a", "b"], ["--jsn: no such flag; did you mean --json?"]),
        (["serve", "--zzzz", "1"], []),
        (["serve", "--server.port", "1"], []),
        (["explain", "a", "--", "--jsn"], []),
        (["nix", "--json"], []),
        ([], []),
    ],
)
def test_what_was_meant(words: list[str], told: list[str]) -> None:
    assert guesses(Root, words) == told


def test_the_status_is_that_of_bad_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(["serve", "--server.prot", "1"])
    assert ended.value.code == 2
    assert capsys.readouterr().err.endswith("did you mean --server.port?\n")


def test_every_flag_of_the_help_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["serve", "--help"])
    words = {word.strip("[]{},;") for word in capsys.readouterr().out.split()}
    known = set(flags_of(ServeCommand))
    assert len(known) > 50
    missing = {word for word in words if word.startswith("--")} - known
    assert missing == {"--help"}
