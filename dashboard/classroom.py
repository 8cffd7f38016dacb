"""What the classroom shows. Owns: which lessons there are, the story of a lesson under changed settings, and links.

No Streamlit here. A story is played once per process and setting: stepping through it costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Final

from dashboard.theme import Palette
from telemetry.lessons.load import LessonError, built_in, read_folder
from telemetry.lessons.model import Lesson
from telemetry.lessons.outcome import Comparison, compare
from telemetry.lessons.play import Story, play
from telemetry.lessons.terminal import value_of

#: Changes as they stand in an address, hashable.
Changes = tuple[tuple[str, object], ...]

#: Requests beyond this many that run before step 1 are one row of the timeline.
_SHOWN_RUNNING: Final = 3


def lessons_of(folder: Path | None, own: Sequence[Lesson] = ()) -> tuple[dict[str, Lesson], list[str]]:
    """Lessons by id, and a line for each file of `folder` that cannot be read. A teacher's own come first."""
    found, faults = ([], []) if folder is None else read_folder(folder)
    lessons: dict[str, Lesson] = {}
    for lesson in [*own, *found, *built_in()]:
        lessons.setdefault(lesson.id, lesson)
    return lessons, faults


@lru_cache(maxsize=64)
def _played(lesson: Lesson, changes: Changes) -> Story:
    return play(lesson, dict(changes))


def story_of(lesson: Lesson, changes: Changes) -> Story:
    """The lesson, played. Raises LessonError where the engine refuses the changes."""
    return _played(lesson, changes)


def difference_of(lesson: Lesson, changes: Changes) -> Comparison:
    """What the changes change."""
    before, after = story_of(lesson, ()), story_of(lesson, changes)
    return compare((before.moments, before.outcomes), (after.moments, after.outcomes))


def changes_from(text: str, lesson: Lesson) -> Changes:
    """Changes as an address says them, `page_size=32,schedule_policy=lpm`: those that the lesson offers.

    Raises ValueError for anything else; links come from strangers.
    """
    offered = {parameter.name: parameter.values for parameter in lesson.parameter}
    changes: dict[str, object] = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        if value_of(value) not in offered.get(name, ()):
            raise ValueError(f"{part!r} is nothing that lesson {lesson.id} offers")
        changes[name] = value_of(value)
    return tuple(changes.items())


def changes_text(changes: Mapping[str, object]) -> str | None:
    """The same for an address; None when nothing is changed."""
    return ",".join(f"{name}={_as_toml(value)}" for name, value in changes.items()) or None


def _as_toml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def value_text(value: object) -> str:
    """A setting's value as a person reads it in a file."""
    return _as_toml(value)


def lanes_of(lesson: Lesson) -> dict[str, str]:
    """Request to the row of the timeline that shows it: many that run before step 1 share one."""
    running = [request.rid for request in lesson.request if request.already]
    shared = f"{running[0]}…{running[-1]}" if len(running) > _SHOWN_RUNNING else None
    return {
        request.rid: shared if shared is not None and request.already else request.rid for request in lesson.request
    }


def owner_colours(lesson: Lesson, colours: Palette) -> dict[str, str]:
    """A colour for each request and prefix, the same in every moment: who waits and what is shared come first."""
    lanes = lanes_of(lesson)
    alone = [rid for rid, lane in lanes.items() if rid == lane]
    named = [*alone, *(prefix.name for prefix in lesson.prefix)]
    found = dict(zip(named, _around(colours.owners, len(named)), strict=True))
    return {rid: found.get(rid, colours.segments["decode rows"]) for rid in [*lanes, *found]}


def _around(colours: Sequence[str], count: int) -> Iterable[str]:
    return [colours[place % len(colours)] for place in range(count)]


__all__ = [
    "Changes",
    "LessonError",
    "changes_from",
    "changes_text",
    "difference_of",
    "lanes_of",
    "lessons_of",
    "owner_colours",
    "story_of",
    "value_text",
]
