"""The classroom as a script and as pictures: it needs no engine, steps both ways, checks answers, and keeps links."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest

from dashboard import classroom, classroom_picture
from dashboard.places import settings_from
from dashboard.theme import DARK, LIGHT, contrast
from dashboard.words import CHINESE, ENGLISH, speak
from telemetry.lessons.load import built_in, parse_lesson
from telemetry.lessons.model import Lesson

APP = Path(__file__).resolve().parents[2] / "dashboard" / "app.py"
LESSONS = {lesson.id: lesson for lesson in built_in()}
FOUR = LESSONS["four-requests"]


@pytest.fixture(autouse=True)
def english() -> Iterator[None]:
    yield
    speak(ENGLISH)


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> AppTest:
    """The page with no engine behind it, in the classroom."""
    monkeypatch.setenv("ADMITSCOPE_URL", "http://127.0.0.1:9")
    at = AppTest.from_file(str(APP), default_timeout=120)
    at.query_params["view"] = "classroom"
    return at


def shown(at: AppTest, part: str = "moment") -> str:
    """The text of one part of the view."""
    found = [element.proto.body for element in at.get("html") if f'data-testid="{part}"' in element.proto.body]
    assert len(found) == 1, f"{part}: {len(found)}"
    return re.sub(r"<[^>]+>", " ", found[0])


def test_a_lesson_steps_forward_and_back_with_no_engine(page: AppTest) -> None:
    at = page.run()
    assert not at.exception
    assert "Eight requests decode" in shown(at)
    assert "A, B, C and D come" in shown(at), "nobody waits yet"
    assert [box.label for box in at.selectbox if box.label in {"Refresh every", "Speed"}] == []
    (pulse,) = [each for each in at.get("bidi_component") if "pulse" in each.proto.component_name]
    told = json.loads(pulse.proto.json)
    assert (told["facts"], told["stands"]) == ([], "")
    at.button("cr_next").click().run()
    arrived = shown(at)
    assert "A joins the queue" in arrived
    at.button("cr_next").click().run()
    at.button("cr_back").click().run()
    assert shown(at) == arrived
    assert at.session_state["selected"]["moment"] == "1"
    assert at.slider[0].value == 1


@pytest.mark.parametrize(("pick", "said"), [("admitted_first_chunk", "Right"), ("admitted_whole", "otherwise")])
def test_a_prediction_is_checked_with_why(page: AppTest, pick: str, said: str) -> None:
    page.query_params["moment"] = "4"
    at = page.run()
    question = classroom.story_of(FOUR, ()).moments[5].question
    assert question is not None
    place = [option.key for option in question.options].index(pick)
    at.button(f"cr_option_5_{place}").click().run()
    verdict = shown(at, "verdict")
    assert said in verdict
    assert "only 80 of its 160 tokens fit the chunk" in verdict
    at.button("cr_next").click().run()
    assert "answer" not in at.session_state["selected"]


def test_a_changed_setting_runs_again_and_is_compared(page: AppTest) -> None:
    page.query_params["lesson"] = "three-chunks"
    at = page.run()
    at.selectbox("set_three-chunks_chunked_prefill_size_box").select(128).run()
    assert at.session_state["selected"]["set"] == "chunked_prefill_size=128"
    assert "first token in step" in shown(at, "difference")
    at.button("cr_reset").click().run()
    assert "set" not in at.session_state["selected"]


def test_a_link_opens_the_same_moment_in_chinese(page: AppTest) -> None:
    for name, value in {"lesson": "lock-and-eviction", "moment": "6", "lang": "zh-CN", "text": "large"}.items():
        page.query_params[name] = value
    at = page.run()
    assert "middle 的 4 页被驱逐" in shown(at)
    assert "前缀树" in shown(at, "picture")


def test_what_a_stranger_puts_into_a_link_changes_nothing(page: AppTest) -> None:
    for name, value in {"lesson": "<script>", "moment": "-3", "set": "page_size=99999,chunk=1"}.items():
        page.query_params[name] = value
    at = page.run()
    assert not at.exception
    assert "Eight requests decode" in shown(at)


def test_a_folder_of_lessons_is_offered_and_its_faults_are_told(
    page: AppTest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = '[title]\nen = "Mine"\n[about]\nen = "About <b>me</b>"\n[[request]]\nrid = "A"\nprompt = 9\nmax_new = 2\n'
    (tmp_path / "mine.toml").write_text(f'id = "mine"\n{good}', encoding="utf-8")
    (tmp_path / "bad.toml").write_text('id = "bad"\n', encoding="utf-8")
    monkeypatch.setattr("sys.argv", ["app.py", "--lessons", str(tmp_path)])
    page.query_params["lesson"] = "mine"
    at = page.run()
    assert "About &lt;b&gt;me" in shown(at)
    faults = "".join(element.proto.body for element in at.get("html") if 'role="alert"' in element.proto.body)
    assert "bad.toml: title: Field required" in faults


def test_the_folder_is_named_on_the_command_line() -> None:
    assert settings_from(["--lessons", "x"], {}).lessons == Path("x").absolute()
    assert settings_from([], {}).lessons is None


def test_changes_in_an_address_are_those_that_the_lesson_offers() -> None:
    assert classroom.changes_from("chunked_prefill_size=off,enable_mixed_chunk=false", FOUR) == (
        ("chunked_prefill_size", "off"),
        ("enable_mixed_chunk", False),
    )
    assert classroom.changes_text({"page_size": 8, "enable_mixed_chunk": False}) == (
        "page_size=8,enable_mixed_chunk=false"
    )
    assert classroom.changes_text({}) is None
    for text in ("page_size=7", "pool_tokens=16", "page_size"):
        with pytest.raises(ValueError, match="is nothing that lesson four-requests offers"):
            classroom.changes_from(text, FOUR)


def test_a_story_is_played_once() -> None:
    assert classroom.story_of(FOUR, ()) is classroom.story_of(FOUR, ())


@pytest.mark.parametrize("lesson", LESSONS.values(), ids=LESSONS)
@pytest.mark.parametrize("lang", [ENGLISH, CHINESE])
def test_every_moment_can_be_drawn(lesson: Lesson, lang: str) -> None:
    speak(lang)
    owners, lanes = classroom.owner_colours(lesson, DARK), classroom.lanes_of(lesson)
    for moment in classroom.story_of(lesson, ()).moments:
        state = moment.state
        assert classroom_picture.ledgers(state.ledgers, owners, DARK).count("<code>") == len(state.ledgers)
        drawn = classroom_picture.pages(state.pages, owners)
        assert drawn.count("title=") == len(state.pages)
        assert classroom_picture.queue(state.queue, owners, looked_at=moment.rid).count("<li") == len(state.queue)
        assert classroom_picture.running(state.running, owners).count("<li") == len(state.running)
        assert classroom_picture.tree(state.nodes, owners).count("<li") == len(state.nodes)
        classroom_picture.timeline(state, lanes, owners, steps=10, step=moment.step)
        for formula in classroom_picture.formulas(each.text for each in moment.formulas).split("<li>")[1:]:
            assert "->" not in formula


def test_a_large_pool_is_drawn_as_runs() -> None:
    text = 'id = "big"\n[title]\nen = "B"\n[about]\nen = "B"\n[engine]\npool_tokens = 65536\n'
    big = parse_lesson((text + '[[request]]\nrid = "A"\nprompt = 99\nmax_new = 2\n').encode(), source="x")
    state = classroom.story_of(big, ()).moments[-2].state
    assert len(state.pages) == 4096
    drawn = classroom_picture.pages(state.pages, {"A": "#000000"})
    assert drawn.count("flex-grow") <= 4


def test_ink_on_a_bar_can_be_read() -> None:
    for colours in (LIGHT, DARK):
        for colour in (*colours.owners, *classroom_picture.ledger_colours(colours).values()):
            assert max(contrast(ink, colour) for ink in (colours.page, colours.text)) >= 3.7, colour


def test_a_formula_says_its_result_apart() -> None:
    assert classroom_picture.formulas(["need = extend 64 + page 16 = 80", "need 9 >= have 8 -> kv (NO_TOKEN)"]) == (
        '<ul class="cr-formulas"><li>need = extend 64 + page 16 = <b>80</b></li>'
        "<li>need 9 ≥ have 8 → <b>kv (NO_TOKEN)</b></li></ul>"
    )
