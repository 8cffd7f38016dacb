"""Marks of the view "What if". Owns: the frames of `frames_whatif` -> Altair charts.

Before is dashed, after is whole: colour never tells them apart alone.
"""

from __future__ import annotations

from typing import Any, Final

import altair as alt
import pandas as pd

from dashboard.charts import PADDING, SECONDS_AXIS
from dashboard.theme import Palette

RUNS: Final = ("before", "after")
_TICKS: Final = [step * decade for decade in (1e-4, 1e-3, 1e-2, 1e-1, 1, 10, 100) for step in (1, 2, 5)]


def _axis(colours: Palette, **options: Any) -> alt.Axis:
    given: dict[str, Any] = {"gridColor": colours.line, "domain": False, "ticks": False, **options}
    return alt.Axis(titleColor=colours.muted, titleFontWeight="normal", **given)


def _seconds(colours: Palette, field: str, title: str) -> dict[str, Any]:
    axis = _axis(colours, labelExpr=SECONDS_AXIS, values=_TICKS, labelOverlap="greedy")
    return {"shorthand": field, "title": title, "axis": axis, "scale": alt.Scale(type="log", nice=False)}


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
            x=alt.X(**_seconds(colours, "seconds:Q", "time (log)")),
            y=alt.Y("percent:Q", title="share below, %", axis=_axis(colours, tickCount=5, labelFlush=False)),
            order="percent:Q",
            tooltip=[
                alt.Tooltip("run:N", title="run"),
                alt.Tooltip("percent:Q", title="share below, %"),
                alt.Tooltip("seconds:Q", title="seconds", format=".4~g"),
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
    points = (
        alt.Chart(frame)
        .mark_point(filled=True, size=26, opacity=0.75)
        .encode(
            x=alt.X(**_seconds(colours, "before:Q", "before (log)")),
            y=alt.Y(**_seconds(colours, "after:Q", "after (log)")),
            color=alt.Color("change:N", scale=alt.Scale(domain=list(tones), range=list(tones.values())), legend=None),
            shape=alt.Shape("change:N", scale=alt.Scale(domain=list(shapes), range=list(shapes.values())), legend=None),
            tooltip=[
                alt.Tooltip("rid:N", title="request"),
                alt.Tooltip("prompt:Q", title="prompt, tokens", format=","),
                alt.Tooltip("before:Q", title="before, seconds", format=".4~g"),
                alt.Tooltip("after:Q", title="after, seconds", format=".4~g"),
            ],
        )
    )
    return alt.LayerChart(layer=(_diagonal(frame, colours), points), height=height, padding=PADDING)


def _diagonal(frame: pd.DataFrame, colours: Palette) -> alt.Chart:
    """Where nothing changed."""
    values = frame[["before", "after"]].to_numpy().ravel() if len(frame) else []
    ends = [float(min(values)), float(max(values))] if len(values) else []
    line: alt.Chart = (
        alt.Chart(pd.DataFrame({"before": ends, "after": ends}))
        .mark_line(color=colours.text, strokeDash=[5, 3], strokeWidth=1.2)
        .encode(x="before:Q", y="after:Q")
    )
    return line


def fairness_chart(frame: pd.DataFrame, colours: Palette, *, height: int = 240) -> alt.Chart:
    """TTFT p50 by length of prompt, from `fairness_frame`."""
    order = list(dict.fromkeys(frame["group"]))
    chart: alt.Chart = (
        alt.Chart(frame)
        .mark_line(strokeWidth=2, point={"size": 40})
        .encode(
            x=alt.X("group:O", sort=order, title="tokens in the prompt", axis=_axis(colours, labelAngle=-35)),
            y=alt.Y(**_seconds(colours, "seconds:Q", "TTFT p50 (log)")),
            tooltip=[
                alt.Tooltip("run:N", title="run"),
                alt.Tooltip("group:N", title="prompt, tokens"),
                alt.Tooltip("requests:Q", title="requests"),
                alt.Tooltip("seconds:Q", title="TTFT p50, seconds", format=".4~g"),
            ],
            **_by_run(colours),
        )
        .properties(height=height, padding=PADDING)
    )
    return chart
