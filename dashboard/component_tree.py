"""The tree explorer in the browser. Owns: mounting it, and what it is sent."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import streamlit as st

from dashboard.components import colours_for_css
from dashboard.theme import Palette
from dashboard.words import mark, t

_ASSETS: Final = Path(__file__).parent / "assets"

#: Label, unit and help of each column; the cells are made in `frames_kv.tree_rows`.
_COLUMNS: Final = (
    (mark("Node"), "", mark("round: evictable; square: in use")),
    (mark("Pages"), "", mark("its own")),
    (mark("Tokens"), "", mark("its own")),
    (mark("With beneath"), mark("pages"), mark("its own pages and those of everything beneath it")),
    (mark("Locks"), "", mark("requests that hold it now")),
    (mark("Hits"), "", mark("requests that found it in the cache")),
    (mark("Last use"), mark("ago"), mark("since a request took, extended or left it")),
    (mark("Goes out"), "", mark("place in the order of eviction: 1 goes next")),
)

_html, _css, _js = ((_ASSETS / f"tree.{kind}").read_text(encoding="utf-8") for kind in ("html", "css", "js"))
_tree: Final[Callable[..., Any]] = st.components.v2.component("admitscope_tree", html=_html, css=_css, js=_js)


def tree_explorer(
    rows: list[dict[str, Any]],
    colours: Palette,
    *,
    key: str,
    picked: int | None,
    height: int,
    on_fold: Callable[[int], None],
    on_node: Callable[[int], None],
    on_top: Callable[[int], None],
) -> None:
    """Rows of `frames_kv.tree_rows`.

    on_fold  gets a node that is to be opened or closed; on_node one that was picked
    on_top   gets how many children of a node are to be shown
    """
    said = {"more": t("show more"), "open": t("open"), "close": t("close")}
    _tree(
        key=key,
        data={
            "columns": [[t(label), t(unit) if unit else "", t(note)] for label, unit, note in _COLUMNS],
            "rows": rows,
            "picked": picked,
            "height": height,
            "states": {name: colours.states[name] for name in ("protected", "evictable")},
            "words": said,
            "empty": t("The tree is empty: no prompt has been computed yet, or everything was evicted."),
            "colours": colours_for_css(colours),
        },
        on_fold_change=lambda: _deliver(key, "fold", on_fold),
        on_node_change=lambda: _deliver(key, "node", on_node),
        on_top_change=lambda: _deliver(key, "top", on_top),
    )


def _deliver(key: str, name: str, take: Callable[[int], None]) -> None:
    """Hand over what was done, in the callback: a run that is broken off by the next refresh would lose it."""
    value = st.session_state[key].get(name)
    if isinstance(value, int):
        take(value)
