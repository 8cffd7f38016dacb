"""Places: which engines and journals a page may show, by command line and environment, and what they are called."""

from __future__ import annotations

from pathlib import Path

import pytest

from dashboard.places import DEFAULT_URL, MAX_OPENED, Opened, Place, Settings, settings_from


def engine(url: str, name: str) -> Place:
    return Place("engine", url, name)


ADDRESSES = [
    ([], {}, Settings((engine(DEFAULT_URL, "127.0.0.1:8000"),))),
    ([], {"ADMITSCOPE_URL": "http://h:1/", "ADMITSCOPE_API_KEY": "k"}, Settings((engine("http://h:1", "h:1"),), "k")),
    (["--url", "https://x"], {"ADMITSCOPE_URL": "http://h:1"}, Settings((engine("https://x", "x"),))),
    (["--other", "--url=http://y:2"], {"ADMITSCOPE_API_KEY": ""}, Settings((engine("http://y:2", "y:2"),))),
    (
        ["--url", "http://a", "--url", "http://b", "--url", "http://a/", "--url", "http://a/v1/"],
        {},
        Settings((engine("http://a", "a"), engine("http://b", "b"))),
    ),
    ([], {"ADMITSCOPE_URL": "http://a http://b"}, Settings((engine("http://a", "a"), engine("http://b", "b")))),
    (
        ["--journal", "/j/run.jsonl"],
        {"ADMITSCOPE_URL": "http://h"},
        Settings((Place("journal", "/j/run.jsonl", "run.jsonl"),)),
    ),
    (["--ttft-ms", "500", "--tbt-ms=80"], {}, Settings((engine(DEFAULT_URL, "127.0.0.1:8000"),), None, 0.5, 0.08)),
]


@pytest.mark.parametrize(("arguments", "environment", "expected"), ADDRESSES)
def test_the_command_line_is_stronger_than_the_environment(
    arguments: list[str], environment: dict[str, str], expected: Settings
) -> None:
    assert settings_from(arguments, environment) == expected


def test_places_with_one_short_name_are_told_apart() -> None:
    places = settings_from(
        ["--journal", "/a/run.jsonl", "--journal", "/b/run.jsonl", "--journal", "/b/x.jsonl"], {}
    ).places
    assert [place.name for place in places] == ["/a/run.jsonl", "/b/run.jsonl", "x.jsonl"]


@pytest.mark.parametrize("text", ["http://t/trace", "file:///{trace_id}", "{trace_id}", "https:///{trace_id}"])
def test_a_place_of_traces_is_an_http_address_with_room_for_the_id(text: str) -> None:
    assert settings_from(["--trace-url", "http://t:1/{trace_id}?ui=1"], {}).trace_url == "http://t:1/{trace_id}?ui=1"
    with pytest.raises(ValueError, match=r"--trace-url is .*with \{trace_id\} in it is expected"):
        settings_from(["--trace-url", text], {})


@pytest.mark.parametrize("text", ["0", "-5", "soon", "inf", "nan"])
def test_an_objective_is_milliseconds_above_zero(text: str) -> None:
    with pytest.raises(ValueError, match=r"--ttft-ms is .*; milliseconds above 0 are expected"):
        settings_from([f"--ttft-ms={text}"], {})


def test_opened_journals_are_bounded_and_the_oldest_goes() -> None:
    opened = Opened()
    for number in range(MAX_OPENED + 3):
        opened.add(Path(f"/j/{number}.jsonl"), f"run {number}")
    opened.add(Path("/j/again.jsonl"), f"run {MAX_OPENED}")
    assert len(opened.places()) == MAX_OPENED
    assert opened.places()[0].name == "run 3"
    assert opened.places()[-1] == Place("journal", "/j/again.jsonl", f"run {MAX_OPENED}")
