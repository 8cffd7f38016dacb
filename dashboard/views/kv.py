"""The view "K/V pages": the map of the pool, one page's owner, the tree of shared prefixes, and the pool over time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import streamlit as st

from dashboard import charts_kv as charts
from dashboard import components, tables
from dashboard import formats as f
from dashboard import frames_kv as frames
from dashboard.component_tree import tree_explorer
from dashboard.feed import Look
from dashboard.page_map import page_map_data
from dashboard.session import Viewer, natural
from dashboard.views.parts import choice, legend, page_fact, page_question, read_later, waiting_for_engine
from dashboard.words import mark, t
from telemetry.client import Source
from telemetry.observe import PageFact, PageMap, PoolAnswer, TreeAnswer

MODES = {"state": mark("By state"), "owner": mark("By owner")}
#: Buttons to requests in one row.
_SHOWN_HOLDERS = 4


def show(viewer: Viewer, look: Look) -> None:
    """The map over the full width and the chosen page, then the tree beside the pool over time, then the owners."""
    if look.pages is None:
        waiting_for_engine(viewer, look.error)
        return
    pages = look.pages
    tree, opened = _asked_tree(viewer)
    _map(viewer, pages, tree)
    left, right = st.columns([1.45, 1], gap="medium")
    with left:
        _tree(viewer, tree, opened)
    with right:
        _over_time(viewer, look.pool)
    st.subheader(t("Largest owners"), anchor=False)
    components.live_table(
        tables.owners_table(pages.owners, pages.num_pages, pages.owners_total, viewer.colours),
        viewer.colours,
        key="owners",
        height=330,
        on_pick=lambda owner: _pick_owner(viewer, pages, owner),
    )


def _map(viewer: Viewer, pages: PageMap, tree: TreeAnswer | None) -> None:
    with st.container(horizontal=True, horizontal_alignment="distribute", vertical_alignment="center"):
        st.subheader(t("Pages of the K/V pool"), anchor=False, width="content")
        mode = choice(viewer, "mode", MODES, label=mark("Colours"))
    chosen = viewer.selection("page", natural)
    picked = None if tree is None else tree.picked
    lit = frames.owner_bitmap(pages, chosen) if chosen is not None else ""
    components.page_map(
        page_map_data(pages, viewer.colours, mode=mode, chosen=chosen, lit=lit or (picked.lit_b64 if picked else "")),
        viewer.colours,
        key="page_map",
        # A page and a node light up different pages: the last choice wins.
        on_pick=lambda page: viewer.select_all({"page": page, "node": None}),
    )
    if chosen is None:
        st.caption(t("No page is chosen."))
        return
    found = page_fact(viewer, chosen)
    if found.value is None:
        st.caption(found.error or t("The pool has no page {page}.", page=f.count(chosen)))
        return
    _page(viewer, found.value, pages.page_size)


def _page(viewer: Viewer, fact: PageFact, page_size: int) -> None:
    with st.container(key="page_owner"):
        st.text(frames.page_sentence(fact, page_size))
        read_later(viewer, fact)
        with st.container(horizontal=True, gap="small"):
            if fact.node is not None:
                node = fact.node
                st.button(
                    t("Show node {node}", node=node),
                    key="to_node",
                    on_click=lambda: viewer.select_all({"node": node, "page": None}),
                )
            _requests(viewer, fact.holders, fact.holders_total, key="page")
            st.button(t("Close"), key="close_page", type="tertiary", on_click=lambda: viewer.select("page", None))


def _requests(viewer: Viewer, rids: tuple[str, ...], total: int, *, key: str) -> None:
    """Buttons to the first few requests."""
    for at, rid in enumerate(rids[:_SHOWN_HOLDERS]):
        st.button(
            t("Request {rid}", rid=f.short_rid(rid)),
            key=f"{key}_holder_{at}",
            on_click=lambda rid=rid: viewer.select_all({"view": "requests", "rid": rid}),
            help=rid,
        )
    if total > _SHOWN_HOLDERS:
        st.caption(t("and {n} more requests", n=f.count(total - _SHOWN_HOLDERS)), width="content")


def _pick_owner(viewer: Viewer, pages: PageMap, owner: str) -> None:
    """A node is shown in the tree, a request in its view."""
    row = next((each for each in pages.owners if each.owner == owner), None)
    if row is None:
        return
    if row.kind == "request":
        viewer.select_all({"view": "requests", "rid": row.label})
    else:
        viewer.select_all({"node": int(row.label.split()[-1]), "page": None})


# -- the tree --------------------------------------------------------------------------------------------------------


def _top(viewer: Viewer) -> int:
    top = viewer.selection("top", natural)
    return top if top in frames.TOPS else frames.TOPS[0]


def questions(viewer: Viewer) -> dict[tuple[object, ...], Callable[[Source], Any]]:
    """What this view asks beside its look, by key, for who asks ahead of it: the tree, and the chosen page."""
    asked: list[tuple[tuple[object, ...], Callable[[Source], Any]]] = [_tree_question(viewer)]
    page = viewer.selection("page", natural)
    if page is not None:
        asked.append(page_question(page))
    return dict(asked)


def _tree_question(viewer: Viewer) -> tuple[tuple[object, ...], Callable[[Source], TreeAnswer | None]]:
    """Key and question. Until somebody opens a node, a root with one child is asked for with that one open."""
    node, top = viewer.selection("node", natural), _top(viewer)
    chosen = viewer.selection("open", frames.open_nodes)

    def question(source: Source) -> TreeAnswer | None:
        tree = source.tree(node=node, opened=chosen or (), top=top)
        only = None if chosen is not None or tree is None else frames.only_child(tree)
        return tree if only is None else source.tree(node=node, opened=(only,), top=top)

    return ("tree", node, chosen, top), question


def _asked_tree(viewer: Viewer) -> tuple[TreeAnswer | None, tuple[int, ...]]:
    """(the answer, the nodes that are open in it)."""
    key, question = _tree_question(viewer)
    tree = viewer.ask(*key, question=question).value
    chosen = viewer.selection("open", frames.open_nodes)
    return tree, frames.opened_in(tree) if chosen is None and tree is not None else chosen or ()


def _tree(viewer: Viewer, tree: TreeAnswer | None, opened: tuple[int, ...]) -> None:
    st.subheader(t("Radix tree of shared prefixes"), anchor=False)
    if tree is None:
        st.caption(t("This source does not say: its engine is older than this page."))
        return
    top = _top(viewer)
    st.caption(
        t(
            "{nodes} nodes hold {pages} pages ({tokens} tok). {next}",
            nodes=f.count(tree.nodes_total),
            pages=f.count(tree.pages_total),
            tokens=f.count(tree.pages_total * tree.page_size),
            next=frames.next_out_words(tree),
        )
    )
    tree_explorer(
        frames.tree_rows(tree, opened, top),
        viewer.colours,
        key="tree",
        picked=viewer.selection("node", natural),
        height=380,
        on_fold=lambda node: viewer.select("open", frames.toggled(opened, node)),
        on_node=lambda node: viewer.select_all({"node": node, "page": None}),
        on_top=lambda wanted: viewer.select("top", wanted if wanted in frames.TOPS else None),
    )
    st.caption(frames.order_words(tree))
    read_later(viewer, tree)
    _picked(viewer, tree)


def _picked(viewer: Viewer, tree: TreeAnswer) -> None:
    wanted = viewer.selection("node", natural)
    if wanted is None:
        st.caption(t("Click a node: its path, its holders and its pages on the map."))
        return
    with st.container(key="picked_node"):
        if tree.picked is None:
            st.text(t("Node {node} is gone: it was evicted.", node=wanted))
        else:
            row = tree.picked.path[-1]
            path = " → ".join(f"{each.node} ({f.count(each.pages)})" for each in tree.picked.path)
            st.text(
                t(
                    "Node {node}: {pages} of {depth} pages from the root; {locks} locks, {hits} hits, computed {age} "
                    "ago, last used {used} ago in step {step}.",
                    node=row.node,
                    pages=f.count(row.pages),
                    depth=f.count(row.depth_pages),
                    locks=f.count(row.lock_count),
                    hits=f.count(row.hits),
                    age=f.duration(row.age_s),
                    used=f.duration(row.last_used_s),
                    step=f.count(row.last_used_step),
                )
            )
            st.text(t("Path from the root (pages): {path}", path=path))
        with st.container(horizontal=True, gap="small"):
            if tree.picked is not None:
                _requests(viewer, tree.picked.holders, tree.picked.path[-1].holders, key="node")
            st.button(t("Close"), key="close_node", type="tertiary", on_click=lambda: viewer.select("node", None))


# -- over time -------------------------------------------------------------------------------------------------------


def _over_time(viewer: Viewer, pool: PoolAnswer | None) -> None:
    st.subheader(t("Pool over time"), anchor=False)
    if pool is None or not pool.points:
        st.caption(t("Nothing yet: the chart begins with the first step."))
        return
    colours = viewer.colours
    legend([(colours.states[state], state, "") for state in ("free", "evictable", "protected", "private")])
    st.altair_chart(charts.pool_chart(frames.pool_frame(pool), colours), width="stretch", key="pool_over_time")
    st.subheader(t("Promises against free memory"), anchor=False)
    marks = (colours.states["evictable"], colours.p99, colours.muted)
    legend([(mark_, side, "") for mark_, side in zip(marks, frames.SIDES, strict=True)], shape="line")
    st.altair_chart(charts.promise_chart(frames.promise_frame(pool), colours), width="stretch", key="promises")
    st.caption(frames.promise_words(pool))
