"""State of one viewer. Owns: where the engine is, the shared feed, the pause, and what was picked.

Everything kept in the session has a fixed size: a few scalars and, while paused, one look.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar, overload
from urllib.parse import urlencode, urlsplit

import streamlit as st

from dashboard.feed import PARTS, Detail, Feed, Look
from dashboard.theme import Palette, palette
from dashboard.words import ENGLISH, language_of, speak
from telemetry.client import LiveSource

DEFAULT_URL: Final = "http://127.0.0.1:8000"
ENV_URL: Final = "ADMITSCOPE_URL"
ENV_KEY: Final = "ADMITSCOPE_API_KEY"

INTERVALS_S: Final = (0.5, 1.0, 2.0, 3.0, 5.0)
DEFAULT_INTERVAL_S: Final = 1.0

_TIMEOUT_S: Final = 2.0

#: Bounds of what an address may select: it comes from strangers, and a session keeps it.
_MAX_SELECTION: Final = 400
_MAX_SELECTIONS: Final = 24

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Settings:
    """Which engine this page shows. The key is not on the command line, where other users could read it."""

    url: str
    api_key: str | None


def settings_from(arguments: Sequence[str], environment: Mapping[str, str]) -> Settings:
    """Settings of `streamlit run dashboard/app.py -- --url URL`; the environment where the command line is silent.

    Raises ValueError for a URL that is not http or https.
    """
    parser = argparse.ArgumentParser(prog="dashboard", add_help=False, allow_abbrev=False)
    parser.add_argument("--url", default=environment.get(ENV_URL) or DEFAULT_URL)
    url: str = parser.parse_known_args(arguments)[0].url.rstrip("/")
    parts = urlsplit(url)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ValueError(f"--url (or {ENV_URL}) is {url!r}; an address like {DEFAULT_URL} is expected")
    return Settings(url, environment.get(ENV_KEY) or None)


@st.cache_resource(max_entries=4, show_spinner=False)
def feed_for(settings: Settings) -> Feed:
    """The one feed of an engine, shared by all viewers of this process."""
    return Feed(LiveSource(settings.url, settings.api_key, timeout_s=_TIMEOUT_S))


@dataclass(frozen=True, slots=True)
class Viewer:
    """One viewer's way to the numbers. Built anew in each run of the script."""

    settings: Settings
    colours: Palette

    @property
    def interval_s(self) -> float:
        return float(st.session_state.get("interval_s", DEFAULT_INTERVAL_S))

    @property
    def language(self) -> str:
        """As the address says, else as the browser does, else English."""
        return self.selection("lang", language_of) or language_of(st.context.locale) or ENGLISH

    @property
    def is_paused(self) -> bool:
        return self.selection("pause") is not None

    @property
    def run_every_s(self) -> float | None:
        """How often live panels rerun; None while paused."""
        return None if self.is_paused else self.interval_s

    def look(self, *parts: str) -> Look:
        """The newest answers with `parts`; while paused, those of the moment of the pause."""
        frozen = st.session_state.get("frozen")
        if self.is_paused and not isinstance(frozen, Look):
            # A link to a paused page: the pause begins now.
            frozen = st.session_state["frozen"] = feed_for(self.settings).look(PARTS, max_age_s=0.0)
        if self.is_paused and isinstance(frozen, Look):
            return frozen
        # A little under the interval, so that each tick of the first viewer brings new numbers.
        return feed_for(self.settings).look(frozenset(parts), max_age_s=0.7 * self.interval_s)

    def detail(self, rid: str) -> Detail:
        """One request in full; while paused, as it was when it was first looked at since."""
        frozen = st.session_state.get("frozen_detail")
        if self.is_paused and isinstance(frozen, Detail) and frozen.rid == rid:
            return frozen
        found = feed_for(self.settings).detail(rid, max_age_s=0.7 * self.interval_s)
        st.session_state["frozen_detail"] = found if self.is_paused else None
        return found

    @overload
    def selection(self, name: str) -> str | None: ...

    @overload
    def selection(self, name: str, parse: Callable[[str], _T]) -> _T | None: ...

    def selection(self, name: str, parse: Callable[[str], _T] | None = None) -> _T | str | None:
        """What is selected under `name`, as `parse` reads it; None when nothing is, or when it cannot be read.

        Everything that is selected stands in the address, so that a reload or a sent link shows the same. Names in use:
        view, rid, step, page, node, law, lang, mode, list, source, at, pause. A view may use others: short lower-case
        names. `parse` raises ValueError for a text that it does not take, as `natural` does; a link with such a text
        selects nothing.
        """
        text = _selected().get(name)
        if text is None or parse is None:
            return text
        try:
            return parse(text)
        except ValueError:
            return None

    def select(self, name: str, value: object | None) -> None:
        """Select `value` under `name`; None selects nothing. In callbacks, so that the run that follows shows it."""
        self.select_all({name: value})

    def select_all(self, values: Mapping[str, object | None]) -> None:
        """Several at once: the way from one view to another is `viewer.select_all({"view": "kv", "page": 7})`."""
        selected = {**_selected(), **{name: None if v is None else str(v) for name, v in values.items()}}
        kept = {name: text[:_MAX_SELECTION] for name, text in selected.items() if text is not None}
        st.session_state["selected"] = kept
        # All at once: a run that began before the browser knew of the last choice carries an older address.
        st.query_params.from_dict(kept)

    def link(self, **values: object) -> str:
        """Relative address of this page with `values` selected too: for links that a component draws."""
        kept = {**_selected(), **{name: str(v)[:_MAX_SELECTION] for name, v in values.items()}}
        return f"?{urlencode(kept)}"

    def pick_request(self, rid: str) -> None:
        """Tell the story of `rid` from now on."""
        self.select("rid", rid)

    def close_story(self) -> None:
        """Tell no story."""
        self.select("rid", None)

    @property
    def picked_request(self) -> str | None:
        """The request whose story is told."""
        return self.selection("rid")

    def set_interval(self, interval_s: float) -> None:
        """Refresh every `interval_s` seconds, one of INTERVALS_S."""
        st.session_state["interval_s"] = interval_s

    def set_pause(self, *, paused: bool) -> None:
        """Keep one look with all parts when the pause begins, so that every panel stands at the same moment."""
        self.select("pause", 1 if paused else None)
        st.session_state["frozen_detail"] = None
        st.session_state["frozen"] = feed_for(self.settings).look(PARTS, max_age_s=0.0) if self.is_paused else None


def natural(text: str) -> int:
    """A number of a step or a page, from an address. Raises ValueError for anything but 0, 1, 2 …"""
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"{text!r} is not a whole number")
    return int(text)


def _selected() -> dict[str, str]:
    """What is selected, by name. The address says it once, when the session begins; afterwards it only follows.

    Else a refresh that the browser sent just before it learnt of a choice would take the choice back.
    """
    kept: dict[str, str] | None = st.session_state.get("selected")
    if kept is None:
        asked = list(st.query_params.to_dict().items())[:_MAX_SELECTIONS]
        kept = {name[:_MAX_SELECTION]: text[:_MAX_SELECTION] for name, text in asked}
        st.session_state["selected"] = kept
    return kept


def viewer_for(settings: Settings) -> Viewer:
    """The viewer of this run, with the palette of the theme and the words of the language in use."""
    viewer = Viewer(settings, palette(st.context.theme.type))
    speak(viewer.language)
    return viewer


def now_mono_s() -> float:
    """The clock that looks are dated with."""
    return time.monotonic()
