"""Latency. Owns: time to first token taken apart, late tokens, the way to the client."""

from __future__ import annotations

from typing import Final

from grafana.boards.shared import E2E, TBT_QUANTILES, TTFT, TTFT_QUANTILES, TTFT_STACK
from grafana.panel import Board, Panel, Row, Target, by, one, quantiles
from grafana.queries import heatmap, rate, share, summed

LATENCY: Final = Board(
    "admitscope-latency",
    "admitscope: latency",
    "Where did the time to first token go, and why was a token late?",
    (
        Row(
            "What users see",
            (
                TTFT_QUANTILES,
                Panel("TTFT heat map", "heatmap", "s", TTFT, (Target(heatmap(TTFT), "{{le}}"),), exemplars=True),
                TBT_QUANTILES,
                Panel(
                    "Late tokens /s by cause",
                    "stacked",
                    "ops",
                    "token_stalls_total",
                    by("cause", rate("token_stalls_total", "cause")),
                ),
                Panel(
                    "TPOT p95",
                    "timeseries",
                    "s",
                    "time_per_output_token_seconds",
                    quantiles("time_per_output_token_seconds", 0.95),
                ),
                Panel("End to end p95 by end", "timeseries", "s", E2E, quantiles(E2E, 0.95, by=("finish_reason",))),
            ),
        ),
        Row(
            "Time to first token, taken apart",
            (
                TTFT_STACK,
                Panel(
                    "Share of TTFT per component",
                    "stacked",
                    "percentunit",
                    "ttft_component_seconds",
                    by(
                        "component",
                        share(summed("ttft_component_seconds", "component", part="sum"), summed(TTFT, part="sum")),
                    ),
                ),
                Panel(
                    "p95 per component",
                    "timeseries",
                    "s",
                    "ttft_component_seconds",
                    quantiles("ttft_component_seconds", 0.95, by=("component",)),
                ),
                Panel(
                    "Unexplained share of TTFT",
                    "timeseries",
                    "percentunit",
                    "ttft_residual_seconds_total",
                    one(share(rate("ttft_residual_seconds_total"), summed(TTFT, part="sum")), "unexplained"),
                ),
                Panel(
                    "Chunk forward p95 by position",
                    "timeseries",
                    "s",
                    "chunk_forward_seconds",
                    quantiles("chunk_forward_seconds", 0.95, by=("position",)),
                ),
                Panel(
                    "Chunks per request p50, p95",
                    "timeseries",
                    "short",
                    "request_chunks",
                    quantiles("request_chunks", 0.5, 0.95),
                ),
            ),
        ),
        Row(
            "The way to the client",
            (
                Panel(
                    "Stream send p99", "timeseries", "s", "stream_send_seconds", quantiles("stream_send_seconds", 0.99)
                ),
                Panel(
                    "Clients that gave up /s",
                    "timeseries",
                    "ops",
                    "client_disconnects_total",
                    one(rate("client_disconnects_total"), "disconnects"),
                ),
                Panel(
                    "Connections ended by the server /s",
                    "timeseries",
                    "ops",
                    "connections_cut_total",
                    by("cause", rate("connections_cut_total", "cause")),
                ),
            ),
        ),
    ),
)
