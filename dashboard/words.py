"""Words of the page in the reader's language. Owns: the languages, and the way from an English text to another.

A view wraps each text that a person reads, where it is written:

    st.subheader(t("Waiting queue"))
    st.caption(t("{n} of {total} pages in use", n=f.count(used), total=f.count(total)))

The English text is the key; `locale/zh-CN.json` holds one entry for each, and a text without an entry stays English.
Numbers come in by name and already formatted: a translation may put them in another order. A text that is written down
before the language is known (a constant of a module, a title) is marked there and translated where it is shown:

    TITLES = {"kv": mark("K/V pages")}  ...  st.subheader(t(TITLES["kv"]))

`tests/dashboard/test_words.py` reads every `t("…")` and `mark("…")` of the package and names those without a
translation; so the first argument is one plain literal, never built with `+` or an f-string. Codes of the engine
(reasons, blockers, states, ledgers, laws) are names: they are the same in every language.

A `format_func` of a widget is called outside of a run too: give it texts that were translated before
(`views.parts.choice` does), never a function that calls `t`.

No Streamlit here: the frame calls `speak` at the start of each run, and every module may ask.
"""

from __future__ import annotations

import functools
import json
from contextvars import ContextVar
from pathlib import Path
from typing import Final

ENGLISH: Final = "en"
CHINESE: Final = "zh-CN"

#: Languages by code, each in its own words.
LANGUAGES: Final = {ENGLISH: "English", CHINESE: "简体中文"}

_FOLDER: Final = Path(__file__).parent / "locale"

_spoken: ContextVar[str] = ContextVar("spoken", default=ENGLISH)


def language_of(code: str | None) -> str | None:
    """The language for a code as a browser or an address says it ("zh", "zh_CN", "en-GB"); None for any other."""
    first = (code or "").replace("_", "-").split("-")[0].lower()
    return {"en": ENGLISH, "zh": CHINESE}.get(first)


def speak(language: str) -> None:
    """Use `language`, one of LANGUAGES, for what this run of the page says from now on."""
    if language not in LANGUAGES:
        raise ValueError(f"language={language!r}: must be one of {', '.join(LANGUAGES)}")
    _spoken.set(language)


def spoken() -> str:
    """The language in use."""
    return _spoken.get()


@functools.cache
def dictionary(language: str) -> dict[str, str]:
    """English text to the text in `language`; empty for English."""
    if language == ENGLISH:
        return {}
    found: dict[str, str] = json.loads((_FOLDER / f"{language}.json").read_text(encoding="utf-8"))
    return found


def t(text: str, **values: object) -> str:
    """`text` in the language in use, with `{name}` replaced by `values`. Without values, braces stay as they are."""
    said = dictionary(_spoken.get()).get(text, text)
    return said.format(**values) if values else said


def mark(text: str) -> str:
    """`text` itself: says to the reader of the code, and to the test, that it is translated where it is shown."""
    return text
