"""What an address says that this page does not know. Owns: finding it, and the one notice about it.

A link may be old, or typed by hand: the page shows what it can, and names what it left aside, and what may stand there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Final, NamedTuple

import streamlit as st

from dashboard import formats as f
from dashboard import frames_lanes, frames_whatif
from dashboard.recorded_feed import RecordedFeed
from dashboard.session import Viewer, natural
from dashboard.views import VIEWS, kv, requests
from dashboard.words import LANGUAGES, language_of, t

#: Selections that are one of a few, by name.
_CHOICES: Final[dict[str, Mapping[str, object]]] = {
    "view": VIEWS,
    "mode": kv.MODES,
    "list": requests.LISTS,
    "n": requests.COUNTS,
    "lanes": frames_lanes.ORDERS,
    "measure": frames_whatif.MEASURES,
}

#: Selections that are a whole number.
_NATURAL: Final = ("step", "page", "node", "top", "moment", "first", "broken")

#: A text of an address is repeated so far.
_SAID: Final = 40


class Odd(NamedTuple):
    """One selection that was left aside: its name, what it says, and what may stand there."""

    name: str
    text: str
    known: str


def say_odd_address(viewer: Viewer) -> None:
    """Tell what the address says in vain."""
    for odd in odd_selections(viewer):
        said = odd.text if len(odd.text) <= _SAID else f"{odd.text[:_SAID]}…"
        told = {"name": odd.name, "value": repr(said), "known": odd.known}
        st.warning(t("The address says {name}={value}, which does not exist here. Possible: {known}.", **told))


def odd_selections(viewer: Viewer) -> Iterator[Odd]:
    """All of them, in a fixed order."""
    for name, options in _CHOICES.items():
        chosen = viewer.selection(name)
        if chosen is not None and chosen not in options:
            yield Odd(name, chosen, _listed(options))
    lang = viewer.selection("lang")
    if lang is not None and language_of(lang) is None:
        yield Odd("lang", lang, _listed(LANGUAGES))
    source = viewer.selection("source")
    names = [place.name for place in viewer.places]
    if source is not None and source not in names:
        yield Odd("source", source, _listed(names))
    for name in _NATURAL:
        number = viewer.selection(name)
        if number is not None and viewer.selection(name, natural) is None:
            yield Odd(name, number, t("a whole number from 0 on"))
    yield from _odd_moment(viewer)


def _odd_moment(viewer: Viewer) -> Iterator[Odd]:
    """Of a recording, a moment that cannot be read, or that it does not have."""
    at, recording = viewer.selection("at"), viewer.recording
    if at is None or recording is None or recording.moment(None) is None or _is_in(recording, at):
        return
    told = recording.progress()
    yield Odd(
        "at",
        at,
        t(
            "a step up to {step}, a time up to {time} as in 1.5s, fullest, slowest",
            step=f.count(told.steps[1]),
            time=f.duration(told.times_s[1]),
        ),
    )


def _is_in(recording: RecordedFeed, at: str) -> bool:
    """Whether it has the moment `at`; while it is still read, what is to come may have it."""
    if at in {"fullest", "slowest"}:
        return True
    told = recording.progress()
    is_time = at.endswith("s")
    try:
        wanted = float(at[:-1]) if is_time else int(at)
    except ValueError:
        return False
    # A played moment is written down rounded to milliseconds.
    last = told.times_s[1] + 0.001 if is_time else told.steps[1]
    return math.isfinite(wanted) and wanted >= 0 and (wanted <= last or not told.is_read)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)
