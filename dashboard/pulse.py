"""The head of the page. Owns: the key numbers, the mix of waiting reasons, and what is said about freshness."""

from __future__ import annotations

from typing import Any, Final

from dashboard import formats as f
from dashboard.feed import Look
from dashboard.frames import Quantiles, blocker_mix, finish_mix, queue_share, tbt_quantiles, ttft_quantiles
from dashboard.theme import Palette, blocker_colour
from telemetry.observe import EngineStatus

#: Data older than this many refresh intervals is shown as old.
OLD_AFTER_INTERVALS: Final = 3

#: Points of the small lines in the tiles.
_SPARK_POINTS: Final = 40

#: A loop that has work but has not turned for so long deserves a word.
_SLOW_LOOP_S: Final = 5.0


def pulse_data(
    look: Look, colours: Palette, *, url: str, interval_s: float, paused: bool, now_mono_s: float
) -> dict[str, Any]:
    """Everything the head shows of `look`. `now_mono_s` is the clock that `look.contact_mono_s` was read from."""
    age = None if look.contact_mono_s is None else max(0.0, now_mono_s - look.contact_mono_s)
    return {
        "facts": _facts(look.status, url),
        "tiles": [] if look.status is None else _tiles(look.status, look),
        "mix": _mix(look.status, colours, url),
        "age_s": age,
        "old_after_s": OLD_AFTER_INTERVALS * interval_s,
        "interval_s": interval_s,
        "paused": paused,
        "contact": f.clock(look.contact_wall_s),
        "error": look.error,
        "warning": None if look.status is None else _warning(look.status),
    }


def _facts(status: EngineStatus | None, url: str) -> list[list[str]]:
    if status is None:
        return [["engine", url]]
    return [
        ["model", status.model],
        ["policy", status.policy or f.NOTHING],
        ["attention", status.attention_backend],
        ["pages", f"{f.count(status.kv_pages.capacity)} × {status.page_size} tok"],
        ["step", f.count(status.step)],
        ["up", f.duration(status.uptime_s)],
        ["engine", url],
    ]


def _warning(status: EngineStatus) -> list[str] | None:
    if status.violations_total:
        laws = ", ".join(f"{law} ({n})" for law, n in sorted(status.violations.items()))
        return [f"{f.count(status.violations_total)} violations of invariants.", laws]
    has_work = status.waiting + status.running > 0
    if has_work and status.heartbeat_age_s > _SLOW_LOOP_S:
        return [
            f"The engine's loop has not turned for {f.duration(status.heartbeat_age_s)}.",
            "It answers, but no step ended in that time: one step is very long, or the loop is stuck.",
        ]
    return None


def _tiles(status: EngineStatus, look: Look) -> list[dict[str, Any]]:
    points = look.latency.points[-_SPARK_POINTS:] if look.latency else ()
    ttft = ttft_quantiles(look.requests) if look.requests else Quantiles(None, None, 0)
    tbt = tbt_quantiles(look.latency) if look.latency else Quantiles(None, None, 0)
    queued = queue_share(look.requests) if look.requests else None
    slot = look.latency.slot_s if look.latency else 0.0
    pages = status.kv_pages
    used = pages.private + pages.protected
    finished = ", ".join(f"{f.count(n)} {f.words(name)}" for name, n in finish_mix(status)) or "none finished yet"
    return [
        {
            "id": "waiting",
            "label": "Waiting",
            "values": [["", f.count(status.waiting), "req"]],
            "sub": f"oldest {f.duration(status.waiting_oldest_s)}" if status.waiting else "queue is empty",
            "spark": [p.waiting for p in points],
        },
        {
            "id": "running",
            "label": "Running",
            "values": [["", f.count(status.running), "req"]],
            "sub": f"of {f.count(status.limits.rows)} rows" if status.limits.rows else "hold K/V memory",
            "spark": [p.running for p in points],
        },
        {
            "id": "tokens",
            "label": "Output",
            "values": [["", f.rate(status.tokens_per_s), "tok/s"]],
            "sub": f"prefill {f.rate(status.prefill_tokens_per_s)} tok/s",
            "spark": [p.tokens_per_s for p in points],
            "help": f"Over the last {f.duration(status.rate_window_s)}",
        },
        _latency_tile("ttft", "TTFT", ttft, "last 60 s", [p.ttft_p50_s for p in points], queued),
        _latency_tile("tbt", "TBT", tbt, f"last {slot:g}\u00a0s with tokens", [p.tbt_p50_s for p in points]),
        {
            "id": "kv",
            "label": "K/V in use",
            "values": [["", f.share(used, pages.capacity), ""]],
            "sub": f"pages: {f.count(pages.evictable)} cached, {f.count(pages.free)} free",
            "help": f"{f.count(used)} of {f.count(pages.capacity)} pages are held by requests; cached ones can go",
        },
        {
            "id": "finished",
            "label": "Finished",
            "values": [["", f.count(sum(status.requests_finished.values())), "req"]],
            "sub": f"of {f.count(status.requests_received)} received",
            "help": finished,
        },
        _violations_tile(status),
    ]


def _latency_tile(
    name: str, label: str, quantiles: Quantiles, when: str, spark: list[float | None], queued: float | None = None
) -> dict[str, Any]:
    share = "" if queued is None else f" · {f.share(queued, 1.0)} in queue"
    return {
        "id": name,
        "label": label,
        "values": [["p50", *f.seconds(quantiles.p50)], ["p99", *f.seconds(quantiles.p99)]],
        "sub": f"{when} · n {f.count(quantiles.count)}{share}" if quantiles.count else "nothing observed yet",
        "spark": spark,
    }


def _violations_tile(status: EngineStatus) -> dict[str, Any]:
    tone = "bad" if status.violations_total else "good" if status.invariants_checked else ""
    number = f.count(status.violations_total) if status.invariants_checked or status.violations_total else "off"
    return {
        "id": "violations",
        "label": "Invariant violations",
        "values": [["", number, ""]],
        "sub": "every step is checked" if status.invariants_checked else "no checker runs",
        "tone": tone,
    }


def _why(blocker: str, status: EngineStatus | None) -> str:
    """A blocker in words; those behind somebody are told what stopped the one in front."""
    why = f.BLOCKER_WORDS.get(blocker, "")
    cause = status.last_pass_ended_by if status is not None else None
    return f"{why}: {f.words(cause)}" if blocker == "order" and cause is not None else why


def _mix(status: EngineStatus | None, colours: Palette, url: str) -> dict[str, Any]:
    mix = [] if status is None else blocker_mix(status.waiting_by_blocker)
    if status is None:
        title = "Why requests wait"
    elif mix:
        title = "Why requests wait now"
    elif status.requests_received == 0:
        title = f"No requests yet. Send one to {url}/v1, or run: python bench/serve.py --base-url {url}"
    else:
        title = "Nobody waits now"
    parts = [
        {
            "label": f.words(name),
            "count": n,
            "colour": blocker_colour(colours, name),
            "why": _why(name, status),
        }
        for name, n in mix
    ]
    return {"title": title, "parts": parts}
