"""The live page. Owns: the order of the page, and which part of it reruns when.

Run by path: `streamlit run dashboard/app.py -- --url http://127.0.0.1:8000`; ADMITSCOPE_URL and ADMITSCOPE_API_KEY say
the same by environment. The script runs once per viewer and again for another pace; everything else is one fragment,
which draws the head and the open view from one look at the engine.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import streamlit as st

if importlib.util.find_spec("dashboard") is None:
    # Run by path from a checkout that is not installed.
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dashboard import components, theme
from dashboard.feed import Look
from dashboard.places import settings_from
from dashboard.pulse import pulse_data
from dashboard.session import INTERVALS_S, Viewer, now_mono_s, viewer_for
from dashboard.views import VIEWS
from dashboard.views.parts import choice
from dashboard.words import LANGUAGES, mark, speak, t

#: The head needs these whatever view is open.
_HEAD_PARTS = ("latency", "requests")


def main() -> None:
    """Draw the page for one viewer."""
    st.set_page_config(page_title="admitscope", layout="wide", initial_sidebar_state="collapsed")
    try:
        settings = settings_from(sys.argv[1:], os.environ)
    except ValueError as error:
        st.error(str(error))
        return
    viewer = viewer_for(settings)
    st.html(theme.page_css(viewer.colours))
    every_s = viewer.run_every_s
    # One fragment for all: head and view always stand on the same look, and nothing else ever reruns by itself.
    st.fragment(_page, run_every=every_s)(viewer, every_s)


def _page(viewer: Viewer, every_s: float | None) -> None:
    speak(viewer.language)
    view = VIEWS[_view(viewer)]
    look = viewer.look(*_HEAD_PARTS, *view.parts)
    _head(viewer, look)
    _controls(viewer)
    if viewer.run_every_s != every_s:
        # Another pace, or a pause, begins with a new run of the script: the timer belongs to the fragment.
        st.rerun()
    with st.container(key="live"):
        view.show(viewer, look)


def _view(viewer: Viewer) -> str:
    """The name of the open view."""
    chosen = viewer.selection("view")
    return chosen if chosen in VIEWS else "now"


def _controls(viewer: Viewer) -> None:
    """Choice of the view, pause, and refresh interval.

    What was chosen is kept apart from the widgets: Streamlit forgets a widget that one broken-off run did not reach.
    """
    with st.container(horizontal=True, horizontal_alignment="distribute", vertical_alignment="center", key="controls"):
        choice(viewer, "view", {name: view.title for name, view in VIEWS.items()}, label=mark("View"))
        with st.container(horizontal=True, vertical_alignment="center", width="content", key="pace"):
            st.selectbox(
                t("Language"),
                list(LANGUAGES),
                index=list(LANGUAGES).index(viewer.language),
                format_func=LANGUAGES.__getitem__,
                key="lang_box",
                on_change=lambda: viewer.select("lang", st.session_state["lang_box"]),
                label_visibility="collapsed",
                width=120,
            )
            st.toggle(
                "Pause",
                value=viewer.is_paused,
                key="pause_box",
                on_change=lambda: viewer.set_pause(paused=st.session_state["pause_box"]),
                help="All panels stand at one moment.",
            )
            st.selectbox(
                "Refresh every",
                INTERVALS_S,
                index=INTERVALS_S.index(viewer.interval_s),
                format_func=lambda s: f"every {s:g} s",
                key="interval_box",
                on_change=lambda: viewer.set_interval(st.session_state["interval_box"]),
                label_visibility="collapsed",
                width=120,
            )


def _head(viewer: Viewer, look: Look) -> None:
    components.pulse(
        pulse_data(
            look,
            viewer.colours,
            url=viewer.place.where,
            interval_s=viewer.interval_s,
            paused=viewer.is_paused,
            now_mono_s=now_mono_s(),
        ),
        viewer.colours,
        key="pulse",
    )


main()
