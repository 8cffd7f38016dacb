"""Plots of incidents as SVG text. Owns: panels over time, the run before the cure and after it; no drawing library."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Final, NamedTuple

from bench.incidents.diagnosis import Diagnosis
from bench.incidents.numbers import Numbers
from bench.incidents.world import START_NS, Client, Run

WIDTH: Final = 720
PANEL_HEIGHT: Final = 120
LEFT, RIGHT, TOP, GAP, BOTTOM = 64, 16, 44, 40, 40
_GREY: Final = "#808080"
#: Okabe and Ito: told apart with any kind of colour vision, in light and dark.
_BEFORE, _AFTER = "#d55e00", "#0072b2"


class Panel(NamedTuple):
    """One quantity over time: (seconds, value) before and after. `dots`: single events, not a line."""

    label: str
    before: Sequence[tuple[float, float]]
    after: Sequence[tuple[float, float]]
    dots: bool = False


def drawn(told: Diagnosis) -> str:
    """The incident's plot as an SVG document."""
    panels = _panels(told)
    end_s = max(t_s for panel in panels for t_s, _ in (*panel.before, *panel.after))
    height = TOP + len(panels) * (PANEL_HEIGHT + GAP) - GAP + BOTTOM
    title = f"{told.incident.title}: before and after the cure"
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'font-family="system-ui, sans-serif" font-size="12" fill="{_GREY}">'
    )
    legend = (
        f'<text x="{WIDTH - RIGHT}" y="20" text-anchor="end"><tspan fill="{_BEFORE}">before</tspan> '
        f'<tspan fill="{_AFTER}">after the cure</tspan></text>'
    )
    out = [
        head,
        f"<title>{escape(title)}</title>",
        f'<text x="{LEFT}" y="20" font-size="14">{escape(told.incident.title)}</text>',
        legend,
    ]
    for number, panel in enumerate(panels):
        out += _panel(panel, TOP + number * (PANEL_HEIGHT + GAP), end_s)
    for second in range(0, math.ceil(end_s) + 1, _tick(end_s)):
        out.append(
            f'<text x="{_across(second, end_s):.0f}" y="{height - BOTTOM + 16}" text-anchor="middle">{second}</text>'
        )
    middle = (LEFT + WIDTH - RIGHT) / 2
    out.append(
        f'<text x="{middle:.0f}" y="{height - 6}" text-anchor="middle">seconds since the start of the run</text>'
    )
    return "\n".join([*out, "</svg>"]) + "\n"


def _panels(told: Diagnosis) -> list[Panel]:
    before, after = Numbers(told.before.scrapes), Numbers(told.after.scrapes)

    def waiting(numbers: Numbers) -> list[tuple[float, float]]:
        queued, back = numbers.series("requests", state="waiting"), numbers.series("requests", state="retracted")
        return [(t_s, value + more) for (t_s, value), (_, more) in zip(queued, back, strict=True)]

    in_queue = Panel("requests waiting", waiting(before), waiting(after))
    ttft = Panel("TTFT of each request, s, by its arrival", _ttfts(told.before), _ttfts(told.after), dots=True)
    gaps = Panel("longest gap between two tokens, ms, by second", _worst(told.before), _worst(told.after))
    pool = Panel(
        "pool free or evictable, %",
        [(t_s, 100 * share) for t_s, share in before.to_be_had()],
        [(t_s, 100 * share) for t_s, share in after.to_be_had()],
    )
    retractions = Panel("retractions so far", before.series("retractions_total"), after.series("retractions_total"))
    return {
        "starvation": [in_queue, ttft],
        "over-reservation": [in_queue, pool, ttft],
        "retract-storm": [retractions, pool, gaps],
        "chunk-too-small": [in_queue, ttft, gaps],
        "chunk-too-large": [gaps, ttft],
    }[told.incident.name]


def _ttfts(run: Run) -> list[tuple[float, float]]:
    return [
        ((client.accepted_ns - START_NS) / 1e9, client.ttft_ns / 1e9)
        for client in run.clients.values()
        if client.ttft_ns is not None
    ]


def _worst(run: Run) -> list[tuple[float, float]]:
    """Of the gaps that ended within each second, the longest."""
    worst: dict[int, float] = {}
    for client in run.clients.values():
        for t_ns, gap_ns in _gaps(client):
            second = (t_ns - START_NS) // 1_000_000_000
            worst[second] = max(worst.get(second, 0.0), gap_ns / 1e6)
    return [(second + 0.5, worst[second]) for second in sorted(worst)]


def _gaps(client: Client) -> list[tuple[int, int]]:
    return [(later, later - earlier) for earlier, later in zip(client.token_ns, client.token_ns[1:], strict=False)]


def _panel(panel: Panel, top: float, end_s: float) -> list[str]:
    most = _round_up(max((value for _, value in (*panel.before, *panel.after)), default=1.0))
    base = top + PANEL_HEIGHT

    def up(value: float) -> float:
        return base - PANEL_HEIGHT * value / most

    out = [f'<text x="{LEFT}" y="{top - 8}">{escape(panel.label)}</text>']
    for part in (0.0, 0.5, 1.0):
        y = up(part * most)
        out.append(
            f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="{_GREY}" stroke-opacity="0.25"/>'
        )
        out.append(f'<text x="{LEFT - 8}" y="{y + 4:.0f}" text-anchor="end">{part * most:g}</text>')
    for points, colour in ((panel.before, _BEFORE), (panel.after, _AFTER)):
        places = [(_across(t_s, end_s), up(value)) for t_s, value in points]
        if panel.dots:
            out += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.2" fill="{colour}"/>' for x, y in places]
        else:
            line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
            out.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
    return out


def _across(t_s: float, end_s: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * t_s / end_s


def _tick(end_s: float) -> int:
    return 1 if end_s <= 10 else 2 if end_s <= 20 else 5


def _round_up(value: float) -> float:
    """The next of 1, 2, 5 times a power of ten."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= value - 1e-9)
