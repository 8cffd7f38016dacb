"""One request in full. Owns: its lane, the sentences about it, its parts of TTFT, its decisions, its raw records."""

from __future__ import annotations

from html import escape
from urllib.parse import quote

import streamlit as st

from dashboard import charts, charts_lanes, frames, frames_lanes, tables
from dashboard import formats as f
from dashboard.components import live_table
from dashboard.frames_latency import with_order
from dashboard.places import TRACE_ID
from dashboard.session import Viewer
from dashboard.theme import cause_colour
from dashboard.views.parts import explained, legend, no_story, read_later
from dashboard.words import t
from telemetry.observe import Lane, RequestDetail, Timeline


def full_story(viewer: Viewer, rid: str) -> None:
    """Everything that is known about `rid`."""
    with st.container(horizontal=True, horizontal_alignment="distribute", vertical_alignment="center"):
        st.html(f'<h3 class="why">{escape(t("Request"))} <code>{escape(rid)}</code></h3>', width="content")
        st.button(t("Close"), key="close_story", on_click=viewer.close_story, type="tertiary")
    found = viewer.detail(rid)
    if found.detail is None:
        no_story(viewer, rid, found.error)
        return
    detail = found.detail
    if detail.lane is not None:
        lane_picture(viewer, [detail.lane], key="lane_of_request")
    left, right = st.columns([1.25, 1], gap="medium")
    with left:
        st.subheader(t("What happened, and why"), anchor=False)
        st.html(explained(found.explanation))
        read_later(viewer, detail)
    with right:
        _where_ttft_went(viewer, detail.timeline)
        _trace(viewer, detail)
    st.subheader(t("Every decision about it"), anchor=False)
    live_table(
        tables.decisions_table(detail.decisions, viewer.colours, with_step=True),
        viewer.colours,
        key="decisions_of_request",
        height=260,
        on_pick=lambda row: viewer.select_all({"view": "admission", "step": row.split("/", 1)[0]}),
    )
    with st.expander(t("Raw records (JSON)"), key="raw_records"):
        st.json(detail.model_dump(mode="json"), expanded=1)


def lane_picture(viewer: Viewer, lanes: list[Lane], *, key: str, note: str = "") -> None:
    """The lanes with their legend; `note` begins the line below.

    Many lanes can be picked from; one is drawn larger, from its acceptance on.
    """
    spans, marks = frames_lanes.span_frame(lanes), frames_lanes.mark_frame(lanes)
    legend(
        [
            (charts_lanes.lane_colour(viewer.colours, cause), _named(cause), f.duration(seconds))
            for cause, seconds in frames_lanes.cause_totals(lanes)
        ]
    )
    if len(lanes) == 1:
        st.altair_chart(charts_lanes.one_chart(spans, marks, viewer.colours), width="stretch", key=key)
    else:
        st.altair_chart(
            charts_lanes.many_chart(spans, marks, viewer.colours),
            width="stretch",
            key=key,
            on_select=lambda: _picked(viewer, key),
            selection_mode=charts_lanes.PICK,
        )
    signs = t("Colour tells why it waits, height what is done: full for a chunk, thin for decode, a line in between.")
    moments = t("▶ first token, ◀ pushed back, ■ end.")
    st.caption(" ".join(filter(None, (note, signs, moments, frames_lanes.left_out_words(lanes)))))


def _named(cause: str) -> str:
    return t(frames_lanes.DONE[cause]) if cause in frames_lanes.DONE else f.words(cause)


def _picked(viewer: Viewer, key: str) -> None:
    """A click on a lane picks its request; a click beside all lanes changes nothing."""
    points = st.session_state[key].selection.get(charts_lanes.PICK, [])
    if points and points[0].get("rid"):
        viewer.pick_request(points[0]["rid"])


def _where_ttft_went(viewer: Viewer, timeline: Timeline) -> None:
    parts = frames.parts_frame(timeline)
    if parts.empty:
        return
    total = t("so far") if timeline.ttft_ns is None else f.duration(timeline.ttft_ns / 1e9)
    st.subheader(t("Where its time to first token went · {total}", total=total), anchor=False)
    legend(
        [
            (cause_colour(viewer.colours, part), with_order(part, timeline.order_ns), f.duration(seconds))
            for part, seconds in zip(parts["part"], parts["seconds"], strict=True)
        ]
    )
    st.altair_chart(charts.parts_chart(parts, viewer.colours), width="stretch", key="parts_of_ttft")


def _trace(viewer: Viewer, detail: RequestDetail) -> None:
    """The id of its trace, to be copied, and a link where it is known who shows traces."""
    st.subheader(t("Trace"), anchor=False)
    if not detail.request.trace_id:
        st.caption(t("It has no trace: start the engine with --traces.endpoint to have them."))
        return
    st.code(detail.request.trace_id, language=None)
    if viewer.settings.trace_url is not None:
        st.link_button(t("Open the trace"), viewer.settings.trace_url.replace(TRACE_ID, quote(detail.request.trace_id)))
