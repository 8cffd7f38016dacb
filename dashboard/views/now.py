"""The view "Now": who waits and why, and how late tokens are."""

from __future__ import annotations

import streamlit as st

from dashboard import charts, frames, tables
from dashboard.answers import answer_lines, highlight_lines
from dashboard.components import answers, live_table
from dashboard.feed import Look
from dashboard.session import Viewer
from dashboard.views.parts import fitting, legend, page_fact, request_story, waiting_for_engine
from dashboard.words import mark, t
from telemetry.observe import LatencyAnswer, QueueAnswer

#: Measure, heading, and what a reader should know about it.
_LATENCIES = (
    ("ttft", mark("Time to first token")),
    ("tbt", mark("Time between tokens")),
)


def show(viewer: Viewer, look: Look) -> None:
    """Five questions with their answers; the queue on the left, latency on the right, or below on a narrow page."""
    if look.queue is None or look.latency is None:
        waiting_for_engine(viewer, look.error)
        return
    recording = viewer.recording
    lines = answer_lines(look)
    if recording is not None:
        lines = [*highlight_lines(recording.recording.highlights), *lines]
    answers(lines, viewer.colours, key="answers", on_go=viewer.follow)
    left, right = st.columns([1.9, 1], gap="medium")
    with left:
        _queue(viewer, look.queue)
    with right:
        _latency(viewer, look.latency)


def ask_ahead(viewer: Viewer) -> None:
    """When a pause begins, ask at once for what the answers lead to, and for who is picked: read later, it would
    contradict them."""
    if viewer.picked_request is not None:
        viewer.detail(viewer.picked_request)
    for go in (line["go"] for line in answer_lines(viewer.look())):
        if "rid" in go:
            viewer.detail(go["rid"])
        if "page" in go:
            page_fact(viewer, go["page"])


def _queue(viewer: Viewer, queue: QueueAnswer) -> None:
    st.subheader(t("Waiting queue"), anchor=False)
    rid = viewer.picked_request
    live_table(
        fitting(viewer, tables.queue_table(frames.queue_frame(queue), queue.total, viewer.colours)),
        viewer.colours,
        key="queue",
        # A story below must be in sight without scrolling.
        height=440 if rid is None else 262,
        selected=rid,
        on_pick=viewer.pick_request,
    )
    if rid is None:
        if queue.entries:
            st.caption(t("Click a request to read why it waits."))
        return
    request_story(viewer, rid)


def _latency(viewer: Viewer, latency: LatencyAnswer) -> None:
    frame = frames.latency_frame(latency)
    for measure, heading in _LATENCIES:
        long = frames.quantile_frame(frame, measure)
        st.subheader(t(heading), anchor=False)
        if long.empty:
            st.caption(t("Nothing observed yet. The chart begins with the first token that is sent."))
            continue
        legend([(viewer.colours.p50, "p50", ""), (viewer.colours.p99, t("p99 (dashed)"), "")], shape="line")
        st.altair_chart(
            charts.latency_chart(long, viewer.colours), width="stretch", key=f"{measure}_over_time", theme="streamlit"
        )
        if measure == "ttft":
            st.caption(
                t(
                    "It ends here when the engine has the token, and each point ranks its own requests; the number at "
                    "the top ends when the first byte is sent, and ranks those of the last 60 s."
                )
            )
    st.caption(
        t(
            "Each point is {n} s; the last {shown} of at most {most} are shown.",
            n=f"{latency.slot_s:g}",
            shown=len(frame),
            most=frames.MAX_POINTS,
        )
    )
