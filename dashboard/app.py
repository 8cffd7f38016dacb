"""The live page. Owns: the order of the page, and which part of it reruns when.

Run by path: `streamlit run dashboard/app.py -- --url http://127.0.0.1:8000`; ADMITSCOPE_URL and ADMITSCOPE_API_KEY say the
same by environment. The script as a whole runs when a viewer touches a control; while nobody does, only the two fragments
run: the head, and the view that is open.
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
from dashboard.pulse import pulse_data
from dashboard.session import INTERVALS_S, Viewer, now_mono_s, settings_from, viewer_for
from dashboard.views import admission, kv, now, requests

_VIEWS = {
    "now": ("Now", now.show),
    "admission": ("Admission", admission.show),
    "kv": ("K/V pages", kv.show),
    "requests": ("Requests", requests.show),
}


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
    st.fragment(_head, run_every=viewer.run_every_s)(viewer)
    view = _controls(viewer)
    with st.container(key="live"):
        st.fragment(_body, run_every=viewer.run_every_s)(viewer, view)


def _controls(viewer: Viewer) -> str:
    """Choice of the view, pause and refresh interval. Returns the open view."""
    if "view" not in st.session_state:
        asked = st.query_params.get("view", "now")
        st.session_state["view"] = asked if asked in _VIEWS else "now"
        st.session_state["interval_s"] = 1.0
    with st.container(horizontal=True, horizontal_alignment="distribute", vertical_alignment="bottom", key="controls"):
        view = st.segmented_control(
            "View", list(_VIEWS), format_func=lambda name: _VIEWS[name][0], key="view", required=True, label_visibility="collapsed"
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
    chosen = view or "now"
    st.query_params["view"] = chosen
    return chosen


def _head(viewer: Viewer) -> None:
    look = viewer.look("latency", "requests")
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


def _body(viewer: Viewer, view: str) -> None:
    _VIEWS[view][1](viewer)


main()
