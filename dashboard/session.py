"""State of one viewer. Owns: which place is shown and when, the shared feeds, the pause, and what was selected.

Everything kept in the session has a fixed size: a few scalars and, while paused, one look.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar, overload
from urllib.parse import urlencode

import streamlit as st

from dashboard.feed import PARTS, Asked, Detail, Feed, Look, Questions
from dashboard.places import Opened, Place, Settings
from dashboard.recorded_feed import RecordedFeed
from dashboard.theme import Palette, palette
from dashboard.words import ENGLISH, Lang, language_of, speak, spoken
from telemetry.client import LiveSource, Source

INTERVALS_S: Final = (0.5, 1.0, 2.0, 3.0, 5.0)
DEFAULT_INTERVAL_S: Final = 1.0

_TIMEOUT_S: Final = 2.0

#: Bounds of what an address may select: it comes from strangers, and a session keeps it.
_MAX_SELECTION: Final = 400
_MAX_SELECTIONS: Final = 24

#: Names in an address that say how Streamlit itself is drawn.
_EMBEDDED: Final = ("embed", "embed_options")

#: Answers to questions of single views that a paused viewer keeps.
_MAX_FROZEN: Final = 12

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Playing:
    """A recording that runs: since when (monotonic seconds), from which of its seconds, and how fast."""

    since_mono_s: float
    from_s: float
    speed: float

    def at_s(self, now_mono_s: float) -> float:
        """The second of the recording that is due."""
        return round(self.from_s + self.speed * (now_mono_s - self.since_mono_s), 3)


@st.cache_resource(max_entries=16, show_spinner=False)
def feed_for(place: Place, api_key: str | None) -> Feed:
    """The one feed of an engine, shared by all viewers of this process."""
    return Feed(LiveSource(place.where, api_key, timeout_s=_TIMEOUT_S))


@st.cache_resource(max_entries=4, show_spinner=False, on_release=RecordedFeed.close)
def recorded_feed_for(place: Place) -> RecordedFeed:
    """The one reading of a journal, shared by all viewers of this process."""
    return RecordedFeed(Path(place.where))


@st.cache_resource(show_spinner=False)
def opened() -> Opened:
    """Journals that views of this process opened."""
    return Opened()


@dataclass(frozen=True, slots=True)
class Viewer:
    """One viewer's way to the numbers. Built anew in each run of the script."""

    settings: Settings
    colours: Palette

    @property
    def places(self) -> tuple[Place, ...]:
        """Everything that this page may show."""
        return (*self.settings.places, *opened().places())

    @property
    def place(self) -> Place:
        """What it shows now: the place that the address names, else the first."""
        name = self.selection("source")
        return next((place for place in self.places if place.name == name), self.places[0])

    def show_place(self, name: str) -> None:
        """Look at another place. What was selected belongs to the old one."""
        gone: dict[str, object | None] = dict.fromkeys(("at", "pause", "rid", "step", "page", "node"))
        for key in ("frozen", "frozen_detail", "frozen_asked", "playing"):
            st.session_state[key] = None
        self.select_all({**gone, "source": name})

    def open_journal(self, path: Path, name: str) -> None:
        """Show a journal that this process wrote, under `name`: every view then shows it like any other source."""
        place = opened().add(path, name)
        recorded_feed_for.clear(place)
        self.show_place(place.name)

    @property
    def recording(self) -> RecordedFeed | None:
        """The journal that is shown; None for a live engine."""
        return recorded_feed_for(self.place) if self.place.is_recorded else None

    @property
    def at(self) -> str | None:
        """The moment of a recording, as `RecordedFeed.moment` takes it: as played, else as the address says."""
        playing: Playing | None = st.session_state.get("playing")
        return self.selection("at") if playing is None else f"{playing.at_s(now_mono_s())}s"

    @property
    def is_playing(self) -> bool:
        return st.session_state.get("playing") is not None

    def go_to(self, at: str | None) -> None:
        """Show a recording at another moment, and stay there."""
        self.select("at", at)
        st.session_state["playing"] = None

    def play(self, *, speed: float) -> None:
        """Let a recording run from where it stands, `speed` times as fast as it was; from its end, from its start."""
        recording = self.recording
        moment = None if recording is None else recording.moment(self.at)
        if recording is None or moment is None:
            return
        ends_s = recording.progress().times_s[1]
        starts_s = 0.0 if moment.at_s >= ends_s else moment.at_s
        st.session_state["playing"] = Playing(now_mono_s(), starts_s, speed)

    def stop(self) -> None:
        """Stay where a recording is now."""
        recording = self.recording
        moment = None if recording is None else recording.moment(self.at)
        self.go_to(None if moment is None else str(moment.step))

    @property
    def now_mono_s(self) -> float:
        """The clock that looks are dated with."""
        return now_mono_s()

    @property
    def interval_s(self) -> float:
        return float(st.session_state.get("interval_s", DEFAULT_INTERVAL_S))

    @property
    def language(self) -> Lang:
        """As the address says, else as the browser does, else English."""
        return self.selection("lang", language_of) or language_of(st.context.locale) or ENGLISH

    @property
    def is_paused(self) -> bool:
        """Whether a live engine's numbers stand still. A recording has `is_playing` instead."""
        return self.selection("pause") is not None and not self.place.is_recorded

    @property
    def run_every_s(self) -> float | None:
        """How often the page reruns by itself; None while nothing moves."""
        recording = self.recording
        if recording is None:
            return None if self.is_paused else self.interval_s
        if self.is_playing:
            return min(self.interval_s, 0.5)
        return None if recording.progress().is_read else self.interval_s

    def look(self, *parts: str) -> Look:
        """The answers with `parts` to show: the newest, those of the pause, or those of a recording's moment."""
        recording = self.recording
        if recording is not None:
            return recording.look(frozenset(parts), self.at)
        frozen = st.session_state.get("frozen")
        if self.is_paused and not isinstance(frozen, Look):
            # A link to a paused page: the pause begins now.
            frozen = st.session_state["frozen"] = self._feed.look(PARTS, max_age_s=0.0)
        if self.is_paused and isinstance(frozen, Look):
            return frozen
        # A little under the interval, so that each tick of the first viewer brings new numbers.
        return self._feed.look(frozenset(parts), max_age_s=0.7 * self.interval_s)

    def look_at(self, place: Place, *parts: str) -> Look:
        """The last answers of another place, whatever is paused here, without waiting for newer ones."""
        if place.is_recorded:
            return recorded_feed_for(place).look(frozenset(parts), None)
        return feed_for(place, self.settings.api_key).look_later(frozenset(parts), max_age_s=0.7 * self.interval_s)

    def detail(self, rid: str) -> Detail:
        """One request in full; while paused, as it was when it was first looked at since."""
        recording = self.recording
        if recording is not None:
            return recording.detail(rid, self.at, self.language)
        frozen: dict[tuple[str, str], Detail] = st.session_state.get("frozen_detail") or {}
        key = (rid, self.language)
        if self.is_paused and key in frozen:
            return frozen[key]
        found = self._feed.detail(rid, self.language, max_age_s=0.7 * self.interval_s)
        kept = list(frozen.items())[-_MAX_FROZEN + 1 :]
        st.session_state["frozen_detail"] = {**dict(kept), key: found} if self.is_paused else None
        return found

    def ask(self, *key: object, question: Callable[[Source], _T | None]) -> Asked[_T]:
        """What the source says to a question of one view; `key` names it with its parameters.

        While paused, as it was when it was first asked since.
        """
        recording = self.recording
        if recording is not None:
            return recording.ask(key, question, self.at)
        if not self.is_paused:
            return self._feed.ask(key, question, max_age_s=0.7 * self.interval_s)
        frozen: dict[tuple[object, ...], Asked[_T]] = st.session_state.get("frozen_asked") or {}
        if key not in frozen:
            kept = list(frozen.items())[-_MAX_FROZEN + 1 :]
            found = self._feed.ask(key, question, max_age_s=0.7 * self.interval_s)
            st.session_state["frozen_asked"] = frozen = {**dict(kept), key: found}
        return frozen[key]

    @property
    def _feed(self) -> Feed:
        return feed_for(self.place, self.settings.api_key)

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
        # One assignment: a run that is broken off here has selected all or nothing.
        st.session_state["selected"] = _kept({name: text for name, text in selected.items() if text is not None})

    def return_to(self, selected: Mapping[str, str]) -> None:
        """Select what an address says and nothing else: the browser went back to it, or forward."""
        for name in ("frozen", "frozen_detail", "frozen_asked", "playing"):
            st.session_state[name] = None
        st.session_state["selected"] = _kept(selected)

    def follow(self, wanted: object) -> None:
        """Follow a link that a component drew: selections by name, None for those that end."""
        if isinstance(wanted, dict):
            if "at" in wanted:  # a link to a moment: what plays would go on from another one
                st.session_state["playing"] = None
            self.select_all({str(name): value for name, value in wanted.items()})

    @property
    def address(self) -> str:
        """Query of what is selected. The head of the page brings the browser's address to it, as its only writer."""
        return urlencode(_selected())

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

    def set_pause(self, *, paused: bool, questions: Questions | None = None) -> None:
        """Keep one look with all parts when the pause begins, so that every panel stands at the same moment.

        questions  what views will ask beside it: asked together with it, not when somebody comes to look
        """
        for name in ("frozen", "frozen_detail", "frozen_asked"):
            st.session_state[name] = None
        if paused and not self.place.is_recorded:
            st.session_state["frozen"], st.session_state["frozen_asked"] = self._feed.moment(PARTS, questions or {})
        self.select("pause", 1 if paused else None)

    @property
    def is_held(self) -> bool:
        """Whether a pause has its look: one that a link says begins when the page is first drawn."""
        return isinstance(st.session_state.get("frozen"), Look)


def box_key(name: str, value: object) -> str:
    """Key of the widget that shows `value` and lets it be changed; the widget's default must be `value`.

    A value that changed by another way gets a new widget. To move the old one would need its new value to reach the
    browser: a run that is broken off leaves the old one there, which would then come back as if it had been chosen.
    """
    versions: dict[str, int] = st.session_state.setdefault("box_versions", {})
    key = _versioned(name, versions.get(name, 0))
    if key in st.session_state and st.session_state[key] != value:
        versions[name] = versions.get(name, 0) + 1
    st.session_state.setdefault("box_keys", {})[name] = _versioned(name, versions.get(name, 0))
    current: str = st.session_state["box_keys"][name]
    return current


def on_box(name: str, key: str, act: Callable[[Any], None]) -> Callable[[], None]:
    """What the widget `key` of `box_key(name, …)` does when it is changed: `act` gets the new value.

    The browser still speaks of a widget that is gone for a run or two, and Streamlit takes that for a change.
    """

    def changed() -> None:
        if key == st.session_state.get("box_keys", {}).get(name):
            act(st.session_state[key])

    return changed


def _versioned(name: str, version: int) -> str:
    # The browser names a choice by its label: a widget of one language must not be asked about another's.
    return f"{name}_box{version or ''}" + ("" if spoken() == ENGLISH else f"_{spoken()}")


def natural(text: str) -> int:
    """A number of a step or a page, from an address. Raises ValueError for anything but 0, 1, 2 …"""
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"{text!r} is not a whole number")
    return int(text)


def _selected() -> dict[str, str]:
    """What is selected, by name. The address says it once, when the session begins; afterwards it only follows.

    Else a refresh that the browser sent just before it learnt of a choice would take the choice back. That the browser
    went back to another address, the head tells.
    """
    kept: dict[str, str] | None = st.session_state.get("selected")
    if kept is None:
        kept = st.session_state["selected"] = _kept(st.query_params.to_dict())
    return kept


def _kept(selected: Mapping[str, str]) -> dict[str, str]:
    """So much of an address as a session keeps. Some names are Streamlit's own."""
    named = [(name[:_MAX_SELECTION], text[:_MAX_SELECTION]) for name, text in selected.items() if name not in _EMBEDDED]
    return dict(named[:_MAX_SELECTIONS])


def viewer_for(settings: Settings) -> Viewer:
    """The viewer of this run, with the palette of the theme and the words of the language in use."""
    viewer = Viewer(settings, palette(st.context.theme.type))
    speak(viewer.language)
    return viewer


def now_mono_s() -> float:
    """The clock that looks are dated with."""
    return time.monotonic()
