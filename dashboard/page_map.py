"""The map of K/V pages. Owns: what the canvas of `assets/page_map.js` is sent."""

from __future__ import annotations

from typing import Any, Final

from dashboard import formats as f
from dashboard.theme import Palette
from dashboard.words import mark, t
from telemetry.observe import PAGE_STATES, PageMap

#: Above this many pages the owners are sent only in the mode that draws them, to keep a refresh under 300 kB.
OWNERS_ALWAYS_BELOW: Final = 25_000

#: Owners that the hover can name.
_LABELS: Final = 400

_STATE_WORDS: Final = {
    "free": mark("free"),
    "private": mark("private to a request"),
    "protected": mark("shared prefix, in use"),
    "evictable": mark("shared prefix, evictable"),
}


def page_map_data(
    pages: PageMap, colours: Palette, *, mode: str, chosen: int | None, lit: str = "", height: int = 330
) -> dict[str, Any]:
    """Data of the canvas.

    mode    "state" or "owner"
    chosen  the page that is framed
    lit     base64 of one bit for each page: those that stay bright; "" for all
    """
    by_owner = mode == "owner"
    has_owners = by_owner or pages.num_pages <= OWNERS_ALWAYS_BELOW
    used = pages.num_pages - pages.counts.free
    return {
        "count": pages.num_pages,
        "mode": mode,
        "height": height,
        "states_b64": pages.states_b64,
        "owners_b64": pages.owners_b64 if has_owners else "",
        "lit_b64": lit,
        "states": [{"name": name, "colour": colours.states[name]} for name in PAGE_STATES],
        "owner_colours": list(colours.owners[: len(pages.owners)]),
        "owner_labels": [owner.label for owner in pages.owners[:_LABELS]] if has_owners else [],
        "rest_colour": colours.muted,
        "legend": _owner_legend(pages, colours) if by_owner else _state_legend(pages, colours),
        "chosen": chosen if chosen is not None and chosen < pages.num_pages else None,
        "words": {"page": t("page"), "unlisted": t("an owner that is not listed")},
        "summary": t("{used} of {total} pages in use", used=f.count(used), total=f.count(pages.num_pages)),
        "hint": t(
            "{total} pages of {size} tokens. Click a page, or use the arrow keys and Enter, to see who holds it.",
            total=f.count(pages.num_pages),
            size=f.count(pages.page_size),
        ),
    }


def _state_legend(pages: PageMap, colours: Palette) -> list[list[str]]:
    return [[colours.states[name], t(_STATE_WORDS[name]), f.count(getattr(pages.counts, name))] for name in PAGE_STATES]


def _owner_legend(pages: PageMap, colours: Palette) -> list[list[str]]:
    named = list(zip(colours.owners, pages.owners, strict=False))
    items = [[colour, f.short_rid(owner.label), f.count(owner.pages)] for colour, owner in named]
    rest = pages.num_pages - pages.counts.free - sum(owner.pages for _, owner in named)
    if rest > 0:
        others = t("{n} other owners", n=f.count(pages.owners_total - len(named)))
        items.append([colours.muted, others, f.count(rest)])
    items.append([colours.states["free"], t("free"), f.count(pages.counts.free)])
    return items
