"""Laws of what listeners count. Owns: INV-METER-01 to 03 - gauges, counters and histograms against the second books.

`Readings` are plain numbers under the names of the metric families, taken between two steps. The listener is free in
what it shows: a family that is not in the readings is not compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from engine.request import Cause, RequestState
from invariants.meter_books import Key, MeterBooks, Readings, finish_reason
from invariants.page_book import STATE_NAMES
from invariants.queue_books import QueueBooks
from invariants.shadow import Shadow
from invariants.violation import Report

NS: Final = 1_000_000_000
#: Families that `MeterBooks.totals` counts whole: a label that was never counted is 0.
_RECOUNTED: Final = frozenset(
    {
        "admissions_total",
        "overdrafts_total",
        "selected_tokens_total",
        "prompt_tokens_total",
        "requests_finished_total",
        "request_ends_total",
        "retractions_total",
        "guard_activations_total",
        "kv_pages_evicted_total",
        "steps_total",
        "generation_tokens_total",
    }
)
_LIVE: Final = ("waiting", "prefill", "decode", "retracted")


class MeterLaws:
    """The laws, and the readings of last time, which no counter may fall below."""

    def __init__(self) -> None:
        self._before: dict[Key, int] = {}

    def on_readings(
        self, books: Shadow, queue: QueueBooks, meters: MeterBooks, readings: Readings, report: Report
    ) -> None:
        """Lay the readings beside the books."""
        for family, label, due, found in _gauges(books, queue, meters, readings.gauges):
            if due != found:
                report("INV-METER-01", f"{_name(family, label)} {due}", f"{found}")
        self._grown(readings, report)
        for (family, label), found in readings.counters.items():
            if family in _RECOUNTED:
                due = _total(meters, family, label)
                if due != found:
                    report("INV-METER-02", f"{_name(family, label)} {due}", f"{found}")
        _balance(meters, readings, report)
        _observations(meters, readings.observations, report)

    def _grown(self, readings: Readings, report: Report) -> None:
        now = {**readings.counters, **readings.observations}
        for key, before in self._before.items():
            found = now.get(key, before)
            if found < before:
                report("INV-METER-02", f"{_name(*key)} at {before} or above, as before", f"{found}")
        self._before = now


def _name(family: str, label: str) -> str:
    return f"{family}{{{label}}}" if label else family


def _total(meters: MeterBooks, family: str, label: str) -> int:
    if family == "steps_total":
        return meters.steps.get(label, 0)
    if family == "generation_tokens_total":
        return meters.tokens
    if family == "admissions_total":
        return meters.examined.get(label, 0)
    if family == "selected_tokens_total":
        return meters.cached_tokens if label == "cached" else meters.chosen_tokens
    if family == "prompt_tokens_total":
        return meters.found_tokens if label == "cached" else meters.new_tokens
    if family == "request_ends_total":
        return meters.ends.get(label, 0)
    if family == "requests_finished_total":
        return sum(count for cause, count in meters.ends.items() if finish_reason(Cause(cause)) == label)
    return meters.totals.get((family, label), 0)


def _gauges(
    books: Shadow, queue: QueueBooks, meters: MeterBooks, gauges: Mapping[Key, int]
) -> Iterable[tuple[str, str, int, int]]:
    """(family, label, what it must show, what it shows)."""
    due: dict[Key, int] = {
        ("requests", "waiting"): len(queue.waiting) - queue.returned,
        ("requests", "retracted"): queue.returned,
        ("requests", "prefill"): books.in_state[RequestState.PREFILL],
        ("requests", "decode"): books.in_state[RequestState.DECODE],
        ("kv_pages_capacity", ""): books.num_pages,
        ("waiting_tokens", ""): books.waiting_tokens,
        ("new_token_ratio", ""): round(books.ratio * NS),
        ("promised_pages", ""): 0,
    }
    if meters.promising is not None and books.requests:
        due["promised_pages", ""] = round(1000 * meters.promising.promised_tokens / books.page_size)
    due |= {("kv_pages", name): count for name, count in zip(STATE_NAMES, books.counts, strict=True)}
    if meters.closing is not None and meters.closing.budget_close is not None:
        left = meters.closing.budget_close
        due["ledger_remaining_tokens", "compute"] = left.rem_input
        due["ledger_remaining_tokens", "chunk"] = left.rem_chunk or 0
        due["ledger_remaining_tokens", "kv_now"] = left.remaining_current
    for (family, label), number in due.items():
        if (family, label) in gauges:
            yield family, label, number, gauges[family, label]
    blockers = [number for (family, _), number in gauges.items() if family == "waiting_by_blocker"]
    if blockers:
        yield "waiting_by_blocker", "sum", len(queue.waiting), sum(blockers)


def _balance(meters: MeterBooks, readings: Readings, report: Report) -> None:
    """Who came in has ended or is still inside, by the listener's own numbers; and the door let no more through."""
    ended = [number for (family, _), number in readings.counters.items() if family == "requests_finished_total"]
    live = [readings.gauges[key] for key in (("requests", state) for state in _LIVE) if key in readings.gauges]
    if ended and live and sum(ended) + sum(live) != meters.arrived:
        report("INV-METER-02", f"{meters.arrived} requests ended or live", f"{sum(ended)} ended, {sum(live)} live")


def _observations(meters: MeterBooks, found: Mapping[Key, int], report: Report) -> None:
    """Each histogram holds as many observations as its definition implies."""
    due: dict[str, int] = {
        "queue_time_seconds": meters.admitted,
        "request_chunks": meters.first_tokens,
        "inter_token_latency_seconds": meters.tokens - meters.first_tokens,
        "time_per_output_token_seconds": meters.many_tokens,
        "request_retractions": meters.ended,
        "chunk_tokens": meters.pieces,
    }
    by_label = {
        "request_duration_seconds": "requests_finished_total",
        "step_seconds": "steps_total",
        "step_tokens": "steps_total",
        "step_requests": "steps_total",
    }
    told = found.get(("time_to_first_token_seconds", ""))
    for (family, label), count in found.items():
        least = most = None
        if family in due:
            least = most = due[family]
        elif family in by_label:
            least = most = _total(meters, by_label[family], label)
        elif family == "ttft_component_seconds":
            least = most = told
        elif family == "time_to_first_token_seconds":
            # Final once the first byte is out, which may come after the token, or never.
            least, most = 0, meters.first_tokens
        if least is not None and most is not None and not least <= count <= most:
            due_words = f"{most}" if least == most else f"at most {most}"
            report("INV-METER-03", f"{due_words} observations of {_name(family, label)}", f"{count}")
