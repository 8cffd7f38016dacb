"""One admission pass, ready to draw. Owns: its ledgers as waterfalls, the queue before and after, and why it was empty.

Pure: no Streamlit. All of it is made from one `PassRow`, and `story` puts it into one value with the step in it, so
that the title of one pass can never stand over the bars of another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from dashboard import formats as f
from dashboard.frames import LEDGERS, Refusal, refusal_of
from dashboard.theme import Palette
from dashboard.words import mark, t
from telemetry.observe import DecisionRow, Ledgers, PassesAnswer, PassRow, QueueMove

#: Admissions that a waterfall shows one by one; those between are summed.
SHOWN_ADMISSIONS: Final = 6
#: Right edge of a waterfall as a share of its limit, for a need that goes beyond it; a longer one is cut there.
REACH: Final = 1.3

#: What running requests took of a ledger before the pass began.
_RUNNING: Final = {
    "rem_input": mark("decode rows"),
    "rem_chunk": mark("decode rows"),
    "remaining_total": mark("held and promised"),
    "remaining_current": mark("held by running"),
}
#: What a ledger asks, in a line of its own below the name.
_ASKS: Final = {
    "rem_input": mark("prompt tokens this step may compute"),
    "rem_chunk": mark("tokens of one slice, decode rows first"),
    "remaining_total": mark("pool less what is promised to the future"),
    "remaining_current": mark("pool at this moment"),
}
_MEMORY: Final = ("remaining_total", "remaining_current")
#: What each policy sorts by, as `PassRow.order_key` names it: its column, its unit, and the rule.
_KEYS: Final = {
    "entry": (mark("Entered as"), "", mark("first come, first served: nobody moves")),
    "cached_tokens": (mark("Cached prefix"), "tok", mark("the longest cached prefix first")),
    "uncached_tokens": (mark("To compute"), "tok", mark("the least left to compute first")),
    "max_new_tokens": (mark("Asks for"), "tok", mark("the longest output asked for first")),
    "priority": (mark("Priority"), "", mark("by priority, then first come, first served")),
}
#: Why a step made no pass, by the reason that its end gives.
_SKIPPED: Final = {
    "queue_end": mark("No pass was made: the queue was empty."),
    "full_flag_set": mark(
        "No pass was made: an earlier one found the batch full, and nobody has left since. {waiting} wait."
    ),
    "rows_exhausted": mark("No pass was made: {running} requests ran, as many as may at once. {waiting} wait."),
    "chunk_exhausted": mark("No pass was made: decode rows sat out the last step and had this one. {waiting} wait."),
}


@dataclass(frozen=True, slots=True)
class Bar:
    """One line of a waterfall, [start, end) in tokens of what is left. `kind` is one of the palette's segments.

    is_request  the label is a request's id
    have  of kind `need`: where the ledger stood; the bar beyond it is what was missing
    computed  of an admission that was charged in whole pages: the tokens that it computes, which are fewer
    """

    kind: str
    label: str
    start: float
    end: float
    amount: float
    title: str = ""
    have: float | None = None
    is_request: bool = False
    computed: float | None = None


@dataclass(frozen=True, slots=True)
class Waterfall:
    """One ledger over one pass, from its limit down to what is left. Without a limit it has no bars."""

    ledger: str
    limit: float | None
    low: float
    high: float
    bars: tuple[Bar, ...] = ()
    refused: bool = False


def waterfalls(row: PassRow) -> list[Waterfall]:
    """The ledgers of one pass, in the order in which its tests ask them."""
    refused = refusal_of(row)
    return [_waterfall(row, name, refused) for name in LEDGERS]


def _waterfall(row: PassRow, name: str, refused: Refusal | None) -> Waterfall:
    limit, opened, closed = (_of(one, name) for one in (row.limits, row.budget_open, row.budget_close))
    if limit is None or opened is None or closed is None:
        return Waterfall(name, None, 0, 0)
    bars = [Bar("limit", mark("limit"), 0, limit, limit)]
    if opened != limit:
        bars.append(Bar("running", _RUNNING[name], opened, limit, opened - limit))
    bars += _admissions(row.candidates, name)
    bars.append(Bar("left" if closed >= 0 else "overdraft", mark("left"), min(closed, 0), max(closed, 0), closed))
    is_refused = refused is not None and refused.ledger == name
    if refused is not None and is_refused and refused.need is not None and refused.have is not None:
        title = f"{refused.rid} · {refused.reason}"
        bars += _down_to_have(refused, refused.have, closed)
        bars.append(Bar("need", refused.rid, 0, refused.need, refused.need, title, refused.have, is_request=True))
    low = min(0.0, *(bar.start for bar in bars))
    spent = max(limit, *(bar.end for bar in bars if bar.kind != "need"))
    need = refused.need if refused is not None and is_refused and refused.need is not None else 0
    high = max(spent, min(need, spent * REACH))
    return Waterfall(name, limit, low, high, tuple(bars), is_refused)


def _down_to_have(refused: Refusal, have: float, closed: float) -> list[Bar]:
    """What lies between what the pass left of a ledger and what the refused request had of it; nothing where that is
    the same."""
    bars, left = [], closed if refused.left is None else refused.left
    if left != closed:
        bars.append(Bar("left" if left >= 0 else "overdraft", mark("left for it"), min(left, 0), max(left, 0), left))
    if have == left or refused.ledger not in _MEMORY:
        return bars
    if refused.locked:
        # What is cached for nobody counts as room, until the request that would use it locks it.
        label = mark("its cached prefix, locked")
    elif refused.ledger == "remaining_current":
        label = mark("counted in whole pages")
    else:
        label = mark("at the tightest moment to come")
    return [*bars, Bar("running", label, min(have, left), max(have, left), have - left)]


def _admissions(candidates: Sequence[DecisionRow], name: str) -> list[Bar]:
    """A bar for each admission that took something, those in the middle as one when there are many."""
    bars = []
    for decision in candidates:
        before, after = _of(decision.before, name), _of(decision.after, name)
        if not decision.admitted or before is None or after is None or before == after:
            continue
        kind = "continuation" if decision.is_continuation else "admission"
        title = f"{decision.rid} · {decision.reason}"
        computed = decision.selected_extend
        rounded = computed if name not in _MEMORY and before - after > computed else None
        if rounded is not None:
            title += " · " + t("charged in whole pages")
        bars.append(Bar(kind, decision.rid, after, before, after - before, title, is_request=True, computed=rounded))
    if len(bars) <= SHOWN_ADMISSIONS:
        return bars
    head, middle = bars[: SHOWN_ADMISSIONS - 2], bars[SHOWN_ADMISSIONS - 2 : -1]
    more = t("{n} more", n=f.count(len(middle)))
    spent = sum(bar.amount for bar in middle)
    return [*head, Bar("admission", more, middle[-1].start, middle[0].end, spent), bars[-1]]


def _of(ledgers: Ledgers | None, name: str) -> float | None:
    value = None if ledgers is None else getattr(ledgers, name)
    return None if value is None else float(value)


def why_empty(row: PassRow) -> str | None:
    """Why nobody was looked at; None when somebody was."""
    if row.candidates:
        return None
    words = _SKIPPED.get(row.end_reason or "") if row.end == "skipped" else None
    if words is not None:
        return t(words, running=f.count(row.num_running), waiting=f.count(row.num_waiting))
    if row.end is None:
        return t("This step made no pass.")
    return t("The pass ended before it looked at anybody: {reason}.", reason=f.words(row.end_reason))


@dataclass(frozen=True, slots=True)
class PassGroup:
    """One pass that looked at somebody, or consecutive ones that did not, for one reason. `rows` newest first."""

    rows: tuple[PassRow, ...]

    @property
    def newest(self) -> PassRow:
        return self.rows[0]


def pass_groups(passes: PassesAnswer) -> list[PassGroup]:
    """The last passes, newest first; empty ones of the same reason in a row are one."""
    groups: list[list[PassRow]] = []
    for row in reversed(passes.passes):
        last = groups[-1][-1] if groups else None
        if last is not None and not row.candidates and not last.candidates and row.end_reason == last.end_reason:
            groups[-1].append(row)
        else:
            groups.append([row])
    return [PassGroup(tuple(group)) for group in groups]


def moved(move: QueueMove) -> int | None:
    """Places won (above zero) or lost by the ordering; None for who was not reached."""
    return None if move.after is None else move.before - move.after


def story(row: PassRow, colours: Palette) -> dict[str, Any]:
    """Everything that the component draws of one pass."""
    return {
        "step": row.step,
        "title": t("Step {step}", step=f.count(row.step)),
        "facts": _facts(row),
        "ending": _ending(row),
        "is_refused": refusal_of(row) is not None,
        "empty": why_empty(row),
        "ledgers": [_panel(one) for one in waterfalls(row)] if row.budget_open is not None else [],
        "queue": _queue(row),
        "segments": {**colours.segments, "limit": colours.line, "need": colours.bad},
    }


def _facts(row: PassRow) -> list[str]:
    admitted = sum(decision.admitted for decision in row.candidates)
    facts = [row.kind]
    if row.policy:
        facts.append(t("policy {policy}", policy=row.policy))
    if row.candidates:
        facts.append(t("{n} looked at", n=f.count(len(row.candidates))))
        facts.append(t("{n} admitted", n=f.count(admitted)))
    facts.append(t("{n} not reached", n=f.count(row.not_considered)))
    if row.step_s is not None and row.behind_s:
        took, behind = f.duration(row.step_s), f.duration(row.behind_s)
        facts.append(t("took {time}, {behind} of it behind the step before", time=took, behind=behind))
    elif row.step_s is not None:
        facts.append(t("took {time}", time=f.duration(row.step_s)))
    return facts


def _ending(row: PassRow) -> str:
    refused = refusal_of(row)
    if refused is None:
        if not row.candidates:
            return ""
        if row.end_reason in {None, "queue_end"}:
            return t("Nobody was refused: the pass reached the end of the queue.")
        where = f.short_rid(row.end_rid) if row.end_rid else t("the queue")
        return t("The pass ended at {where}: {reason}.", where=where, reason=f.words(row.end_reason))
    rid, reason = f.short_rid(refused.rid), f.words(refused.reason)
    if refused.need is None:
        return t("{rid} was refused: {reason}.", rid=rid, reason=reason)
    need, have = f.tokens(refused.need), f.tokens(refused.have)
    counted = f.counted_test(refused.reason, need, have)
    if counted:
        return t("{rid} was refused: {reason} ({test}).", rid=rid, reason=reason, test=counted)
    told = {"rid": rid, "reason": reason, "need": need, "have": have}
    if refused.locked:
        return t(
            "{rid} was refused: {reason}. It needs {need} tok, there are {have}: the {left} left, less {locked} of its "
            "cached prefix, which count as room until it locks them.",
            left=f.tokens(refused.left),
            locked=f.tokens(refused.locked),
            **told,
        )
    return t("{rid} was refused: {reason}. It needs {need} tok, there are {have}.", **told)


def _panel(one: Waterfall) -> dict[str, Any]:
    return {
        "name": f.LEDGER_NAMES[one.ledger],
        "code": one.ledger,
        "asks": t(_ASKS[one.ledger]),
        "limit": None if one.limit is None else f"{f.tokens(one.limit)} tok",
        "none": t("no limit"),
        "refused": t("refused here") if one.refused else "",
        "bars": [_bar(bar, one) for bar in one.bars],
    }


def _bar(bar: Bar, one: Waterfall) -> dict[str, Any]:
    span = one.high - one.low or 1.0
    place = [max(0.0, min(1.0, (at - one.low) / span)) for at in (bar.start, bar.end)]
    label = f.short_rid(bar.label, 16) if bar.is_request else t(bar.label)
    if bar.kind in {"running", "continuation", "admission"}:
        amount = f"+{f.tokens(bar.amount)}" if bar.amount > 0 else f"−{f.tokens(-bar.amount)}"
        if bar.computed is not None:
            amount = t("{charged} for {tokens}", charged=amount, tokens=f.tokens(bar.computed))
    else:
        amount = f.tokens(bar.amount)
    drawn: dict[str, Any] = {
        "kind": bar.kind,
        "label": label,
        "title": bar.title or label,
        "from": place[0],
        "to": place[1],
        "amount": amount,
        "mono": bar.is_request,
    }
    if bar.have is not None:
        drawn["have"] = max(0.0, min(1.0, (bar.have - one.low) / span))
        drawn["amount"] = t("needs {need}, has {have}", need=f.tokens(bar.end), have=f.tokens(bar.have))
        drawn["cut"] = bar.end > one.high
    return drawn


def _queue(row: PassRow) -> dict[str, Any]:
    label, unit, rule = _KEYS.get(row.order_key, ("", "", ""))
    rows = [_move(move, row.order_key) for move in row.moves]
    changed = sum(1 for move in row.moves if moved(move))
    reached = sum(1 for move in row.moves if move.after is not None)
    said = t(
        "{changed} of {reached} looked at stood elsewhere by entry; {waiting} waited.",
        changed=f.count(changed),
        reached=f.count(reached),
        waiting=f.count(row.waiting_before),
    )
    told = t("What {policy} sorts by is not in the records.", policy=row.policy or "")
    return {
        "title": t("Queue before and after ordering"),
        "rule": f"{row.policy or ''}: {t(rule)}. {said}" if rule else f"{told} {said}",
        "heads": [t("After"), t("Request"), t(label) + (f" {unit}" if unit else ""), t("Before"), t("Moved")],
        "rows": rows,
    }


def _move(move: QueueMove, key: str) -> dict[str, Any]:
    by = moved(move)
    if move.after is None:
        way, text = "", t("not reached")
    elif not by:
        way, text = "same", "="
    else:
        way, text = ("up", f"▲ {f.count(by)}") if by > 0 else ("down", f"▼ {f.count(-by)}")
    shown = move.key if key != "entry" or move.key is None else move.key + 1
    return {
        "rid": move.rid,
        "short": f.short_rid(move.rid),
        "after": f.NOTHING if move.after is None else f.count(move.after + 1),
        "key": f.tokens(shown),
        "before": f.count(move.before + 1),
        "way": way,
        "moved": text,
    }
