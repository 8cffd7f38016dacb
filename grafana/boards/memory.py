"""K/V ownership. Owns: who owns the pool, and what pressure costs."""

from __future__ import annotations

from typing import Final

from grafana.boards.shared import HIT_SHARE, PAGES
from grafana.panel import Board, Panel, Row, Target, by, quantiles
from grafana.queries import gauge, rate

MEMORY: Final = Board(
    "admitscope-kv",
    "admitscope: K/V ownership",
    "Who owns the pool, what is lost to pressure, and is anything unaccounted for?",
    (
        Row(
            "Pool",
            (
                PAGES,
                Panel(
                    "Unaccounted pages",
                    "timeseries",
                    "short",
                    "kv_pages_unaccounted",
                    by("instance", gauge("kv_pages_unaccounted", "instance", how="max")),
                ),
                Panel(
                    "Evictions and failed claims /s",
                    "timeseries",
                    "ops",
                    "kv_pages_evicted_total",
                    (
                        Target(rate("kv_pages_evicted_total"), "evicted pages"),
                        Target(rate("kv_claim_failures_total", "caller"), "failed claim, {{caller}}"),
                    ),
                ),
            ),
        ),
        Row(
            "Pressure",
            (
                Panel(
                    "Retractions /s, wasted tokens /s",
                    "timeseries",
                    "ops",
                    "retractions_total",
                    (
                        Target(rate("retractions_total", "cause"), "{{cause}}"),
                        Target(rate("retracted_tokens_total", "kind"), "{{kind}} tokens lost"),
                    ),
                ),
                Panel(
                    "Retractions per request p99",
                    "timeseries",
                    "short",
                    "request_retractions",
                    quantiles("request_retractions", 0.99),
                ),
                Panel(
                    "Prompt tokens /s by source",
                    "stacked",
                    "short",
                    "prompt_tokens_total",
                    by("source", rate("prompt_tokens_total", "source")),
                ),
                HIT_SHARE,
            ),
        ),
    ),
)
