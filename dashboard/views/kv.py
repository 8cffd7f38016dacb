"""The view "K/V pages": the map of the pool, one page's owner, and the largest owners."""

from __future__ import annotations

import streamlit as st

from dashboard import components, frames, tables
from dashboard.feed import Look
from dashboard.page_map import page_map_data, page_sentence
from dashboard.session import Viewer, natural
from dashboard.views.parts import choice, waiting_for_engine
from dashboard.words import mark

_MODES = {"state": mark("By state"), "owner": mark("By owner")}


def show(viewer: Viewer, look: Look) -> None:
    """The map over the full width, the chosen page's sentence, then the owners."""
    if look.pages is None:
        waiting_for_engine(viewer, look.error)
        return
    pages = look.pages
    with st.container(horizontal=True, horizontal_alignment="distribute", vertical_alignment="center"):
        st.subheader("Pages of the K/V pool", anchor=False, width="content")
        mode = choice(viewer, "mode", _MODES, label=mark("Colours"))
    chosen = viewer.selection("page", natural)
    components.page_map(
        page_map_data(pages, viewer.colours, mode=mode, chosen=chosen),
        viewer.colours,
        key="page_map",
        on_pick=lambda page: viewer.select("page", page),
    )
    facts = None if chosen is None else frames.page_facts(pages, chosen)
    with st.container(key="page_owner"):
        st.text("No page is chosen." if facts is None else page_sentence(facts, pages.page_size))
    st.subheader("Largest owners", anchor=False)
    components.live_table(
        tables.owners_table(pages.owners, pages.num_pages, pages.owners_total, viewer.colours),
        viewer.colours,
        key="owners",
        height=330,
    )
