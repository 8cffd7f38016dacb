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
from dashboard.pulse import pulse_data
from dashboard.session import DEFAULT_INTERVAL_S, INTERVALS_S, Viewer, now_mono_s, settings_from, viewer_for
from dashboard.views import VIEWS

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
    if "view" not in st.session_state:
        asked = st.query_params.get("view", "now")
        st.session_state["view"] = asked if asked in VIEWS else "now"
        st.session_state["interval_s"] = DEFAULT_INTERVAL_S
    viewer = viewer_for(settings)
    st.html(theme.page_css(viewer.colours))
    every_s = viewer.run_every_s
    # One fragment for all: head and view always stand on the same look, and nothing else ever reruns by itself.
    st.fragment(_page, run_every=every_s)(viewer, every_s)


def _page(viewer: Viewer, every_s: float | None) -> None:
    view = VIEWS[st.session_state.get("view") or "now"]
    look = viewer.look(*_HEAD_PARTS, *view.parts)
    _head(viewer, look)
    _controls(viewer)
    if viewer.run_every_s != every_s:
        # Another pace, or a pause, begins with a new run of the script: the timer belongs to the fragment.
        st.rerun()
    with st.container(key="live"):
        view.show(viewer, look)


def _controls(viewer: Viewer) -> None:
    """Choice of the view, pause, and refresh interval."""
    with st.container(horizontal=True, horizontal_alignment="distribute", vertical_alignment="center", key="controls"):
        st.segmented_control(
            "View",
            list(VIEWS),
            format_func=lambda name: VIEWS[name].title,
            key="view",
            label_visibility="collapsed",
            on_change=_view_changed,
        )
        with st.container(horizontal=True, vertical_alignment="center", width="content", key="pace"):
            st.toggle("Pause", key="paused", on_change=viewer.pause_changed, help="All panels stand at one moment.")
            st.selectbox(
                "Refresh every",
                INTERVALS_S,
                format_func=lambda s: f"every {s:g} s",
                key="interval_s",
                label_visibility="collapsed",
                width=120,
            )


def _view_changed() -> None:
    """The address names the view, so that a reload or a sent link opens the same one."""
    # A segmented control lets its choice be taken back; the page always has a view.
    st.session_state["view"] = st.session_state["view"] or st.query_params.get("view", "now")
    st.query_params["view"] = st.session_state["view"]


def _head(viewer: Viewer, look: Look) -> None:
    components.pulse(
        pulse_data(
            look,
            viewer.colours,
            url=viewer.settings.url,
            interval_s=viewer.interval_s,
            paused=viewer.is_paused,
            now_mono_s=now_mono_s(),
        ),
        viewer.colours,
        key="pulse",
    )


main()
