"""Parts that run in the browser. Owns: mounting the head of the page, the live table and the page map.

Their scripts and styles lie in `assets/` and are sent by Streamlit itself; nothing comes from another host. Texts are
written as text in the browser, so an id chosen by a stranger stays an id.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import streamlit as st

from dashboard.tables import Table
from dashboard.theme import Palette

_ASSETS: Final = Path(__file__).parent / "assets"


def colours_for_css(colours: Palette) -> dict[str, str]:
    """Custom properties that the components' style sheets use."""
    names = ("page", "surface", "text", "muted", "line", "good", "warn", "bad", "accent", "accent_soft")
    return {name: getattr(colours, name) for name in names}


def _component(name: str) -> Callable[..., Any]:
    html, css, js = ((_ASSETS / f"{name}.{kind}").read_text(encoding="utf-8") for kind in ("html", "css", "js"))
    mounted: Callable[..., Any] = st.components.v2.component(f"admitscope_{name}", html=html, css=css, js=js)
    return mounted


_pulse = _component("pulse")
_live_table = _component("live_table")
_page_map = _component("page_map")


def pulse(data: dict[str, Any], colours: Palette, *, key: str) -> None:
    """The head of the page, from `dashboard.pulse.pulse_data`."""
    _pulse(key=key, data={**data, "colours": colours_for_css(colours)})


def live_table(
    table: Table, colours: Palette, *, key: str, height: int, selected: str | None = None, pickable: bool = False
) -> str | None:
    """A table whose rows live; returns the id of a row that was just clicked."""
    answer = _live_table(
        key=key,
        data={
            "name": key,
            "columns": list(table.columns),
            "rows": table.rows,
            "note": table.note,
            "empty": list(table.empty),
            "filter": table.filter,
            "selected": selected,
            "pickable": pickable,
            "height": height,
            "colours": colours_for_css(colours),
        },
        on_picked_change=_nothing,
    )
    picked = answer.picked
    return None if picked is None else str(picked)


def page_map(data: dict[str, Any], colours: Palette, *, key: str) -> int | None:
    """The page map, from `dashboard.page_map.page_map_data`; returns the page that was just clicked."""
    answer = _page_map(key=key, data={**data, "colours": colours_for_css(colours)}, on_page_change=_nothing)
    picked = answer.page
    return None if picked is None else int(picked)


def _nothing() -> None:
    """A callback must be named for its value to exist; the value is read from the answer."""
