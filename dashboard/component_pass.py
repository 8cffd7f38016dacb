"""The pass, drawn in the browser. Owns: mounting `assets/pass_story`, one admission pass in one piece."""

from __future__ import annotations

from typing import Any

from dashboard.components import _component, colours_for_css
from dashboard.theme import Palette

_pass_story = _component("pass_story")


def pass_story(data: dict[str, Any], colours: Palette, *, key: str) -> None:
    """One admission pass, from `dashboard.frames_pass.story`."""
    _pass_story(key=key, data={**data, "colours": colours_for_css(colours)})
