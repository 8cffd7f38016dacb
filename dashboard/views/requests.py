"""The view "Requests": live and finished ones, and the story of one."""

from __future__ import annotations

import streamlit as st

from dashboard import formats as f
from dashboard import frames, tables
from dashboard.components import live_table
from dashboard.feed import Look
from dashboard.session import Viewer
from dashboard.views.parts import request_story, waiting_for_engine

_LISTS = {"finished": "Finished", "live": "Live"}


def show(viewer: Viewer, look: Look) -> None:
    """The list, a picker that also takes an id typed by hand, and the picked request in full."""
    if look.requests is None or look.status is None:
        waiting_for_engine(viewer, look.error)
        return
    with st.container(horizontal=True, horizontal_alignment="distribute", vertical_alignment="center"):
        st.subheader("Requests", anchor=False, width="content")
        which = st.segmented_control(
            "List",
            list(_LISTS),
            format_func=lambda name: _LISTS[name],
            default="finished",
            key="which_requests",
            label_visibility="collapsed",
        )
    is_live = which == "live"
    rows = look.requests.live if is_live else look.requests.finished
    total = sum(look.status.requests.values()) if is_live else sum(look.status.requests_finished.values())
    what = "live, in order of arrival" if is_live else "finished, newest first"
    picked = live_table(
        tables.requests_table(
            frames.requests_frame(rows),
            viewer.colours,
            note=f"{f.count(len(rows))} of {f.count(max(total, len(rows)))} {what}",
            live=is_live,
        ),
        viewer.colours,
        key=f"requests_{which or 'finished'}",
        height=330 if st.session_state.get("picked_rid") is None else 220,
        selected=st.session_state.get("picked_rid"),
        pickable=True,
    )
    if picked is not None and picked != st.session_state.get("picked_rid"):
        st.session_state["picked_rid"] = picked
        st.rerun(scope="fragment")
    _story(viewer, [row.rid for row in (*look.requests.live, *look.requests.finished)])


def _story(viewer: Viewer, known: list[str]) -> None:
    current = st.session_state.get("picked_rid")
    options = list(dict.fromkeys(([current] if current else []) + known))[: frames.MAX_POINTS]
    st.session_state["rid_box"] = current
    st.selectbox(
        "Explain a request",
        options,
        key="rid_box",
        index=None,
        placeholder="Click a row, or pick or type an id",
        accept_new_options=True,
        on_change=_box_changed,
    )
    if current is None:
        st.caption("The story of a request says in plain sentences why it waited, was late, or ended.")
        return
    st.subheader(f"Why {current}", anchor=False)
    request_story(viewer, current, full=True)


def _box_changed() -> None:
    st.session_state["picked_rid"] = st.session_state.get("rid_box")
