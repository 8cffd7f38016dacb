"""Recording and alert rules as data. Owns: their expressions, for any time scale.

    python -m grafana.rules            writes grafana/rules/admitscope.yml

Every window, `for` and threshold in seconds goes through one `Scale`, so the same rules can be tried end to end in a
tenth of the time. Objectives: 99 % of requests with a first token within 1 s and at most 0.5 s in the queue; a burn of
14.4 spends a tenth of a 30-day budget in 5 hours, one of 6 in half a day.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import yaml

from grafana.queries import ALL, increase, rate, selector, summed, within

FOLDER: Final = Path(__file__).parent / "rules"
#: Where the sentence behind each alert is.
RUNBOOK: Final = "docs/alerts.md"
_BUDGET: Final = 0.01
_FAST, _SLOW = 14.4, 6.0
_TTFT_S, _QUEUE_S = 1.0, 0.5


class Scale(NamedTuple):
    """Time as rules see it: 1.0 in production, 0.1 where a test has no hours."""

    factor: float = 1.0

    def window(self, seconds: float) -> str:
        """A range or `for`, in milliseconds when it is no whole number of seconds."""
        scaled = seconds * self.factor
        return f"{scaled:.0f}s" if scaled == int(scaled) else f"{scaled * 1000:.0f}ms"

    def seconds(self, seconds: float) -> str:
        """A threshold in seconds."""
        return f"{seconds * self.factor:g}"


REAL_TIME: Final = Scale()


class Alert(NamedTuple):
    """One alert.

    expr      of a scale
    hold_s    how long it must be true
    severity  `page` wakes somebody, `ticket` does not
    meaning   what is the matter, in a sentence
    look      what to look at first
    """

    name: str
    expr: Callable[[Scale], str]
    hold_s: float
    severity: Literal["page", "ticket"]
    meaning: str
    look: str


class Recording(NamedTuple):
    """One recorded ratio over one window."""

    name: str
    histogram: str
    bound: float
    window_s: float


_WINDOWS: Final = (("5m", 300.0), ("30m", 1800.0), ("1h", 3600.0), ("6h", 21600.0))
RECORDINGS: Final = tuple(
    Recording(f"admitscope:{short}_bad:ratio_rate{name}", histogram, bound, seconds)
    for short, histogram, bound in (
        ("ttft", "time_to_first_token_seconds", _TTFT_S),
        ("queue", "queue_time_seconds", _QUEUE_S),
    )
    for name, seconds in _WINDOWS
)


def _all(name: str, *matchers: str) -> str:
    return selector(name, *matchers, where=ALL)


def _burn(short: str, quick: str, long: str, factor: float) -> Callable[[Scale], str]:
    limit = f"{factor * _BUDGET:g}"
    name = f"admitscope:{short}_bad:ratio_rate"
    return lambda _: f"{name}{quick} > {limit} and {name}{long} > {limit}"


_HELD: Final = 'state=~"private|protected"'
_ADMITTED: Final = 'reason=~"admitted_.*"'
_NO_KV: Final = 'reason=~"kv_.*_exhausted"'
_TO_BE_HAD: Final = 'state=~"free|evictable"'
_BUSY: Final = ('kind!="idle"',)
_JUDGED: Final = 'mode!="off"'
_AT_EVENTS: Final = ('group="step"',)

ALERTS: Final = (
    Alert(
        "AdmitscopeInvariantViolation",
        lambda s: f"{increase('violations_total', 'instance', 'id', where=ALL, over=s.window(300))} > 0",
        0,
        "page",
        "A law of the engine broke: its books and what it did disagree.",
        "The evidence bundle beside the journal, and `admitscope check JOURNAL`.",
    ),
    Alert(
        "AdmitscopeKVLeak",
        lambda s: f"min_over_time({_all('kv_pages_unaccounted')}[{s.window(120)}]) > 0",
        60,
        "page",
        "Pages of the pool belong to nobody.",
        "Board K/V ownership; `admitscope check JOURNAL` names the page and its last owner.",
    ),
    Alert(
        "AdmitscopeKVIdleResidue",
        lambda _: (
            f"sum by (instance) ({_all('kv_pages', _HELD)}) > 0 "
            f"and on (instance) sum by (instance) ({_all('requests')}) == 0"
        ),
        60,
        "page",
        "Nobody is served, and pages are still held.",
        "Page owners in the dashboard: a request that ended did not give back its lease.",
    ),
    Alert(
        "AdmitscopeStarvation",
        lambda s: (
            f"{_all('waiting_oldest_seconds')} > {s.seconds(30)} and on (instance) sum by (instance) "
            f"(rate({_all('admissions_total', _ADMITTED)}[{s.window(60)}])) > 0"
        ),
        30,
        "ticket",
        "Somebody waits for long while others are admitted.",
        "`admitscope explain URL RID` for the oldest; `starvation_limit_s` and `max_overtakes` bound it.",
    ),
    Alert(
        "AdmitscopeStuck",
        lambda s: (
            f"time() - {_all('heartbeat_timestamp_seconds')} > {s.seconds(15)} or "
            f"(sum by (instance) ({_all('requests')}) > 0 and on (instance) sum by (instance) "
            f"(rate({_all('steps_total', *_BUSY)}[{s.window(60)}])) == 0)"
        ),
        30,
        "page",
        "The loop does not turn, or turns without doing work though requests are there.",
        "`/ready` and the last lines of the log; a stack of the engine thread.",
    ),
    Alert(
        "AdmitscopeRetractStorm",
        lambda s: (
            f"{rate('retractions_total', 'instance', where=ALL, over=s.window(120))} > 0.2 * "
            f"{rate('requests_finished_total', 'instance', where=ALL, over=s.window(120))} and on (instance) "
            f"{increase('retractions_total', 'instance', where=ALL, over=s.window(120))} > 10"
        ),
        60,
        "ticket",
        "Running requests are pushed back again and again: too much is admitted.",
        "`promised_pages` on board admission; raise `clip_max_new_tokens` where answers are longer, then "
        "`schedule_conservativeness`; or a larger pool, or a smaller `max_running_requests`.",
    ),
    Alert(
        "AdmitscopeTTFTSLOBurn",
        _burn("ttft", "5m", "1h", _FAST),
        120,
        "page",
        "First tokens are late at a rate that spends the month's budget in days.",
        "Board latency: which component grew.",
    ),
    Alert(
        "AdmitscopeTTFTSLOSlowBurn",
        _burn("ttft", "30m", "6h", _SLOW),
        900,
        "ticket",
        "First tokens are late more often than the objective allows.",
        "Board latency: which component grew.",
    ),
    Alert(
        "AdmitscopeQueueSLOBurn",
        _burn("queue", "5m", "1h", _FAST),
        120,
        "page",
        "The queue holds requests at a rate that spends the month's budget in days.",
        "Board admission: which blocker costs the request-seconds.",
    ),
    Alert(
        "AdmitscopeQueueSLOSlowBurn",
        _burn("queue", "30m", "6h", _SLOW),
        900,
        "ticket",
        "Requests wait more often than the objective allows.",
        "Board admission: which blocker costs the request-seconds.",
    ),
    Alert(
        "AdmitscopeLateTokens",
        # Late is what is later than `traces.gap_objective_s`, so the objective stands in one place.
        lambda s: (
            f"{rate('token_stalls_total', 'instance', where=ALL, over=s.window(300))} > 0.01 * "
            f"{rate('generation_tokens_total', 'instance', where=ALL, over=s.window(300))} and on (instance) "
            f"{increase('token_stalls_total', 'instance', where=ALL, over=s.window(300))} > 10"
        ),
        300,
        "ticket",
        "More than one token in a hundred comes later than the objective for gaps.",
        "Board latency: late tokens by cause. `long_prefill` and `chunk_overhead`: a smaller `chunked_prefill_size`; "
        "`mixed_sat_out`: `enable_mixed_chunk`; `kernel`: a smaller `max_running_requests`.",
    ),
    Alert(
        "AdmitscopeReservationTooLarge",
        lambda s: (
            f"sum by (instance) (rate({_all('pass_ends_total', _NO_KV)}[{s.window(300)}])) > 0 "
            f"and on (instance) (sum by (instance) ({_all('kv_pages', _TO_BE_HAD)}) / "
            f"sum by (instance) ({_all('kv_pages_capacity')})) > 0.3"
        ),
        300,
        "ticket",
        "Passes end for want of memory while a third of the pool could be had: too much is promised.",
        "need and have of the first in the queue, `promised_pages`; lower `clip_max_new_tokens` to what answers take, "
        "or `schedule_conservativeness`.",
    ),
    Alert(
        "AdmitscopeTelemetryLoss",
        lambda s: f"{rate('telemetry_dropped_total', 'instance', where=ALL, over=s.window(300))} > 0",
        120,
        "ticket",
        "Records are lost: a sink is slower than the engine.",
        "Board invariants and loop: which sink; its disk, or its collector.",
    ),
    Alert(
        "AdmitscopeTTFTUnexplained",
        lambda s: (
            f"{rate('ttft_residual_seconds_total', 'instance', where=ALL, over=s.window(600))} / "
            f"({summed('time_to_first_token_seconds', 'instance', part='sum', where=ALL, over=s.window(600))} > 0) "
            "> 0.05"
        ),
        600,
        "ticket",
        "The parts of the time to first token do not add up to it.",
        "A fault of this engine's own timeline: keep the journal.",
    ),
    Alert(
        "AdmitscopeClaimFailure",
        lambda s: f"{increase('kv_claim_failures_total', 'instance', where=ALL, over=s.window(300))} > 0",
        0,
        "page",
        "An allocation failed after admission had promised room.",
        "The record of that step: need, have, and who else claimed.",
    ),
    Alert(
        "AdmitscopeCheckerSilent",
        lambda s: (
            # A checker that lost events goes on with audits alone: laws of steps are judged at events.
            f"{rate('invariant_checks_total', 'instance', matchers=_AT_EVENTS, where=ALL, over=s.window(120))} == 0 "
            "and on (instance) "
            f"{rate('steps_total', 'instance', matchers=_BUSY, where=ALL, over=s.window(120))} > 0 "
            # A checker that is off on purpose is a setting, and no fault.
            f"and on (instance) sum by (instance) ({_all('invariant_laws', _JUDGED)}) > 0"
        ),
        60,
        "page",
        "Steps are made, laws are to be judged, and nothing checks them.",
        '`telemetry_errors_total{component="checker"}`, `telemetry_dropped_total{sink="checker"}` (after a loss it '
        "judges by audits alone, until a restart) and the log; `invariant_laws` by mode says what is off.",
    ),
    Alert(
        "AdmitscopeDown",
        lambda _: 'up{job="admitscope"} == 0',
        30,
        "page",
        "Prometheus cannot scrape this engine.",
        "The process, its port, its key.",
    ),
)


def rules(scale: Scale = REAL_TIME) -> str:
    """The rule file as YAML."""
    recording = []
    for rule in RECORDINGS:
        good = within(rule.histogram, rule.bound, "instance", where=ALL, over=scale.window(rule.window_s))
        recording.append({"record": rule.name, "expr": f"1 - {good}"})
    alerts: list[dict[str, Any]] = []
    for alert in ALERTS:
        entry: dict[str, Any] = {"alert": alert.name, "expr": alert.expr(scale)}
        if alert.hold_s:
            entry["for"] = scale.window(alert.hold_s)
        entry["labels"] = {"severity": alert.severity}
        entry["annotations"] = {"summary": alert.meaning, "description": alert.look, "runbook": RUNBOOK}
        alerts.append(entry)
    interval = scale.window(15)
    groups = [
        {"name": "admitscope-objectives", "interval": interval, "rules": recording},
        {"name": "admitscope-alerts", "interval": interval, "rules": alerts},
    ]
    head = "# Generated by `python -m grafana.rules`. Do not edit.\n"
    return head + str(yaml.safe_dump({"groups": groups}, sort_keys=False, width=10_000))


def main() -> int:
    """Write the rules at full length."""
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / "admitscope.yml").write_text(rules(), encoding="utf-8")
    sys.stdout.write(f"{len(RECORDINGS)} recording rules, {len(ALERTS)} alerts\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
