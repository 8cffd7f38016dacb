"""Steps through a recording: in any order, and whoever stands ready, answers are of the step that was asked for."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from telemetry import recorded
from telemetry.read_model import ReadModel
from telemetry.recorded import RecordedSource, Recording
from telemetry.recorded_states import RecordedClock
from telemetry.recorded_steps import RecordedSteps

JOURNAL = Path(__file__).parent / "data" / "cookbook.jsonl.gz"


@pytest.fixture(scope="module")
def recording() -> Recording:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(recorded, "SPACING", 300)
        return Recording(JOURNAL, in_background=False)


def told(source: RecordedSource) -> list[str]:
    return [each.model_dump_json() for each in (source.status(), source.queue(), source.requests(), source.pages())]


def test_every_answer_is_of_the_step_that_was_asked_for(recording: Recording) -> None:
    steps, alone = RecordedSteps(recording), RecordedSource(recording)
    rng, index = random.Random(4), 400
    for _ in range(60):
        index = min(max(index + rng.choice((-1, -1, -1, 1, 2, -7, 90, -200, 0)), 0), 854)
        moment = recording.moment(index)
        alone.seek(moment)
        source = steps.at(moment)
        assert source.moment == moment
        assert told(source) == told(alone)
    steps.close()


def test_a_second_step_back_reads_no_kept_state_by_itself(
    recording: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    readers: list[str] = []
    read: Callable[[int, RecordedClock], tuple[int, ReadModel]] = recording.model_before

    def seen(events: int, clock: RecordedClock) -> tuple[int, ReadModel]:
        readers.append(threading.current_thread().name)
        return read(events, clock)

    monkeypatch.setattr(recording, "model_before", seen)
    steps = RecordedSteps(recording)
    own = threading.current_thread().name
    for index in (500, 499, 498, 497, 496):
        steps.at(recording.moment(index))
    assert readers.count(own) == 2, "to get there, and for the first step back"
    assert {name for name in readers if name != own} == {"step-back_0"}
    steps.at(recording.moment(497))
    assert readers.count(own) == 2, "forward it only folds"
    steps.close()


def test_before_the_first_step_there_is_nothing_to_prepare(recording: Recording) -> None:
    steps = RecordedSteps(recording)
    for index in (2, 1, 0, 0):
        assert steps.at(recording.moment(index)).moment == recording.moment(index)
    steps.close()
