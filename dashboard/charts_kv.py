"""Marks of the view "K/V pages". Owns: the frames of `frames_kv` -> Altair charts.

As in `charts`, a specification depends on the palette only.
"""

from __future__ import annotations

from typing import Final

import altair as alt
import pandas as pd

from dashboard.charts import PADDING, time_axis
from dashboard.frames_kv import SIDES
from dashboard.theme import Palette
from dashboard.words import t
from telemetry.observe import PAGE_STATES

#: From the bottom up: what is held, then what can be had.
_STACK: Final = ("private", "protected", "evictable", "free")


def _axis(colours: Palette) -> alt.Axis:
    return alt.Axis(
        labelFlush=False,
        format="~s",
        tickCount=4,
        gridColor=colours.line,
        domain=False,
        ticks=False,
        titleFontWeight="normal",
        titleColor=colours.muted,
    )


def pool_chart(frame: pd.DataFrame, colours: Palette, *, height: int = 190) -> alt.Chart:
    """Pages by state over time, stacked, from `pool_frame`; the top edge is the pool."""
    chart: alt.Chart = (
        alt.Chart(frame)
        .transform_fold(list(PAGE_STATES), as_=["state", "pages"])
        .transform_calculate(order=f"indexof({list(_STACK)}, datum.state)")
        .mark_area(interpolate="step-after", stroke=colours.page, strokeWidth=0.6)
        .encode(
            x=alt.X("at:T", title=None, axis=time_axis()),
            y=alt.Y("pages:Q", stack="zero", title=t("pages"), axis=_axis(colours)),
            color=alt.Color(
                "state:N",
                scale=alt.Scale(domain=list(_STACK), range=[colours.states[state] for state in _STACK]),
                legend=None,
            ),
            order=alt.Order("order:Q"),
            tooltip=[
                alt.Tooltip("at:T", title=t("slot ends"), format="%H:%M:%S"),
                alt.Tooltip("state:N", title=t("state")),
                alt.Tooltip("pages:Q", title=t("pages"), format=","),
                alt.Tooltip("evicted:Q", title=t("evicted in the slot"), format=","),
            ],
        )
        .properties(height=height, padding=PADDING)
    )
    return chart


def promise_chart(frame: pd.DataFrame, colours: Palette, *, height: int = 170) -> alt.LayerChart:
    """The two sides of remaining_total over time, from `promise_frame`; tokens. Dashes tell the lines apart too."""
    scale = alt.Scale(domain=list(SIDES), range=[colours.states["evictable"], colours.p99, colours.muted])
    dash = alt.Scale(domain=list(SIDES), range=[[1, 0], [5, 3], [2, 2]])
    line = (
        alt.Chart(frame)
        .mark_line(strokeWidth=1.8, interpolate="step-after")
        .encode(
            x=alt.X("at:T", title=None, axis=time_axis()),
            y=alt.Y("tokens:Q", title=t("tokens"), axis=_axis(colours)),
            color=alt.Color("side:N", scale=scale, legend=None),
            strokeDash=alt.StrokeDash("side:N", scale=dash, legend=None),
            tooltip=[
                alt.Tooltip("at:T", title=t("slot ends"), format="%H:%M:%S"),
                alt.Tooltip("side:N", title=t("side")),
                alt.Tooltip("tokens:Q", title=t("tokens"), format=",.1~f"),
            ],
        )
    )
    zero = alt.Chart().mark_rule(color=colours.muted, strokeWidth=1).encode(y=alt.datum(0))
    return alt.LayerChart(layer=(zero, line), data=frame, height=height, padding=PADDING)
