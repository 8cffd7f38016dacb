"""The view "Requests": many requests as lanes, live and finished ones as a list, and the story of one."""

from __future__ import annotations

import streamlit as st

from dashboard import formats as f
from dashboard import frames, frames_lanes, tables
from dashboard.components import live_table
from dashboard.feed import Look
from dashboard.session import Viewer
from dashboard.views.parts import choice, choice_of, fitting, waiting_for_engine
from dashboard.views.story import full_story, lane_picture
from dashboard.words import mark, t
from telemetry.observe import EngineStatus, LanesAnswer, RequestsAnswer

LISTS = {"finished": mark("Finished"), "live": mark("Live")}
COUNTS = {"10": "10", "20": "20", "40": "40", "80": "80"}


def show(viewer: Viewer, look: Look) -> None:
    """The picked request in full, or the lanes of many; below both the list from which one is picked."""
    if look.requests is None or look.status is None:
        waiting_for_engine(viewer, look.error)
        return
    rid = viewer.picked_request
    if rid is not None:
        full_story(viewer, rid)
    elif look.lanes is not None and look.lanes.lanes:
        _lanes(viewer, look.lanes)
    _list(viewer, look.requests, look.status)


def _lanes(viewer: Viewer, told: LanesAnswer) -> None:
    with st.container(horizontal=True, horizontal_alignment="distribute", vertical_alignment="center"):
        st.subheader(t("Requests over time"), anchor=False, width="content")
        with st.container(horizontal=True, width="content", vertical_alignment="center"):
            by = choice(viewer, "lanes", frames_lanes.ORDERS, label=mark("Which requests"))
            count = choice(viewer, "n", COUNTS, label=mark("How many requests"), unless_chosen="20")
    lanes = frames_lanes.chosen_lanes(told.lanes, int(count), by)
    note = t(
        "{n} of {total} requests that the engine remembers, in order of arrival. Click a lane for its story.",
        n=f.count(len(lanes)),
        total=f.count(told.total),
    )
    lane_picture(viewer, lanes, key="lanes_of_requests", note=note)


def _list(viewer: Viewer, requests: RequestsAnswer, status: EngineStatus) -> None:
    with st.container(horizontal=True, horizontal_alignment="distribute", vertical_alignment="center"):
        st.subheader(t("Requests"), anchor=False, width="content")
        which = choice(viewer, "list", LISTS, label=mark("List"))
    is_live = which == "live"
    # The order that was chosen for the lanes, which is how they are named above.
    by = choice_of(viewer, "lanes", frames_lanes.ORDERS)
    rows = frames.ranked_requests(requests.live if is_live else requests.finished, by)
    total = max(sum((status.requests if is_live else status.requests_finished).values()), len(rows))
    what = (
        t("{n} of {total} live", n=f.count(len(rows)), total=f.count(total))
        if is_live
        else t("the last {n} of {total} finished", n=f.count(len(rows)), total=f.count(total))
    )
    what = f"{what} · {t(frames_lanes.ORDERS[by])}"
    live_table(
        fitting(viewer, tables.requests_table(frames.requests_frame(rows), viewer.colours, note=what, live=is_live)),
        viewer.colours,
        key=f"requests_{which}",
        height=330,
        selected=viewer.picked_request,
        on_pick=viewer.pick_request,
        hold=True,
    )
    if viewer.picked_request is None:
        st.caption(t("Click a request, or type its id and press Enter, to read why it waited, was late, or ended."))
