"""Words: every text of an explanation is one plain literal, has a Chinese one with its places; languages never mix."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from pydantic import TypeAdapter, ValidationError

from telemetry.words import CHINESE, ENGLISH, Lang, TypedLang, dictionary, known, speak, speaking, spoken, t, tn
from tests.texts import ROOT, built, literals, places_of

#: Between Chinese words, a half-width mark was typed on an English keyboard.
HALF_WIDTH = re.compile(r"[\u3400-\u9fff][,;:!?(]|[,;:!?)][\u3400-\u9fff]")


def test_every_text_has_a_translation_and_none_is_left_over() -> None:
    said = literals("telemetry")
    assert {text: place for text, place in said.items() if text not in dictionary(CHINESE)} == {}
    assert set(dictionary(CHINESE)) - set(said) == set()
    assert len(said) > 200


def test_no_text_is_built_where_it_is_said() -> None:
    assert built("telemetry") == [], "an f-string or a sum is never found in the dictionary: name the values instead"


def test_a_translation_has_the_places_of_its_text() -> None:
    assert [text for text, said in dictionary(CHINESE).items() if places_of(text) != places_of(said)] == []


def test_the_dictionary_has_each_text_once_and_chinese_punctuation() -> None:
    content = (ROOT / "telemetry" / "locale" / f"{CHINESE}.json").read_text(encoding="utf-8")
    names = [name for name, _ in json.loads(content, object_pairs_hook=list)]
    assert sorted(names) == sorted(set(names))
    assert all(said.strip() for said in dictionary(CHINESE).values())
    assert [said for said in dictionary(CHINESE).values() if HALF_WIDTH.search(said)] == []


def test_a_count_is_said_as_one_or_as_many() -> None:
    assert (tn(1, "{n} token", "{n} tokens"), tn(0, "{n} token", "{n} tokens")) == ("1 token", "0 tokens")
    assert tn(1234, "{n} token", "{n} tokens") == "1,234 tokens"
    with speaking(CHINESE):
        assert (tn(1, "{n} token", "{n} tokens"), tn(1234, "{n} token", "{n} tokens")) == ("1 个词元", "1,234 个词元")
        assert t("nobody ever translates this {n}", n=3) == "nobody ever translates this 3"


def test_a_block_speaks_its_language_and_gives_the_one_before_back() -> None:
    with speaking(CHINESE):
        with speaking(ENGLISH):
            assert spoken() == ENGLISH
        assert spoken() == CHINESE
        with pytest.raises(ValueError, match="must be one of en, zh-CN"):
            speak("fr")
    with pytest.raises(RuntimeError), speaking(CHINESE):
        raise RuntimeError
    assert spoken() == ENGLISH


def test_threads_and_tasks_that_speak_at_the_same_time_do_not_hear_each_other() -> None:
    both = threading.Barrier(2, timeout=10)

    def one(lang: Lang) -> set[str]:
        with speaking(lang):
            both.wait()
            return {t("The step failed.") for _ in range(200)}

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(one, (ENGLISH, CHINESE))) == [{"The step failed."}, {"本步失败。"}]

    async def task(lang: Lang) -> set[str]:
        found = set()
        with speaking(lang):
            for _ in range(20):
                await asyncio.sleep(0)
                found.add(t("The step failed."))
        return found

    async def at_once() -> list[set[str]]:
        return list(await asyncio.gather(task(CHINESE), task(ENGLISH)))

    assert asyncio.run(at_once()) == [{"本步失败。"}, {"The step failed."}]


def test_a_language_is_typed_by_any_of_its_names_and_asked_for_by_one() -> None:
    typed = TypeAdapter(TypedLang)
    assert [typed.validate_python(name) for name in ("zh-CN", "zh-cn", "zh", "en")] == [CHINESE] * 3 + [ENGLISH]
    with pytest.raises(ValidationError, match="'en' or 'zh-CN'"):
        typed.validate_python("fr")
    assert (known("zh-CN"), known("zh"), known("en")) == (CHINESE, None, ENGLISH)
