"""The view "Now": who waits and why, and how late tokens are."""

from __future__ import annotations

import streamlit as st

from dashboard import charts, frames, tables
from dashboard.components import live_table
from dashboard.feed import Look
from dashboard.session import Viewer
from dashboard.views.parts import legend, request_story, waiting_for_engine
from telemetry.observe import LatencyAnswer, QueueAnswer

#: Measure, heading, and what a reader should know about it.
_LATENCIES = (
    ("ttft", "Time to first token"),
    ("tbt", "Time between tokens"),
)


def show(viewer: Viewer, look: Look) -> None:
    """The queue on the left, latency over time on the right; on a narrow page one below the other."""
    if look.queue is None or look.latency is None:
        waiting_for_engine(viewer, look.error)
        return
    left, right = st.columns([1.9, 1], gap="medium")
    with left:
        _queue(viewer, look.queue)
    with right:
        _latency(viewer, look.latency)


def _queue(viewer: Viewer, queue: QueueAnswer) -> None:
    st.subheader("Waiting queue", anchor=False)
    rid = viewer.picked_request
    live_table(
        tables.queue_table(frames.queue_frame(queue), queue.total, viewer.colours),
        viewer.colours,
        key="queue",
        # A story below must be in sight without scrolling.
        height=440 if rid is None else 262,
        selected=rid,
        on_pick=viewer.pick_request,
    )
    if rid is None:
        st.caption("Click a request to read why it waits.")
        return
    request_story(viewer, rid, full=False)


def _latency(viewer: Viewer, latency: LatencyAnswer) -> None:
    frame = frames.latency_frame(latency)
    for measure, heading in _LATENCIES:
        long = frames.quantile_frame(frame, measure)
        st.subheader(heading, anchor=False)
        if long.empty:
            st.caption("Nothing observed yet. The chart begins with the first token that is sent.")
            continue
        legend([(viewer.colours.p50, "p50", ""), (viewer.colours.p99, "p99 (dashed)", "")], shape="line")
        st.altair_chart(
            charts.latency_chart(long, viewer.colours), width="stretch", key=f"{measure}_over_time", theme="streamlit"
        )
    st.caption(f"Each point is {latency.slot_s:g} s; the last {len(frame)} of at most {frames.MAX_POINTS} are shown.")
