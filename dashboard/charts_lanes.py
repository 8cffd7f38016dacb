"""Marks of lanes. Owns: the frames of `frames_lanes` -> Gantt charts of one request or many.

Colour says why a request waits; height tells waiting (middle), chunks (full), decode (thin) and the rest (a line), so
that no colour is needed to tell them apart. As in `charts`, a specification depends on the palette only.
"""

from __future__ import annotations

from typing import Final

import altair as alt
import pandas as pd

from dashboard.charts import PADDING, SECONDS_AXIS, time_axis
from dashboard.theme import Palette
from dashboard.words import t
from telemetry.observe import BLOCKERS

#: Height of each kind of stretch, as a share of its lane.
_HEIGHTS: Final = {"waiting": 0.5, "chunk": 0.86, "decode": 0.24, "late": 0.24, "between": 0.12, "intake": 0.12}
_LABEL: Final = "length(datum.value) > 18 ? slice(datum.value, 0, 11) + '…' + slice(datum.value, -6) : datum.value"
_RID_AXIS: Final = alt.Axis(
    labelExpr=_LABEL,
    labelLimit=160,
    labelFontSize=11,
    labelFont="monospace",
    labelOverlap=False,
    labelFlush=False,
    domain=False,
    ticks=False,
)
#: Name of the point selection, and of the field that it gives.
PICK: Final = "lane"


def work_colours(colours: Palette) -> dict[str, str]:
    """Colours of what is done with a request; no blocker has them."""
    return {
        "prefill": colours.work["chunk_forward"],
        "decode": colours.decode,
        "between": colours.work["between_chunks"],
        "intake": colours.work["intake"],
        "late": colours.bad,
    }


def lane_colour(colours: Palette, cause: str) -> str:
    """The colour of a blocker, or of what is done."""
    return work_colours(colours).get(cause) or colours.blockers.get(cause, colours.blockers["order"])


def many_chart(spans: pd.DataFrame, marks: pd.DataFrame, colours: Palette, *, step: int = 17) -> alt.LayerChart:
    """Many requests in order of arrival, by time of day. A click on a lane picks its request."""
    return _lanes(spans, marks, colours, "from:T", "to:T", "at:T", time_axis(), step)


def one_chart(spans: pd.DataFrame, marks: pd.DataFrame, colours: Palette, *, step: int = 44) -> alt.LayerChart:
    """One request, in seconds since it was accepted."""
    axis = alt.Axis(labelExpr=SECONDS_AXIS, tickCount=8, grid=True, gridColor=colours.line, domain=False, ticks=False)
    return _lanes(spans, marks, colours, "from_s:Q", "to_s:Q", "at_s:Q", axis, step)


def _lanes(
    spans: pd.DataFrame,
    marks: pd.DataFrame,
    colours: Palette,
    start: str,
    end: str,
    at: str,
    axis: alt.Axis,
    step: int,
) -> alt.LayerChart:
    is_one = start == "from_s:Q"
    rows = alt.Y(
        "rid:N",
        title=None,
        sort=alt.EncodingSortField("place", op="min", order="ascending"),
        axis=None if is_one else _RID_AXIS,
    )
    causes = [*BLOCKERS, *work_colours(colours)]
    scale = alt.Scale(domain=causes, range=[lane_colour(colours, cause) for cause in causes])
    pick = alt.selection_point(name=PICK, fields=["rid"], on="click", toggle=False, empty=True)
    title = t("since it was accepted") if is_one else None
    layers: list[alt.Chart] = []
    for kind, height in _HEIGHTS.items():
        layer = (
            alt.Chart(spans)
            .transform_filter(alt.datum.kind == kind)
            .mark_bar(height=alt.RelativeBandSize(height), minBandSize=2)
            .encode(
                x=alt.X(start, title=title, axis=axis),
                x2=end,
                y=rows,
                color=alt.Color("cause:N", scale=scale, legend=None),
                tooltip=[
                    alt.Tooltip("rid:N", title=t("request")),
                    alt.Tooltip("cause:N", title=t("waits for") if kind == "waiting" else t("is in")),
                    alt.Tooltip("words:N", title=t("that is")),
                    alt.Tooltip("seconds:Q", title=t("seconds"), format=".4~f"),
                    alt.Tooltip("from_s:Q", title=t("after acceptance, s"), format=".3~f"),
                ],
            )
        )
        if kind == "waiting" and not is_one:
            # Named, since a made-up name would be another one in each refresh, and the chart would be built anew.
            layer = layer.properties(name="waiting_lanes").add_params(pick)
        layers.append(layer)
    names = ["first token", "retracted", "end"]
    shapes = ["triangle-right", "triangle-left", "square"]
    shades = [colours.good, colours.bad, colours.muted]
    points = (
        alt.Chart(marks)
        .mark_point(filled=True, size=70 if is_one else 34, opacity=1, strokeWidth=1.6, stroke=colours.page)
        .encode(
            x=alt.X(at, axis=axis, title=title),
            y=rows,
            shape=alt.Shape("mark:N", scale=alt.Scale(domain=names, range=shapes), legend=None),
            color=alt.Color("mark:N", scale=alt.Scale(domain=names, range=shades), legend=None),
            tooltip=[
                alt.Tooltip("rid:N", title=t("request")),
                alt.Tooltip("words:N", title=t("moment")),
                alt.Tooltip("at_s:Q", title=t("after acceptance, s"), format=".4~f"),
            ],
        )
    )
    # Blockers and moments are told by different colours: one scale for both would mix them.
    apart = alt.Resolve(scale=alt.ScaleResolveMap(color="independent"))
    return alt.LayerChart(layer=(*layers, points), height=alt.Step(step), padding=PADDING, resolve=apart)
