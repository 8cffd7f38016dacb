"""Engines beside each other. Owns: the table that compares the head numbers of several.

Pure. An engine that does not answer keeps its last numbers, greyed, with words that say so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from dashboard import formats as f
from dashboard.feed import Look
from dashboard.frames import Quantiles, tbt_quantiles, ttft_quantiles
from dashboard.places import Place
from dashboard.tables import Cell, Table
from dashboard.theme import Palette
from dashboard.words import mark, t

#: Label, kind, unit and help of each column.
_COLUMNS: Final = (
    (mark("Engine"), "mono", "", ""),
    (mark("State"), "pill", "", mark("whether it answers, turns, and keeps its laws")),
    (mark("Data age"), "num", "", mark("since the last answer")),
    (mark("Waiting"), "num", "req", ""),
    (mark("Running"), "num", "req", ""),
    (mark("K/V in use"), "bar", "", mark("pages that requests hold, of all")),
    (mark("Output"), "num", "tok/s", ""),
    (mark("TTFT p50"), "num", "", mark("of the last 60 s")),
    (mark("TTFT p99"), "num", "", mark("of the last 60 s")),
    (mark("TBT p99"), "num", "", mark("of the last second with tokens")),
    (mark("Violations"), "num", "", ""),
)

#: A loop with work that has not turned for so long is stuck, or in one very long step.
_SLOW_LOOP_S: Final = 5.0


def fleet_table(looks: Sequence[tuple[Place, Look]], colours: Palette, *, now_mono_s: float) -> Table:
    """One row for each engine. `now_mono_s` is the clock that `contact_mono_s` was read from."""
    return Table(
        columns=tuple(
            {"label": t(label), "kind": kind, "unit": unit, "help": t(told) if told else ""}
            for label, kind, unit, told in _COLUMNS
        ),
        rows=[_row(place, look, colours, now_mono_s) for place, look in looks],
        note=t("{n} engines; click one to look into it", n=len(looks)),
        empty=(t("No engine is named"), t("Start the page with several --url.")),
    )


def _row(place: Place, look: Look, colours: Palette, now_mono_s: float) -> dict[str, Any]:
    age = None if look.contact_mono_s is None else max(0.0, now_mono_s - look.contact_mono_s)
    words, colour = _state(look, colours)
    cells: list[Cell] = [
        [place.name, place.name, None, None, place.where],
        [words, words, None, colour, look.error or words],
        _timed(age),
    ]
    status = look.status
    if status is None:
        cells += [f.NOTHING] * (len(_COLUMNS) - len(cells))
        return {"id": place.name, "quiet": True, "cells": cells}
    ttft = ttft_quantiles(look.requests) if look.requests else Quantiles(None, None, 0)
    tbt = tbt_quantiles(look.latency) if look.latency else Quantiles(None, None, 0)
    pages = status.kv_pages
    used = pages.private + pages.protected
    cells += [
        [f.count(status.waiting), status.waiting],
        [f.count(status.running), status.running],
        [f.share(used, pages.capacity), used / max(pages.capacity, 1), used / max(pages.capacity, 1)],
        [f.rate(status.tokens_per_s), status.tokens_per_s],
        _timed(ttft.p50),
        _timed(ttft.p99),
        _timed(tbt.p99),
        [f.count(status.violations_total), status.violations_total]
        if status.invariants_checked or status.violations_total
        else t("off"),
    ]
    return {"id": place.name, "quiet": look.error is not None, "cells": cells}


def _timed(seconds: float | None) -> Cell:
    return [f.duration(seconds), -1.0 if seconds is None else seconds]


def _state(look: Look, colours: Palette) -> tuple[str, str]:
    """In one word, the worst first."""
    status = look.status
    if look.error is not None:
        return t("does not answer") if look.error_kind == "unreachable" else t("no usable answer"), colours.bad
    if status is None:
        return t("not asked yet"), colours.muted
    if status.violations_total:
        return t("laws broken"), colours.bad
    if status.waiting + status.running and status.heartbeat_age_s > _SLOW_LOOP_S:
        return t("stands still"), colours.warn
    return (t("runs") if status.waiting + status.running else t("idle")), colours.good
