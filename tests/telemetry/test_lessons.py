"""Lessons: the real scheduler tells them, every number of a formula adds up, and they are the same in every run."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest

from engine.scheduler.decision import VERDICTS
from telemetry.lessons.load import built_in
from telemetry.lessons.model import Lesson
from telemetry.lessons.moment import Moment, Text
from telemetry.lessons.play import Story, play
from telemetry.lessons.words import _SENTENCES
from tests.golden.test_worked_example import FCFS, SHORTEST_FIRST

LESSONS = {lesson.id: lesson for lesson in built_in()}

every_lesson = pytest.mark.parametrize("lesson", LESSONS.values(), ids=LESSONS)


@pytest.fixture(scope="module")
def stories() -> dict[str, Story]:
    return {name: play(lesson) for name, lesson in LESSONS.items()}


def of_kind(story: Story, kind: str) -> list[Moment]:
    return [moment for moment in story.moments if moment.kind == kind]


def test_the_seven_lessons_are_there_in_their_order() -> None:
    assert list(LESSONS) == [
        "four-requests",
        "three-chunks",
        "shared-prefix",
        "long-among-decodes",
        "overcommit",
        "starvation",
        "lock-and-eviction",
    ]


@every_lesson
def test_a_lesson_is_the_same_in_every_run(lesson: Lesson, stories: dict[str, Story]) -> None:
    assert play(lesson) == stories[lesson.id]


@every_lesson
def test_every_moment_is_told_in_both_languages(lesson: Lesson, stories: dict[str, Story]) -> None:
    for place, moment in enumerate(stories[lesson.id].moments):
        assert moment.index == place
        assert moment.sentences
        for text in (moment.title, *moment.sentences):
            assert text.en.strip()
            assert re.search(r"[\u4e00-\u9fff]", text.zh), text


@every_lesson
def test_every_note_of_a_lesson_is_said(lesson: Lesson, stories: dict[str, Story]) -> None:
    said = {moment.note.en for moment in stories[lesson.id].moments if moment.note is not None}
    assert said == {note.say.text.en for note in lesson.note}


@every_lesson
def test_the_answer_of_a_question_is_what_was_decided(lesson: Lesson, stories: dict[str, Story]) -> None:
    asked = [moment for moment in stories[lesson.id].moments if moment.question is not None]
    assert len(asked) >= 3
    for moment in asked:
        question = moment.question
        assert question is not None
        keys = [option.key for option in question.options]
        assert len(set(keys)) == len(keys) >= 2
        assert question.answer in keys
        match moment.kind:
            case "admission" | "refusal" | "end":
                assert question.answer == moment.reason
            case "continuation":
                assert moment.decided.split()[-1] == question.answer
            case "order" | "eviction" | "growth":
                assert moment.decided.startswith(question.answer)
            case "retraction" | "look":
                assert question.answer == moment.rid


@every_lesson
def test_pages_add_up_and_reasons_are_the_engines_own(lesson: Lesson, stories: dict[str, Story]) -> None:
    known = {reason.value for reason in VERDICTS} | {"kv_pool_exhausted"}
    for moment in stories[lesson.id].moments:
        assert len(moment.state.pages) == lesson.engine.pages
        assert all((page.state == "free") == (page.owner == "") for page in moment.state.pages)
        assert moment.reason is None or moment.reason in known


def _value(expression: str) -> float:
    """The sum of a formula's right side. `ceil16(extend 80) 80` counts as what stands after it."""
    text = re.sub(r"(?:ceil|floor)\d+\([^)]*\)\s*", "", expression)
    text = re.sub(r"\b(?!min\b)[A-Za-z_]+[A-Za-z_ ]*?(?= -?[\d.(])", "", text).replace("×", "*")
    assert re.fullmatch(r"[\d\s.+*()\-,/min]*", text), text
    return float(eval(text, {"__builtins__": {}, "min": min}))


@every_lesson
def test_the_terms_of_a_formula_come_out_at_its_result(lesson: Lesson, stories: dict[str, Story]) -> None:
    checked = 0
    for moment in stories[lesson.id].moments:
        for formula in moment.formulas:
            parts = formula.text.split(" = ")
            if len(parts) != 3 or "min(" in parts[1]:
                continue
            # The new-token ratio is shown with four figures.
            assert _value(parts[1]) == pytest.approx(float(parts[2]), rel=1e-3, abs=0.05), formula.text
            checked += 1
    assert checked > 10


@every_lesson
def test_no_built_in_lesson_shows_a_result_without_its_terms(lesson: Lesson, stories: dict[str, Story]) -> None:
    bare = [
        formula.text
        for moment in stories[lesson.id].moments
        for formula in moment.formulas
        if re.fullmatch(r"(promised|need|extend|rem_\w+|remaining_\w+|ratio) = -?[\d.]+", formula.text)
    ]
    assert bare == []


def _golden_numbers(step: str) -> list[tuple[str, int, int, int, str, list[float]]]:
    """(rid, has, wants, gets, reason, ledgers after) of each decision of one golden step."""
    found = []
    lines = step.strip().splitlines()
    for line, ledgers in pairwise(lines):
        decided = re.match(r"(\w+) +has (\d+), wants (\d+), gets (\d+): (\w+)", line)
        if decided:
            after = [float(part.split("->")[-1].split()[-1]) for part in ledgers.strip().split(", ")]
            rid, has, wants, gets, reason = decided.groups()
            found.append((rid, int(has), int(wants), int(gets), reason, after))
    return found


def _told_numbers(story: Story, step: int) -> list[tuple[str, str, list[float]]]:
    """(rid, what was decided, ledgers after) of each decision that a lesson told of one step."""
    order = {"rem_input": 0, "rem_chunk": 1, "remaining_total": 2, "remaining_current": 3}
    told = []
    for moment in story.moments:
        if moment.step == step and moment.kind in {"continuation", "admission", "refusal"}:
            left = sorted((order[bar.name], bar.left) for bar in moment.state.ledgers)
            assert moment.rid is not None
            told.append((moment.rid, moment.decided, [value for _, value in left if value is not None]))
    return told


@pytest.mark.parametrize(("policy", "golden"), [("fcfs", FCFS), ("shortest-prefill-first", SHORTEST_FIRST)])
def test_the_worked_example_is_the_golden_one(policy: str, golden: list[str]) -> None:
    story = play(LESSONS["four-requests"], {"schedule_policy": policy})
    for step, text in enumerate(golden, 1):
        expected = [
            (rid, f"{reason} {gets}", pytest.approx(after, abs=1e-6))
            for rid, _, _, gets, reason, after in _golden_numbers(text)
        ]
        assert _told_numbers(story, step) == expected


def test_one_prompt_in_three_chunks_yields_a_token_only_at_its_end(stories: dict[str, Story]) -> None:
    pieces = [piece for piece in stories["three-chunks"].moments[-1].state.pieces if piece.kind == "prefill"]
    assert [(piece.start, piece.end) for piece in pieces] == [(0, 96), (96, 192), (192, 240)]
    assert stories["three-chunks"].outcomes[0].first_token == 3


def test_the_second_of_two_finds_the_prefix_cached(stories: dict[str, Story]) -> None:
    outcomes = {outcome.rid: outcome for outcome in stories["shared-prefix"].outcomes}
    assert (outcomes["A"].cached, outcomes["B"].cached, outcomes["B"].computed) == (0, 64, 16)
    cold = {outcome.rid: outcome for outcome in play(LESSONS["shared-prefix"], {"enable_radix": False}).outcomes}
    assert cold["B"].cached == 0


def test_decodes_ride_along_with_each_chunk_of_a_long_prompt(stories: dict[str, Story]) -> None:
    def steps_of(story: Story, rid: str) -> int:
        return sum(piece.steps for piece in story.moments[-1].state.pieces if piece.rid == rid)

    mixed = stories["long-among-decodes"]
    apart = play(LESSONS["long-among-decodes"], {"enable_mixed_chunk": False})
    assert steps_of(mixed, "x") == 10
    assert steps_of(apart, "x") == 10 - 4


def test_over_commit_ends_in_a_retraction_and_a_higher_ratio_prevents_it(stories: dict[str, Story]) -> None:
    assert [moment.rid for moment in of_kind(stories["overcommit"], "retraction")] == ["C"]
    assert all(outcome.finished for outcome in stories["overcommit"].outcomes)
    careful = play(LESSONS["overcommit"], {"schedule_conservativeness": 1.0})
    assert of_kind(careful, "retraction") == []


def test_aging_ends_starvation(stories: dict[str, Story]) -> None:
    aged = {outcome.rid: outcome for outcome in stories["starvation"].outcomes}
    starved = {outcome.rid: outcome for outcome in play(LESSONS["starvation"], {"max_overtakes": "off"}).outcomes}
    assert aged["L"].admitted == 5
    assert starved["L"].admitted in (None, 9)


def test_the_oldest_node_stays_because_it_is_locked(stories: dict[str, Story]) -> None:
    first = of_kind(stories["lock-and-eviction"], "eviction")[0]
    assert first.decided == "middle 4"
    assert any("old+R is older, but locked" in sentence.en for sentence in first.sentences)


def test_quiet_steps_are_one_moment(stories: dict[str, Story]) -> None:
    quiet = of_kind(stories["overcommit"], "quiet")
    assert any("Steps 10 to 21" in moment.sentences[0].en for moment in quiet)
    pieces = stories["overcommit"].moments[-1].state.pieces
    assert sum(piece.steps for piece in pieces if piece.rid == "A" and piece.kind == "decode") == 59


def test_the_sentences_have_the_same_places_in_both_languages() -> None:
    def places(text: str) -> set[str]:
        return set(re.findall(r"{(\w+)}", text))

    wrong = [key for key, text in _SENTENCES.items() if not places(text.zh) <= places(text.en)]
    assert wrong == []
    assert all(isinstance(text, Text) for text in _SENTENCES.values())
