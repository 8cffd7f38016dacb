"""Boards as JSON. Owns: turning `grafana.boards` into what Grafana reads, through its typed builders.

    python -m grafana.build            writes grafana/dashboards/*.json

The SDK builds for Grafana 10.1; newer versions migrate a board when they load it. It gives no ids to panels and no
heights to rows, so both are set here.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Final

from grafana_foundation_sdk.builders import dashboard, heatmap, prometheus, stat, table, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import (
    StackingMode,
    VisibilityMode,
)
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DashboardLinkType,
    DataSourceRef,
    GridPos,
    VariableRefresh,
)

from grafana.boards import BOARDS
from grafana.panel import Board, Panel

FOLDER: Final = Path(__file__).parent / "dashboards"
WIDTH: Final = 24
_SOURCE: Final = "${datasource}"
_HEIGHT: Final = {"stat": 5}
_DEFAULT_HEIGHT: Final = 8


def source() -> DataSourceRef:
    """The Prometheus that the reader chose."""
    return DataSourceRef(type_val="prometheus", uid=_SOURCE)


def build(board: Board) -> str:
    """The JSON of one board, the same every time."""
    builder = (
        dashboard.Dashboard(board.title)
        .uid(board.uid)
        .description(board.about)
        .tags(["admitscope"])
        .refresh("5s")
        .time("now-30m", "now")
        .timezone("browser")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .readonly()
        .with_variable(dashboard.DatasourceVariable("datasource").type("prometheus").label("Prometheus"))
        .link(
            dashboard.DashboardLink("other boards")
            .type(DashboardLinkType.DASHBOARDS)
            .tags(["admitscope"])
            .as_dropdown(True)
            .keep_time(True)
            .include_vars(True)
        )
    )
    if board.per_engine:
        builder = builder.with_variable(
            dashboard.QueryVariable("instance")
            .label("Engine")
            .datasource(source())
            .query("label_values(admitscope_build_info, instance)")
            .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
            .multi(True)
            .include_all(True)
            .all_value(".*")
        )
    number = 0
    top = 0
    for row in board.rows:
        number += 1
        builder = builder.with_row(dashboard.Row(row.title).id(number).grid_pos(GridPos(h=1, w=WIDTH, x=0, y=top)))
        top += 1
        left = height = 0
        for panel in row.panels:
            number += 1
            if left + panel.width > WIDTH:
                left, top, height = 0, top + height, 0
            tall = _HEIGHT.get(panel.kind, _DEFAULT_HEIGHT)
            made = _panel(panel).id(number).grid_pos(GridPos(h=tall, w=panel.width, x=left, y=top))
            builder = builder.with_panel(made)
            left, height = left + panel.width, max(height, tall)
        top += height
    return (
        json.dumps(_tidy(json.loads(JSONEncoder(sort_keys=True).encode(builder.build()))), indent=1, sort_keys=True)
        + "\n"
    )


def _panel(panel: Panel) -> Any:
    made = _of_kind(panel)
    made = made.title(panel.title).description(panel.description).unit(panel.unit).datasource(source())
    for number, target in enumerate(panel.targets):
        query = (
            prometheus.Dataquery()
            .expr(target.expr)
            .legend_format(target.legend or "__auto")
            .ref_id(chr(ord("A") + number))
            .datasource(source())
        )
        if panel.kind in {"stat", "table"}:
            query = query.instant().format(_format("table" if panel.kind == "table" else "time_series"))
        else:
            query = query.range().exemplar(panel.exemplars)
            if panel.kind == "heatmap":
                query = query.format(_format("heatmap"))
        made = made.with_target(query)
    return made


def _format(name: str) -> Any:
    from grafana_foundation_sdk.models.prometheus import PromQueryFormat

    return PromQueryFormat(name)


def _of_kind(panel: Panel) -> Any:
    if panel.kind == "stat":
        return stat.Panel()
    if panel.kind == "table":
        return table.Panel()
    if panel.kind == "heatmap":
        return heatmap.Panel().calculate(False)
    from grafana_foundation_sdk.builders.common import StackingConfig, VizLegendOptions
    from grafana_foundation_sdk.models.common import LegendDisplayMode, LegendPlacement

    lines = (
        timeseries.Panel()
        .show_points(VisibilityMode.NEVER)
        .line_width(1)
        .legend(
            VizLegendOptions().display_mode(LegendDisplayMode.LIST).placement(LegendPlacement.BOTTOM).show_legend(True)
        )
    )
    if panel.unit == "percentunit":
        lines = lines.min(0)
    if panel.kind == "stacked":
        lines = lines.fill_opacity(30).stacking(StackingConfig().mode(StackingMode.NORMAL))
    return lines


def _tidy(value: Any) -> Any:
    """Without nulls, which mean "default" and make differences that are none."""
    if isinstance(value, dict):
        return {key: _tidy(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_tidy(inner) for inner in value]
    return value


def main() -> int:
    """Write every board."""
    FOLDER.mkdir(exist_ok=True)
    for board in BOARDS:
        (FOLDER / f"{board.uid}.json").write_text(build(board), encoding="utf-8")
        sys.stdout.write(f"{board.uid}: {sum(len(row.panels) for row in board.rows)} panels\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
