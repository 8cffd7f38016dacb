"""Lanes of requests, ready to draw. Owns: lanes -> rows of stretches, marks and late tokens, and which lanes are shown.

Pure: no Streamlit. A stretch has one `cause`: a blocker while it waits, else what is done with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import pandas as pd

from dashboard import formats as f
from dashboard.words import mark, t
from telemetry.observe import BLOCKERS, Lane, LaneSpan, Stall

#: What is done with a request, in words, thickest first.
DONE: Final = {
    "prefill": mark("prefill chunk"),
    "decode": mark("decode"),
    "late": mark("gap before a late token"),
    "between": mark("between chunks"),
    "intake": mark("intake"),
}
#: The blocker `chunk` is another thing than a chunk.
_CAUSES: Final = {"chunk": "prefill"}
#: Which of the lanes that were sent are shown.
ORDERS: Final = {
    "arrival": mark("Latest arrivals"),
    "ttft": mark("Slowest first tokens"),
    "waiting": mark("Waited longest"),
}
_SPAN_COLUMNS: Final = ["rid", "place", "kind", "cause", "from", "to", "from_s", "to_s", "seconds", "words"]
_MARK_COLUMNS: Final = ["rid", "place", "mark", "at", "at_s", "words"]


def _waited_ns(lane: Lane) -> int:
    return sum(span.end_ns - span.start_ns for span in lane.spans if span.kind == "waiting")


def _ttft_ns(lane: Lane) -> int:
    """So far, while there is none."""
    return (lane.end_ns if lane.first_token_ns is None else lane.first_token_ns) - lane.accepted_ns


_RANKS: Final[dict[str, Callable[[Lane], int]]] = {
    "arrival": lambda lane: lane.accepted_ns,
    "ttft": _ttft_ns,
    "waiting": _waited_ns,
}


def chosen_lanes(lanes: Sequence[Lane], n: int, by: str) -> list[Lane]:
    """The first `n` of `lanes` by one of ORDERS, always in order of arrival."""
    first = sorted(lanes, key=_RANKS[by], reverse=True)[:n]
    return sorted(first, key=lambda lane: (lane.accepted_ns, lane.rid))


def span_frame(lanes: Sequence[Lane]) -> pd.DataFrame:
    """One row per stretch, gaps before late tokens after the others.

    from, to      time of day
    from_s, to_s  seconds since the request was accepted
    """
    rows: list[tuple[object, ...]] = []
    for place, lane in enumerate(lanes):
        rows += [
            (lane.rid, place, span.kind, _cause(span), *_times(lane, span), span_words(span)) for span in lane.spans
        ]
        rows += [
            (
                lane.rid,
                place,
                "late",
                "late",
                *_times(lane, stall),
                t("late token: {cause}", cause=f.words(stall.cause)),
            )
            for stall in lane.stalls
        ]
    return _dated(pd.DataFrame(rows, columns=_SPAN_COLUMNS), "from", "to")


def _cause(span: LaneSpan) -> str:
    return span.blocker or _CAUSES.get(span.kind, span.kind)


def _times(lane: Lane, stretch: LaneSpan | Stall) -> tuple[float, float, float, float, float]:
    since = [(ns - lane.accepted_ns) / 1e9 for ns in (stretch.start_ns, stretch.end_ns)]
    walls = [lane.accepted_wall_s + seconds for seconds in since]
    return walls[0], walls[1], since[0], since[1], since[1] - since[0]


def _late_words(stall: Stall) -> str:
    return t("late token: {cause}", cause=f.words(stall.cause))


def span_words(span: LaneSpan) -> str:
    """What a stretch was, with its numbers."""
    if span.kind == "waiting":
        why = f.words(span.blocker)
        if span.reason and span.reason != span.blocker:
            why += f" · {f.words(span.reason)}"
        at = t(" at {rid}", rid=f.short_rid(span.who)) if span.who else ""
        over = t(", {n} passes", n=f.count(span.passes)) if span.passes > 1 else ""
        return why + at + over
    if span.kind == "chunk":
        return t(
            "step {step}: {tokens} tok, beside {rows} decode rows",
            step=f.count(span.step),
            tokens=f.count(span.tokens),
            rows=f.count(span.decode_rows),
        )
    return t(DONE.get(_cause(span), span.kind))


def mark_frame(lanes: Sequence[Lane]) -> pd.DataFrame:
    """Moments of each lane: first token, retraction, end."""
    rows: list[tuple[object, ...]] = []
    for place, lane in enumerate(lanes):
        moments = [("retracted", ns, t("pushed back to the queue")) for ns in lane.retracted_ns]
        if lane.first_token_ns is not None:
            moments.append(("first token", lane.first_token_ns, t("first token")))
        if lane.finish is not None:
            moments.append(("end", lane.end_ns, t("ended: {finish}", finish=lane.finish)))
        rows += [
            (lane.rid, place, name, _wall(lane, ns), (ns - lane.accepted_ns) / 1e9, words)
            for name, ns, words in moments
        ]
    return _dated(pd.DataFrame(rows, columns=_MARK_COLUMNS), "at")


def cause_totals(lanes: Sequence[Lane]) -> list[tuple[str, float]]:
    """(cause, seconds over all lanes), blockers first; those above zero. Gaps before late tokens are part of decode."""
    totals: dict[str, float] = {}
    for lane in lanes:
        for span in lane.spans:
            cause = _cause(span)
            totals[cause] = totals.get(cause, 0.0) + (span.end_ns - span.start_ns) / 1e9
        for stall in lane.stalls:
            totals["late"] = totals.get("late", 0.0) + (stall.end_ns - stall.start_ns) / 1e9
    order = [*BLOCKERS, *DONE]
    known = [cause for cause in order if cause in totals]
    return [(cause, totals[cause]) for cause in (*known, *sorted(set(totals) - set(order)))]


def left_out_words(lanes: Sequence[Lane]) -> str:
    """What the picture leaves out; empty when it shows all."""
    hidden = sum(lane.spans_left_out for lane in lanes)
    return t("{n} short stretches are left out.", n=f.count(hidden)) if hidden else ""


def _wall(lane: Lane, ns: int) -> float:
    return lane.accepted_wall_s + (ns - lane.accepted_ns) / 1e9


def _dated(frame: pd.DataFrame, *names: str) -> pd.DataFrame:
    for name in names:
        frame[name] = pd.to_datetime(frame[name], unit="s", utc=True)
    return frame
