"""The view "Now": who waits and why, and how late tokens are."""

from __future__ import annotations

import streamlit as st

from dashboard import charts, frames, tables
from dashboard.components import live_table
from dashboard.session import Viewer
from dashboard.views.parts import legend, request_story, waiting_for_engine

#: Measure, heading, and what a reader should know about it.
_LATENCIES = (
    ("ttft", "Time to first token"),
    ("tbt", "Time between tokens"),
)


def show(viewer: Viewer) -> None:
    """The queue on the left, latency over time on the right; on a narrow page one below the other."""
    look = viewer.look("queue", "latency", "requests")
    if look.queue is None or look.latency is None:
        waiting_for_engine(viewer, look.error)
        return
    left, right = st.columns([1.75, 1], gap="medium")
    with left:
        st.subheader("Waiting queue", anchor=False)
        picked = live_table(
            tables.queue_table(frames.queue_frame(look.queue), look.queue.total, viewer.colours),
            viewer.colours,
            key="queue",
            height=420,
            selected=st.session_state.get("picked_rid"),
            pickable=True,
        )
        if picked is not None:
            st.session_state["picked_rid"] = picked
        rid = st.session_state.get("picked_rid")
        if rid is None:
            st.caption("Click a request to read why it waits.")
        else:
            st.subheader(f"Why {rid}", anchor=False)
            request_story(viewer, rid, full=False)
    with right:
        _latency(viewer, look.latency)


def _latency(viewer: Viewer, latency: frames.LatencyAnswer) -> None:
    frame = frames.latency_frame(latency)
    for measure, heading in _LATENCIES:
        long = frames.quantile_frame(frame, measure)
        st.subheader(heading, anchor=False)
        if long.empty:
            st.caption("Nothing observed yet. The chart begins with the first token that is sent.")
            continue
        legend([(viewer.colours.p50, "p50", ""), (viewer.colours.p99, "p99 (dashed)", "")], line=True)
        st.altair_chart(
            charts.latency_chart(long, viewer.colours), width="stretch", key=f"{measure}_over_time", theme="streamlit"
        )
    st.caption(f"Each point is {latency.slot_s:g} s; the last {len(frame)} of at most {frames.MAX_POINTS} are shown.")
