"""Finding and reading lesson files. Owns: the built-in ones, a teacher's own, and errors that name what is wrong."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from engine.errors import ConfigError
from telemetry.lessons.bounds import bound_toml
from telemetry.lessons.model import Engine, Lesson

#: Largest lesson file, in bytes: a lesson is a page of text.
MAX_FILE_BYTES: Final = 64 * 1024


class LessonError(ConfigError):
    """A lesson cannot be read, or asks for what the engine refuses. One line per fault."""


def parse_lesson(content: bytes, *, source: str) -> Lesson:
    """The lesson in `content`. Raises LessonError; `source` begins each line of it."""
    if len(content) > MAX_FILE_BYTES:
        raise LessonError(f"{source}: {len(content)} bytes; a lesson file may have {MAX_FILE_BYTES}")
    try:
        text = content.decode("utf-8")
        bound_toml(text)
        data = tomllib.loads(text)
    except UnicodeDecodeError as error:
        raise LessonError(f"{source}: byte {error.start} is not UTF-8") from error
    except ValueError as error:
        # Every fault of TOML and of its bounds is one, and what Python says to a number of thousands of digits.
        raise LessonError(f"{source}: {error}") from error
    except RecursionError as error:
        raise LessonError(f"{source}: brackets are nested too deeply") from error
    try:
        lesson = Lesson.model_validate(data)
    except ValidationError as error:
        raise LessonError("\n".join(f"{source}: {line}" for line in fault_lines(error))) from error
    check_settings(lesson, source=source)
    return lesson


def check_settings(lesson: Lesson, *, source: str) -> None:
    """Raise LessonError where the engine refuses the lesson's settings, or a parameter has a value of another type."""
    _configured(lesson.engine, source)
    for parameter in lesson.parameter:
        for value in parameter.values:
            changed(lesson, {parameter.name: value}, source=f"{source}: parameter {parameter.name}")


def changed(lesson: Lesson, changes: Mapping[str, object], *, source: str = "change") -> Lesson:
    """The lesson with other settings of [engine]. Raises LessonError."""
    unknown = sorted(set(changes) - set(Engine.model_fields))
    if unknown:
        raise LessonError(f"{source}: {unknown[0]!r} is no field of [engine]: {sorted(Engine.model_fields)}")
    try:
        engine = Engine.model_validate(lesson.engine.model_dump() | dict(changes))
    except ValidationError as error:
        raise LessonError("\n".join(f"{source}: engine.{line}" for line in fault_lines(error))) from error
    _configured(engine, source)
    return lesson.model_copy(update={"engine": engine})


def _configured(engine: Engine, source: str) -> None:
    try:
        engine.config()
    except ValidationError as error:
        raise LessonError("\n".join(f"{source}: engine.{line}" for line in fault_lines(error))) from error
    except ValueError as error:
        raise LessonError(f"{source}: {error}") from error


def fault_lines(error: ValidationError) -> list[str]:
    """One line per fault: field, limit, value."""
    lines = []
    faults = error.errors(include_url=False)
    for fault in faults:
        if fault["type"] == "too_short" and any(len(other["loc"]) > len(fault["loc"]) for other in faults):
            # A list is short of what was refused for itself.
            continue
        field = _path(fault["loc"])
        message = fault["msg"].removeprefix("Value error, ")
        value = fault["input"]
        named = isinstance(value, dict | list | tuple) or not field or fault["type"] == "value_error"
        lines.append(
            f"{field}: {message}" if named and field else message if named else f"{field}: {message}; got {value!r}"
        )
    return lines


def _path(place: Iterable[Any]) -> str:
    """request[2].prompt, counting from 1, as a person counts the tables of a file."""
    text = ""
    for part in place:
        if isinstance(part, int):
            text += f"[{part + 1}]"
        elif not (text and part in {"int", "float", "bool", "str"}) and not str(part).startswith("literal"):
            text += f".{part}" if text else str(part)
    return text


@cache
def built_in() -> tuple[Lesson, ...]:
    """The lessons that come with the package, in their order."""
    folder = files("telemetry.lessons") / "data"
    found = [
        parse_lesson(entry.read_bytes(), source=entry.name)
        for entry in folder.iterdir()
        if entry.name.endswith(".toml")
    ]
    return tuple(sorted(found, key=lambda lesson: (lesson.place, lesson.id)))


def read_lesson(path: Path) -> Lesson:
    """The lesson in a file. Raises LessonError."""
    try:
        if path.exists() and not path.is_file():
            raise LessonError(f"{path}: is no file")  # a device or a pipe would be read without end
        if path.stat().st_size > MAX_FILE_BYTES:
            raise LessonError(f"{path}: {path.stat().st_size} bytes; a lesson file may have {MAX_FILE_BYTES}")
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise LessonError(f"{path}: {error.strerror or error}") from error
    return parse_lesson(content, source=str(path))


def read_folder(folder: Path) -> tuple[list[Lesson], list[str]]:
    """The lessons of a folder's .toml files by place, and a line for each that cannot be read."""
    lessons: list[Lesson] = []
    faults: list[str] = []
    if not folder.is_dir():
        return [], [f"{folder}: no such folder"]
    for path in sorted(folder.glob("*.toml")):
        try:
            lessons.append(read_lesson(path))
        except LessonError as error:
            faults.extend(str(error).splitlines())
    return sorted(lessons, key=lambda lesson: (lesson.place, lesson.id)), faults
