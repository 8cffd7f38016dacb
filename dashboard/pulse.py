"""The head of the page. Owns: the key numbers, the mix of waiting reasons, and what is said about freshness."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

from dashboard import formats as f
from dashboard.feed import Look
from dashboard.frames import (
    Quantiles,
    blocker_mix,
    finish_mix,
    queue_share,
    tbt_quantiles,
    ttft_quantiles,
)
from dashboard.places import Place
from dashboard.theme import Palette, blocker_colour
from dashboard.troubles import trouble
from dashboard.words import t
from telemetry.observe import EngineStatus

#: Objectives for TTFT and TBT in seconds; None: there is none.
Goals = tuple[float | None, float | None]

#: Data older than this many refresh intervals is shown as old.
OLD_AFTER_INTERVALS: Final = 3

#: Points of the small lines in the tiles.
_SPARK_POINTS: Final = 40

#: A loop that has work but has not turned for so long deserves a word.
_SLOW_LOOP_S: Final = 5.0

#: A younger turn of the loop is that of an engine that is well: an idle one sleeps a quarter of a second.
_IDLE_TURN_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Showing:
    """How the head is shown.

    now_mono_s  of the clock that `Look.contact_mono_s` was read from
    goals       objectives for TTFT and TBT
    whole       with facts, tiles and the mix of reasons; else nothing of the source, for views that stand on their own
    broken      violations that judging the whole recording found here; None: it was not judged
    outdated    whether the journal was written to since
    """

    place: Place
    interval_s: float
    now_mono_s: float
    paused: bool
    goals: Goals
    whole: bool = True
    broken: int | None = None
    outdated: bool = False


def pulse_data(look: Look, colours: Palette, how: Showing) -> dict[str, Any]:
    """Everything the head shows of `look`."""
    place, paused, whole = how.place, how.paused, how.whole
    status = look.status
    wrong = trouble(look, place)
    return {
        "facts": _facts(status, place) if whole else [],
        "tiles": _tiles(status, look, how) if whole and status is not None else [],
        "mix": _mix(status, colours, place) if whole else None,
        "age_s": None if look.contact_mono_s is None else max(0.0, how.now_mono_s - look.contact_mono_s),
        "loop_s": _loop_age_s(status),
        "old_after_s": OLD_AFTER_INTERVALS * how.interval_s,
        "paused": paused,
        # A lesson has no age: an empty word hides the mark.
        "stands": _stands(look, paused=paused) if whole else "",
        # Before the first answer the view itself says what to do, in all its room; a lesson needs no engine.
        "bare": status is None or not whole,
        "error": None if wrong is None or not whole else [text.replace("`", "") for text in wrong],
        "warning": None if status is None else _warning(status),
        "words": _words(look),
    }


def _loop_age_s(status: EngineStatus | None) -> float:
    """How old the numbers already were when they came: an engine that turns, turns several times a second."""
    if status is None or status.heartbeat_age_s < _IDLE_TURN_S:
        return 0.0
    return status.heartbeat_age_s


def _stands(look: Look, *, paused: bool) -> str | None:
    """What is said instead of an age, where numbers are meant to stand still."""
    if look.moment is not None:
        return t("recorded {clock}", clock=f.clock(look.contact_wall_s))
    return t("paused at {clock}", clock=f.clock(look.contact_wall_s)) if paused else None


def _words(look: Look) -> dict[str, str]:
    """Texts that the browser completes with what only it knows: how long ago the last answer came."""
    return {
        "old": t("data is {ago} old"),
        "none": t("no data yet"),
        "lost": t("No new data since {clock}.").replace("{clock}", f.clock(look.contact_wall_s)),
        "lost_why": t("The dashboard itself does not answer. Once it does, this page goes on by itself."),
    }


def _facts(status: EngineStatus | None, place: Place) -> list[list[str]]:
    # A path is long, and of no use to who only sees the page.
    where = [t("journal"), place.name] if place.is_recorded else [t("engine"), place.where]
    if status is None:
        return [where]
    return [
        [t("model"), status.model],
        [t("policy"), status.policy or f.NOTHING],
        [t("attention"), status.attention_backend],
        [t("pages"), f"{f.count(status.kv_pages.capacity)} × {status.page_size} tok"],
        [t("step"), f.count(status.step)],
        [t("up"), f.duration(status.uptime_s)],
        where,
    ]


def _warning(status: EngineStatus) -> list[str] | None:
    if status.violations_total:
        laws = ", ".join(f"{law} ({n})" for law, n in sorted(status.violations.items()))
        return [t("{n} violations of invariants.", n=f.count(status.violations_total)), laws]
    has_work = status.waiting + status.running > 0
    if has_work and status.heartbeat_age_s > _SLOW_LOOP_S:
        return [
            t("The engine's loop has not turned for {time}.", time=f.duration(status.heartbeat_age_s)),
            t("It answers, but no step ended in that time: one step is very long, or the loop is stuck."),
        ]
    return None


def _tiles(status: EngineStatus, look: Look, how: Showing) -> list[dict[str, Any]]:
    points = look.latency.points[-_SPARK_POINTS:] if look.latency else ()
    ttft, queued, beyond = _first_tokens(look)
    tbt = tbt_quantiles(look.latency) if look.latency else Quantiles(None, None, 0)
    slot = look.latency.slot_s if look.latency else 0.0
    pages = status.kv_pages
    used = pages.private + pages.protected
    return [
        {
            "id": "waiting",
            "label": t("Waiting"),
            "values": [["", f.count(status.waiting), "req"]],
            "sub": _oldest(status),
            "spark": [p.waiting for p in points],
            "go": {"view": "admission"},
        },
        {
            "id": "running",
            "label": t("Running"),
            "values": [["", f.count(status.running), "req"]],
            "sub": t("of {n} rows", n=f.count(status.limits.rows)) if status.limits.rows else t("hold K/V memory"),
            "spark": [p.running for p in points],
            "go": {"view": "requests", "list": "live"},
        },
        {
            "id": "tokens",
            "label": t("Output"),
            "values": [["", f.rate(status.tokens_per_s), "tok/s"]],
            "sub": t("prefill {rate} tok/s", rate=f.rate(status.prefill_tokens_per_s)),
            "spark": [p.tokens_per_s for p in points],
            "help": t("Over the last {time}", time=f.duration(status.rate_window_s)),
            "go": {"view": "admission"},
        },
        _latency_tile(
            "ttft",
            ttft,
            t("last 60 s"),
            [p.ttft_p50_s for p in points],
            goal=how.goals[0],
            queued=queued,
            beyond=beyond,
            what=t("From arrival until the first byte is sent, of the requests with a first token in the last 60 s"),
        ),
        _latency_tile(
            "tbt", tbt, t("last {n} s with tokens", n=f"{slot:g}"), [p.tbt_p50_s for p in points], goal=how.goals[1]
        ),
        {
            "id": "kv",
            # The unit of the line below, which has no room for it.
            "label": t("K/V pages in use"),
            "values": [["", f.share(used, pages.capacity), ""]],
            "sub": t("{cached} cached, {free} free", cached=f.count(pages.evictable), free=f.count(pages.free)),
            "help": t(
                "{used} of {all} pages are held by requests; cached ones can go",
                used=f.count(used),
                all=f.count(pages.capacity),
            ),
            "go": {"view": "kv"},
        },
        {
            "id": "finished",
            "label": t("Finished"),
            "values": [["", f.count(sum(status.requests_finished.values())), "req"]],
            "sub": t("of {n} received", n=f.count(status.requests_received)),
            "help": _finished(status),
            "go": {"view": "requests", "list": "finished"},
        },
        _violations_tile(status, how),
    ]


def _first_tokens(look: Look) -> tuple[Quantiles, float | None, int]:
    """TTFT of the last minute, what share of it was the queue, and how many wait beyond its p99.

    An older engine tells none of it: then the requests that it sends are ranked, of which there are 500 at most.
    """
    recent = look.breakdown.recent if look.breakdown is not None else None
    if recent is not None:
        return Quantiles(recent.p50_s, recent.p99_s, recent.count), recent.queue_share, recent.waiting_longer
    if look.requests is None:
        return Quantiles(None, None, 0), None, 0
    return ttft_quantiles(look.requests), queue_share(look.requests), 0


def _finished(status: EngineStatus) -> str:
    """How those that finished ended, most frequent first."""
    return ", ".join(f"{f.count(n)} {f.words(name)}" for name, n in finish_mix(status)) or t("none finished yet")


def _oldest(status: EngineStatus) -> str:
    """Under the number of waiting requests: how long, and how many of them ran before and were retracted."""
    if not status.waiting:
        return t("queue is empty")
    oldest = t("oldest {time}", time=f.duration(status.waiting_oldest_s))
    retracted = status.requests.get("retracted", 0)
    return f"{oldest} · {t('{n} retracted', n=f.count(retracted))}" if retracted else oldest


def _latency_tile(
    name: Literal["ttft", "tbt"],
    quantiles: Quantiles,
    when: str,
    spark: list[float | None],
    *,
    goal: float | None,
    queued: float | None = None,
    beyond: int = 0,
    what: str = "",
) -> dict[str, Any]:
    """Median and 99th percentile; red when the latter is above its objective.

    beyond  requests that wait for their first token already longer than the latter
    what    is measured, of whom
    """
    share = "" if queued is None else f" · {t('{share} in queue', share=f.share(queued, 1.0))}"
    share += f" · {t('{n} wait longer than p99', n=f.count(beyond))}" if beyond else ""
    values = [["p50", *f.seconds(quantiles.p50)], ["p99", *f.seconds(quantiles.p99)]]
    if quantiles.count == 1:  # one is no distribution
        values = [["", *f.seconds(quantiles.p50)]]
    count = t("1 request") if quantiles.count == 1 and name == "ttft" else f"n {f.count(quantiles.count)}"
    is_late = goal is not None and quantiles.p99 is not None and quantiles.p99 > goal
    late = t("p99 is above the objective of {time}", time=f.duration(goal)) if is_late else ""
    return {
        "id": name,
        "label": name.upper(),
        "aim": "" if goal is None else t("aim {time}", time=f.duration(goal)),
        "values": values,
        "sub": f"{when} · {count}{share}" if quantiles.count else t("nothing observed yet"),
        "spark": spark,
        "late": is_late,
        "help": "\n".join(filter(None, (late, what))),
        "go": {"view": "latency"},
    }


def _violations_tile(status: EngineStatus, how: Showing) -> dict[str, Any]:
    place, broken = how.place, how.broken
    # A journal has no verdicts: whether its run was checked is not known. The page can judge it, the whole of it.
    found, is_judged = status.violations_total, status.invariants_checked
    sub = t("every step is checked") if is_judged else t("no checker runs")
    if place.is_recorded:
        found, is_judged = broken or 0, broken is not None
        judged = t("judged before it grew") if how.outdated else t("in the whole recording")
        sub = judged if is_judged else t("not judged yet")
    unknown = f.NOTHING if place.is_recorded else t("off")
    return {
        "id": "violations",
        "label": t("Invariant violations"),
        "values": [["", f.count(found) if is_judged or found else unknown, ""]],
        "sub": sub,
        "tone": "bad" if found else "good" if is_judged else "",
        "go": {"view": "invariants"},
    }


def _why(blocker: str, status: EngineStatus | None) -> str:
    """A blocker in words; those behind somebody are told what stopped the one in front."""
    why = f.blocker_words(blocker)
    cause = status.last_pass_ended_by if status is not None else None
    return f"{why}: {f.words(cause)}" if blocker == "order" and cause is not None else why


def _mix(status: EngineStatus | None, colours: Palette, place: Place) -> dict[str, Any]:
    mix = [] if status is None else blocker_mix(status.waiting_by_blocker)
    if status is None:
        title = t("Why requests wait")
    elif mix:
        title = t("Why requests wait now")
    elif status.requests_received == 0 and not place.is_recorded:
        title = t("No requests yet. Send one to {url}/v1, or run: admitscope demo", url=place.where)
    else:
        title = t("Nobody waits now")
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
