"""The views: arrangement only. Numbers are made in `dashboard.frames`, marks in `dashboard.charts`.

To add a view: one file with `show(viewer, look)`, its name in the import, and one line in VIEWS. The line says the
title (English; translated where it is shown), the parts of a look that it draws, and its group:

    engine   what a source says, live or recorded
    checks   what was proved about it
    learn    what runs on the page's own account: it must also work where no source answers

The order of VIEWS is the order on the page and of the keys 1 to 9.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal, NamedTuple

from dashboard.feed import Look
from dashboard.session import Viewer
from dashboard.views import admission, classroom, invariants, kv, latency, now, requests, what_if
from dashboard.words import mark


class View(NamedTuple):
    """One view of the page: its title, the parts of a look that it draws, the function that draws them, its group.

    walk  what the keys left (-1) and right (1) do, in a view that has moments of its own
    """

    title: str
    parts: tuple[str, ...]
    show: Callable[[Viewer, Look], None]
    group: Literal["engine", "checks", "learn"] = "engine"
    walk: Callable[[Viewer, int], None] | None = None


#: By name, as the address has it: now, admission, requests, latency, kv, invariants, what_if, classroom.
VIEWS: Final = {
    "now": View(mark("Now"), ("queue", "passes", "pages"), now.show),
    "admission": View(mark("Admission"), ("passes",), admission.show),
    "requests": View(mark("Requests"), ("lanes",), requests.show),
    "latency": View(mark("Latency"), ("breakdown",), latency.show),
    "kv": View(mark("K/V pages"), ("pages", "pool"), kv.show),
    "invariants": View(mark("Invariants"), ("laws", "evidence"), invariants.show, "checks"),
    "what_if": View(mark("What if"), (), what_if.show, "checks"),
    "classroom": View(mark("Classroom"), (), classroom.show, "learn", classroom.walk),
}
