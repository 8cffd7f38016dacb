"""Marks of the page. Owns: pandas frames -> Altair charts.

Pure: no Streamlit. A chart's specification depends on palette and language only, never on the numbers, so that the
browser exchanges the data of a living chart instead of building it anew each second.
"""

from __future__ import annotations

from typing import Final

import altair as alt
import pandas as pd

from dashboard.frames_latency import CAUSES
from dashboard.theme import Palette, cause_colour
from dashboard.words import t

PADDING: Final = {"left": 4, "right": 12, "top": 6, "bottom": 2}

#: Seconds on an axis, in the unit that fits.
SECONDS_AXIS: Final = (
    "datum.value == 0 ? '0' : datum.value < 0.00995 ? format(datum.value * 1000, '.2~f') + ' ms' : "
    "datum.value < 0.9995 ? format(datum.value * 1000, '.3~r') + ' ms' : format(datum.value, '.3~r') + ' s'"
)


def latency_chart(frame: pd.DataFrame, colours: Palette, *, height: int = 170) -> alt.LayerChart:
    """Median and 99th percentile of one latency over time, from `frames.quantile_frame`; seconds, from zero."""
    quantiles = alt.Scale(domain=["p99", "p50"], range=[colours.p99, colours.p50])
    base = alt.Chart(frame).encode(
        x=alt.X("at:T", title=None, axis=time_axis()),
        y=alt.Y(
            "seconds:Q",
            title=None,
            scale=alt.Scale(zero=True, nice=True),
            axis=alt.Axis(
                labelExpr=SECONDS_AXIS,
                tickCount=4,
                gridColor=colours.line,
                domain=False,
                ticks=False,
                labelFlush=False,
            ),
        ),
        color=alt.Color("quantile:N", scale=quantiles, legend=None),
        tooltip=[
            alt.Tooltip("at:T", title=t("slot ends"), format="%H:%M:%S"),
            alt.Tooltip("quantile:N", title=t("quantile")),
            alt.Tooltip("seconds:Q", title=t("seconds"), format=".4~f"),
            alt.Tooltip("count:Q", title=t("observed in the slot")),
        ],
    )
    # The dash tells the two lines apart without colour. A line ends where a slot observed nothing, and the points show
    # slots between two such.
    line = base.mark_line(strokeWidth=1.8, interpolate="linear").encode(
        detail="run:N",
        strokeDash=alt.StrokeDash(
            "quantile:N", scale=alt.Scale(domain=["p99", "p50"], range=[[5, 3], [1, 0]]), legend=None
        ),
    )
    points = base.mark_circle(size=16, opacity=0.9)
    return alt.LayerChart(layer=(line, points), height=height, padding=PADDING)


def steps_chart(frame: pd.DataFrame, colours: Palette, *, height: int = 120) -> alt.Chart:
    """Tokens that each of the last steps computed, stacked by part, from `frames.steps_frame`."""
    parts = ["admission", "continuation", "decode rows"]
    chart: alt.Chart = (
        alt.Chart(frame)
        .mark_bar(stroke=colours.page, strokeWidth=1)
        .encode(
            x=alt.X(
                "step:O",
                title=t("step"),
                axis=alt.Axis(labelAngle=0, labelOverlap="greedy", domain=False, ticks=False),
            ),
            y=alt.Y(
                "tokens:Q",
                title=t("tok"),
                axis=alt.Axis(
                    tickCount=3, gridColor=colours.line, domain=False, ticks=False, format="~s", labelFlush=False
                ),
            ),
            color=alt.Color(
                "part:N",
                scale=alt.Scale(domain=parts, range=[colours.segments[part] for part in parts]),
                legend=None,
            ),
            order=alt.Order("part:N", sort="descending"),
            tooltip=[
                alt.Tooltip("step:O", title=t("step")),
                alt.Tooltip("kind:N", title=t("kind")),
                alt.Tooltip("part:N", title=t("part")),
                alt.Tooltip("tokens:Q", title=t("tokens"), format=","),
                alt.Tooltip("reason:N", title=t("pass ended by")),
            ],
        )
        .properties(height=height, padding=PADDING)
    )
    return chart


def parts_chart(frame: pd.DataFrame, colours: Palette, *, height: int = 74) -> alt.Chart:
    """Where the time to first token of one request went, from `frames.parts_frame`; seconds."""
    causes = [*CAUSES, "queue"]
    chart: alt.Chart = (
        alt.Chart(frame)
        .mark_bar(stroke=colours.page, strokeWidth=1, cornerRadius=2, height=22)
        .encode(
            x=alt.X(
                "start:Q",
                title=t("since it was accepted"),
                axis=alt.Axis(labelExpr=SECONDS_AXIS, tickCount=6, grid=False),
            ),
            x2="end:Q",
            color=alt.Color(
                "part:N",
                scale=alt.Scale(domain=causes, range=[cause_colour(colours, each) for each in causes]),
                legend=None,
            ),
            tooltip=[
                alt.Tooltip("part:N", title=t("part")),
                alt.Tooltip("seconds:Q", title=t("seconds"), format=".4~f"),
            ],
        )
        .properties(height=height, padding=PADDING)
    )
    return chart


def time_axis() -> alt.Axis:
    """Time of day."""
    return alt.Axis(format="%H:%M:%S", labelOverlap="greedy", tickCount=6, grid=False, domain=False, labelFlush=True)
