"""A lesson in a terminal. Owns: `admitscope lesson`: listing, stepping, predicting, and a moment as text."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Final, TextIO

from telemetry.lessons.command import LessonCommand
from telemetry.lessons.load import LessonError, built_in, read_lesson
from telemetry.lessons.model import Engine, Lesson
from telemetry.lessons.moment import LedgerBar, Moment, Question, State, Text
from telemetry.lessons.outcome import Comparison, compare
from telemetry.lessons.play import Story, play
from telemetry.lessons.words import number

_BAR: Final = 32
_PAGES_A_LINE: Final = 64
_HINT: Final = Text(
    "Enter: next   b: back   p: predict   number: go there   q: quit",
    "回车：下一步   b：上一步   p：预测   数字：跳到该处   q：退出",
)
_RIGHT: Final = Text("Right.", "正确。")
_WRONG: Final = Text("No: ", "不对：")
_NO_QUESTION: Final = Text("Nothing is decided in the next moment.", "下一个时刻没有什么要决定。")
_WHICH: Final = Text("number of your answer: ", "你的答案（数字）：")
_SAME: Final = Text("Nothing changed.", "没有变化。")
_FIRST: Final = Text("first decision that differs", "第一个不同的决定")
#: One letter a state, for the strip of pages; small letters would be names of requests.
_STATE_MARKS: Final = {"free": "·", "private": "P", "protected": "L", "evictable": "e"}


def run_lesson(command: LessonCommand, *, read: Callable[[str], str], out: TextIO, is_interactive: bool) -> int:
    """List lessons, or play one. Raises LessonError. Without a person in front of it, all moments are printed."""
    if command.lesson is None:
        for lesson in built_in():
            print(f"{lesson.id:22}{lesson.title.text.say(command.lang)}", file=out)
        return 0
    lesson = find_lesson(command.lesson)
    changes = changes_of(command.set)
    story = play(lesson, changes)
    if command.check:
        print(f"{lesson.id}: {len(story.moments)} moments in {story.moments[-1].step} steps", file=out)
        return 0
    if changes:
        before = play(lesson)
        difference = compare((before.moments, before.outcomes), (story.moments, story.outcomes))
        print(comparison_text(difference, command.lang), file=out)
    if command.all or not is_interactive:
        for moment in story.moments:
            print(moment_text(moment, command.lang, total=len(story.moments)), file=out)
        return 0
    _step_through(story, command.lang, read, out)
    return 0


def find_lesson(name: str) -> Lesson:
    """A built-in lesson by its id, else the one in a file."""
    for lesson in built_in():
        if lesson.id == name:
            return lesson
    path = Path(name)
    if not path.suffix and not path.exists():
        raise LessonError(f"{name!r} is no file, and none of the lessons {', '.join(each.id for each in built_in())}")
    return read_lesson(path)


def changes_of(settings: tuple[str, ...]) -> dict[str, object]:
    """`page_size=32` as a change of [engine]. Raises LessonError where a word is no NAME=VALUE."""
    changes: dict[str, object] = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not equals or name not in Engine.model_fields:
            raise LessonError(f"--set {setting}: NAME=VALUE is expected, NAME one of {', '.join(Engine.model_fields)}")
        changes[name] = value_of(text)
    return changes


def value_of(text: str) -> object:
    """A value as TOML would read it: a number, true or false, else a word."""
    if text in {"true", "false"}:
        return text == "true"
    for kind in (int, float):
        try:
            value = kind(text)
        except ValueError:
            continue
        if math.isfinite(value):
            return value
    return text


def _step_through(story: Story, lang: str, read: Callable[[str], str], out: TextIO) -> None:
    at, moments = 0, story.moments
    print(_HINT.say(lang), file=out)
    print(moment_text(moments[at], lang, total=len(moments)), file=out)
    while True:
        try:
            said = read("> ").strip().lower()
        except EOFError:
            return
        if said in {"q", "quit"}:
            return
        if said == "p":
            upcoming = moments[at + 1].question if at + 1 < len(moments) else None
            if upcoming is None:
                print(_NO_QUESTION.say(lang), file=out)
                continue
            print(_predicted(upcoming, lang, read, out), file=out)
            at += 1
        elif said == "b":
            at = max(0, at - 1)
        elif said.isdigit():
            at = min(max(int(said), 0), len(moments) - 1)
        else:
            at = min(at + 1, len(moments) - 1)
        print(moment_text(moments[at], lang, total=len(moments)), file=out)


def _predicted(question: Question, lang: str, read: Callable[[str], str], out: TextIO) -> str:
    """Ask, and say whether the answer is the scheduler's."""
    print(question.text.say(lang), file=out)
    for place, option in enumerate(question.options, 1):
        print(f"  {place}  {option.text.say(lang)}", file=out)
    said = read(_WHICH.say(lang)).strip()
    right = next(option for option in question.options if option.key == question.answer)
    if said.isdigit() and 0 < int(said) <= len(question.options) and question.options[int(said) - 1] is right:
        return _RIGHT.say(lang)
    return f"{_WRONG.say(lang)}{right.text.say(lang)}"


def moment_text(moment: Moment, lang: str, *, total: int) -> str:
    """One moment: heading, sentences, formulas, then the picture of the state."""
    lines = [f"── {moment.index}/{total - 1} · step {moment.step} · {moment.title.say(lang)}"]
    lines += [f"   {sentence.say(lang)}" for sentence in moment.sentences]
    lines += [f"     {formula.text}" for formula in moment.formulas]
    if moment.note is not None:
        lines.append(f"   » {moment.note.say(lang)}")
    return "\n".join([*lines, *_picture(moment.state)])


def _picture(state: State) -> list[str]:
    lines = [_bar_text(bar) for bar in state.ledgers]
    if state.queue:
        lines.append("   waiting  " + " ".join(row.rid for row in state.queue))
    if state.running:
        lines.append(
            "   running  " + " ".join(f"{row.rid}:{row.computed_len}+{row.output_len}" for row in state.running)
        )
    marks = "".join(_STATE_MARKS.get(page.state, "?") for page in state.pages)
    rows = [marks[start : start + _PAGES_A_LINE] for start in range(0, len(marks), _PAGES_A_LINE)]
    return lines + [f"   {'pages' if not place else '':9}{row}" for place, row in enumerate(rows)]


def _bar_text(bar: LedgerBar) -> str:
    left = bar.left or 0.0
    share = 0.0 if not bar.limit else min(1.0, max(0.0, left / bar.limit))
    full = round(share * _BAR)
    limit = "" if bar.limit is None else f" of {number(bar.limit)}"
    asks = "" if bar.need is None or bar.have is None else f"   need {number(bar.need)}, have {number(bar.have)}"
    return f"   {bar.name:18}{'█' * full}{'░' * (_BAR - full)} {number(left)}{limit} tok left{asks}"


def comparison_text(difference: Comparison, lang: str) -> str:
    """What a changed setting changed."""
    if difference.is_same:
        return _SAME.say(lang)
    lines = [f"{change.rid} {change.field}: {change.before} -> {change.after}" for change in difference.changes]
    for side, moment in zip(("-", "+"), difference.first, strict=True):
        if moment is not None:
            heading = f"{side} {_FIRST.say(lang)}: step {moment.step}, {moment.title.say(lang)}"
            lines += [heading, *(f"    {sentence.say(lang)}" for sentence in moment.sentences)]
    return "\n".join(lines)
