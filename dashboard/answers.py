"""The questions that the first screen answers. Owns: five lines, each computed from one look, each a link to its view.

Pure. Where a look lacks what a line needs, the line says so instead of guessing.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, Final

import numpy as np

from dashboard import formats as f
from dashboard.feed import Look
from dashboard.frames import REASON_LEDGER, page_bytes
from dashboard.words import t
from telemetry.observe import LatencyBreakdown, PageMap, PassesAnswer, PassRow, QueueAnswer, TailShare

#: Causes of a late token that a smaller chunk makes shorter: prefill of others in, or before, its step.
_CHUNK_CAUSES: Final = ("chunk_overhead", "long_prefill", "mixed_sat_out")

#: From which share of the late tokens on a smaller chunk is said to help much, or a little.
_MUCH, _LITTLE = 0.5, 0.2


def answer_lines(look: Look) -> list[dict[str, Any]]:
    """What the component `answers` draws: id, question, head and rest of the answer, and the selections behind it."""
    return [
        _line("longest", t("Who waits longest, and why?"), *_longest(look.queue)),
        _line("ledger", t("Which ledger binds most often?"), *_binding(look.passes)),
        _line("queueing", t("How much of p99 TTFT is queueing?"), *_queueing(look.breakdown)),
        _line("owner", t("Who owns most pages?"), *_owner(look.pages)),
        _line("chunk", t("Would a smaller chunk help TBT?"), *_chunk(look.breakdown)),
    ]


Answer = tuple[str, str, dict[str, Any]]


def _line(name: str, ask: str, head: str, rest: str, go: dict[str, Any]) -> dict[str, Any]:
    return {"id": name, "ask": ask, "head": head, "rest": rest, "go": go}


def _longest(queue: QueueAnswer | None) -> Answer:
    if queue is None or not queue.entries:
        return t("Nobody waits."), "", {"view": "requests", "list": "live"}
    entry = max(queue.entries, key=lambda each: each.age_s)
    why = f"{f.words(entry.blocker)}: {t(f.BLOCKER_WORDS.get(entry.blocker, ''))}".rstrip(": ")
    if entry.blocker == "order" and entry.who_stopped:
        why += f" ({f.short_rid(entry.who_stopped)}: {f.words(entry.reason)})"
    elif entry.need is not None and entry.have is not None:
        unit = "req" if entry.reason in {"rows_exhausted", "prefill_max_reached"} else "tok"
        why += t(" (needs {need} {unit}, has {have})", need=f.tokens(entry.need), unit=unit, have=f.tokens(entry.have))
    head = f"{f.short_rid(entry.rid)}, {f.duration(entry.age_s)}:"
    return head, why, {"view": "requests", "list": "live", "rid": entry.rid}


def _binding(passes: PassesAnswer | None) -> Answer:
    """Of the passes kept, which ledger (or limit) ended most."""
    go = {"view": "admission", "step": None}
    made = [row for row in passes.passes if row.end is not None] if passes is not None else []
    if not made:
        return t("No pass was made yet."), "", go
    ends = _causes(made)
    counts = Counter(_limit_of(reason) for _, reason in ends)
    if not counts:
        return t("None."), t("Each of the last {n} passes reached the end of the queue.", n=f.count(len(made))), go
    (name, most), *others = counts.most_common()
    rest = t("it ended {n} of the last {all} passes", n=f.count(most), all=f.count(len(made)))
    if others:
        rest += "; " + ", ".join(f"{other} {f.count(n)}" for other, n in others[:2])
    bound = [step for step, reason in ends if _limit_of(reason) == name]
    # A pass that still stood at an older refusal looked at nobody: the refusal itself is what one wants to see.
    looked = {row.step for row in made if row.candidates}
    last = max((step for step in bound if step in looked), default=max(bound))
    return f"{name}:", rest, {"view": "admission", "step": last}


def _causes(made: list[PassRow]) -> list[tuple[int, str]]:
    """(step, reason) of each pass that ended before the end of the queue.

    A pass that ended because the batch was still full ended for what had filled it: the reason of a pass before. Where
    that one is no longer kept, the flag counts only if there is nothing else to say.
    """
    told = [(row.step, row.end_reason or "queue_end") for row in made]
    before = ""
    for at, (step, reason) in enumerate(told):
        if reason != "full_flag_set":
            before = reason
        elif before:
            told[at] = (step, before)
    ends = [(step, reason) for step, reason in told if reason != "queue_end"]
    return [end for end in ends if end[1] != "full_flag_set"] or ends


def _limit_of(reason: str | None) -> str:
    """The ledger that a refusal is about; the reason itself where it is about none (rows, an order, a rule)."""
    ledger = REASON_LEDGER.get(reason or "")
    return f.LEDGER_NAMES[ledger] if ledger is not None else f.words(reason)


def _queueing(breakdown: LatencyBreakdown | None) -> Answer:
    go = {"view": "latency"}
    tail = _tail(breakdown)
    if tail is None or tail.ttft_ns <= 0:
        return t("Not known before the first response."), "", go
    queued = tail.parts_ns.get("queue", 0)
    rest = t("of {time} at p99 (the slowest {n})", time=f.duration(tail.ttft_s), n=f.count(tail.count))
    blocker, most_ns = max(tail.blockers_ns.items(), key=lambda item: item[1], default=("", 0))
    if most_ns and queued:
        rest += "; " + t("most of the wait: {blocker}", blocker=f.words(blocker))
    return f"{f.share(queued, tail.ttft_ns)}", rest, go


def _tail(breakdown: LatencyBreakdown | None) -> TailShare | None:
    """The slowest hundredth; of an engine that sends fewer, the slowest there is."""
    tails = breakdown.tails if breakdown is not None else ()
    return max(tails, key=lambda each: each.q, default=None)


def _owner(pages: PageMap | None) -> Answer:
    go: dict[str, Any] = {"view": "kv", "mode": "owner"}
    if pages is None or not pages.owners:
        return t("Nobody: all pages are free."), "", go
    owner = pages.owners[0]
    what = t("private pages of a request") if owner.kind == "request" else t("a shared prefix")
    rest = t(
        "{n} pages, {share} of the pool; {what}, held by {holders}",
        n=f.count(owner.pages),
        share=f.share(owner.pages, pages.num_pages),
        what=what,
        holders=_holders(owner.holders),
    )
    _, owners = page_bytes(pages)
    return f"{f.short_rid(owner.label)}:", rest, {**go, "page": int(np.argmax(owners == 1))}


def _holders(holders: tuple[str, ...]) -> str:
    if not holders:
        return t("nobody now")
    return f.short_rid(holders[0]) if len(holders) == 1 else t("{n} requests", n=f.count(len(holders)))


def _chunk(breakdown: LatencyBreakdown | None) -> Answer:
    go = {"view": "what_if"}
    if breakdown is None or not breakdown.gaps:
        return t("No second token yet."), "", {"view": "latency"}
    late = sum(breakdown.late.values())
    if not late:
        aim = f.duration(breakdown.gap_objective_s)
        return t("No need:"), t("no token came later than {aim} after the one before", aim=aim), go
    share = sum(breakdown.late.get(cause, 0) for cause in _CHUNK_CAUSES) / late
    head = t("Likely:") if share >= _MUCH else t("A little:") if share >= _LITTLE else t("Hardly:")
    rest = t("{share} of {n} late tokens waited for the prefill of others", share=f.share(share, 1.0), n=f.count(late))
    return head, rest, go
