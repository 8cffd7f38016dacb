"""Marks of the view "Latency". Owns: the frames of `frames_latency` -> Altair charts.

As in `charts`, a specification depends on the palette only: limits and objectives come as data.
"""

from __future__ import annotations

from typing import Any, Final

import altair as alt
import pandas as pd

from dashboard.charts import PADDING, SECONDS_AXIS, time_axis
from dashboard.frames_latency import CAUSES
from dashboard.theme import Palette, cause_colour
from dashboard.words import t

#: Decimal ticks of a log axis of seconds, so that labels stay readable.
_DECADES: Final = [0.0001, 0.001, 0.01, 0.1, 1, 10, 100, 1000]
_TICKS: Final = [step * decade for decade in _DECADES for step in (1, 2, 5)]


def _cause_scale(colours: Palette) -> alt.Scale:
    return alt.Scale(domain=list(CAUSES), range=[cause_colour(colours, cause) for cause in CAUSES])


def _axis(colours: Palette, **options: Any) -> alt.Axis:
    given: dict[str, Any] = {"gridColor": colours.line, "domain": False, "ticks": False, **options}
    return alt.Axis(titleColor=colours.muted, titleFontWeight="normal", **given)


def stack_chart(frame: pd.DataFrame, colours: Palette, *, height: int = 260) -> alt.Chart:
    """Mean TTFT by cause, one bar for each slot with first tokens, from `stack_frame`. Nothing joins two bars."""
    chart: alt.Chart = (
        alt.Chart(frame)
        .mark_bar(stroke=colours.page, strokeWidth=0.6)
        .encode(
            x=alt.X("from:T", title=None, axis=time_axis()),
            x2="at:T",
            y=alt.Y(
                "low:Q",
                title=t("mean TTFT"),
                axis=_axis(colours, labelExpr=SECONDS_AXIS, tickCount=5, labelFlush=False),
            ),
            y2="high:Q",
            color=alt.Color("cause:N", scale=_cause_scale(colours), legend=None),
            tooltip=[
                alt.Tooltip("at:T", title=t("slot ends"), format="%H:%M:%S"),
                alt.Tooltip("cause:N", title=t("cause")),
                alt.Tooltip("seconds:Q", title=t("seconds (mean)"), format=".4~f"),
                alt.Tooltip("count:Q", title=t("first tokens in the slot")),
            ],
        )
        .properties(height=height, padding=PADDING)
    )
    return chart


def gap_chart(frame: pd.DataFrame, objective: pd.DataFrame, colours: Palette, *, height: int = 200) -> alt.LayerChart:
    """The histogram of gaps from `gap_frame` on a log axis; `objective` has one row: its `seconds` and `words`."""
    bars = (
        alt.Chart(frame)
        .mark_bar(stroke=colours.page, strokeWidth=1)
        .encode(
            x=alt.X(
                "from:Q",
                title=t("gap between two tokens (log)"),
                scale=alt.Scale(type="log", nice=False),
                axis=_axis(colours, labelExpr=SECONDS_AXIS, values=_TICKS, grid=False, labelOverlap="greedy"),
            ),
            x2="to:Q",
            y=alt.Y(
                "share:Q", title=t("share of gaps"), axis=_axis(colours, format=".0%", tickCount=4, labelFlush=False)
            ),
            y2=alt.datum(0),
            color=alt.Color(
                "late:N", scale=alt.Scale(domain=[False, True], range=[colours.accent, colours.bad]), legend=None
            ),
            tooltip=[
                alt.Tooltip("from:Q", title=t("from, seconds"), format=".4~f"),
                alt.Tooltip("to:Q", title=t("up to, seconds"), format=".4~f"),
                alt.Tooltip("count:Q", title=t("gaps"), format=","),
                alt.Tooltip("share:Q", title=t("share"), format=".2%"),
            ],
        )
    )
    return alt.LayerChart(layer=(bars, *_objective_x(objective, colours)), height=height, padding=PADDING)


def _objective_x(objective: pd.DataFrame, colours: Palette) -> tuple[alt.Chart, alt.Chart]:
    base = alt.Chart(objective).encode(x=alt.X("seconds:Q", scale=alt.Scale(type="log", nice=False)))
    rule = base.mark_rule(color=colours.text, strokeDash=[5, 3], strokeWidth=1.4)
    label = base.mark_text(align="left", baseline="top", dx=5, color=colours.text, fontSize=12).encode(
        y=alt.value(0), text="words:N"
    )
    return rule, label


def stall_chart(frame: pd.DataFrame, colours: Palette, *, height: int = 150) -> alt.LayerChart:
    """Late tokens by cause from `stall_frame`; each bar has its label and its number."""
    base = alt.Chart(frame).encode(
        y=alt.Y("order:O", axis=None),
        tooltip=[
            alt.Tooltip("cause:N", title=t("cause")),
            alt.Tooltip("words:N", title=t("that is")),
            alt.Tooltip("count:Q", title=t("late tokens"), format=","),
            alt.Tooltip("share:Q", title=t("share"), format=".1%"),
        ],
    )
    bars = base.mark_bar(color=colours.warn, height=9, yOffset=9, cornerRadius=2).encode(
        x=alt.X("share:Q", title=None, axis=None, scale=alt.Scale(domain=[0, 1]))
    )
    label = base.mark_text(align="left", baseline="bottom", color=colours.text, fontSize=12.5, dy=3)
    text = label.encode(x=alt.value(0), text="said:N")
    return alt.LayerChart(layer=(bars, text), height=height, padding=PADDING)


def first_chart(frame: pd.DataFrame, objective: pd.DataFrame, colours: Palette, *, height: int = 260) -> alt.LayerChart:
    """Prompt length against TTFT from `first_frame`, coloured by the dominant cause; one shape for waiting."""
    seconds = alt.Scale(type="log", nice=True)
    points = (
        alt.Chart(frame)
        .mark_point(filled=True, size=34, opacity=0.72)
        .encode(
            x=alt.X(
                "prompt_len:Q",
                title=t("prompt length, tok"),
                scale=alt.Scale(zero=False, nice=True),
                axis=_axis(colours, tickCount=6, format="~s", grid=False),
            ),
            y=alt.Y(
                "ttft_s:Q",
                title=t("TTFT (log)"),
                scale=seconds,
                axis=_axis(colours, labelExpr=SECONDS_AXIS, values=_DECADES, labelFlush=False),
            ),
            color=alt.Color("cause:N", scale=_cause_scale(colours), legend=None),
            shape=alt.Shape(
                "kind:N", scale=alt.Scale(domain=["waiting", "work"], range=["circle", "square"]), legend=None
            ),
            tooltip=[
                alt.Tooltip("rid:N", title=t("request")),
                alt.Tooltip("ttft_s:Q", title=t("TTFT, seconds"), format=".4~f"),
                alt.Tooltip("prompt_len:Q", title=t("prompt, tok")),
                alt.Tooltip("cached_tokens:Q", title=t("of it cached, tok")),
                alt.Tooltip("cause:N", title=t("dominant cause")),
            ],
        )
    )
    base = alt.Chart(objective).encode(y=alt.Y("seconds:Q", scale=seconds))
    rule = base.mark_rule(color=colours.text, strokeDash=[5, 3], strokeWidth=1.4)
    label = base.mark_text(align="right", baseline="bottom", dy=-3, color=colours.text, fontSize=12).encode(
        x=alt.value("width"), text="words:N"
    )
    # Points may lie under the words: they are written on a rim of the page's colour.
    rim = label.mark_text(
        align="right", baseline="bottom", dy=-3, fontSize=12, stroke=colours.page, strokeWidth=5, strokeJoin="round"
    )
    return alt.LayerChart(layer=(points, rule, rim, label), height=height, padding=PADDING)


def decile_chart(frame: pd.DataFrame, colours: Palette, *, height: int = 190) -> alt.LayerChart:
    """Share within the TTFT objective by prompt length, from `decile_frame`; each bar carries its share."""
    base = alt.Chart(frame).encode(
        x=alt.X(
            "prompts:N",
            title=t("prompt length, tok"),
            sort=alt.SortField("order", "ascending"),
            axis=_axis(colours, labelAngle=0, labelOverlap="greedy"),
        ),
        tooltip=[
            alt.Tooltip("prompts:N", title=t("prompts of, tok")),
            alt.Tooltip("share:Q", title=t("within the objective"), format=".1%"),
            alt.Tooltip("within:Q", title=t("of them"), format=","),
            alt.Tooltip("count:Q", title=t("first tokens"), format=","),
        ],
    )
    share = alt.Y(
        "share:Q",
        title=t("within the objective"),
        scale=alt.Scale(domain=[0, 1.12], nice=False),
        axis=_axis(colours, format=".0%", values=[0, 0.25, 0.5, 0.75, 1], labelFlush=False),
    )
    bars = base.mark_bar(color=colours.accent, cornerRadius=2).encode(y=share)
    label = base.mark_text(baseline="bottom", dy=-3, color=colours.text, fontSize=11.5).encode(
        y=share, text=alt.Text("share:Q", format=".0%")
    )
    return alt.LayerChart(layer=(bars, label), height=height, padding=PADDING)
