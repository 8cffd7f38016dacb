"""Invariants and loop. Owns: laws, loop time and the cost of watching."""

from __future__ import annotations

from typing import Final

from grafana.panel import Board, Panel, Row, Target, by, one, quantiles
from grafana.queries import gauge, increase, rate, share

WATCH: Final = Board(
    "admitscope-invariants",
    "admitscope: invariants and loop",
    "Does every law hold, where does loop time go, and what does watching cost?",
    (
        Row(
            "Laws",
            (
                Panel(
                    "Checks /s by group",
                    "stacked",
                    "ops",
                    "invariant_checks_total",
                    by("group", rate("invariant_checks_total", "group")),
                ),
                Panel(
                    "Violations by law",
                    "timeseries",
                    "short",
                    "violations_total",
                    by("id", increase("violations_total", "id")),
                ),
                Panel(
                    "Laws by mode",
                    "stacked",
                    "short",
                    "invariant_laws",
                    by("mode", gauge("invariant_laws", "mode", how="max")),
                ),
                Panel(
                    "Audits /s by part",
                    "timeseries",
                    "ops",
                    "invariant_audits_total",
                    by("part", rate("invariant_audits_total", "part")),
                ),
                Panel(
                    "Seconds between audits",
                    "timeseries",
                    "s",
                    "invariant_audit_period_seconds",
                    one(gauge("invariant_audit_period_seconds", how="max"), "period"),
                ),
                Panel(
                    "Evidence bundles",
                    "timeseries",
                    "short",
                    "evidence_bundles_total",
                    by("outcome", increase("evidence_bundles_total", "outcome")),
                ),
            ),
        ),
        Row(
            "Loop",
            (
                Panel(
                    "Step time p50, p99 by kind",
                    "timeseries",
                    "s",
                    "step_seconds",
                    quantiles("step_seconds", 0.5, 0.99, by=("kind",)),
                ),
                Panel(
                    "Loop time by phase",
                    "stacked",
                    "percentunit",
                    "step_phase_seconds_total",
                    by("phase", share(rate("step_phase_seconds_total", "phase"), rate("step_phase_seconds_total"))),
                ),
                Panel("Planning p50, p99", "timeseries", "s", "plan_seconds", quantiles("plan_seconds", 0.5, 0.99)),
                Panel("Steps /s by kind", "stacked", "ops", "steps_total", by("kind", rate("steps_total", "kind"))),
                Panel(
                    "Batch tokens p50, p95 by kind",
                    "timeseries",
                    "short",
                    "step_tokens",
                    quantiles("step_tokens", 0.5, 0.95, by=("kind",)),
                ),
                Panel(
                    "Batch requests p50",
                    "timeseries",
                    "short",
                    "step_requests",
                    quantiles("step_requests", 0.5, by=("kind",)),
                ),
                Panel(
                    "Idle share",
                    "timeseries",
                    "percentunit",
                    "idle_seconds_total",
                    one(rate("idle_seconds_total"), "idle"),
                ),
            ),
        ),
        Row(
            "The observer",
            (
                Panel(
                    "Events and drops /s by sink",
                    "timeseries",
                    "ops",
                    "telemetry_events_total",
                    (
                        Target(rate("telemetry_events_total", "sink"), "{{sink}}"),
                        Target(rate("telemetry_dropped_total", "sink"), "{{sink}} dropped"),
                    ),
                ),
                Panel(
                    "Cost of watching per step",
                    "stacked",
                    "s",
                    "telemetry_seconds_total",
                    by("part", share(rate("telemetry_seconds_total", "part"), rate("steps_total"))),
                ),
                Panel(
                    "Checking, seconds per second by tier",
                    "timeseries",
                    "s",
                    "invariant_check_seconds_total",
                    by("tier", rate("invariant_check_seconds_total", "tier")),
                ),
                Panel(
                    "Queue of each sink",
                    "timeseries",
                    "short",
                    "telemetry_queue_depth",
                    by("sink", gauge("telemetry_queue_depth", "sink", how="max")),
                ),
                Panel(
                    "Spans /s by outcome",
                    "timeseries",
                    "ops",
                    "spans_exported_total",
                    by("outcome", rate("spans_exported_total", "outcome")),
                ),
                Panel(
                    "Errors of listeners /s",
                    "timeseries",
                    "ops",
                    "telemetry_errors_total",
                    by("component", rate("telemetry_errors_total", "component")),
                ),
            ),
        ),
    ),
)
