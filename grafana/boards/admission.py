"""Admission. Owns: decisions, ledgers and waiting."""

from __future__ import annotations

from typing import Final

from grafana.boards.shared import WAITING_BY_BLOCKER
from grafana.panel import Board, Panel, Row, Target, by, one, quantiles
from grafana.queries import gauge, rate

ADMISSION: Final = Board(
    "admitscope-admission",
    "admitscope: admission",
    "What did each pass decide, which limit stopped it, and what did the waiting cost?",
    (
        Row(
            "Decisions",
            (
                Panel(
                    "Examinations /s by reason",
                    "stacked",
                    "ops",
                    "admissions_total",
                    by("reason", rate("admissions_total", "reason")),
                ),
                Panel(
                    "Pass ends /s by reason",
                    "stacked",
                    "ops",
                    "pass_ends_total",
                    by("reason", rate("pass_ends_total", "reason")),
                ),
                Panel(
                    "Never looked at /s, overdrafts /s",
                    "timeseries",
                    "short",
                    "not_considered_total",
                    (
                        Target(rate("not_considered_total"), "never looked at"),
                        Target(rate("overdrafts_total", "kind"), "overdraft {{kind}}"),
                    ),
                    note="An overdraft is a named exception by which a ledger may go below zero.",
                ),
                Panel(
                    "Guards /s",
                    "timeseries",
                    "ops",
                    "guard_activations_total",
                    by("guard", rate("guard_activations_total", "guard")),
                ),
                Panel(
                    "Turned away /s by cause",
                    "timeseries",
                    "ops",
                    "requests_rejected_total",
                    by("cause", rate("requests_rejected_total", "cause")),
                ),
                Panel(
                    "Ends /s by cause",
                    "timeseries",
                    "ops",
                    "request_ends_total",
                    by("cause", rate("request_ends_total", "cause")),
                ),
            ),
        ),
        Row(
            "Ledgers",
            (
                Panel(
                    "Headroom when the pass ended",
                    "timeseries",
                    "percentunit",
                    "ledger_remaining_tokens",
                    by(
                        "ledger",
                        f"{gauge('ledger_remaining_tokens', 'ledger')} / "
                        f"({gauge('ledger_limit_tokens', 'ledger')} > 0)",
                    ),
                    note="As a share of the ledger's limit. Near zero: this ledger is what passes run into.",
                ),
                Panel(
                    "Tokens clipped /s by ledger",
                    "timeseries",
                    "short",
                    "clipped_tokens_total",
                    by("ledger", rate("clipped_tokens_total", "ledger")),
                ),
                Panel(
                    "Selected tokens /s",
                    "stacked",
                    "short",
                    "selected_tokens_total",
                    by("kind", rate("selected_tokens_total", "kind")),
                ),
                Panel(
                    "Promised pages", "timeseries", "short", "promised_pages", one(gauge("promised_pages"), "promised")
                ),
                Panel(
                    "new_token_ratio",
                    "timeseries",
                    "short",
                    "new_token_ratio",
                    by("instance", gauge("new_token_ratio", "instance", how="avg")),
                ),
                Panel(
                    "Chunk tokens p50, p95",
                    "timeseries",
                    "short",
                    "chunk_tokens",
                    quantiles("chunk_tokens", 0.5, 0.95),
                ),
            ),
        ),
        Row(
            "Waiting",
            (
                WAITING_BY_BLOCKER,
                Panel(
                    "Waiting request-seconds per second",
                    "stacked",
                    "s",
                    "waiting_request_seconds_total",
                    by("blocker", rate("waiting_request_seconds_total", "blocker")),
                ),
                Panel(
                    "Queue wait p50, p95",
                    "timeseries",
                    "s",
                    "queue_time_seconds",
                    quantiles("queue_time_seconds", 0.5, 0.95),
                ),
                Panel(
                    "Blocked time p95 by blocker",
                    "timeseries",
                    "s",
                    "queue_blocked_seconds",
                    quantiles("queue_blocked_seconds", 0.95, by=("blocker",)),
                ),
                Panel(
                    "Waiting tokens", "timeseries", "short", "waiting_tokens", one(gauge("waiting_tokens"), "tokens")
                ),
                Panel(
                    "Oldest wait, most passed over",
                    "timeseries",
                    "short",
                    "waiting_oldest_seconds",
                    (
                        Target(gauge("waiting_oldest_seconds", how="max"), "oldest, seconds"),
                        Target(gauge("times_passed_over_max", how="max"), "times passed over"),
                    ),
                ),
            ),
        ),
    ),
)
