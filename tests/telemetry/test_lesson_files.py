"""Lesson files: what a teacher may write, and that everything else is refused by field, value and limit."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from telemetry.cli import main
from telemetry.lessons.command import LessonCommand
from telemetry.lessons.load import LessonError, built_in, changed, parse_lesson, read_folder, read_lesson
from telemetry.lessons.model import Lesson
from telemetry.lessons.moment import Moment
from telemetry.lessons.outcome import compare
from telemetry.lessons.play import play
from telemetry.lessons.terminal import changes_of, moment_text, run_lesson, value_of

TEACHING = Path(__file__).resolve().parents[2] / "docs" / "teaching.md"

SMALL = """
id = "small"
[title]
en = "Small"
[about]
zh-CN = "只有中文"
[engine]
pool_tokens = 256
[[request]]
rid = "A"
prompt = 40
max_new = 4
"""


def parsed(text: str) -> str:
    """The error of a file."""
    with pytest.raises(LessonError) as raised:
        parse_lesson(text.encode(), source="x.toml")
    return str(raised.value)


def test_a_small_file_is_a_lesson() -> None:
    lesson = parse_lesson(SMALL.encode(), source="x.toml")
    story = play(lesson)
    assert story.outcomes[0].finished == 4
    assert story.moments[0].sentences[0] == ("只有中文", "只有中文")


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("prompt = 40", "prompt = 0", "x.toml: request[1].prompt: Input should be greater than or equal to 1; got 0"),
        ("prompt = 40", 'prompt = "40"', "x.toml: request[1].prompt: Input should be a valid integer; got '40'"),
        (
            "max_new = 4",
            "max_new = 4\nmax_old = 1",
            "x.toml: request[1].max_old: Extra inputs are not permitted; got 1",
        ),
        ("max_new = 4", "max_new = 4\noutputs = 9", "outputs is 9; it may be at most max_new=4"),
        ("max_new = 4", 'max_new = 4\nprefix = "p"', "request A: prefix 'p' is not among []"),
        ("max_new = 4", "max_new = 4\nalready = 4", "already is 4; it must be below the 4 outputs"),
        ('en = "Small"', "", "x.toml: title: a text needs `en`, `zh-CN`, or both"),
        ("pool_tokens = 256", "pool_tokens = 16", "is 1 pages; 2 to 4096 are possible"),
        ("pool_tokens = 256", "page_size = 0", "x.toml: engine.page_size: Input should be greater than or equal to 1"),
        (
            "pool_tokens = 256",
            "chunked_prefill_size = 8",
            "scheduler.chunked_prefill_size=8 is below cache.page_size=16",
        ),
        ("pool_tokens = 256", 'schedule_policy = "best"', "engine.schedule_policy is 'best'; one of ['fcfs', 'lpm'"),
        ('id = "small"', "", "x.toml: id: Field required"),
        ('id = "small"', 'id = "no spaces"', "x.toml: id: String should match pattern"),
        ('id = "small"', 'id = "small', "x.toml: Illegal character"),
    ],
)
def test_a_fault_is_named_with_field_value_and_limit(old: str, new: str, expected: str) -> None:
    assert expected in parsed(SMALL.replace(old, new))


def test_two_of_one_name_are_refused() -> None:
    twice = SMALL + '[[request]]\nrid = "A"\nprompt = 1\nmax_new = 1\n'
    assert "the name 'A' is given to 2 requests or prefixes; one may have it" in parsed(twice)


def test_a_parameter_is_a_setting_that_the_engine_takes() -> None:
    assert "parameter 'colour' is no field of [engine]" in parsed(
        SMALL + '[[parameter]]\nname = "colour"\nvalues = [1]\n'
    )
    wrong = SMALL + '[[parameter]]\nname = "page_size"\nvalues = [32, 4096]\n'
    assert "parameter page_size: engine.page_size: Input should be less than or equal to 1024; got 4096" in parsed(
        wrong
    )


def test_all_faults_of_a_file_are_told_at_once() -> None:
    lines = parsed(SMALL.replace("prompt = 40", "prompt = 0").replace("max_new = 4", "max_new = -1")).splitlines()
    assert len(lines) == 2


def test_a_file_that_is_none_is_told_apart(tmp_path: Path) -> None:
    with pytest.raises(LessonError, match="No such file"):
        read_lesson(tmp_path / "none.toml")
    (tmp_path / "big.toml").write_bytes(b"#" * 300_000)
    with pytest.raises(LessonError, match=r"300000 bytes; a lesson file may have 65536"):
        read_lesson(tmp_path / "big.toml")
    (tmp_path / "odd.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(LessonError, match="byte 0 is not UTF-8"):
        read_lesson(tmp_path / "odd.toml")
    (tmp_path / "good.toml").write_text(SMALL, encoding="utf-8")
    lessons, faults = read_folder(tmp_path)
    assert [lesson.id for lesson in lessons] == ["small"]
    assert len(faults) == 2
    assert read_folder(tmp_path / "nowhere")[1] == [f"{tmp_path / 'nowhere'}: no such folder"]


def test_what_is_there_before_step_1_has_to_fit() -> None:
    running = SMALL.replace("max_new = 4", "max_new = 9\nalready = 2").replace("pool_tokens = 256", "pool_tokens = 32")
    with pytest.raises(LessonError, match=r"takes 3 pages of 16 tokens; engine\.pool_tokens=32 has 2"):
        play(parse_lesson(running.encode(), source="x.toml"))


def test_a_request_that_never_fits_is_turned_away_in_the_lesson() -> None:
    story = play(parse_lesson(SMALL.replace("prompt = 40", "prompt = 400").encode(), source="x.toml"))
    assert "A is turned away at the door" in story.moments[1].sentences[0].en


def test_a_changed_setting_is_compared_decision_by_decision() -> None:
    lesson = next(lesson for lesson in built_in() if lesson.id == "three-chunks")
    before, after = play(lesson), play(lesson, {"chunked_prefill_size": 128})
    found = compare((before.moments, before.outcomes), (after.moments, after.outcomes))
    first = found.first[0], found.first[1]
    assert [moment.decided if moment else None for moment in first] == [
        "admitted_first_chunk 96",
        "admitted_first_chunk 128",
    ]
    assert ("P", "first_token", 3, 2) in [
        (change.rid, change.field, change.before, change.after) for change in found.changes
    ]
    assert compare((before.moments, before.outcomes), (before.moments, before.outcomes)).is_same
    with pytest.raises(LessonError, match="'speed' is no field of"):
        changed(lesson, {"speed": 1})


@pytest.mark.parametrize("lesson", built_in(), ids=lambda lesson: lesson.id)
def test_every_offered_setting_can_be_played(lesson: Lesson) -> None:
    for parameter in lesson.parameter:
        for value in parameter.values:
            story = play(lesson, {parameter.name: value})
            assert len(story.moments) > 3


def _answers(*said: str) -> Iterator[str]:
    yield from said


def _session(lesson: str, *said: str, lang: str = "en", **more: object) -> str:
    """What a terminal shows when a person types `said`."""
    answers, out = _answers(*said), io.StringIO()

    def read(_prompt: str) -> str:
        try:
            return next(answers)
        except StopIteration as error:
            raise EOFError from error

    command = LessonCommand.model_validate({"lesson": lesson, "lang": lang, **more})
    assert run_lesson(command, read=read, out=out, is_interactive=True) == 0
    return out.getvalue()


def headings(text: str) -> list[tuple[str, str]]:
    return re.findall(r"^── (\d+)/\d+ · step \d+ · (.*)$", text, re.MULTILINE)


def test_back_after_forward_shows_the_same_moment() -> None:
    shown = _session("four-requests", "", "", "", "b", "b")
    assert [int(place) for place, _ in headings(shown)] == [0, 1, 2, 3, 2, 1]
    moments = shown.split("── ")[1:]
    assert moments[1] == moments[5]
    assert moments[2] == moments[4]
    assert [int(place) for place, _ in headings(_session("four-requests", "b", "999", "", "7", "q", ""))] == [
        0, 0, 34, 34, 7,
    ]  # fmt: skip


def test_a_prediction_is_checked_against_the_scheduler() -> None:
    story = play(built_in()[0])
    moment: Moment = story.moments[5]
    assert moment.question is not None
    right = [option.key for option in moment.question.options].index("admitted_first_chunk") + 1
    wrong = right % len(moment.question.options) + 1
    assert "Right.\n── 5/34" in _session("four-requests", "4", "p", str(right))
    assert "No: admitted, first chunk only (admitted_first_chunk)\n── 5/34" in _session(
        "four-requests", "4", "p", str(wrong)
    )
    assert "Nothing is decided in the next moment." in _session("four-requests", "p")


def test_a_lesson_is_told_in_chinese() -> None:
    shown = _session("four-requests", "", lang="zh-CN")
    assert "请求到达" in shown
    assert "进入队列" in shown


def test_the_command_lists_checks_and_prints(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert main(["lesson"]) == 0
    assert "four-requests" in capsys.readouterr().out
    assert main(["lesson", "four-requests", "--check"]) == 0
    assert capsys.readouterr().out == "four-requests: 35 moments in 4 steps\n"
    assert main(["lesson", "three-chunks", "--set", "chunked_prefill_size=128"]) == 0
    out = capsys.readouterr().out
    assert "P first_token: 3 -> 2" in out
    assert "need 276 < have 512" in out
    assert main(["lesson", "nothing"]) == 2
    assert "'nothing' is no file, and none of the lessons four-requests," in capsys.readouterr().err
    assert main(["lesson", "three-chunks", "--set", "speed=1"]) == 2
    assert "--set speed=1: NAME=VALUE is expected" in capsys.readouterr().err


def test_values_of_the_command_line_are_those_of_a_file() -> None:
    assert [value_of(text) for text in ("1", "1.5", "true", "off", "nan")] == [1, 1.5, True, "off", "nan"]
    assert changes_of(("page_size=32", "chunked_prefill_size=off")) == {"page_size": 32, "chunked_prefill_size": "off"}


def test_the_example_of_the_teaching_page_is_a_lesson() -> None:
    blocks = re.findall(r"```toml\n(.*?)```", TEACHING.read_text(encoding="utf-8"), re.DOTALL)
    whole = [block for block in blocks if block.startswith('id = "')]
    assert len(whole) == 1
    story = play(parse_lesson(whole[0].encode(), source="docs/teaching.md"))
    assert all(outcome.finished for outcome in story.outcomes)
    said = [moment.note.en for moment in story.moments if moment.note is not None]
    assert len(said) == len(story.lesson.note)
    assert moment_text(story.moments[0], "en", total=1).startswith("── 0/0 · step 0 · The situation")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (".".join(["a"] * 900) + " = 1", "line 1: 899 dots in a key; 8 are possible"),
        (" . ".join(['"a"'] * 300) + " = 1", "line 1: 299 dots in a key; 8 are possible"),
        ("[" + ".".join(["a"] * 900) + "]", "line 1: 899 dots in a key; 8 are possible"),
        ("steps = " + "9" * 1_900, "line 1: 1900 digits of a number"),
        ("steps = 0x" + "f" * 1_900, "line 1: 1902 digits of a number"),
        ("steps = " + "9" * 5_000, "line 1: 5008 characters; 2000 are possible"),
        ("a = " + "[" * 1_900, "line 1: 9 open brackets; 8 are possible"),
        ("a = " + "[\n" * 2_000, "line 9: 9 open brackets; 8 are possible"),
        ("a = " + "{a = " * 300, "line 1: 9 open brackets; 8 are possible"),
        ("a = {b = '''\n\" ''', " + ".".join(["a"] * 900) + '=1, c = "x"}', "line 2: 899 dots in a row of words"),
        ("a=1\n" * 5_000, "5000 lines that are not blank; 4000 are possible"),
    ],
)
def test_a_small_file_that_would_take_all_memory_is_refused_before_it_is_parsed(text: str, expected: str) -> None:
    assert f"x.toml: {expected}" in parsed(text)


def test_dots_and_digits_of_a_text_are_no_keys() -> None:
    told = SMALL.replace('en = "Small"', f'en = "Small {"a.b" * 30}"')
    assert parse_lesson(told.encode(), source="x.toml").id == "small"


def test_a_folder_with_a_device_and_with_odd_files_lists_them_as_faults(tmp_path: Path) -> None:
    (tmp_path / "device.toml").symlink_to("/dev/zero")
    (tmp_path / "digits.toml").write_text("steps = " + "9" * 3_000)
    (tmp_path / "nested.toml").write_text("a = " + "[" * 3_000)
    (tmp_path / "good.toml").write_text(SMALL, encoding="utf-8")
    lessons, faults = read_folder(tmp_path)
    assert [lesson.id for lesson in lessons] == ["small"]
    assert [fault.split(":")[0].rpartition("/")[2] for fault in faults] == ["device.toml", "digits.toml", "nested.toml"]
    assert "is no file" in faults[0]
