"""The command line of lessons. Owns: the words of `admitscope lesson`."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field
from pydantic_settings import CliPositionalArg

from telemetry.words import ENGLISH, TypedLang


class LessonCommand(BaseModel):
    """Step through a lesson about admission, one decision of the real scheduler at a time. No model, no server.

    Without a lesson the built-in ones are listed. With a person in front of it: Enter is the next moment, b the one
    before, p asks for a prediction. Otherwise all moments are printed.

    examples:
      admitscope lesson                                   the built-in lessons
      admitscope lesson four-requests
      admitscope lesson four-requests --lang zh-CN --set schedule_policy=lpm
      admitscope lesson ./my-lesson.toml --check          docs/teaching.md says how to write one
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    lesson: CliPositionalArg[str | None] = None
    """The id of a built-in lesson, or a lesson file."""
    lang: TypedLang = ENGLISH
    """Language of the sentences."""
    set: tuple[str, ...] = Field(default=())
    """NAME=VALUE: another setting of the lesson's [engine]; what it changes is said first. Repeatable."""
    all: bool = False
    """Print all moments at once."""
    check: bool = False
    """Only say whether the lesson can be played, and how long it is."""
