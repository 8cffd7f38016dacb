"""Charts of the studies. Owns: one picture for each, from the figures that its table has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import altair as alt

from telemetry.sim.svg import HEIGHT, WIDTH, Row, data

Figures = dict[str, Any]
#: Shares of TTFT in the cost of a chunk.
WEIGHTS: Final = (0.5, 0.75, 0.9)


def policies(figures: Sequence[Figures]) -> dict[str, Any]:
    """Time to first token of each policy, median and 99th percentile."""
    rows: list[Row] = [
        {"policy": one["name"], "load": one["group"], "seconds": one[field], "what": what}
        for one in figures
        for field, what in (("ttft_p50", "p50"), ("ttft_p99", "p99"))
    ]
    return {"ttft": _grouped(rows, "policy", "time to first token (s)")}


def chunks(figures: Sequence[Figures]) -> dict[str, Any]:
    """Both times against each other, and the cost of each chunk."""
    points: list[Row] = [
        {"chunk": int(one["name"].replace(",", "")), "ttft": one["ttft_p99"], "tbt": one["tbt_p99"]} for one in figures
    ]
    base = alt.Chart(data(points), title="each point is a chunk size", width=WIDTH, height=HEIGHT).encode(
        x=alt.X("ttft:Q", title="TTFT p99 (s)", scale=alt.Scale(zero=False, padding=30)),
        y=alt.Y("tbt:Q", title="TBT p99 (s)", scale=alt.Scale(type="log", padding=14)),
    )
    named = base.mark_text(align="left", dx=8, fill="#808080").encode(text=alt.Text("chunk:Q", format=","))
    costs: list[Row] = [
        {"chunk": chunk, "cost": cost, "weight": f"TTFT weighs {weight:.0%}"}
        for weight in WEIGHTS
        for chunk, cost in cost_curve(figures, weight).items()
    ]
    curve = (
        alt.Chart(data(costs), title="what a chunk costs; 1 would be best in both", width=WIDTH, height=HEIGHT)
        .mark_line(point=True)
        .encode(
            x=alt.X("chunk:Q", title="tokens in a chunk", scale=alt.Scale(type="log", base=2, nice=False)),
            y=alt.Y("cost:Q", title="cost", scale=alt.Scale(type="log", nice=True)),
            color=alt.Color("weight:N", title=None),
        )
    )
    order = base.mark_line(strokeOpacity=0.4).encode(order="chunk:Q")
    return {"trade": alt.layer(order, base.mark_point(filled=True, size=60), named), "cost": curve}


def cost_curve(figures: Sequence[Figures], weight: float) -> dict[int, float]:
    """Chunk -> weighted sum of both 99th percentiles, each over the least of all chunks."""
    least = {field: min(one[field] for one in figures) for field in ("ttft_p99", "tbt_p99")}
    return {
        int(one["name"].replace(",", "")): float(
            f"{weight * one['ttft_p99'] / least['ttft_p99'] + (1 - weight) * one['tbt_p99'] / least['tbt_p99']:.4g}"
        )
        for one in figures
    }


def accounting(figures: Sequence[Figures]) -> dict[str, Any]:
    """Time to first token by pool and accounting."""
    rows: list[Row] = [
        {"accounting": one["name"], "load": one["group"], "seconds": one[field], "what": what}
        for one in figures
        for field, what in (("ttft_p50", "p50"), ("ttft_p99", "p99"))
    ]
    return {"ttft": _grouped(rows, "accounting", "time to first token (s)")}


def mixed(figures: Sequence[Figures]) -> dict[str, Any]:
    """The percentile of all gaps beside the longest gap of a request: they tell opposite stories."""
    rows: list[Row] = [
        {"steps": one["name"], "load": one["group"], "seconds": one[field], "what": what}
        for one in figures
        for field, what in (("tbt_p99", "TBT p99, of all gaps"), ("longest_gap_p99", "longest gap p99, of requests"))
    ]
    return {"gaps": _grouped(rows, "steps", "seconds", log=True)}


def fallback(figures: Sequence[Figures]) -> dict[str, Any]:
    """Time to first token of each order."""
    rows: list[Row] = [
        {"order": one["name"], "load": one["group"], "seconds": one[field], "what": what}
        for one in figures
        for field, what in (("ttft_p50", "p50"), ("ttft_p99", "p99"))
    ]
    return {"ttft": _grouped(rows, "order", "time to first token (s)")}


def _grouped(rows: list[Row], name: str, title: str, *, log: bool = False) -> Any:
    """Points on a line for each run, a panel for each load: no bars, which would lie on a logarithmic axis."""
    scale = alt.Scale(type="log" if log else "linear", nice=True)
    order = list(dict.fromkeys(str(row["load"]) for row in rows))
    names = list(dict.fromkeys(str(row[name]) for row in rows))
    panel = (
        alt.Chart(data(rows), width=WIDTH, height=26 * len(names))
        .mark_point(filled=True, size=80)
        .encode(
            x=alt.X("seconds:Q", title=title, scale=scale),
            y=alt.Y(f"{name}:N", title=None, sort=names),
            color=alt.Color("what:N", title=None),
            shape=alt.Shape("what:N", title=None),
        )
    )
    header = alt.Header(labelColor="#808080", labelAnchor="start", labelOrient="top")
    return panel.facet(row=alt.Row("load:N", title=None, sort=order, header=header)).resolve_scale(x="independent")
