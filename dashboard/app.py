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

from dashboard import components, downloads, frame, theme
from dashboard.feed import Look
from dashboard.odd_address import say_odd_address
from dashboard.places import settings_from
from dashboard.pulse import Goals, Showing, pulse_data
from dashboard.session import Viewer, viewer_for
from dashboard.told import Told
from dashboard.views import VIEWS, View
from dashboard.views.judging import is_outdated, report_of
from dashboard.views.parts import choice
from dashboard.words import mark, speak

#: The head needs these whatever view is open.
_HEAD_PARTS = ("latency", "requests", "breakdown")


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
    downloads.begin()
    done = frame.hear(viewer, components.told_by_page())
    frame.begin_pause(viewer)
    name = frame.open_view(viewer)
    view = VIEWS[name]
    look = viewer.look(*_HEAD_PARTS, *view.parts)
    _head(viewer, look, view, done)
    with st.container(horizontal=True, horizontal_alignment="distribute", vertical_alignment="center", key="controls"):
        choice(viewer, "view", {name: view.title for name, view in VIEWS.items()}, label=mark("View"))
        with st.container(horizontal=True, vertical_alignment="center", width="content", key="pace"):
            frame.place_switch(viewer)
            download = st.container(width="content", key="download")
            frame.pace(viewer, moves=view.group != "learn")
    if view.group != "learn":
        frame.scrub_bar(viewer, look)
    if name == "now":
        frame.fleet(viewer)
    say_odd_address(viewer)
    with st.container(key="live"):
        view.show(viewer, look)
    with download:
        # Last: only now is it known what the view has drawn.
        frame.download_box(name)
    if viewer.run_every_s != every_s:
        # Another pace, or a pause, begins with a new run of the script: the timer belongs to the fragment. Once all is
        # drawn: a run that is broken off before a view's fields forgets what was typed into them.
        st.rerun()


def _head(viewer: Viewer, look: Look, view: View, done: Told) -> None:
    report = report_of(viewer)
    components.pulse(
        pulse_data(
            look,
            viewer.colours,
            Showing(
                place=viewer.place,
                interval_s=viewer.interval_s,
                now_mono_s=viewer.now_mono_s,
                paused=viewer.is_paused,
                goals=_goals(viewer, look),
                whole=view.group != "learn",
                broken=None if report is None else sum(report.counts.values()),
                outdated=is_outdated(viewer),
            ),
        ),
        viewer.colours,
        done=done,
        address=viewer.address,
    )


def _goals(viewer: Viewer, look: Look) -> Goals:
    """Objectives for TTFT and TBT: those of the command line, else the engine's own."""
    own = look.breakdown
    return (
        viewer.settings.ttft_s or (own.ttft_objective_s if own is not None else None),
        viewer.settings.tbt_s or (own.gap_objective_s if own is not None else None),
    )


main()
