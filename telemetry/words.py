"""Words in the reader's language. Owns: the languages, the way from an English text to another, the language in use.

A text that a person reads is wrapped where it is written:

    t("Someone asked to abort it.")
    t("Step {step}: first token. TTFT {ttft}: {parts}.", step=7, ttft=span(ns), parts=parts)
    tn(count, "{n} token", "{n} tokens")

The English text is the key; `locale/zh-CN.json` beside the package holds one entry for each, and a text without an
entry stays English. Values come in by name and already formatted: a translation may put them in another order. A text
that is written down before the language is known (a constant of a module) is marked there and translated where it is
said:

    MEANING = {"rows": mark("as many requests ran as may run at once")}  ...  t(MEANING["rows"])

A test reads every `t`, `tn` and `mark` of a package and names the texts without a translation; so each text is one
plain literal, never built with `+` or an f-string. Codes of the engine (reasons, blockers, states, ledgers, laws) are
names: they are the same in every language.

The language in use belongs to the context of a thread or a task (`contextvars`): two requests that are answered at the
same time do not hear of each other's.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import BeforeValidator

Lang = Literal["en", "zh-CN"]
ENGLISH: Final = "en"
CHINESE: Final = "zh-CN"

#: Languages by code, each in its own words.
LANGUAGES: Final[dict[Lang, str]] = {ENGLISH: "English", CHINESE: "简体中文"}

_spoken: ContextVar[Lang] = ContextVar("spoken", default=ENGLISH)


def language_of(code: str | None) -> Lang | None:
    """The language for a code as a browser or an address says it ("zh", "zh_CN", "en-GB"); None for any other."""
    first = (code or "").replace("_", "-").split("-")[0].lower()
    return next((language for language in LANGUAGES if language.split("-", maxsplit=1)[0] == first), None)


def known(code: str) -> Lang | None:
    """`code` where it is one of LANGUAGES, to the letter; None for any other."""
    return next((language for language in LANGUAGES if language == code), None)


#: A language as a person types it: `language_of` knows it by more than one name.
TypedLang = Annotated[Lang, BeforeValidator(lambda typed: language_of(typed) or typed)]


def speak(language: Lang) -> None:
    """Use `language`, one of LANGUAGES, for what this context says from now on."""
    if language not in LANGUAGES:
        raise ValueError(f"language={language!r}: must be one of {', '.join(LANGUAGES)}")
    _spoken.set(language)


@contextmanager
def speaking(language: Lang) -> Iterator[None]:
    """Use `language` inside of the block."""
    before = _spoken.get()
    speak(language)
    try:
        yield
    finally:
        _spoken.set(before)


def spoken() -> Lang:
    """The language in use."""
    return _spoken.get()


def mark(text: str) -> str:
    """`text` itself: says to the reader of the code, and to the test, that it is translated where it is said."""
    return text


class Words:
    """The texts of one package. `folder` holds a dictionary for each language but English."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def dictionary(self, language: Lang) -> dict[str, str]:
        """English text to the text in `language`; empty for English."""
        return {} if language == ENGLISH else _read(self._folder / f"{language}.json")

    def t(self, text: str, **values: object) -> str:
        """`text` in the language in use, `{name}` replaced by `values`. Without values, braces stay as they are."""
        said = self.dictionary(_spoken.get()).get(text, text)
        return said.format(**values) if values else said

    def tn(self, count: int, one: str, many: str, **values: object) -> str:
        """`one` for 1, else `many`, as `t` says it; `{n}` is the count with thousands apart, unless `values` has it."""
        return self.t(one if count == 1 else many, **{"n": f"{count:,}", **values})


@functools.cache
def _read(file: Path) -> dict[str, str]:
    found: dict[str, str] = json.loads(file.read_text(encoding="utf-8"))
    return found


_OWN: Final = Words(Path(__file__).parent / "locale")
dictionary = _OWN.dictionary
t = _OWN.t
tn = _OWN.tn
