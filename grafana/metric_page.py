"""The page of metrics. Owns: docs/reference/metrics.md, generated from catalogue, views, boards and rules.

python -m grafana.metric_page
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from grafana.boards import BOARDS
from grafana.rules import ALERTS, REAL_TIME, RECORDINGS
from telemetry import metric_bounds
from telemetry.metric_catalog import (
    BUILD_INFO,
    BUILD_LABELS,
    CATALOG,
    FRONT_END,
    GROUPS,
    METRICS_VERSION,
    PREFIX,
    Metric,
)
from telemetry.views import WITH_EXEMPLARS, View, count_samples, gen_ai, sglang

PAGE: Final = Path(__file__).parents[1] / "docs" / "reference" / "metrics.md"
_UNITS: Final = (("_seconds", "s"), ("_tokens", "tokens"), ("_pages", "pages"), ("_ratio", "ratio"))
_BOUNDS: Final[dict[tuple[float, ...], str]] = {
    value: name for name, value in vars(metric_bounds).items() if isinstance(value, tuple)
}
_HEAD: Final = """# Metrics

Generated from `telemetry/metric_catalog.py`, `telemetry/views.py` and `grafana/` by `python -m grafana.metric_page`. Do
not edit.

`/metrics` shows {samples:,} samples, as many after a week as at the start: label values come from closed sets, and each
combination exists from the start at zero. Times are in seconds, counted inside in whole nanoseconds. Whoever asks for
`application/openmetrics-text` gets OpenMetrics, with exemplars; anybody else gets the Prometheus text format.

- A ratio is never exported: divide two rates.
- Gauges are of the moment when the last step, arrival or end was counted; ages go on to the scrape.
- Histograms marked ◆ carry exemplars `{{trace_id}}` while traces are on: of traces that are going to be kept, at most
  one per bucket and second. A token in time has none. See [spans](spans.md).
- Families marked ● are counted by threads of the front end: a scrape may see one of them a request ahead of the rest.

## What a name promises

This is version {version} of the contract. Under one name, the type, the unit, the label and the meaning do not change.

| Change | How |
|---|---|
| A new family, label value or bucket bound | In any release; named in the change log. |
| Another meaning, unit, type or label | A new name and version. The old name lives on for one minor release. |
| A family, label value or bound goes | Not before that release is over. |

`tests/golden/metrics-v{version}.txt` lists what this version promises; a test fails when a line of it no longer holds.
"""


def page() -> str:
    """The whole page."""
    parts = [_HEAD.format(samples=count_samples(), version=METRICS_VERSION)]
    for title, group in GROUPS.items():
        parts += [f"\n## {title}\n", _table(group)]
    parts += ["\n## Build\n", _build(), _label_values(), _bounds(), _gen_ai(), _sglang()]
    return "\n".join(parts).rstrip() + "\n"


def unit(name: str) -> str:
    """Unit of a family, by its name."""
    stem = name.removesuffix("_total").removesuffix("_max")
    return next((word for suffix, word in _UNITS if stem.endswith(suffix)), "1")


def places(name: str) -> list[str]:
    """Boards with their rows, and rules, that read the family `name`."""
    wanted = re.compile(rf"\b{PREFIX}{name}(_bucket|_sum|_count)?\b")
    found = [
        f"{board.title.removeprefix('admitscope: ')}: {row.title}"
        for board in BOARDS
        for row in board.rows
        if any(wanted.search(target.expr) for panel in row.panels for target in panel.targets)
    ]
    found += [f"alert {alert.name}" for alert in ALERTS if wanted.search(alert.expr(REAL_TIME))]
    found += sorted({f"rule {rule.name}" for rule in RECORDINGS if rule.histogram == name})
    return found


def _table(group: tuple[Metric, ...]) -> str:
    lines = ["| Name | Type | Unit | Label | Buckets | Question | Where |", "|---|---|---|---|---|---|---|"]
    for metric in group:
        marks = " ◆" * (metric.name in WITH_EXEMPLARS) + " ●" * (metric.name in FRONT_END)
        bounds = f"[{_BOUNDS[metric.bounds]}](#buckets)" if metric.bounds else ""
        label = f"`{metric.label}`" if metric.label else ""
        where = "; ".join(places(metric.name))
        cells = (f"`{PREFIX}{metric.name}`{marks}", metric.kind, unit(metric.name), label, bounds, metric.help, where)
        lines.append(_row(cells))
    return "\n".join(lines)


def _row(cells: tuple[str, ...]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _build() -> str:
    labels = ", ".join(f"`{label}`" for label in BUILD_LABELS)
    where = "; ".join(places(BUILD_INFO.name))
    return f"`{PREFIX}{BUILD_INFO.name}` is always 1; its labels say what is running: {labels}. Where: {where}.\n"


def _label_values() -> str:
    lines = ["## Label values\n", "| Family | Label | Values |", "|---|---|---|"]
    lines += [
        _row((f"`{metric.name}`", f"`{metric.label}`", ", ".join(f"`{value}`" for value in metric.values)))
        for metric in CATALOG
        if metric.label
    ]
    return "\n".join(lines) + "\n"


def _bounds() -> str:
    lines = [
        "## Buckets\n",
        "Every histogram has `+Inf` besides. Inside, some are kept with more bounds than are shown: with those of all",
        "views, each of which sums neighbouring cells.\n",
        "| Set | Upper bounds |",
        "|---|---|",
    ]
    lines += [_row((name, ", ".join(f"{bound:g}" for bound in value))) for value, name in _BOUNDS.items()]
    return "\n".join(lines) + "\n"


def _views(views: tuple[View, ...]) -> Iterator[str]:
    yield "| Name | Type | Buckets | Labels | What |"
    yield "|---|---|---|---|---|"
    for view in views:
        labels = dict.fromkeys(name for series in view.series for name, _ in series.labels)
        bounds = f"[{_BOUNDS[view.bounds]}](#buckets)" if view.bounds else ""
        yield _row((f"`{view.name}`", view.kind, bounds, ", ".join(f"`{name}`" for name in labels), view.help))


def _gen_ai() -> str:
    text = """## OpenTelemetry

The three server histograms of the conventions for generative AI, on `/metrics`, from the same numbers: dots are
underscores and the unit ends the name, as Prometheus writes them. `gen_ai_operation_name` is `chat` or
`text_completion`; `error_type` is `abort`, `error` or `refused`, and absent when all went well. The convention counts
the time to first token of successful requests only; here it is counted when the token leaves, before the end is known.
The conventions are still in development: these names follow them, not the contract above.
"""
    return text + "\n" + "\n".join(_views(gen_ai(""))) + "\n"


def _sglang() -> str:
    text = """## SGLang

`serve --sglang-metrics` also answers `/metrics/sglang`: names, labels and bounds of an SGLang server over the same
numbers, for its Grafana board and for routers that read one. It is a path of its own, because one scrape of both would
invite sums over both. Left out is the label `is_streaming`: this engine does not keep streams apart, and sums over it
are the same. `request_time_per_output_token_seconds` has the bounds of `inter_token_latency_seconds`.
"""
    return text + "\n" + "\n".join(_views(sglang(""))) + "\n"


def main() -> int:
    """Write the page."""
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
