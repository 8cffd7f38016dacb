"""Log-log charts as SVG text. Owns: axes, decades, lines, labels; no drawing library."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Final, NamedTuple

WIDTH: Final = 640
HEIGHT: Final = 380
LEFT, RIGHT, TOP, BOTTOM = 64, 190, 44, 52
#: Okabe and Ito's palette: told apart with any kind of colour vision, in light and dark.
COLOURS: Final = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
_GREY: Final = "#808080"
_HEAD: Final = (
    f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
    f'font-family="system-ui, sans-serif" font-size="12" fill="{_GREY}">'
)
_UNITS: Final = ((1e6, "M"), (1e3, "k"))


class Line(NamedTuple):
    """A curve: points (x, y), both above 0. `dashed` marks somebody else's figures."""

    name: str
    points: Sequence[tuple[float, float]]
    dashed: bool = False


def chart(title: str, x_label: str, y_label: str, lines: Sequence[Line]) -> str:
    """One chart as an SVG document."""
    xs = [x for line in lines for x, _ in line.points]
    ys = [y for line in lines for _, y in line.points]
    left, right = _decades(xs)
    low, high = _decades(ys)

    def place(x: float, y: float) -> tuple[float, float]:
        across = (math.log10(x) - left) / (right - left)
        up = (math.log10(y) - low) / (high - low)
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)

    out = [
        _HEAD,
        f"<title>{escape(title)}</title>",
        f'<text x="{LEFT}" y="20" font-size="14">{escape(title)}</text>',
    ]
    for decade in range(left, right + 1):
        x, _ = place(10.0**decade, 10.0**low)
        out.append(_grid(x, TOP, x, HEIGHT - BOTTOM))
        out.append(f'<text x="{x:.0f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{_number(decade)}</text>')
    for decade in range(low, high + 1):
        _, y = place(10.0**left, 10.0**decade)
        out.append(_grid(LEFT, y, WIDTH - RIGHT, y))
        out.append(f'<text x="{LEFT - 8}" y="{y + 4:.0f}" text-anchor="end">{_number(decade)}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    out.append(f'<text x="{middle:.0f}" y="{HEIGHT - 12}" text-anchor="middle">{escape(x_label)}</text>')
    out.append(f'<text x="{LEFT}" y="36">{escape(y_label)}</text>')
    for number, line in enumerate(lines):
        out += _curve(line, COLOURS[number % len(COLOURS)], [place(x, y) for x, y in line.points], number)
    return "\n".join([*out, "</svg>"]) + "\n"


def write(folder: Path, name: str, document: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.svg").write_text(document, encoding="utf-8")


def _decades(values: Sequence[float]) -> tuple[int, int]:
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    return low, max(high, low + 1)


def _number(decade: int) -> str:
    value = 10.0**decade
    for unit, letter in _UNITS:
        if value >= unit:
            return f"{value / unit:g}{letter}"
    return f"{value:g}"


def _grid(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{_GREY}" stroke-opacity="0.25"/>'


def _curve(line: Line, colour: str, places: Sequence[tuple[float, float]], number: int) -> list[str]:
    dash = ' stroke-dasharray="5 4"' if line.dashed else ""
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    y = TOP + 12 + 20 * number
    x = WIDTH - RIGHT + 14
    return [
        f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>',
        *(f'<circle cx="{across:.1f}" cy="{up:.1f}" r="3" fill="{colour}"/>' for across, up in places),
        f'<line x1="{x}" y1="{y - 4}" x2="{x + 18}" y2="{y - 4}" stroke="{colour}" stroke-width="2"{dash}/>',
        f'<text x="{x + 24}" y="{y}">{escape(line.name)}</text>',
    ]
