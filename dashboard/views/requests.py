"""The view "Requests": live and finished ones, and the story of one."""

from __future__ import annotations

import streamlit as st

from dashboard import formats as f
from dashboard import frames, tables
from dashboard.components import live_table
from dashboard.feed import Look
from dashboard.session import Viewer
from dashboard.views.parts import choice, request_story, waiting_for_engine
from dashboard.words import mark

_LISTS = {"finished": mark("Finished"), "live": mark("Live")}


def show(viewer: Viewer, look: Look) -> None:
    """The list, from which a request is picked by a click or by its id, and the picked request in full."""
    if look.requests is None or look.status is None:
        waiting_for_engine(viewer, look.error)
        return
    with st.container(horizontal=True, horizontal_alignment="distribute", vertical_alignment="center"):
        st.subheader("Requests", anchor=False, width="content")
        which = choice(viewer, "list", _LISTS, label=mark("List"))
    is_live = which == "live"
    rows = look.requests.live if is_live else look.requests.finished
    total = sum(look.status.requests.values()) if is_live else sum(look.status.requests_finished.values())
    what = "live, in order of arrival" if is_live else "finished, newest first"
    rid = viewer.picked_request
    live_table(
        tables.requests_table(
            frames.requests_frame(rows),
            viewer.colours,
            note=f"{f.count(len(rows))} of {f.count(max(total, len(rows)))} {what}",
            live=is_live,
        ),
        viewer.colours,
        key=f"requests_{which}",
        height=440 if rid is None else 220,
        selected=rid,
        on_pick=viewer.pick_request,
        hold=True,
    )
    if rid is None:
        st.caption(
            "Click a request, or type its id and press Enter: its story says in plain words why it waited, was late, "
            "or ended."
        )
        return
    request_story(viewer, rid, full=True)
