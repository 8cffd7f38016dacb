"""State of one viewer. Owns: where the engine is, the shared feed, the pause, and what was picked.

Everything kept in the session has a fixed size: a few scalars and, while paused, one look.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

import streamlit as st

from dashboard.feed import PARTS, Detail, Feed, Look
from dashboard.theme import Palette, palette
from telemetry.client import LiveSource

DEFAULT_URL: Final = "http://127.0.0.1:8000"
ENV_URL: Final = "ADMITSCOPE_URL"
ENV_KEY: Final = "ADMITSCOPE_API_KEY"

INTERVALS_S: Final = (0.5, 1.0, 2.0, 3.0, 5.0)
DEFAULT_INTERVAL_S: Final = 1.0

_TIMEOUT_S: Final = 2.0


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
    def is_paused(self) -> bool:
        return bool(st.session_state.get("paused", False))

    @property
    def run_every_s(self) -> float | None:
        """How often live panels rerun; None while paused."""
        return None if self.is_paused else self.interval_s

    def look(self, *parts: str) -> Look:
        """The newest answers with `parts`; while paused, those of the moment of the pause."""
        frozen = st.session_state.get("frozen")
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

    def pick_request(self, rid: str) -> None:
        """Tell the story of `rid` from now on."""
        st.session_state["picked_rid"] = rid

    def close_story(self) -> None:
        """Tell no story."""
        st.session_state["picked_rid"] = None

    @property
    def picked_request(self) -> str | None:
        """The request whose story is told."""
        rid: str | None = st.session_state.get("picked_rid")
        return rid

    def set_interval(self, interval_s: float) -> None:
        """Refresh every `interval_s` seconds, one of INTERVALS_S."""
        st.session_state["interval_s"] = interval_s

    def set_pause(self, *, paused: bool) -> None:
        """Keep one look with all parts when the pause begins, so that every panel stands at the same moment."""
        st.session_state["paused"] = paused
        st.session_state["frozen_detail"] = None
        st.session_state["frozen"] = feed_for(self.settings).look(PARTS, max_age_s=0.0) if self.is_paused else None


def viewer_for(settings: Settings) -> Viewer:
    """The viewer of this run, with the palette of the theme in use."""
    return Viewer(settings, palette(st.context.theme.type))


def now_mono_s() -> float:
    """The clock that looks are dated with."""
    return time.monotonic()
