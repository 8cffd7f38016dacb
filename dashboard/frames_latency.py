"""Where latency goes, ready to draw. Owns: the breakdown's sums and sample -> frames, shares and sentences.

Pure: no Streamlit. Everywhere the queue's part of TTFT is told by blocker, so that "causes" are the other parts and the
blockers together; refused continuations count with the blockers, not with `between_chunks`, and the sum stays TTFT.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import pandas as pd

from dashboard import formats as f
from dashboard.words import mark, t
from telemetry.observe import BLOCKERS, TTFT_PARTS, LatencyBreakdown, TailShare

#: Causes from the bottom of the stack to its top: in the order in which they first occur.
CAUSES: Final = (TTFT_PARTS[0], *BLOCKERS, *(part for part in TTFT_PARTS[1:] if part != "queue"))

#: Late tokens by cause, in words.
STALL_WORDS: Final = {
    "queue_position": mark("pushed back to the queue"),
    "mixed_sat_out": mark("steps in which it did not decode"),
    "long_prefill": mark("a long piece of a prompt in its step"),
    "chunk_overhead": mark("a short piece of a prompt in its step"),
    "kernel": mark("decode alone took so long"),
}

_STACK_COLUMNS: Final = ["from", "at", "cause", "low", "high", "seconds", "count"]
_GAP_COLUMNS: Final = ["from", "to", "count", "share", "late"]
_FIRST_COLUMNS: Final = ["rid", "prompt_len", "cached_tokens", "ttft_s", "cause", "kind"]
_DECILE_COLUMNS: Final = ["prompts", "within", "count", "share", "order"]
_STALL_COLUMNS: Final = ["cause", "words", "count", "share", "said", "order"]

#: Histogram bars have a width on a log axis: what lies below the first bound and above the last gets one of this ratio.
_EDGE_RATIO: Final = 1.5


def plain(seconds: float) -> str:
    """A duration that somebody chose: 250 ms, 1 s, 10 min."""
    unit, size = next(((name, size) for name, size in (("min", 60.0), ("s", 1.0)) if seconds >= size), ("ms", 0.001))
    return f"{seconds / size:.3g}\u00a0{unit}"


def causes_ns(parts_ns: Mapping[str, int], blockers_ns: Mapping[str, int], refused_between_ns: int) -> dict[str, int]:
    """TTFT by cause, those above zero in the order of CAUSES; they add up to the sum of `parts_ns`."""
    spent = {part: ns for part, ns in parts_ns.items() if part != "queue"}
    spent["between_chunks"] = spent.get("between_chunks", 0) - refused_between_ns
    spent |= blockers_ns
    known = [cause for cause in CAUSES if spent.get(cause, 0) > 0]
    # A newer engine may have words that this page does not know.
    return {cause: spent[cause] for cause in (*known, *sorted(set(spent) - set(CAUSES)))}


def stack_frame(told: LatencyBreakdown) -> pd.DataFrame:
    """Mean TTFT of each slot with first tokens, stacked by cause: a row is [low, high) seconds of one slot."""
    rows = []
    for slot in told.slots:
        if not slot.count:
            continue
        at = 0.0
        for cause, ns in causes_ns(slot.parts_ns, slot.blockers_ns, slot.refused_between_ns).items():
            seconds = ns / slot.count / 1e9
            rows.append((slot.t_wall_s - told.slot_s, slot.t_wall_s, cause, at, at + seconds, seconds, slot.count))
            at += seconds
    frame = pd.DataFrame(rows, columns=_STACK_COLUMNS)
    for name in ("from", "at"):
        frame[name] = pd.to_datetime(frame[name], unit="s", utc=True)
    return frame


def shares(tail: TailShare) -> list[tuple[str, int, float]]:
    """(cause, nanoseconds, share of all) of the requests of `tail`, in the order of CAUSES."""
    spent = causes_ns(tail.parts_ns, tail.blockers_ns, tail.refused_between_ns)
    return [(cause, ns, ns / tail.ttft_ns) for cause, ns in spent.items()] if tail.ttft_ns else []


def tail_of(told: LatencyBreakdown, q: float) -> TailShare | None:
    """The slowest requests at or above quantile `q`; None before the first token, or when it was not sent."""
    return next((tail for tail in told.tails if abs(tail.q - q) < 1e-9), None)


def queue_sentence(told: LatencyBreakdown) -> tuple[str, str] | None:
    """How much of p99 TTFT is queueing, and the numbers behind it; None before the first token."""
    tail, whole = tail_of(told, 0.99), tail_of(told, 0.0)
    if tail is None or whole is None or not tail.ttft_ns:
        return None
    queued = tail.parts_ns.get("queue", 0)
    is_one = whole.count == 1
    headline = (
        t("{share} of TTFT is queueing: 1 request", share=f.share(queued, tail.ttft_ns))
        if is_one
        else t("{share} of p99 TTFT is queueing", share=f.share(queued, tail.ttft_ns))
    )
    numbers = t(
        "The slowest {n} of {all} first tokens of the last {window} took {p99} or longer, {mean} on average. Of these, "
        "{queued} were spent in the queue.",
        n=f.count(tail.count),
        all=f.count(whole.count),
        window=plain(told.window_s),
        p99=f.duration(tail.ttft_s),
        mean=f.duration(tail.ttft_ns / tail.count / 1e9),
        queued=f.duration(queued / tail.count / 1e9),
    )
    if tail.blockers_ns:
        most = max(tail.blockers_ns, key=lambda name: tail.blockers_ns[name])
        numbers += " " + t(
            "What held them longest: {blocker} ({why}), {time} on average.",
            blocker=with_order(most, tail.order_ns),
            why=f.blocker_words(most) or most,
            time=f.duration(tail.blockers_ns[most] / tail.count / 1e9),
        )
    return headline, numbers


def with_order(cause: str, order_ns: Mapping[str, int]) -> str:
    """A cause in words; `order` with what ended the passes, since that is the limit to lift."""
    total = sum(order_ns.values())
    if cause != "order" or not total:
        return f.cause_name(cause)
    ranked = sorted(order_ns.items(), key=lambda item: -item[1])
    told = ", ".join(f"{f.words(reason)} {f.share(ns, total)}" for reason, ns in ranked[:2] if ns)
    return t("order (passes ended by {reasons})", reasons=told)


def _bar(told: LatencyBreakdown, low: float, high: float, count: int, *, late: bool) -> tuple[Any, ...]:
    return low, high, count, count / told.gaps, late


def gap_frame(told: LatencyBreakdown) -> pd.DataFrame:
    """The histogram of gaps between tokens, [from, to) seconds, from the first bar to the last that has any.

    The bar that the objective falls in is cut there: no bar is both in time and late.
    """
    bounds, counts = told.gap_bounds_s, told.gap_counts
    if not told.gaps or not bounds:
        return pd.DataFrame([], columns=_GAP_COLUMNS)
    edges = (bounds[0] / _EDGE_RATIO, *bounds, bounds[-1] * _EDGE_RATIO)
    filled = [at for at, count in enumerate(counts) if count]
    rows = []
    for at in range(filled[0], filled[-1] + 1):
        low, high, aim = edges[at], edges[at + 1], told.gap_objective_s
        if low < aim < high:
            # What is late of this bar is what is late of all, less the bars beyond it.
            late = min(max(sum(told.late.values()) - sum(counts[at + 1 :]), 0), counts[at])
            rows += [_bar(told, low, aim, counts[at] - late, late=False), _bar(told, aim, high, late, late=True)]
        else:
            rows.append(_bar(told, low, high, counts[at], late=low >= aim))
    return pd.DataFrame(rows, columns=_GAP_COLUMNS)


def stall_frame(told: LatencyBreakdown) -> pd.DataFrame:
    """Late tokens by cause, most frequent first."""
    late = sum(told.late.values())
    rows = []
    for order, (cause, count) in enumerate(sorted(told.late.items(), key=lambda item: (-item[1], item[0]))):
        words = t(STALL_WORDS.get(cause, cause))
        said = f"{f.words(cause)}: {words} · {f.count(count)} tok, {f.share(count, late)}"
        rows.append((cause, words, count, count / late, said, order))
    return pd.DataFrame(rows, columns=_STALL_COLUMNS)


def first_frame(told: LatencyBreakdown) -> pd.DataFrame:
    """One row per first token of the sample. `kind` is waiting when a blocker is its dominant cause, else work."""
    rows = [
        (
            first.rid,
            first.prompt_len,
            first.cached_tokens,
            first.ttft_s,
            first.blocker or first.part,
            "waiting" if first.blocker else "work",
        )
        for first in told.firsts
    ]
    return pd.DataFrame(rows, columns=_FIRST_COLUMNS)


def cause_mix(firsts: pd.DataFrame) -> list[tuple[str, int]]:
    """(dominant cause, requests) of `first_frame`, most frequent first; equal counts by name."""
    counts = firsts["cause"].value_counts().to_dict() if len(firsts) else {}
    return sorted(((str(cause), int(n)) for cause, n in counts.items()), key=lambda item: (-item[1], item[0]))


def decile_frame(told: LatencyBreakdown) -> pd.DataFrame:
    """Share of first tokens within the objective, by prompt length."""
    rows = [
        (
            str(one.prompt_from) if one.prompt_from == one.prompt_to else f"{one.prompt_from}–{one.prompt_to}",
            one.within,
            one.count,
            one.within / one.count,
            order,
        )
        for order, one in enumerate(told.deciles)
        if one.count
    ]
    return pd.DataFrame(rows, columns=_DECILE_COLUMNS)


def objective_lines(told: LatencyBreakdown) -> list[tuple[str, str]]:
    """(share, what it is of) for both objectives; nothing of a kind that was not observed."""
    lines = []
    within = sum(one.within for one in told.deciles)
    if told.firsts_total:
        said = t(
            "{n} of {all} first tokens within {objective}",
            n=f.count(within),
            all=f.count(told.firsts_total),
            objective=plain(told.ttft_objective_s),
        )
        lines.append((f.share(within, told.firsts_total), said))
    if told.gaps:
        in_time = told.gaps - sum(told.late.values())
        said = t(
            "{n} of {all} gaps between tokens within {objective}",
            n=f.count(in_time),
            all=f.count(told.gaps),
            objective=plain(told.gap_objective_s),
        )
        lines.append((f.share(in_time, told.gaps), said))
    return lines
