"""The views: arrangement only. Numbers are made in `dashboard.frames`, marks in `dashboard.charts`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from dashboard.feed import Look
from dashboard.session import Viewer
from dashboard.views import admission, kv, now, requests


class View(NamedTuple):
    """One view of the page: its title, the parts of a look that it draws, and the function that draws them."""

    title: str
    parts: tuple[str, ...]
    show: Callable[[Viewer, Look], None]


VIEWS: Final = {
    "now": View("Now", ("queue",), now.show),
    "admission": View("Admission", ("passes",), admission.show),
    "kv": View("K/V pages", ("pages",), kv.show),
    "requests": View("Requests", (), requests.show),
}
