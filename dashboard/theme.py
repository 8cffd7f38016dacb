"""Colours. Owns: one colour-blind-safe palette in a light and a dark tone, and the few page-wide style rules.

Hues follow Okabe and Ito's set, moved in lightness until each mark has a contrast of at least 3 to 1 and each text of
at least 4.5 to 1 against its page (`tests/dashboard/test_theme.py` measures them). Colour never stands alone: each mark
that it tells apart also has a label, a place or a dash.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final


@dataclass(frozen=True, slots=True)
class Palette:
    """One tone of the palette. All colours are #rrggbb.

    states    by page state       segments  parts of a ledger bar
    blockers  why a request waits  owners    for the largest owners of pages, in order
    work      parts of time to first token; instead of `queue` its blockers stand beside them: hues that no blocker has
    decode    stretches of decode on a lane
    """

    page: str
    surface: str
    text: str
    muted: str
    line: str
    p50: str
    p99: str
    good: str
    warn: str
    bad: str
    accent: str
    accent_soft: str
    decode: str
    states: dict[str, str] = field(default_factory=dict)
    segments: dict[str, str] = field(default_factory=dict)
    blockers: dict[str, str] = field(default_factory=dict)
    work: dict[str, str] = field(default_factory=dict)
    owners: tuple[str, ...] = ()


LIGHT: Final = Palette(
    page="#fcfcfb",
    surface="#f1f3f4",
    text="#1a2027",
    muted="#5a646e",
    line="#d9dee3",
    p50="#00609b",
    p99="#c25100",
    good="#00714f",
    warn="#8a5a00",
    bad="#a8321e",
    accent="#00609b",
    accent_soft="#d7e9f5",
    decode="#0b5563",
    states={"free": "#e4e8eb", "private": "#0072b2", "protected": "#d55e00", "evictable": "#00936b"},
    segments={
        "running": "#464f58",
        "decode rows": "#464f58",
        "continuation": "#d55e00",
        "admission": "#0072b2",
        "left": "#e4e8eb",
        "overdraft": "#a8321e",
    },
    blockers={
        "compute": "#0072b2",
        "chunk": "#2e93cc",
        "chunk_slot": "#5c7fa3",
        "kv_now": "#d55e00",
        "kv_total": "#b07800",
        "rows": "#b0568a",
        "prefill_max": "#8464ad",
        "cold_prefix": "#00936b",
        "order": "#858f99",
        "delay": "#8a7a4d",
        "engine_busy": "#4a545e",
    },
    work={
        "intake": "#4f7d2a",
        "prepare": "#8c4a2f",
        "chunk_forward": "#1a2027",
        "between_chunks": "#7b1e5b",
        "commit": "#203a6b",
        "emit": "#5b3fa0",
    },
    owners=(
        "#0072b2",
        "#d55e00",
        "#00936b",
        "#b0568a",
        "#b07800",
        "#2e93cc",
        "#8464ad",
        "#8c4a2f",
        "#4f7d2a",
        "#5c7fa3",
    ),
)

DARK: Final = Palette(
    page="#10151b",
    surface="#1a212a",
    text="#e8edf2",
    muted="#a1acb8",
    line="#333d48",
    p50="#58b4ea",
    p99="#f29a4e",
    good="#3fc79b",
    warn="#e5b454",
    bad="#ff8a73",
    accent="#58b4ea",
    accent_soft="#1d3a4f",
    decode="#5fb3c4",
    states={"free": "#28313b", "private": "#3f9fdc", "protected": "#ee7f35", "evictable": "#2bb98d"},
    segments={
        "running": "#c3ccd5",
        "decode rows": "#c3ccd5",
        "continuation": "#ee7f35",
        "admission": "#3f9fdc",
        "left": "#28313b",
        "overdraft": "#ff8a73",
    },
    blockers={
        "compute": "#3f9fdc",
        "chunk": "#7cc4ee",
        "chunk_slot": "#7e9ec0",
        "kv_now": "#ee7f35",
        "kv_total": "#dba33b",
        "rows": "#d987b5",
        "prefill_max": "#a98bd4",
        "cold_prefix": "#2bb98d",
        "order": "#788694",
        "delay": "#b3a374",
        "engine_busy": "#bcc6d0",
    },
    work={
        "intake": "#8dbb62",
        "prepare": "#c98262",
        "chunk_forward": "#e8edf2",
        "between_chunks": "#b5e0d0",
        "commit": "#6f8fe0",
        "emit": "#9aa5ff",
    },
    owners=(
        "#3f9fdc",
        "#ee7f35",
        "#2bb98d",
        "#d987b5",
        "#dba33b",
        "#7cc4ee",
        "#a98bd4",
        "#c98262",
        "#8dbb62",
        "#7e9ec0",
    ),
)

#: A word that this version does not know still gets a colour.
UNKNOWN: Final = "order"


def palette(kind: str | None) -> Palette:
    """The palette for Streamlit's theme kind, "light" or "dark"; light when unknown."""
    return DARK if kind == "dark" else LIGHT


def blocker_colour(colours: Palette, blocker: str) -> str:
    """The colour of a blocker, also of one that this version has never heard of."""
    return colours.blockers.get(blocker, colours.blockers[UNKNOWN])


def cause_colour(colours: Palette, cause: str) -> str:
    """The colour of a part of TTFT, or of the blocker that its queue part stands for."""
    return colours.work.get(cause) or blocker_colour(colours, cause)


def luminance(colour: str) -> float:
    """Relative luminance of #rrggbb, 0 to 1, as WCAG 2 defines it."""
    channels = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    """Contrast ratio of two colours, 1 to 21."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def page_css(colours: Palette) -> str:
    """Page-wide rules: less empty room above, and a page that visibly fades while its numbers are old."""
    properties = {"text": colours.text, "muted": colours.muted, "line": colours.line}
    declared = "".join(f"--ad-{name}:{value};" for name, value in properties.items())
    return f"<style>:root{{{declared}}}{_PAGE_RULES}</style>"


_PAGE_RULES: Final = """
.stMainBlockContainer { padding: 1.1rem 1.6rem 3rem; max-width: 1680px; }
[data-testid="stHeader"] { background: transparent; height: 0; min-height: 0; pointer-events: none; }
[data-testid="stStatusWidget"] { display: none; }
/* A live fragment is rerun all the time: Streamlit's own fading of elements in work would flicker. */
[data-stale="true"] { opacity: 1 !important; transition: none !important; }
html[data-admitscope="old"] .st-key-live { opacity: .45; filter: grayscale(.7); transition: opacity .4s; }
.st-key-controls { align-items: center; row-gap: .5rem; }
.stMainBlockContainer h3 { font-size: 1.02rem; font-weight: 600; padding: .15rem 0 0; }
.stMainBlockContainer [data-testid="stCaptionContainer"] p { font-size: .84rem; }
.stMainBlockContainer [data-testid="stCaptionContainer"] { color: var(--ad-muted) !important; opacity: 1; }
.stMainBlockContainer h3.why code { font-size: .95rem; color: var(--ad-text); background: none; padding: 0; }
.explain { margin: 0; padding-left: 1.4rem; line-height: 1.5; font-size: .95rem; max-width: 78ch; }
.explain li { margin: .16rem 0; font-variant-numeric: tabular-nums; }
.legend-row { display: flex; flex-wrap: wrap; gap: .1rem 1.1rem; font-size: 13px; color: var(--ad-muted); }
.legend-row b { font-weight: 600; color: var(--ad-text); font-variant-numeric: tabular-nums; }
.legend-row i { display: inline-block; width: .65rem; height: .65rem; border-radius: 2px; margin-right: .4rem; }
.legend-row i { background: var(--mark); box-sizing: border-box; }
.legend-row .legend-line { width: .95rem; height: 3px; vertical-align: 3px; }
.legend-row .legend-outline { background: none; border: 1.5px dashed var(--mark); width: .9rem; }
.amounts { display: grid; grid-template-columns: repeat(auto-fit, minmax(170px, 1fr)); gap: .15rem 1rem;
  font-size: 13px; font-variant-numeric: tabular-nums; }
.st-key-page_owner, .st-key-picked_node { border-left: 4px solid var(--ad-line); padding: .1rem 0 .1rem .8rem; }
.st-key-page_owner [data-testid="stText"],
.st-key-picked_node [data-testid="stText"] { font-family: inherit; white-space: pre-wrap; }
.amounts em { font-style: normal; color: var(--ad-muted); }
.headline { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 22rem), 1fr)); gap: .5rem 1.6rem;
  border: 1px solid var(--ad-line); border-radius: 8px; padding: .8rem 1.1rem; font-variant-numeric: tabular-nums; }
.headline p, .headline ul { margin: 0; padding: 0; list-style: none; display: grid; gap: .2rem; align-content: start; }
.headline p b { font-size: 1.18rem; font-weight: 600; }
.headline p span { font-size: .9rem; max-width: 78ch; }
.headline li { font-size: .9rem; }
.headline li b { display: inline-block; min-width: 4.2rem; font-size: 1.18rem; font-weight: 600; }
.nothing { display: grid; gap: .25rem; border: 1px dashed var(--ad-line); border-radius: 8px; padding: 1.3rem 1.2rem; }
.nothing span { color: var(--ad-muted); }
@media (max-width: 640px) {
  .stMainBlockContainer { padding: .7rem .8rem 2rem; }
  /* All views are in sight: their names wrap, instead of running out of the page. */
  [data-testid="stButtonGroup"] [role="radiogroup"] { flex-wrap: wrap; overflow: visible; row-gap: .2rem; }
}
"""
