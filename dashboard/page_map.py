"""The map of K/V pages. Owns: what the canvas of `assets/page_map.js` is sent, and the sentences about one page."""

from __future__ import annotations

from typing import Any, Final

from dashboard import formats as f
from dashboard.frames import PageFacts
from dashboard.theme import Palette
from telemetry.observe import PAGE_STATES, PageMap

#: Above this many pages the owners are sent only in the mode that draws them, to keep a refresh under 300 kB.
OWNERS_ALWAYS_BELOW: Final = 25_000

#: Above this many pages the map tells the ten largest owners apart by hover only for those.
_LABELS: Final = 400

_STATE_WORDS: Final = {
    "free": "free",
    "private": "private to a request",
    "protected": "shared prefix, in use",
    "evictable": "shared prefix, evictable",
}


def page_map_data(
    pages: PageMap, colours: Palette, *, mode: str, chosen: int | None, height: int = 330
) -> dict[str, Any]:
    """Data of the canvas. `mode` is "state" or "owner"; `chosen` the page whose owner stays bright."""
    by_owner = mode == "owner"
    has_owners = by_owner or pages.num_pages <= OWNERS_ALWAYS_BELOW
    used = pages.num_pages - pages.counts.free
    return {
        "count": pages.num_pages,
        "mode": mode,
        "height": height,
        "states_b64": pages.states_b64,
        "owners_b64": pages.owners_b64 if has_owners else "",
        "states": [{"name": name, "colour": colours.states[name]} for name in PAGE_STATES],
        "owner_colours": list(colours.owners[: len(pages.owners)]),
        "owner_labels": [owner.label for owner in pages.owners[:_LABELS]] if has_owners else [],
        "rest_colour": colours.muted,
        "legend": _owner_legend(pages, colours) if by_owner else _state_legend(pages, colours),
        "chosen": chosen if chosen is not None and chosen < pages.num_pages else None,
        "summary": f"{f.count(used)} of {f.count(pages.num_pages)} pages in use",
        "hint": f"{f.count(pages.num_pages)} pages of {pages.page_size} tokens. "
        "Click a page, or use the arrow keys and Enter, to see who holds it.",
    }


def _state_legend(pages: PageMap, colours: Palette) -> list[list[str]]:
    return [[colours.states[name], _STATE_WORDS[name], f.count(getattr(pages.counts, name))] for name in PAGE_STATES]


def _owner_legend(pages: PageMap, colours: Palette) -> list[list[str]]:
    named = list(zip(colours.owners, pages.owners, strict=False))
    items = [[colour, f.short_rid(owner.label), f.count(owner.pages)] for colour, owner in named]
    rest = pages.num_pages - pages.counts.free - sum(owner.pages for _, owner in named)
    if rest > 0:
        items.append([colours.muted, f"{f.count(pages.owners_total - len(named))} other owners", f.count(rest)])
    items.append([colours.states["free"], "free", f.count(pages.counts.free)])
    return items


def page_sentence(facts: PageFacts, page_size: int) -> str:
    """Who holds one page, in one sentence. Plain text."""
    start = f"Page {facts.page} is {facts.state}"
    if facts.owner is None:
        if facts.is_listed:
            return f"{start}: nobody holds it."
        return f"{start}; its owner is not among those that were sent."
    owner = facts.owner
    size = f"{f.count(owner.pages)} pages ({f.count(owner.pages * page_size)} tokens)"
    if owner.kind == "request":
        return f"{start}: request {owner.label} owns it, with {size}."
    holders = ", ".join(owner.holders[:4]) + (f" and {len(owner.holders) - 4} more" if len(owner.holders) > 4 else "")
    held = f"in use by {holders}" if holders else "used by no request now, so it can be evicted"
    return f"{start}: it belongs to {owner.label}, a shared prefix of {size}, {held}."
