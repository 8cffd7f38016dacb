"""Parts that run in the browser. Owns: mounting the head of the page, the live table and the page map.

Their scripts and styles lie in `assets/` and are sent by Streamlit itself; nothing comes from another host. Texts are
written as text in the browser, so an id chosen by a stranger stays an id.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import streamlit as st

from dashboard import downloads
from dashboard.tables import Table
from dashboard.theme import Palette
from dashboard.told import Told
from dashboard.words import t

_ASSETS: Final = Path(__file__).parent / "assets"

_HEAD: Final = "pulse"


def colours_for_css(colours: Palette) -> dict[str, str]:
    """Custom properties that the components' style sheets use."""
    names = ("page", "surface", "text", "muted", "line", "good", "warn", "bad", "accent", "accent_soft")
    return {name: getattr(colours, name) for name in names}


def _component(name: str) -> Callable[..., Any]:
    html, css, js = ((_ASSETS / f"{name}.{kind}").read_text(encoding="utf-8") for kind in ("html", "css", "js"))
    mounted: Callable[..., Any] = st.components.v2.component(f"admitscope_{name}", html=html, css=css, js=js)
    return mounted


_pulse = _component("pulse")
_answers = _component("answers")
_scrub = _component("scrub")
_live_table = _component("live_table")
_page_map = _component("page_map")


def pulse(data: dict[str, Any], colours: Palette, *, done: Told, address: str) -> None:
    """The head of the page, from `dashboard.pulse.pulse_data`. It tells what the viewer did until that is `done`.

    address  query of what is shown, which the browser is held to
    """
    _pulse(
        key=_HEAD,
        data={
            **data,
            "done": [done.session, done.page, done.done],
            "address": address,
            "colours": colours_for_css(colours),
        },
        # What is told stays until the next is: the run reads it, so that a run that is broken off loses nothing.
        on_told_change=lambda: None,
    )


def told_by_page() -> object:
    """What the head told last; None before it told anything. `Told.new` says what of it is new."""
    head = st.session_state.get(_HEAD)
    return None if head is None else head.get("told")


def answers(lines: list[dict[str, Any]], colours: Palette, *, key: str, on_go: Callable[[Any], None]) -> None:
    """Questions with their answers, from `dashboard.answers`. `on_go` gets what a line leads to."""
    _answers(
        key=key,
        data={"lines": lines, "colours": colours_for_css(colours)},
        on_go_change=lambda: _deliver(key, "go", on_go),
    )


def scrub(
    data: dict[str, Any], colours: Palette, *, on_index: Callable[[int], None], on_play: Callable[[bool], None]
) -> None:
    """The bar of a recording. `on_index` gets the place that was chosen, `on_play` whether it is to run."""
    _scrub(
        key="scrub",
        data={**data, "colours": colours_for_css(colours)},
        on_index_change=lambda: _deliver("scrub", "index", on_index),
        on_play_change=lambda: _deliver("scrub", "play", on_play),
    )


def live_table(
    table: Table,
    colours: Palette,
    *,
    key: str,
    height: int,
    selected: str | None = None,
    on_pick: Callable[[str], None] | None = None,
    hold: bool = False,
) -> None:
    """A table whose rows live.

    on_pick  gets the id of a row that was clicked, or an id that was typed and entered
    hold     rows flow so fast that they stand still while the pointer is over them
    """
    downloads.note(key, table)
    _live_table(
        key=key,
        data={
            "name": key,
            "columns": [
                {**column, **{name: t(column[name]) for name in ("label", "unit", "help")}} for column in table.columns
            ],
            "rows": table.rows,
            "note": table.note,
            "empty": list(table.empty),
            "filter": table.filter,
            "selected": selected,
            "pickable": on_pick is not None,
            "hold": hold,
            "held": t("held while the pointer is here"),
            "match": t("{found} of {all} match"),
            "height": height,
            "colours": colours_for_css(colours),
        },
        on_picked_change=lambda: _deliver(key, "picked", on_pick),
    )


def page_map(data: dict[str, Any], colours: Palette, *, key: str, on_pick: Callable[[int], None]) -> None:
    """The page map. `on_pick` gets the page that was clicked."""
    _page_map(
        key=key,
        data={**data, "colours": colours_for_css(colours)},
        on_page_change=lambda: _deliver(key, "page", on_pick),
    )


def _deliver(key: str, name: str, on_pick: Callable[[Any], None] | None) -> None:
    """Hand over what was just picked.

    Done in the callback, which runs before the script: a run that is broken off by the next refresh would lose it.
    """
    picked = st.session_state[key].get(name)
    if picked is not None and on_pick is not None:
        on_pick(picked)
