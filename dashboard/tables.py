"""Tables of the page. Owns: answers -> columns and rows of the live table (`assets/live_table.js`).

Pure. A cell is a text, or [text, sort value, fraction, colour, title]. Every number has its unit in the head of its
column; heads are marked here and translated where they are drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import pandas as pd

from dashboard import formats as f
from dashboard.frames import LEDGERS, decisions_of
from dashboard.frames_pass import PassGroup, why_empty
from dashboard.theme import Palette, blocker_colour
from dashboard.words import mark, t, tn
from telemetry.observe import DecisionRow, Ledgers, PageOwner, PassRow

Cell = str | list[Any]


@dataclass(frozen=True, slots=True)
class Table:
    """What the live table shows.

    note    the line above: how many of how many
    empty   title and advice when there is no row
    filter  the hint in the filter box; empty for no box
    """

    columns: tuple[dict[str, str], ...]
    rows: list[dict[str, Any]] = field(default_factory=list)
    note: str = ""
    empty: tuple[str, str] = ("Nothing here", "")
    filter: str = ""


def _column(label: str, kind: str, unit: str = "", help_text: str = "") -> dict[str, str]:
    return {"label": label, "kind": kind, "unit": unit, "help": help_text}


#: What a test counts, for reasons whose test does not count tokens: one, and many.
_COUNTED: Final = {"rows_exhausted": ("row", "rows"), "prefill_max_reached": ("prompt", "prompts")}

_QUEUE_COLUMNS: Final = (
    _column("#", "num", help_text=mark("place in the order of the last pass")),
    _column(mark("Request"), "mono"),
    _column(mark("Waits for"), "pill", help_text=mark("the one limit or rule that keeps it waiting now")),
    _column(
        mark("Needs"), "num", "tok", mark("what the deciding test asked for; rows or prompts where the cell says so")
    ),
    _column(mark("Has"), "num", "tok", mark("what there was")),
    _column(mark("Age"), "bar", help_text=mark("since it came in; the bar is relative to the oldest")),
    _column(
        mark("Passed over"),
        "num",
        help_text=mark("passes that went past it for later requests; max_overtakes bounds them"),
    ),
    _column(mark("Prompt"), "num", "tok"),
    _column(mark("Cached"), "num", "tok", mark("prefix found in the cache when it was last examined")),
    _column(
        mark("Pass ended at"),
        "mono",
        help_text=mark("the request whose decision ended the pass before this one was reached"),
    ),
)


def queue_table(queue: pd.DataFrame, total: int, colours: Palette) -> Table:
    """Waiting requests from `frames.queue_frame`, in queue order."""
    oldest = float(queue["age_s"].max()) if len(queue) else 0.0
    rows = [_queue_row(entry, oldest, colours) for entry in queue.to_dict("records")]
    return Table(
        columns=_QUEUE_COLUMNS,
        rows=rows,
        note=_of(len(rows), total, t("waiting")),
        empty=(
            t("Nobody waits"),
            t("The queue is empty at this moment. Send more at a time to see why some wait."),
        ),
        filter=t("Filter, or an id and Enter"),
    )


def _queue_row(entry: dict[Any, Any], oldest: float, colours: Palette) -> dict[str, Any]:
    rid = str(entry["rid"])
    blocker = str(entry["blocker"])
    who = _given(entry["who_stopped"])
    reason = _given(entry["reason"])
    why = f.blocker_words(blocker, reason) or f.words(blocker)
    retracted = " · retracted" if entry["state"] == "retracted" else ""
    title = t("{why}. Last reason: {reason}.", why=why, reason=f.words(reason)) if reason else why
    return {
        "id": rid,
        "cells": [
            [str(entry["position"]), entry["position"]],
            [f.short_rid(rid), rid, None, None, rid],
            [f.words(blocker) + retracted, blocker, None, blocker_colour(colours, blocker), title],
            [_tested(_number(entry["need"]), reason), _sortable(entry["need"])],
            [_tested(_number(entry["have"]), reason), _sortable(entry["have"])],
            [f.duration(entry["age_s"]), entry["age_s"], entry["age_s"] / oldest if oldest else 0.0],
            [f.count(entry["times_passed_over"]), entry["times_passed_over"], None, None, _overtaken(entry)],
            [f.tokens(entry["prompt_len"] + entry["output_len"]), entry["prompt_len"] + entry["output_len"]],
            [f.tokens(entry["matched_len"]), entry["matched_len"]],
            [f.short_rid(who) if who else f.NOTHING, who or "", None, None, who or ""],
        ],
    }


def _overtaken(entry: dict[Any, Any]) -> str:
    count = int(entry.get("overtaken_by") or 0)
    return t("{n} later requests were admitted before it", n=f.count(count)) if count else ""


def _tested(value: float | None, reason: str | None) -> str:
    """One side of the test that decided: tokens, as the head says, or requests, which the cell then says itself."""
    unit = _COUNTED.get(reason or "")
    return f.tokens(value) if value is None or unit is None else f"{f.tokens(value)} {unit[value != 1]}"


_REQUEST_COLUMNS: Final = (
    _column(mark("Request"), "mono"),
    _column(mark("Came"), "num", help_text=mark("local time")),
    _column(mark("State"), "pill"),
    _column(mark("Queue"), "num", help_text=mark("from entering the queue to its first admission")),
    _column(mark("TTFT"), "num", help_text=mark("from arrival to the first token")),
    _column(mark("TBT p50"), "num", help_text=mark("median gap between its tokens")),
    _column(mark("TBT worst"), "num"),
    _column(mark("Total"), "num"),
    _column(mark("Prompt"), "num", "tok"),
    _column(mark("Cached"), "num", "tok", mark("prompt tokens found in the cache at its first admission")),
    _column(mark("Output"), "num", "tok"),
    _column(mark("Chunks"), "num"),
    _column(mark("Retracted"), "num", "times"),
)

_STATE_COLOURS: Final = {"stop": "good", "length": "good", "abort": "warn", "error": "bad", "timeout": "bad"}


def requests_table(requests: pd.DataFrame, colours: Palette, *, note: str, live: bool) -> Table:
    """Requests from `frames.requests_frame`: finished ones, or live ones."""
    empty = (
        (t("No request is live"), t("Send one to the engine, or run bench/serve.py against it."))
        if live
        else (
            t("No request has finished yet"),
            t("The list fills as requests end. Send some, or run bench/serve.py against the engine."),
        )
    )
    rows = [_request_row(row, colours) for row in requests.to_dict("records")]
    return Table(columns=_REQUEST_COLUMNS, rows=rows, note=note, empty=empty, filter=t("Filter, or an id and Enter"))


def _request_row(row: dict[Any, Any], colours: Palette) -> dict[str, Any]:
    rid = str(row["rid"])
    finish = _given(row["finish"])
    state = finish or str(row["state"])
    colour = getattr(colours, _STATE_COLOURS.get(state, "accent" if not finish else "warn"))
    times = [_number(row[name]) for name in ("queue_s", "ttft_s", "tbt_p50_s", "tbt_max_s", "duration_s")]
    numbers = [_number(row[name]) for name in ("prompt_len", "cached_tokens", "outputs", "chunks", "retractions")]
    return {
        "id": rid,
        "cells": [
            [f.short_rid(rid), rid, None, None, rid],
            [f.clock(row["accepted_wall_s"]), row["accepted_wall_s"]],
            [f.words(state), state, None, colour],
            *[[f.duration(value), _sortable(value)] for value in times],
            *[[f.tokens(value), _sortable(value)] for value in numbers],
        ],
    }


_PASS_COLUMNS: Final = (
    _column(mark("Step"), "num"),
    _column(
        mark("Ended by"),
        "text",
        help_text=mark(
            "what ended the pass, and at which request. rows exhausted: this pass found no free row; full flag set: an "
            "earlier pass found the batch full, nobody has left since, and so nobody was looked at"
        ),
    ),
    _column(mark("Looked at"), "num", "req", mark("candidates examined")),
    _column(mark("Admitted"), "num", "req"),
    _column(mark("Prefill"), "num", "tok"),
    _column(mark("Decode"), "num", "rows"),
    _column(mark("Kind"), "text", help_text=mark("of step: extend, mixed, decode or idle")),
)


def passes_table(groups: Sequence[PassGroup], steps: int) -> Table:
    """The passes of the last `steps` steps, newest first, from `frames_pass.pass_groups`."""
    return Table(
        columns=_PASS_COLUMNS,
        rows=[_pass_row(group) for group in groups],
        note=tn(
            steps,
            "the last step",
            "the last {n} steps; empty passes in a row are one line",
            n=f.count(steps),
        ),
        empty=(
            t("No step has been made yet"),
            t("Passes appear when requests arrive. Send some, or run bench/serve.py against the engine."),
        ),
    )


def _pass_row(group: PassGroup) -> dict[str, Any]:
    step, oldest = group.newest, group.rows[-1]
    admitted = sum(decision.admitted for decision in step.candidates)
    ended = f.words(step.end_reason or step.end)
    title = why_empty(step) or (f"at {step.end_rid}" if step.end_rid else ended)
    steps = f.count(step.step) if len(group.rows) == 1 else f"{f.count(oldest.step)}–{f.count(step.step)}"
    prefill = sum(row.prefill_tokens for row in group.rows)
    fewest, most = (pick(row.decode_rows for row in group.rows) for pick in (min, max))
    return {
        "id": str(step.step),
        "quiet": admitted == 0,
        "cells": [
            [steps, step.step],
            [ended, ended, None, None, title],
            [f.count(len(step.candidates)), len(step.candidates)],
            [f.count(admitted), admitted],
            [f.tokens(prefill), prefill],
            [f.count(most) if fewest == most else f"{f.count(fewest)}–{f.count(most)}", most],
            ", ".join(dict.fromkeys(row.kind for row in reversed(group.rows))),
        ],
    }


_DECISION_COLUMNS: Final = (
    _column("#", "num", help_text=mark("order of examination")),
    _column(mark("Request"), "mono"),
    _column(mark("Decision"), "pill", help_text=mark("closed reason code")),
    _column(mark("Prefix"), "num", "tok", mark("prefix_len: already in the cache, or computed by earlier chunks")),
    _column(mark("Candidate"), "num", "tok", mark("candidate_extend: what it still has to compute")),
    _column(mark("Selected"), "num", "tok", mark("selected_extend: what this step computes of it")),
    _column(mark("Needs"), "num", "tok"),
    _column(mark("Has"), "num", "tok"),
    *(_column(f.LEDGER_NAMES[name], "num", mark("before → after")) for name in LEDGERS),
    _column(
        mark("Result"),
        "text",
        help_text=mark(
            "the reference's answer about the next request. CONTINUE: the pass goes on. NO_TOKEN: K/V memory is spent, "
            "the pass ends. OTHER: another limit is reached, the pass ends. LAST: a prompt in chunks ends in this "
            "step. CONTINUES: it goes on in the next."
        ),
    ),
)


def candidates_table(row: PassRow, colours: Palette) -> Table:
    """The candidates of one pass in the order examined; it says itself which pass that is."""
    table = decisions_table(decisions_of(row), colours)
    step = t("step {step}", step=f.count(row.step))
    return replace(table, note=f"{step} · {table.note}", empty=(t("Nobody was looked at"), why_empty(row) or ""))


def decisions_table(decisions: Sequence[DecisionRow], colours: Palette, *, with_step: bool = False) -> Table:
    """Candidates in the order examined, each ledger before and after. `with_step`: of one request over many steps."""
    rows = [_decision_row(decision, colours, with_step=with_step) for decision in decisions]
    first = _column(mark("Step"), "num") if with_step else _DECISION_COLUMNS[0]
    return Table(
        columns=(first, *_DECISION_COLUMNS[1:]),
        rows=rows,
        note=_decisions_note(len(rows), with_step=with_step),
        empty=(t("Nobody was examined"), t("This step made no admission pass.")),
    )


def _decisions_note(rows: int, *, with_step: bool) -> str:
    if with_step:
        return t("1 decision") if rows == 1 else t("{n} decisions", n=f.count(rows))
    if rows == 1:
        return t("1 candidate, in the order examined")
    return t("{n} candidates, in the order examined", n=f.count(rows))


def _decision_row(decision: DecisionRow, colours: Palette, *, with_step: bool) -> dict[str, Any]:
    number = decision.step if with_step else decision.order
    colour = colours.good if decision.admitted else colours.bad
    ended = " · ended the pass" if decision.stopped_pass else ""
    overdrafts = f" Overdrafts: {', '.join(map(f.words, decision.overdrafts))}." if decision.overdrafts else ""
    kind = "Continuation of a chunked prompt. " if decision.is_continuation else ""
    return {
        "id": f"{decision.step}/{decision.order}/{decision.rid}",
        "quiet": not decision.admitted,
        "cells": [
            [f.count(number), number],
            [f.short_rid(decision.rid), decision.rid, None, None, decision.rid],
            [f.words(decision.reason) + ended, decision.reason, None, colour, f"{kind}{decision.reason}.{overdrafts}"],
            [f.tokens(decision.prefix_len), decision.prefix_len],
            [f.tokens(decision.candidate_extend), decision.candidate_extend],
            [f.tokens(decision.selected_extend), decision.selected_extend],
            [_tested(decision.need, decision.reason), _sortable(decision.need)],
            [_tested(decision.have, decision.reason), _sortable(decision.have)],
            *[_ledger_cell(decision.before, decision.after, name) for name in LEDGERS],
            decision.result,
        ],
    }


def _ledger_cell(before: Ledgers, after: Ledgers, name: str) -> Cell:
    start, end = getattr(before, name), getattr(after, name)
    return [f.before_after(start, end), _sortable(end)]


_OWNER_COLUMNS: Final = (
    _column(mark("Owner"), "pill"),
    _column(mark("Kind"), "text"),
    _column(mark("Pages"), "num"),
    _column(mark("Share"), "bar", help_text=mark("of the pool")),
    _column(mark("State"), "text"),
    _column(mark("Held by"), "num", "req", mark("requests that lock it now")),
)


def owners_table(owners: Sequence[PageOwner], capacity: int, total: int, colours: Palette, *, limit: int = 40) -> Table:
    """The largest owners of pages."""
    rows: list[dict[str, Any]] = []
    largest = owners[0].pages if owners else 0
    for index, owner in enumerate(owners[:limit]):
        colour = colours.owners[index] if index < len(colours.owners) else colours.muted
        held = t("by itself") if owner.kind == "request" else ", ".join(owner.holders) or t("nobody now")
        rows.append(
            {
                "id": owner.owner,
                "cells": [
                    [f.short_rid(owner.label), owner.label, None, colour, owner.label],
                    t("private pages") if owner.kind == "request" else t("shared prefix"),
                    [f.count(owner.pages), owner.pages],
                    [f.share(owner.pages, capacity), owner.pages, owner.pages / largest if largest else 0.0, colour],
                    owner.state,
                    [f.count(owner.lock_count), owner.lock_count, None, None, held],
                ],
            }
        )
    return Table(
        columns=_OWNER_COLUMNS,
        rows=rows,
        note=_of(len(rows), total, t("owners, largest first")),
        empty=(t("All pages are free"), t("Pages get owners when requests are admitted.")),
    )


def _of(shown: int, total: int, what: str) -> str:
    if shown >= total:
        return f"{f.count(total)} {what}"
    return t("{shown} of {total} {what}", shown=f.count(shown), total=f.count(total), what=what)


def _given(value: Any) -> str | None:
    """A text cell of a frame; pandas has NaN where the model had None."""
    return value if isinstance(value, str) and value else None


def _number(value: Any) -> float | None:
    return None if value is None or pd.isna(value) else float(value)


def _sortable(value: Any) -> float:
    """Sort value of a number that may be missing: missing comes before everything."""
    number = _number(value)
    return -1e308 if number is None else number
