"""Panels that more than one board shows. Owns: their queries, written once."""

from __future__ import annotations

from typing import Final

from grafana.panel import Panel, Row, Target, by, one, quantiles
from grafana.queries import gauge, increase, rate, share, summed, within

TTFT: Final = "time_to_first_token_seconds"
TBT: Final = "inter_token_latency_seconds"
E2E: Final = "request_duration_seconds"

_OUTCOME_RATES: Final = (
    Target(rate("requests_received_total"), "received"),
    Target(rate("requests_finished_total"), "finished"),
    Target(rate("requests_rejected_total"), "rejected"),
)

HEALTH: Final = Row(
    "Health",
    (
        Panel("TTFT within 1 s", "stat", "percentunit", TTFT, one(within(TTFT, 1.0, over="5m")), 4),
        Panel(
            "Violations (1 h)",
            "stat",
            "short",
            "violations_total",
            one(f"{increase('violations_total', over='1h')} or vector(0)"),
            3,
        ),
        Panel(
            "Unaccounted pages",
            "stat",
            "short",
            "kv_pages_unaccounted",
            one(gauge("kv_pages_unaccounted", how="max")),
            3,
        ),
        Panel("Requests /s", "stat", "reqps", "requests_received_total", _OUTCOME_RATES, 5),
        Panel(
            "Oldest waiting", "stat", "s", "waiting_oldest_seconds", one(gauge("waiting_oldest_seconds", how="max")), 3
        ),
        Panel(
            "Heartbeat age",
            "stat",
            "s",
            "heartbeat_timestamp_seconds",
            one(f"time() - {gauge('heartbeat_timestamp_seconds', how='min')}"),
            3,
        ),
        Panel(
            "Evidence dropped /s", "stat", "short", "telemetry_dropped_total", one(rate("telemetry_dropped_total")), 3
        ),
    ),
)

FIRING: Final = Panel(
    "Firing alerts",
    "table",
    "short",
    "violations_total",
    one('count by (alertname) (ALERTS{alertstate="firing"}) or vector(0)'),
    8,
    "Every alert of the rules in this folder, not only this one.",
)

WAITING_BY_BLOCKER: Final = Panel(
    "Waiting requests by blocker",
    "stacked",
    "short",
    "waiting_by_blocker",
    by("blocker", gauge("waiting_by_blocker", "blocker")),
)
LIVE: Final = Panel("Live requests by state", "stacked", "short", "requests", by("state", gauge("requests", "state")))
PAGES: Final = Panel(
    "K/V pages by state",
    "stacked",
    "short",
    "kv_pages",
    (*by("state", gauge("kv_pages", "state")), Target(gauge("kv_pages_capacity"), "capacity")),
)
TTFT_QUANTILES: Final = Panel(
    "TTFT p50, p95, p99", "timeseries", "s", TTFT, quantiles(TTFT, 0.5, 0.95, 0.99), exemplars=True
)
TTFT_STACK: Final = Panel(
    "Mean TTFT by component",
    "stacked",
    "s",
    "ttft_component_seconds",
    by("component", share(summed("ttft_component_seconds", "component", part="sum"), summed(TTFT, part="count"))),
    note="Means add up to the mean TTFT; quantiles would not.",
)
TBT_QUANTILES: Final = Panel("TBT p50, p99", "timeseries", "s", TBT, quantiles(TBT, 0.5, 0.99))
GENERATION: Final = Panel(
    "Output tokens /s",
    "timeseries",
    "short",
    "generation_tokens_total",
    one(rate("generation_tokens_total"), "tokens"),
)
HIT_SHARE: Final = Panel(
    "Prefix cache hit share",
    "timeseries",
    "percentunit",
    "prompt_tokens_total",
    one(share(rate("prompt_tokens_total", matchers=('source="cached"',)), rate("prompt_tokens_total")), "cached"),
)
