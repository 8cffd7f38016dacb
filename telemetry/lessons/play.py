"""Playing a lesson. Owns: the loop over steps, and the list of moments that comes out of it.

Told from plans, events and pictures of the real core: nothing here decides anything.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from engine.errors import RequestRefused
from telemetry.lessons.load import LessonError, changed
from telemetry.lessons.model import Lesson, LessonRequest
from telemetry.lessons.moment import Moment
from telemetry.lessons.narrator import Narrator
from telemetry.lessons.outcome import Outcome
from telemetry.lessons.stage import Stage
from telemetry.lessons.tell_pass import tell_pass
from telemetry.lessons.tell_step import before_commit, tell_commit, tell_result

#: Moments of the longest lesson: who steps through more has lost the thread.
MAX_MOMENTS = 3_000


class Story(msgspec.Struct, frozen=True):
    """A lesson, played. `lesson` has the settings that it was played with."""

    lesson: Lesson
    moments: tuple[Moment, ...]
    outcomes: tuple[Outcome, ...]


def play(lesson: Lesson, changes: Mapping[str, object] | None = None) -> Story:
    """Play a lesson, with some of its settings changed. Raises LessonError for what the engine refuses."""
    if changes:
        lesson = changed(lesson, changes, source=f"lesson {lesson.id}")
    stage = Stage(lesson)
    narrator = Narrator(stage)
    narrator.start()
    for step in range(1, lesson.steps + 1):
        _one_step(stage, narrator, step)
        if stage.is_over:
            break
        if len(narrator.moments) > MAX_MOMENTS:
            raise LessonError(f"lesson {lesson.id}: more than {MAX_MOMENTS} moments by step {step}; use fewer steps")
    return Story(lesson, tuple(narrator.moments), stage.outcomes.all())


def _one_step(stage: Stage, narrator: Narrator, step: int) -> None:
    come: list[tuple[LessonRequest, RequestRefused | None]] = []
    for request in stage.arrivals(step):
        try:
            stage.arrive(request)
            come.append((request, None))
        except RequestRefused as error:
            come.append((request, error))
    narrator.begin_step(step)
    narrator.arrivals(come)
    stage.take_seen()
    before = narrator.queue()
    stage.prepare()
    stage.take_seen()
    plan = stage.plan()
    told = tell_pass(narrator, plan, before)
    picture = before_commit(narrator, plan)
    plan = stage.core.commit(plan)
    tell_commit(narrator, plan, told, picture)
    stage.finish_step(plan)
    tell_result(narrator, plan, told)
    narrator.merge_quiet()
