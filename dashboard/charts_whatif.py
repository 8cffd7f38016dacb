"""Marks of the view "What if". Owns: the frames of `frames_whatif` -> Altair charts.

Before is dashed, after is whole: colour never tells them apart alone.
"""

from __future__ import annotations

import math
from typing import Any, Final

import altair as alt
import pandas as pd

from dashboard.charts import PADDING, SECONDS_AXIS
from dashboard.theme import Palette
from dashboard.words import t

RUNS: Final = ("before", "after")
#: Seconds; shorter times have no label, which would read 0 ms.
_SHORTEST_LABEL: Final = 1e-4


def _axis(colours: Palette, **options: Any) -> alt.Axis:
    given: dict[str, Any] = {"gridColor": colours.line, "domain": False, "ticks": False, **options}
    return alt.Axis(titleColor=colours.muted, titleFontWeight="normal", **given)


def ticks(values: pd.Series[float]) -> list[float]:
    """1, 2 and 5 of each decade, from the last at or below all `values` (seconds) to the first at or above them.

    At least two, also for values that are all the same, so that a reader can tell distances on a log axis.
    """
    low, high = (float(values.min()), float(values.max())) if len(values) else (0.01, 1.0)
    decades = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 2)
    marks = [float(f"{step}e{decade}") for decade in decades for step in (1, 2, 5)]
    first = max(i for i, value in enumerate(marks) if value <= low)
    last = min(i for i, value in enumerate(marks) if value >= high)
    return marks[first : last + 1] if first < last else marks[first - 1 : last + 2]


def _seconds(colours: Palette, field: str, title: str, marks: list[float]) -> dict[str, Any]:
    labels = [value for value in marks if value >= _SHORTEST_LABEL]
    axis = _axis(colours, labelExpr=SECONDS_AXIS, values=labels, labelOverlap="greedy")
    scale = alt.Scale(type="log", nice=False, domain=[marks[0], marks[-1]])
    return {"shorthand": field, "title": title, "axis": axis, "scale": scale}


def run_colours(colours: Palette) -> dict[str, str]:
    """Of the two runs."""
    return {"before": colours.muted, "after": colours.accent}


def _by_run(colours: Palette) -> dict[str, Any]:
    tones = run_colours(colours)
    scale = alt.Scale(domain=list(RUNS), range=[tones[run] for run in RUNS])
    dashes = alt.Scale(domain=list(RUNS), range=[[5, 3], [1, 0]])
    return {
        "color": alt.Color("run:N", scale=scale, legend=None),
        "strokeDash": alt.StrokeDash("run:N", scale=dashes, legend=None),
    }


def curve_chart(frame: pd.DataFrame, colours: Palette, *, height: int = 240) -> alt.Chart:
    """How large a share stays below which time, from `curve_frame`."""
    chart: alt.Chart = (
        alt.Chart(frame)
        .mark_line(interpolate="step-after", strokeWidth=2)
        .encode(
            x=alt.X(**_seconds(colours, "seconds:Q", t("time (log)"), ticks(frame["seconds"]))),
            y=alt.Y("percent:Q", title=t("share below, %"), axis=_axis(colours, tickCount=5, labelFlush=False)),
            order="percent:Q",
            tooltip=[
                alt.Tooltip("run:N", title=t("run")),
                alt.Tooltip("percent:Q", title=t("share below, %")),
                alt.Tooltip("seconds:Q", title=t("seconds"), format=".4~g"),
            ],
            **_by_run(colours),
        )
        .properties(height=height, padding=PADDING)
    )
    return chart


def pair_chart(frame: pd.DataFrame, colours: Palette, *, height: int = 240) -> alt.LayerChart:
    """One point for each request, before against after, from `pair_frame`. Below the line it got faster."""
    tones = {"earlier": colours.good, "same": colours.muted, "later": colours.bad}
    shapes = {"earlier": "triangle-down", "same": "circle", "later": "triangle-up"}
    marks = ticks(pd.concat([frame["before"], frame["after"]]))
    axes = {
        "x": alt.X(**_seconds(colours, "before:Q", t("before (log)"), marks)),
        "y": alt.Y(**_seconds(colours, "after:Q", t("after (log)"), marks)),
    }
    points = (
        alt.Chart(frame)
        .mark_point(filled=True, size=26, opacity=0.75)
        .encode(
            **axes,
            color=alt.Color("change:N", scale=alt.Scale(domain=list(tones), range=list(tones.values())), legend=None),
            shape=alt.Shape("change:N", scale=alt.Scale(domain=list(shapes), range=list(shapes.values())), legend=None),
            tooltip=[
                alt.Tooltip("rid:N", title=t("request")),
                alt.Tooltip("prompt:Q", title=t("prompt, tokens"), format=","),
                alt.Tooltip("before:Q", title=t("before, seconds"), format=".4~g"),
                alt.Tooltip("after:Q", title=t("after, seconds"), format=".4~g"),
            ],
        )
    )
    return alt.LayerChart(layer=(_diagonal(marks, axes, colours), points), height=height, padding=PADDING)


def _diagonal(marks: list[float], axes: dict[str, Any], colours: Palette) -> alt.Chart:
    """Where nothing changed, from corner to corner."""
    ends = [marks[0], marks[-1]]
    line: alt.Chart = (
        alt.Chart(pd.DataFrame({"before": ends, "after": ends}))
        .mark_line(color=colours.text, strokeDash=[5, 3], strokeWidth=1.2)
        .encode(**axes)
    )
    return line


def fairness_chart(frame: pd.DataFrame, colours: Palette, *, height: int = 240) -> alt.Chart:
    """TTFT p50 by length of prompt, from `fairness_frame`."""
    order = list(dict.fromkeys(frame["group"]))
    chart: alt.Chart = (
        alt.Chart(frame)
        .mark_line(strokeWidth=2, point={"size": 40})
        .encode(
            x=alt.X("group:O", sort=order, title=t("tokens in the prompt"), axis=_axis(colours, labelAngle=-35)),
            y=alt.Y(**_seconds(colours, "seconds:Q", t("TTFT p50 (log)"), ticks(frame["seconds"]))),
            tooltip=[
                alt.Tooltip("run:N", title=t("run")),
                alt.Tooltip("group:N", title=t("prompt, tokens")),
                alt.Tooltip("requests:Q", title=t("requests")),
                alt.Tooltip("seconds:Q", title=t("TTFT p50, seconds"), format=".4~g"),
            ],
            **_by_run(colours),
        )
        .properties(height=height, padding=PADDING)
    )
    return chart
