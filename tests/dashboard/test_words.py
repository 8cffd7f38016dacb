"""Words: every text of the page is a plain literal, has a Chinese one, and keeps its places for numbers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest

from dashboard.words import CHINESE, ENGLISH, LANGUAGES, dictionary, language_of, mark, speak, spoken, t
from telemetry import words as telemetry_words
from tests.texts import ROOT, built, literals, places_of

DASHBOARD = ROOT / "dashboard"


@pytest.fixture(autouse=True)
def english() -> Iterator[None]:
    yield
    speak(ENGLISH)


def test_every_text_has_a_translation() -> None:
    missing = {text: place for text, place in literals("dashboard").items() if text not in dictionary(CHINESE)}
    assert missing == {}


def test_no_translation_is_left_over() -> None:
    assert set(dictionary(CHINESE)) - set(literals("dashboard")) == set()


def test_no_text_is_built_where_it_is_said() -> None:
    assert built("dashboard") == [], "an f-string or a sum is never found in the dictionary: name the values instead"


def test_a_translation_has_the_places_of_its_text() -> None:
    wrong = [text for text, said in dictionary(CHINESE).items() if places_of(text) != places_of(said)]
    assert wrong == []


def test_chinese_words_have_full_width_punctuation_between_them() -> None:
    """A half-width mark beside a Chinese word is one that was typed on an English keyboard."""
    half = re.compile(r"[\u3400-\u9fff][,;:!?(]|[,;:!?)][\u3400-\u9fff]")
    assert [said for said in dictionary(CHINESE).values() if half.search(said)] == []


def test_a_pass_has_one_chinese_name() -> None:
    said = [*dictionary(CHINESE).values(), *telemetry_words.dictionary(CHINESE).values()]
    assert [text for text in said if "趟" in text] == []
    assert any("准入轮" in text for text in said)


def test_the_dictionary_is_sorted_by_nobody_but_has_each_text_once() -> None:
    pairs = json.loads(
        (DASHBOARD / "locale" / f"{CHINESE}.json").read_text(encoding="utf-8"), object_pairs_hook=lambda items: items
    )
    names = [name for name, _ in pairs]
    assert sorted(names) == sorted(set(names))
    assert all(said.strip() for _, said in pairs)


@pytest.mark.parametrize(
    ("code", "language"),
    [("zh-CN", CHINESE), ("zh", CHINESE), ("zh_Hans_CN", CHINESE), ("en-GB", ENGLISH), ("fr", None), ("", None)],
)
def test_a_language_is_known_by_what_browsers_call_it(code: str, language: str | None) -> None:
    assert language_of(code) == language


def test_a_text_is_said_in_the_language_in_use_and_else_in_english() -> None:
    speak(CHINESE)
    assert spoken() == CHINESE
    assert t("Requests") == "请求"
    assert t("nobody ever translates this {n}", n=3) == "nobody ever translates this 3"
    assert t(mark("{braces} without values")) == "{braces} without values"
    speak(ENGLISH)
    assert t("Requests") == "Requests"
    assert set(LANGUAGES) == {ENGLISH, CHINESE}
    with pytest.raises(ValueError, match="must be one of en, zh-CN"):
        speak("fr")
