"""Words of the page in the reader's language. Owns: the page's dictionary; `telemetry.words` says how one is used.

A view wraps each text that a person reads, where it is written:

    st.subheader(t("Waiting queue"))
    st.caption(t("{n} of {total} pages in use", n=f.count(used), total=f.count(total)))
    TITLES = {"kv": mark("K/V pages")}  ...  st.subheader(t(TITLES["kv"]))

`tests/dashboard/test_words.py` reads every `t("…")` and `mark("…")` of the package and names those without an entry in
`locale/zh-CN.json`; so the first argument is one plain literal, never built with `+` or an f-string.

A `format_func` of a widget is called outside of a run too: give it texts that were translated before
(`views.parts.choice` does), never a function that calls `t`.

No Streamlit here: the frame calls `speak` at the start of each run, and every module may ask.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from telemetry.words import CHINESE, ENGLISH, LANGUAGES, Lang, Words, language_of, mark, speak, spoken

__all__ = [
    "CHINESE",
    "ENGLISH",
    "LANGUAGES",
    "Lang",
    "dictionary",
    "language_of",
    "mark",
    "speak",
    "spoken",
    "t",
    "tn",
]

_PAGE: Final = Words(Path(__file__).parent / "locale")
dictionary = _PAGE.dictionary
t = _PAGE.t
tn = _PAGE.tn
