"""Alerts as cases for promtool. Owns: for each alert, series on which it fires and series on which it must not.

Series start at time 0, in promtool's notation: `0+5x40` rises by 5 forty times, `1x40` stays. A sample is 15 s after
the one before it; a minute in the cases of objectives, whose windows are hours.
Short names: `INSTANCE` is added to every selector, the prefix to every name but `up`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from grafana.rules import ALERTS, RUNBOOK
from telemetry.metric_catalog import PREFIX

SECONDS, MINUTES = "15s", "1m"
ENGINE: Final = "engine-a:8000"


class Case(NamedTuple):
    """One set of series. `at`: when the alert is looked at; `labels` beside instance and severity, None: silent.

    interval  between samples, and between evaluations
    """

    why: str
    alert: str
    series: Mapping[str, str]
    at: str
    labels: Mapping[str, str] | None
    interval: str = SECONDS


def _fires(why: str, alert: str, at: str, series: Mapping[str, str], **labels: str) -> Case:
    return Case(why, alert, series, at, labels)


def _silent(why: str, alert: str, at: str, series: Mapping[str, str]) -> Case:
    return Case(why, alert, series, at, None)


def _objective(name: str, good: str, all_: str) -> dict[str, str]:
    bound = {"time_to_first_token_seconds": "1.0", "queue_time_seconds": "0.5"}[name]
    return {f'{name}_bucket{{le="{bound}"}}': good, f"{name}_count": all_}


def _burns(short: str, name: str) -> tuple[Case, ...]:
    fast, slow = f"Admitscope{short}SLOBurn", f"Admitscope{short}SLOSlowBurn"
    bad_for_five_minutes = _objective(name, "0+10x54 541+1x5", "0+10x60")
    cases = (
        _fires("half are late", fast, "10m", _objective(name, "0+5x60", "0+10x60")),
        _silent("not held for two minutes yet", fast, "2m", _objective(name, "0+1x60", "0+10x60")),
        _silent("the hour before was good", fast, "1h", bad_for_five_minutes),
        _silent("a tenth is late: for the slow one", fast, "1h", _objective(name, "0+9x60", "0+10x60")),
        _silent("nobody asked", fast, "1h", _objective(name, "5x60", "90x60")),
        _fires("a tenth is late", slow, "1h", _objective(name, "0+9x60", "0+10x60")),
        _silent("the hours before were good", slow, "6h", _objective(name, "0+10x330 3308+8x29", "0+10x360")),
        _silent("two of a hundred are late", slow, "1h", _objective(name, "0+98x60", "0+100x60")),
    )
    return tuple(case._replace(interval=MINUTES) for case in cases)


_BUSY: Final = {'requests{state="decode"}': "3x80", 'requests{state="waiting"}': "0x80"}
_QUIET: Final = {'requests{state="decode"}': "0x80", 'requests{state="waiting"}': "0x80"}
_BEATS: Final = {"heartbeat_timestamp_seconds": "0+15x80"}
_HELD: Final = {'kv_pages{state="private"}': "3x80", 'kv_pages{state="protected"}': "1x80"}

_CASES: Final = (
    _fires(
        "a law broke",
        "AdmitscopeInvariantViolation",
        "4m",
        {'violations_total{id="INV-PAGE-01"}': "0x8 1x40", 'violations_total{id="INV-PAGE-02"}': "0x48"},
        id="INV-PAGE-01",
    ),
    _silent("long ago", "AdmitscopeInvariantViolation", "9m", {'violations_total{id="INV-PAGE-01"}': "0x4 3x40"}),
    _silent("a restart", "AdmitscopeInvariantViolation", "4m", {'violations_total{id="INV-PAGE-01"}': "3x8 0x40"}),
    _fires("pages are gone", "AdmitscopeKVLeak", "6m", {"kv_pages_unaccounted": "0x4 2x40"}),
    _silent("not held for a minute yet", "AdmitscopeKVLeak", "3m15s", {"kv_pages_unaccounted": "0x4 2x40"}),
    _silent("a count between two steps", "AdmitscopeKVLeak", "6m", {"kv_pages_unaccounted": "0 2 " * 12}),
    _fires("held for nobody", "AdmitscopeKVIdleResidue", "3m", _HELD | _QUIET),
    _silent("held for somebody", "AdmitscopeKVIdleResidue", "10m", _HELD | _BUSY),
    _silent(
        "cached is not held",
        "AdmitscopeKVIdleResidue",
        "10m",
        {'kv_pages{state="evictable"}': "9x80", 'kv_pages{state="private"}': "0x80"} | _QUIET,
    ),
    _fires(
        "others are admitted",
        "AdmitscopeStarvation",
        "4m",
        {"waiting_oldest_seconds": "35x40", 'admissions_total{reason="admitted_whole"}': "0+5x40"},
    ),
    _silent(
        "nobody is admitted",
        "AdmitscopeStarvation",
        "4m",
        {
            "waiting_oldest_seconds": "35x40",
            'admissions_total{reason="kv_total_exhausted"}': "0+5x40",
            'admissions_total{reason="admitted_whole"}': "5x40",
        },
    ),
    _silent(
        "a short wait",
        "AdmitscopeStarvation",
        "4m",
        {"waiting_oldest_seconds": "25x40", 'admissions_total{reason="admitted_whole"}': "0+5x40"},
    ),
    _fires("no heartbeat", "AdmitscopeStuck", "2m", {"heartbeat_timestamp_seconds": "0+15x4 60x40"} | _QUIET),
    _fires("no work done", "AdmitscopeStuck", "5m", _BEATS | _BUSY | {'steps_total{kind="decode"}': "0+9x4 36x76"}),
    _fires(
        "idle steps only",
        "AdmitscopeStuck",
        "5m",
        _BEATS | _BUSY | {'steps_total{kind="idle"}': "0+9x80", 'steps_total{kind="decode"}': "7x80"},
    ),
    _silent("nothing to do", "AdmitscopeStuck", "5m", _BEATS | _QUIET | {'steps_total{kind="decode"}': "36x80"}),
    _silent("at work", "AdmitscopeStuck", "5m", _BEATS | _BUSY | {'steps_total{kind="decode"}': "0+9x80"}),
    _fires(
        "one for two that end",
        "AdmitscopeRetractStorm",
        "6m",
        {'retractions_total{cause="kv_now"}': "0+2x40", 'requests_finished_total{finish_reason="stop"}': "0+4x40"},
    ),
    _silent(
        "many, and very many end",
        "AdmitscopeRetractStorm",
        "6m",
        {'retractions_total{cause="kv_now"}': "0+2x40", 'requests_finished_total{finish_reason="stop"}': "0+20x40"},
    ),
    _silent(
        "few",
        "AdmitscopeRetractStorm",
        "6m",
        {'retractions_total{cause="kv_now"}': "0+1x40", 'requests_finished_total{finish_reason="stop"}': "0+1x40"},
    ),
    *_burns("TTFT", "time_to_first_token_seconds"),
    *_burns("Queue", "queue_time_seconds"),
    _fires(
        "two thirds promised away",
        "AdmitscopeReservationTooLarge",
        "15m",
        {
            'pass_ends_total{reason="kv_total_exhausted"}': "0+2x80",
            'kv_pages{state="free"}': "20x80",
            'kv_pages{state="evictable"}': "20x80",
            "kv_pages_capacity": "100x80",
        },
    ),
    _silent(
        "really full",
        "AdmitscopeReservationTooLarge",
        "15m",
        {
            'pass_ends_total{reason="kv_total_exhausted"}': "0+2x80",
            'kv_pages{state="free"}': "5x80",
            'kv_pages{state="evictable"}': "5x80",
            "kv_pages_capacity": "100x80",
        },
    ),
    _silent(
        "not of late",
        "AdmitscopeReservationTooLarge",
        "15m",
        {
            'pass_ends_total{reason="kv_total_exhausted"}': "9x80",
            'kv_pages{state="free"}': "40x80",
            "kv_pages_capacity": "100x80",
        },
    ),
    _fires("a sink drops", "AdmitscopeTelemetryLoss", "5m", {'telemetry_dropped_total{sink="journal"}': "0+1x40"}),
    _silent("it dropped once", "AdmitscopeTelemetryLoss", "8m", {'telemetry_dropped_total{sink="journal"}': "0 5x40"}),
    _fires(
        "a tenth unexplained",
        "AdmitscopeTTFTUnexplained",
        "20m",
        {"ttft_residual_seconds_total": "0+1x100", "time_to_first_token_seconds_sum": "0+10x100"},
    ),
    _silent(
        "a hundredth",
        "AdmitscopeTTFTUnexplained",
        "20m",
        {"ttft_residual_seconds_total": "0+0.1x100", "time_to_first_token_seconds_sum": "0+10x100"},
    ),
    _fires(
        "a token in twenty",
        "AdmitscopeLateTokens",
        "12m",
        {'token_stalls_total{cause="chunk_overhead"}': "0+1x100", "generation_tokens_total": "0+20x100"},
    ),
    _silent(
        "a token in two hundred",
        "AdmitscopeLateTokens",
        "20m",
        {'token_stalls_total{cause="chunk_overhead"}': "0+1x100", "generation_tokens_total": "0+200x100"},
    ),
    _silent(
        "few tokens in all",
        "AdmitscopeLateTokens",
        "20m",
        {'token_stalls_total{cause="chunk_overhead"}': "0x40 1x60", "generation_tokens_total": "0+0.5x100"},
    ),
    _fires("a miss", "AdmitscopeClaimFailure", "3m", {'kv_claim_failures_total{caller="decode"}': "0x4 1x40"}),
    _silent("long ago", "AdmitscopeClaimFailure", "8m", {'kv_claim_failures_total{caller="decode"}': "0x4 1x40"}),
    _fires(
        "steps without checks",
        "AdmitscopeCheckerSilent",
        "5m",
        {
            'invariant_checks_total{group="step"}': "7x40",
            'steps_total{kind="decode"}': "0+9x40",
            'invariant_laws{mode="record"}': "40x40",
            'invariant_laws{mode="off"}': "1x40",
        },
    ),
    _fires(
        "audits alone",
        "AdmitscopeCheckerSilent",
        "5m",
        {
            'invariant_checks_total{group="step"}': "7x40",
            'invariant_checks_total{group="page"}': "0+70x40",
            'steps_total{kind="decode"}': "0+9x40",
            'invariant_laws{mode="record"}': "40x40",
        },
    ),
    _silent(
        "off on purpose",
        "AdmitscopeCheckerSilent",
        "5m",
        {
            'invariant_checks_total{group="step"}': "7x40",
            'steps_total{kind="decode"}': "0+9x40",
            'invariant_laws{mode="record"}': "0x40",
            'invariant_laws{mode="raise"}': "0x40",
            'invariant_laws{mode="off"}': "41x40",
        },
    ),
    _silent(
        "no steps",
        "AdmitscopeCheckerSilent",
        "5m",
        {
            'invariant_checks_total{group="step"}': "7x40",
            'steps_total{kind="idle"}': "0+9x40",
            'steps_total{kind="decode"}': "9x40",
            'invariant_laws{mode="record"}': "40x40",
        },
    ),
    _silent(
        "checks",
        "AdmitscopeCheckerSilent",
        "5m",
        {
            'invariant_checks_total{group="step"}': "0+70x40",
            'steps_total{kind="decode"}': "0+9x40",
            'invariant_laws{mode="record"}': "40x40",
        },
    ),
    _fires("gone", "AdmitscopeDown", "2m", {'up{job="admitscope"}': "1x4 0x20"}, job="admitscope"),
    _silent("one scrape missed", "AdmitscopeDown", "1m", {'up{job="admitscope"}': "1x3 0 1x20"}),
)
#: The series that fire an alert, looked at when it is true already and was not for long enough.
_TOO_SOON: Final = {
    "AdmitscopeKVIdleResidue": "45s",
    "AdmitscopeStarvation": "30s",
    "AdmitscopeStuck": "1m45s",
    "AdmitscopeRetractStorm": "2m",
    "AdmitscopeTTFTSLOSlowBurn": "10m",
    "AdmitscopeQueueSLOSlowBurn": "10m",
    "AdmitscopeReservationTooLarge": "4m",
    "AdmitscopeTelemetryLoss": "1m30s",
    "AdmitscopeLateTokens": "4m",
    "AdmitscopeTTFTUnexplained": "8m",
    "AdmitscopeCheckerSilent": "1m",
}
CASES: Final = (
    *_CASES,
    *(
        next(case for case in _CASES if case.alert == alert and case.labels is not None)._replace(
            why="not for long enough yet", at=at, labels=None
        )
        for alert, at in _TOO_SOON.items()
    ),
)


def _series(short: str) -> str:
    name, _, rest = short.partition("{")
    inside = rest.rstrip("}")
    labels = ",".join(part for part in (f'instance="{ENGINE}"', inside) if part)
    return f"{name if name == 'up' else PREFIX + name}{{{labels}}}"


def unit_test(case: Case) -> dict[str, Any]:
    """The case as promtool wants it."""
    [alert] = [one for one in ALERTS if one.name == case.alert]
    expected = []
    if case.labels is not None:
        expected.append(
            {
                "exp_labels": {"severity": alert.severity, "instance": ENGINE, **case.labels},
                "exp_annotations": {"summary": alert.meaning, "description": alert.look, "runbook": RUNBOOK},
            }
        )
    return {
        "name": f"{case.alert}: {case.why}",
        "interval": case.interval,
        "input_series": [{"series": _series(name), "values": values} for name, values in case.series.items()],
        "alert_rule_test": [{"eval_time": case.at, "alertname": case.alert, "exp_alerts": expected}],
    }
