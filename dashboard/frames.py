"""Numbers of the page. Owns: typed answers -> pandas frames and small values, ready to draw.

Pure: no Streamlit, no clock of its own. Columns keep numbers as numbers; `dashboard.tables` and `dashboard.charts` turn
them into text and marks. Frames have their columns even when they have no rows.
"""

from __future__ import annotations

import base64
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import pandas as pd

from dashboard.frames_latency import CAUSES, causes_ns
from dashboard.words import mark
from telemetry.observe import (
    PAGE_STATES,
    DecisionRow,
    EngineStatus,
    LatencyAnswer,
    PageMap,
    PageOwner,
    PassesAnswer,
    PassRow,
    QueueAnswer,
    RequestRow,
    RequestsAnswer,
    Timeline,
)

#: Points of a time series at most, whatever an engine sends.
MAX_POINTS: Final = 600

#: Latest finished requests that the quantiles of the key numbers look at, at most this many seconds back.
WINDOW_S: Final = 60.0

LEDGERS: Final = ("rem_input", "rem_chunk", "remaining_total", "remaining_current")

#: Reasons whose `need` and `have` are of one ledger; others compare something else (rows), or nothing.
REASON_LEDGER: Final = {
    "compute_exhausted": "rem_input",
    "chunk_exhausted": "rem_chunk",
    "chunk_below_page": "rem_chunk",
    "kv_total_exhausted": "remaining_total",
    "kv_now_exhausted": "remaining_current",
}

NOT_LISTED: Final = 65535

#: What a step computes, from the top of its bar.
STEP_PARTS: Final = {
    "admission": mark("admission"),
    "continuation": mark("continuation"),
    "decode rows": mark("decode rows"),
}

_LATENCY_COLUMNS: Final = [
    "at",
    "ttft_p50",
    "ttft_p99",
    "ttft_count",
    "tbt_p50",
    "tbt_p99",
    "tbt_count",
    "tokens_per_s",
    "prefill_tokens_per_s",
    "waiting",
    "running",
]
_QUANTILE_COLUMNS: Final = ["at", "quantile", "seconds", "count", "run"]
_STEP_COLUMNS: Final = ["step", "kind", "part", "tokens", "reason"]


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Median and 99th percentile of `count` observations, in seconds; None when there were none."""

    p50: float | None
    p99: float | None
    count: int


def quantile(values: Sequence[float], q: float) -> float | None:
    """The smallest value that at least `q` of all are not above (nearest rank); None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[max(0, math.ceil(q * len(ordered)) - 1)]


def ttft_quantiles(requests: RequestsAnswer, window_s: float = WINDOW_S) -> Quantiles:
    """TTFT of the requests whose first token came in the last `window_s` seconds before the answer."""
    rows = [*requests.live, *requests.finished]
    seen = [
        row.ttft_s
        for row in rows
        if row.ttft_s is not None and requests.t_wall_s - (row.accepted_wall_s + row.ttft_s) <= window_s
    ]
    return Quantiles(quantile(seen, 0.5), quantile(seen, 0.99), len(seen))


def queue_share(requests: RequestsAnswer, window_s: float = WINDOW_S) -> float | None:
    """Of the TTFT of the requests that `ttft_quantiles` counts, the share spent in the queue: 0 to 1."""
    rows = [
        (row.queue_s, row.ttft_s)
        for row in (*requests.live, *requests.finished)
        if row.ttft_s is not None
        and row.queue_s is not None
        and requests.t_wall_s - (row.accepted_wall_s + row.ttft_s) <= window_s
    ]
    whole = sum(ttft for _, ttft in rows)
    return sum(queued for queued, _ in rows) / whole if whole > 0 else None


def tbt_quantiles(latency: LatencyAnswer) -> Quantiles:
    """TBT of the latest slot in which a gap was observed."""
    for point in reversed(latency.points):
        if point.tbt_count:
            return Quantiles(point.tbt_p50_s, point.tbt_p99_s, point.tbt_count)
    return Quantiles(None, None, 0)


def latency_frame(latency: LatencyAnswer) -> pd.DataFrame:
    """One row per slot, oldest first, at most MAX_POINTS; times in seconds, `at` in UTC."""
    rows = [
        (
            p.t_wall_s,
            p.ttft_p50_s,
            p.ttft_p99_s,
            p.ttft_count,
            p.tbt_p50_s,
            p.tbt_p99_s,
            p.tbt_count,
            p.tokens_per_s,
            p.prefill_tokens_per_s,
            p.waiting,
            p.running,
        )
        for p in latency.points[-MAX_POINTS:]
    ]
    frame = pd.DataFrame(rows, columns=_LATENCY_COLUMNS)
    frame["at"] = pd.to_datetime(frame["at"], unit="s", utc=True)
    return frame


def quantile_frame(latency: pd.DataFrame, measure: str) -> pd.DataFrame:
    """Long form of one `measure` ("ttft" or "tbt") of `latency_frame`: a row per slot and observed quantile.

    run  consecutive slots that observed something have one number: no line may join two runs
    """
    is_observed = latency[f"{measure}_p50"].notna()
    runs = (is_observed != is_observed.shift(fill_value=False)).cumsum()
    parts = [
        pd.DataFrame(
            {
                "at": latency["at"],
                "quantile": name,
                "seconds": pd.to_numeric(latency[f"{measure}_{name}"]),
                "count": latency[f"{measure}_count"],
                "run": runs,
            }
        )
        for name in ("p50", "p99")
    ]
    long = pd.concat(parts, ignore_index=True)
    return long[long["seconds"].notna()][_QUANTILE_COLUMNS].reset_index(drop=True)


def queue_frame(queue: QueueAnswer) -> pd.DataFrame:
    """One row per waiting request that was sent, in the order of the queue."""
    return pd.DataFrame(
        [entry.model_dump() for entry in sorted(queue.entries, key=lambda entry: entry.position)],
        columns=list(type(queue.entries[0]).model_fields) if queue.entries else ["rid", "position", "blocker", "age_s"],
    )


def ranked_requests(rows: Sequence[RequestRow], by: str) -> list[RequestRow]:
    """Requests in one of the orders of lanes: "arrival" (latest first), "ttft" (slowest) or "waiting" (longest).

    A request without a first token counts with its time so far; the order of equals is that of `rows`.
    """

    def rank(row: RequestRow) -> float:
        if by == "ttft":
            return (row.duration_s or 0.0) if row.ttft_s is None else row.ttft_s
        return (row.queue_s or 0.0) if by == "waiting" else row.accepted_wall_s

    return sorted(rows, key=rank, reverse=True)


def requests_frame(rows: Sequence[RequestRow]) -> pd.DataFrame:
    """One row per request, in the order given."""
    return pd.DataFrame([row.model_dump() for row in rows], columns=list(RequestRow.model_fields))


def blocker_mix(by_blocker: dict[str, int]) -> list[tuple[str, int]]:
    """Blockers with a count, largest first; equal counts by name, so that nothing jumps."""
    return sorted(((name, n) for name, n in by_blocker.items() if n > 0), key=lambda item: (-item[1], item[0]))


def reason_mix(passes: PassesAnswer) -> list[tuple[str, int, bool]]:
    """(reason, decisions, admitted) over the passes sent, largest first."""
    counts = Counter((row.reason, row.admitted) for step in passes.passes for row in step.candidates)
    return sorted(((r, n, admitted) for (r, admitted), n in counts.items()), key=lambda item: (-item[1], item[0]))


def finish_mix(status: EngineStatus) -> list[tuple[str, int]]:
    """How requests ended, largest first."""
    return sorted(((name, n) for name, n in status.requests_finished.items() if n), key=lambda i: (-i[1], i[0]))


@dataclass(frozen=True, slots=True)
class Refusal:
    """What the request that ended a pass asked of one ledger.

    left    what the ledger had when the request was looked at; None without a ledger
    prefix  tokens of its prompt that were found cached
    """

    rid: str
    reason: str
    ledger: str | None
    need: float | None
    have: float | None
    left: float | None = None
    prefix: int = 0

    @property
    def locked(self) -> float:
        """Tokens of its cached prefix that count as room until it locks them: by so much it has less than is left."""
        if self.ledger != "remaining_total" or self.left is None or self.have is None:
            return 0.0
        # Any other test of this ledger is of a later moment, where more than the prefix may be missing.
        return self.left - self.have if 0 < self.left - self.have <= self.prefix else 0.0


def refusal_of(row: PassRow) -> Refusal | None:
    """The refused candidate that matters: the one that stopped the pass, else the last refused; None when none was."""
    refused = [c for c in row.candidates if not c.admitted]
    if not refused:
        return None
    last = next((c for c in refused if c.stopped_pass), refused[-1])
    ledger = REASON_LEDGER.get(last.reason)
    left = None if ledger is None else getattr(last.before, ledger)
    return Refusal(last.rid, last.reason, ledger, last.need, last.have, left, last.prefix_len)


def steps_frame(passes: PassesAnswer) -> pd.DataFrame:
    """What each of the last steps computed: prefill tokens by part, and decode rows; one row per part above zero."""
    rows: list[tuple[int, str, str, int, str]] = []
    for step in passes.passes:
        continued = sum(c.selected_extend for c in step.candidates if c.admitted and c.is_continuation)
        admitted = max(0, step.prefill_tokens - continued)
        parts = (("decode rows", step.decode_rows), ("continuation", continued), ("admission", admitted))
        rows.extend((step.step, step.kind, part, n, step.end_reason or "") for part, n in parts if n > 0)
    return pd.DataFrame(rows, columns=_STEP_COLUMNS)


def decisions_of(row: PassRow) -> list[DecisionRow]:
    """The candidates of one pass in the order they were examined."""
    return sorted(row.candidates, key=lambda decision: decision.order)


@dataclass(frozen=True, slots=True)
class PageFacts:
    """One page and who holds it. `owner` is None for a free page and for an owner that was not sent."""

    page: int
    state: str
    owner: PageOwner | None
    is_listed: bool


def parts_frame(timeline: Timeline) -> pd.DataFrame:
    """Time to first token of one request, cut into its parts that took any time, as intervals in seconds.

    The queue is told by blocker, as on a lane, where the source says it. Of one that waits the queue is counted so far;
    the record counts it once it is over.
    """
    known, blockers = dict(timeline.parts_ns), Counter(timeline.blockers_ns)
    refused_ns = timeline.refused_between_ns
    if not known.get("queue") and timeline.admitted_ns is None:
        blockers = Counter()
        for wait in timeline.waits:
            blockers[wait.blocker] += wait.end_ns - wait.start_ns
        known["queue"] = blockers.total()
    if blockers.total() == known.get("queue", 0) + refused_ns:
        known = causes_ns(known, blockers, refused_ns)
    rows: list[tuple[str, float, float, float]] = []
    at = 0
    for part in (*CAUSES, "queue"):
        took = known.get(part, 0)
        if took > 0:
            rows.append((part, at / 1e9, (at + took) / 1e9, took / 1e9))
            at += took
    return pd.DataFrame(rows, columns=["part", "start", "end", "seconds"])


def page_bytes(pages: PageMap) -> tuple[bytes, npt.NDArray[np.uint16]]:
    """States (one byte per page) and owners (one uint16 per page) of the map; lengths are checked.

    Raises ValueError when the map does not have one entry per page.
    """
    states = base64.b64decode(pages.states_b64)
    owners = np.frombuffer(base64.b64decode(pages.owners_b64), dtype="<u2")
    if len(states) != pages.num_pages or len(owners) != pages.num_pages:
        raise ValueError(f"page map of {pages.num_pages} pages came with {len(states)} states and {len(owners)} owners")
    return states, owners


def page_facts(pages: PageMap, page: int) -> PageFacts | None:
    """Who holds `page`; None when the pool has no such page."""
    if not 0 <= page < pages.num_pages:
        return None
    states, owners = page_bytes(pages)
    state = PAGE_STATES[states[page]] if states[page] < len(PAGE_STATES) else "unknown"
    number = int(owners[page])
    is_listed = 0 < number != NOT_LISTED and number <= len(pages.owners)
    return PageFacts(page, state, pages.owners[number - 1] if is_listed else None, is_listed or number == 0)
