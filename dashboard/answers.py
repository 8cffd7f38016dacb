"""The questions that the first screen answers. Owns: five lines, each computed from one look, each a link to its view.

Pure. Where a look lacks what a line needs, the line says so instead of guessing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from dashboard import formats as f
from dashboard.feed import Look
from dashboard.frames import page_bytes
from dashboard.frames_latency import plain, with_order
from dashboard.words import mark, t, tn
from telemetry.observe import (
    LatencyBreakdown,
    Overtaker,
    PageMap,
    PassesAnswer,
    PassRow,
    QueueAnswer,
    QueueEntry,
    TailShare,
)
from telemetry.policy_words import tie_words
from telemetry.recorded_highlights import HighlightWatch

#: Causes of a late token that a smaller chunk makes shorter: prefill of others in, or before, its step.
_CHUNK_CAUSES: Final = ("chunk_overhead", "long_prefill", "mixed_sat_out")

#: Why a step makes no pass although somebody waits: a limit. An empty queue and the turn of decode rows are none.
_LIMITS_WITHOUT_PASS: Final = ("full_flag_set", "rows_exhausted")

#: From which share of the late tokens on a smaller chunk is said to help; below the second it hardly does.
_LIKELY, _HARDLY = 0.5, 0.2

#: From this share on `formats.share` writes no decimals.
_SHOWN_WHOLE: Final = 0.1


def answer_lines(look: Look) -> list[dict[str, Any]]:
    """What the component `answers` draws: id, question, head and rest of the answer, and the selections behind it."""
    return [
        _line("longest", t("Who waits longest, and why?"), *_longest(look.queue)),
        _line("ledger", t("Which ledger binds most often?"), *_binding(look.passes)),
        _line("queueing", t("How much of p99 TTFT is queueing?"), *_queueing(look.breakdown)),
        _line("owner", t("Who owns most pages?"), *_owner(look.pages)),
        _line("chunk", t("Would a smaller chunk help TBT?"), *_chunk(look)),
    ]


def highlight_lines(found: HighlightWatch) -> list[dict[str, Any]]:
    """Two more lines of a recording, which opens at its end, where nobody waits: the moments worth a look."""
    lines = []
    if found.fullest is not None:
        head, rest = (
            t("Step {step}:", step=f.count(found.fullest.step)),
            t("{n} waiting", n=f.count(found.fullest.waiting)),
        )
        lines.append(_line("fullest", t("When did most wait?"), head, rest, {"at": found.fullest.step}))
    if found.slowest is not None:
        slow = found.slowest
        rest = t("to its first token, in step {step}", step=f.count(slow.step))
        go = {"view": "requests", "list": "live", "rid": slow.rid, "at": slow.step}
        head = f"{f.short_rid(slow.rid)}, {f.duration(slow.ttft_s)}"
        lines.append(_line("slowest", t("Which request was slowest?"), head, rest, go))
    return lines


Answer = tuple[str, str, dict[str, Any]]


def _line(name: str, ask: str, head: str, rest: str, go: dict[str, Any]) -> dict[str, Any]:
    return {"id": name, "ask": ask, "head": head, "rest": rest, "go": go}


def _longest(queue: QueueAnswer | None) -> Answer:
    if queue is None or not queue.entries:
        return t("Nobody waits."), "", {"view": "requests", "list": "live"}
    entry = max(queue.entries, key=_waited_s)
    why = f"{f.words(entry.blocker)}: {f.blocker_words(entry.blocker, entry.reason)}".rstrip(": ")
    if entry.blocker == "order" and entry.who_stopped:
        lacks = _test(entry.reason, entry.stopper.need, entry.stopper.have) if entry.stopper is not None else ""
        why += f" ({f.short_rid(entry.who_stopped)}: {f.words(entry.reason)}{'; ' if lacks else ''}{lacks})"
    elif test := _test(entry.reason, entry.need, entry.have):
        why += f" ({test})"
    why = _held_most(entry, why) + _overtaken(entry)
    if entry.state == "retracted" and entry.held_ns:
        why += "; " + t("it came {age} ago and ran meanwhile", age=f.duration(entry.age_s))
    head = f"{f.short_rid(entry.rid)}, {f.duration(_waited_s(entry))}:"
    return head, why, {"view": "requests", "list": "live", "rid": entry.rid}


def _test(reason: str | None, need: float | None, have: float | None) -> str:
    """The two sides of a refusal; "" where nothing was compared."""
    if need is None or have is None:
        return ""
    told = {"need": f.tokens(need), "have": f.tokens(have)}
    return f.counted_test(reason, **told) or t("needs {need} tok, has {have}", **told)


def _waited_s(entry: QueueEntry) -> float:
    """How long it waited; its age where the engine does not say, which for one that was pushed back is more."""
    return sum(entry.held_ns.values()) / 1e9 or entry.age_s


#: From this share on a percentage would say 100.
_ALL: Final = 0.995


def _held_most(entry: QueueEntry, why: str) -> str:
    """`why` it waits at this moment, with what held it most of its wait: these are often two things."""
    waited = sum(entry.held_ns.values())
    if not waited:  # an engine that does not say, or who came just now
        return why
    most, most_ns = max(entry.held_ns.items(), key=lambda item: item[1])
    named = with_order(most, entry.order_ns)
    if most != entry.blocker:
        return t(
            "{blocker} held it for {time} of its wait ({share}); now {why}",
            blocker=named,
            time=f.duration(most_ns / 1e9),
            share=f.share(most_ns, waited),
            why=why,
        )
    held = (
        t("{blocker} held it all that time", blocker=named)
        if most_ns >= _ALL * waited
        else t(
            "{blocker} held it for {time} of its wait ({share})",
            blocker=named,
            time=f.duration(most_ns / 1e9),
            share=f.share(most_ns, waited),
        )
    )
    return f"{why}; {held}"


#: What a policy orders by, as `PassRow.order_key` names it, of the later request: nobody looked at the other yet.
_FIRST: Final = {
    "cached_tokens": mark("cached prefix {other} tok of {rid}"),
    "uncached_tokens": mark("to compute {other} tok of {rid}"),
    "max_new_tokens": mark("max_tokens {other} of {rid}"),
    "priority": mark("priority {other} of {rid}"),
}

#: The same of both.
_COMPARED: Final = {
    "cached_tokens": mark("cached prefix {own} against {other} tok of {rid}"),
    "uncached_tokens": mark("to compute {own} against {other} tok of {rid}"),
    "max_new_tokens": mark("max_tokens {own} against {other} of {rid}"),
    "priority": mark("priority {own} against {other} of {rid}"),
}


#: The same of both where that is one number: then it is not what put the later request first.
_EQUAL: Final = {
    "cached_tokens": mark("cached prefix {own} tok, like {rid}: {tie}"),
    "uncached_tokens": mark("to compute {own} tok, like {rid}: {tie}"),
    "max_new_tokens": mark("max_tokens {own}, like {rid}: {tie}"),
    "priority": mark("priority {own}, like {rid}: {tie}"),
}


def _by_what(last: Overtaker) -> str:
    """What put the later request first, in brackets; "" where no record has it."""
    both = {"own": f.tokens(last.own_key), "other": f.tokens(last.key), "rid": f.short_rid(last.rid)}
    tie = tie_words(last.policy)
    if last.key is not None and last.own_key == last.key and last.order_key in _EQUAL and tie:
        return f" ({t(_EQUAL[last.order_key], tie=tie, **both)})"
    words = (_FIRST if last.own_key is None else _COMPARED).get(last.order_key)
    return "" if words is None else f" ({t(words, **both)})"


def _overtaken(entry: QueueEntry) -> str:
    """How many later ones went first, by which policy and what it orders by, and what bounds it."""
    if not entry.times_passed_over:
        return ""
    passes = tn(entry.times_passed_over, "{n} pass", "{n} passes", n=f.count(entry.times_passed_over))
    if entry.overtaken_by:
        said = tn(
            entry.overtaken_by,
            "{n} later request overtook it in {passes}",
            "{n} later requests overtook it in {passes}",
            n=f.count(entry.overtaken_by),
            passes=passes,
        )
    else:  # prompts that were admitted before it came
        said = t("passed over in {passes} for further pieces of other prompts", passes=passes)
    last = entry.overtaker
    if last is not None and last.policy:
        said = t("{overtaken} by policy {policy}", overtaken=said, policy=last.policy)
        said += _by_what(last)
    said = f"; {said}"
    if last is not None and last.policy == "fcfs":  # what let later ones go first there is a priority
        return said + "; " + t("max_overtakes or starvation_limit_s would change that")
    return said + "; " + t("max_overtakes, starvation_limit_s or schedule_policy=fcfs would change that")


def _binding(passes: PassesAnswer | None) -> Answer:
    """In how many of the steps kept each ledger (or limit) held admission: the most frequent first, all in one unit."""
    go = {"view": "admission", "step": None}
    rows = passes.passes if passes is not None else ()
    made = [row for row in rows if row.end not in {None, "skipped"}]
    ends, kept_out = _causes(rows)
    without = Counter(f.limit_name(reason) for _, reason in kept_out)
    counts = _held_by_limit(rows)
    if not counts:
        if not made:
            return (
                tn(len(rows), "No pass in the last step.", "No pass in the last {n} steps.", n=f.count(len(rows)))
                if rows
                else t("No pass was made yet."),
                "",
                go,
            )
        reached = tn(
            len(made),
            "The last pass reached the end of the queue.",
            "Each of the last {n} passes reached the end of the queue.",
            n=f.count(len(made)),
        )
        return t("None."), reached, go
    (name, held), *others = counts.most_common()
    rest = tn(
        len(rows),
        "it held admission in the last step",
        "it held admission in {n} of the last {all} steps",
        n=f.count(held),
        all=f.count(len(rows)),
    )
    if without[name]:
        rest += tn(
            len(rows),
            " (which made no pass because of it)",
            " ({n} of them made no pass because of it)",
            n=f.count(without[name]),
        )
    if others:
        rest += "; " + ", ".join(f"{other} {f.count(n)}" for other, n in others[:2])
    since = _full_since(rows, name)
    if since is not None:
        rest += "; " + t(
            "step {step} refused somebody for it, and since then the full flag let no pass look at anybody",
            step=f.count(since),
        )
        return f"{name}:", rest, {"view": "admission", "step": since}
    bound = [step for step, reason in (*ends, *kept_out) if f.limit_name(reason) == name]
    # A pass that still stood at an older refusal looked at nobody: the refusal itself is what one wants to see.
    looked = {row.step for row in made if row.candidates}
    last = max((step for step in bound if step in looked), default=max(bound))
    return f"{name}:", rest, {"view": "admission", "step": last}


def _full_since(rows: Sequence[PassRow], name: str) -> int | None:
    """The step that refused for `name` and marked the batch full, where it lies before all of `rows`; else None."""
    steps = [row.full_since for row in rows if row.full_by is not None and f.limit_name(row.full_by) == name]
    since = max((step for step in steps if step is not None), default=None)
    looked = any(row.end not in {None, "skipped"} and row.end_reason != "full_flag_set" for row in rows)
    return None if looked or since is None or since >= rows[0].step else since


def _held_by_limit(rows: Sequence[PassRow]) -> Counter[str]:
    """Steps in which each limit held admission: it ended their pass, or there was none because of it."""
    ends, kept_out = _causes(rows)
    return Counter(f.limit_name(reason) for _, reason in (*ends, *kept_out))


_End = tuple[int, str]


def _causes(rows: Sequence[PassRow]) -> tuple[list[_End], list[_End]]:
    """(step, reason) of each pass that ended before the end of the queue, and of each step that made none for a limit.

    What stopped at the mark "batch full" stopped for the refusal that set it: the reason that ended the pass before.
    Where that one is no longer kept, the mark counts only if there is nothing else to say.
    """
    ends: list[_End] = []
    kept_out: list[_End] = []
    before = ""
    for row in rows:
        reason, is_pass = row.end_reason or "queue_end", row.end != "skipped"
        if row.end is None or (not is_pass and reason not in _LIMITS_WITHOUT_PASS):
            continue
        if reason == "full_flag_set":
            reason = row.full_by or before or reason
        elif is_pass:
            before = "" if reason == "queue_end" else reason
        if reason != "queue_end":
            (ends if is_pass else kept_out).append((row.step, reason))
    known = [[end for end in each if end[1] != "full_flag_set"] for each in (ends, kept_out)]
    return (known[0], known[1]) if any(known) else (ends, kept_out)


def _queueing(breakdown: LatencyBreakdown | None) -> Answer:
    go = {"view": "latency"}
    tail = _tail(breakdown)
    if breakdown is None or tail is None or tail.ttft_ns <= 0:
        return t("Not known before the first response."), "", go
    queued = tail.parts_ns.get("queue", 0)
    measured = {"time": f.duration(tail.ttft_s), "window": plain(breakdown.window_s)}
    if breakdown.firsts_total == 1:
        rest = t("of {time}, the one first token of the last {window}: 1 request has no p99", **measured)
    else:
        rest = t("of {time} at p99 of the last {window} (the slowest {n})", n=f.count(tail.count), **measured)
    blocker, most_ns = max(tail.blockers_ns.items(), key=lambda item: item[1], default=("", 0))
    if most_ns and queued:
        rest += "; " + t("most of the wait: {blocker}", blocker=with_order(blocker, tail.order_ns))
    if tail.waiting_longer:
        rest += "; " + tn(
            tail.waiting_longer,
            "{n} waits longer than that for its first token",
            "{n} wait longer than that for their first token",
            n=f.count(tail.waiting_longer),
        )
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
    size = {"n": f.count(owner.pages), "share": f.share(owner.pages, pages.num_pages)}
    if owner.kind == "request":  # it is its own holder: there is nobody else to name
        rest = t("{n} pages, {share} of the pool; private pages of this request", **size)
    else:
        holders = _holders(owner.holders)
        rest = t("{n} pages, {share} of the pool; a shared prefix, held by {holders}", holders=holders, **size)
    _, owners = page_bytes(pages)
    return f"{f.short_rid(owner.label)}:", rest, {**go, "page": int(np.argmax(owners == 1))}


def _holders(holders: tuple[str, ...]) -> str:
    if not holders:
        return t("nobody now")
    return f.short_rid(holders[0]) if len(holders) == 1 else t("{n} requests", n=f.count(len(holders)))


def _chunk(look: Look) -> Answer:
    breakdown = look.breakdown
    go: dict[str, Any] = {"view": "what_if"}
    if breakdown is None or not breakdown.gaps:
        return t("No second token yet."), "", {"view": "latency"}
    late = sum(breakdown.late.values())
    if not late:
        aim = f.duration(breakdown.gap_objective_s)
        return t("No need:"), t("no token came later than {aim} after the one before", aim=aim), go
    share = sum(breakdown.late.get(cause, 0) for cause in _CHUNK_CAUSES) / late
    # Judged as it is written: "hardly, 20 %" beside "hardly below 20 %" would contradict itself.
    share = round(100 * share) / 100 if share >= _SHOWN_WHOLE else share
    head = t("Likely:") if share >= _LIKELY else t("For some:") if share >= _HARDLY else t("Hardly:")
    rest = tn(
        late,
        "{share} of {n} late token waited for the prefill of others",
        "{share} of {n} late tokens waited for the prefill of others",
        share=f.share(share, 1.0),
        n=f.count(late),
    )
    rest += " " + t(
        "(likely from {likely} on, hardly below {hardly})",
        likely=f.share(_LIKELY, 1.0),
        hardly=f.share(_HARDLY, 1.0),
    )
    half = _half_chunk(look.passes, look.pages.page_size if look.pages is not None else 1)
    if half is not None and share >= _HARDLY:
        rest += "; " + t("try it: What if with chunked_prefill_size={half}", half=half)
        go["whatif"] = f"scheduler.chunked_prefill_size={half}"
    return head, rest, go


def _half_chunk(passes: PassesAnswer | None, page_size: int) -> int | None:
    """Half of the chunk in force, in whole pages; None where chunking is off or nothing is known."""
    limits = [row.limits.rem_chunk for row in passes.passes if row.limits.rem_chunk] if passes is not None else []
    half = int(limits[-1]) // 2 // page_size * page_size if limits else 0
    return half or None
