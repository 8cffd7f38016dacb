"""The fleet. Owns: engines side by side."""

from __future__ import annotations

from typing import Final

from grafana.boards.shared import TTFT
from grafana.panel import Board, Panel, Row, Target, each, one
from grafana.queries import ALL, build_info, gauge, increase, quantile, rate, selector, within

_WAITING: Final = selector("requests", 'state="waiting"', where=ALL)
_FREE: Final = selector("kv_pages", 'state="free"', where=ALL)
_CACHED: Final = ('source="cached"',)
FLEET: Final = Board(
    "admitscope-fleet",
    "admitscope: fleet",
    "Which engine is unlike the others?",
    (
        Row(
            "Fleet",
            (
                Panel("Engines up", "stat", "short", "build_info", one('count(up{job="admitscope"} == 1)'), 4),
                Panel(
                    "Unreachable",
                    "stat",
                    "short",
                    "build_info",
                    one('count(up{job="admitscope"} == 0) or vector(0)'),
                    4,
                ),
                Panel("Versions", "table", "short", "build_info", (Target(build_info()),), 16),
                Panel(
                    "TTFT within 1 s",
                    "table",
                    "percentunit",
                    TTFT,
                    each(within(TTFT, 1.0, "instance", where=ALL, over="5m")),
                ),
                Panel("TTFT p95", "timeseries", "s", TTFT, each(quantile(0.95, TTFT, "instance", where=ALL))),
                Panel(
                    "Waiting by blocker, top 5",
                    "timeseries",
                    "s",
                    "waiting_request_seconds_total",
                    (
                        Target(
                            f"topk(5, {rate('waiting_request_seconds_total', 'instance', 'blocker', where=ALL)})",
                            "{{instance}} {{blocker}}",
                        ),
                    ),
                ),
                Panel(
                    "Waiting, most over mean",
                    "timeseries",
                    "short",
                    "requests",
                    one(
                        f"max({_WAITING}) / (avg({_WAITING}) > 0)",
                        "max / mean",
                    ),
                    note="Far above 1: the router sends too much to one engine.",
                ),
                Panel(
                    "K/V occupancy",
                    "timeseries",
                    "percentunit",
                    "kv_pages",
                    each(f"1 - sum by (instance) ({_FREE}) / {gauge('kv_pages_capacity', 'instance', where=ALL)}"),
                ),
                Panel(
                    "Prefix hit share",
                    "timeseries",
                    "percentunit",
                    "prompt_tokens_total",
                    each(
                        f"{rate('prompt_tokens_total', 'instance', matchers=_CACHED, where=ALL)} / "
                        f"({rate('prompt_tokens_total', 'instance', where=ALL)} > 0)"
                    ),
                ),
                Panel(
                    "Retractions /s",
                    "timeseries",
                    "ops",
                    "retractions_total",
                    each(rate("retractions_total", "instance", where=ALL)),
                ),
                Panel(
                    "Violations (5 min)",
                    "timeseries",
                    "short",
                    "violations_total",
                    (
                        Target(
                            increase("violations_total", "instance", "id", where=ALL, over="5m"), "{{instance}} {{id}}"
                        ),
                    ),
                ),
            ),
        ),
    ),
    per_engine=False,
)
