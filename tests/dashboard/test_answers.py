"""The five lines of the first screen: each says what the records say, and leads to where it is shown."""

from __future__ import annotations

from typing import Any

import pytest
from fake_engine import FakeEngine

from dashboard.answers import answer_lines
from dashboard.feed import ASKS, Look
from dashboard.frames import Quantiles, page_facts
from dashboard.pulse import _latency_tile
from dashboard.tables import owners_table
from dashboard.theme import LIGHT
from dashboard.words import CHINESE, ENGLISH, speak
from telemetry import observe as o
from telemetry.observe_latency import TailShare
from telemetry.recorded import RecordedSource, Recording


def head(**more: Any) -> dict[str, Any]:
    return {"engine_id": "e", "observe_seq": 1, "step": 9, "t_ns": 9, "t_wall_s": 1.0, **more}


def line(look: Look, name: str) -> dict[str, Any]:
    return next(each for each in answer_lines(look) if each["id"] == name)


def waiting(rid: str, age_s: float, **more: Any) -> o.QueueEntry:
    return o.QueueEntry(rid=rid, position=0, age_s=age_s, prompt_len=8, **{"blocker": "kv_total", **more})


def queue(*entries: o.QueueEntry) -> o.QueueAnswer:
    return o.QueueAnswer(**head(), entries=entries, total=len(entries), by_blocker={})


def passes(*ends: str | None) -> o.PassesAnswer:
    """A step for each of `ends`; one that begins with "-" made no pass."""
    rows = [
        o.PassRow(
            step=step,
            t_wall_s=1.0,
            kind="mixed",
            end=None if end is None else "skipped" if end.startswith("-") else "budget",
            end_reason=None if end is None else end.removeprefix("-"),
        )
        for step, end in enumerate(ends, 1)
    ]
    return o.PassesAnswer(**head(), passes=tuple(rows))


def breakdown(**more: Any) -> o.LatencyBreakdown:
    empty: dict[str, Any] = {
        "slot_s": 5.0,
        "window_s": 600.0,
        "slots": (),
        "ttft_objective_s": 1.0,
        "gap_objective_s": 0.25,
        "gap_bounds_s": (),
        "gap_counts": (0,),
        "gaps": 0,
        "late": {},
        "firsts": (),
        "firsts_total": 0,
        "deciles": (),
        "tails": (),
    }
    return o.LatencyBreakdown(**head(), **{**empty, **more})


def test_who_waits_longest_is_not_who_stands_first() -> None:
    look = Look(
        queue=queue(waiting("young", 1.0), waiting("old", 12.0, reason="kv_total_exhausted", need=92, have=66.3))
    )
    said = line(look, "longest")
    assert said["head"] == "old, 12.0\u00a0s:"
    assert "future output of running requests" in said["rest"]
    assert said["rest"].endswith("(needs 92 tok, has 66.3)")
    assert said["go"] == {"view": "requests", "list": "live", "rid": "old"}


def test_who_waits_behind_another_is_told_behind_whom() -> None:
    entry = waiting("b", 3.0, blocker="order", reason="chunk_exhausted", who_stopped="a", need=1, have=0)
    assert line(Look(queue=queue(entry)), "longest")["rest"].endswith("(a: chunk exhausted)")


def test_who_waits_behind_another_is_told_what_that_one_lacks() -> None:
    lacks = o.Stopper(rid="a", reason="kv_total_exhausted", blocker="kv_total", need=1200, have=66.3, step=4)
    entry = waiting("b", 3.0, blocker="order", reason="kv_total_exhausted", who_stopped="a", stopper=lacks)
    said = line(Look(queue=queue(entry)), "longest")["rest"]
    assert said.endswith("(a: KV total exhausted; needs 1\u202f200 tok, has 66.3)")


def test_what_held_it_most_is_named_beside_what_holds_it_now() -> None:
    """The blocker of this moment is often the least of a wait."""
    held = {"kv_total": 6_900_000_000, "order": 1_000_000_000, "chunk": 300_000_000}
    said = line(Look(queue=queue(waiting("a", 8.2, blocker="chunk", held_ns=held))), "longest")["rest"]
    assert said.startswith("KV total held it for 6.90\u00a0s of its wait (84\u00a0%); now chunk: the chunk budget")
    same = line(Look(queue=queue(waiting("a", 8.2, held_ns=held))), "longest")["rest"]
    assert same.endswith("; KV total held it for 6.90\u00a0s of its wait (84\u00a0%)")
    alone = line(Look(queue=queue(waiting("a", 8.2, held_ns={"kv_total": 8_200_000_000}))), "longest")["rest"]
    assert alone.endswith("; KV total held it all that time")


def test_who_ran_meanwhile_is_ranked_by_its_wait_and_not_by_its_age() -> None:
    """Else the line says one wait, and the sentences beside it another."""
    back = waiting("back", 60.0, state="retracted", held_ns={"kv_now": 2_000_000_000})
    new = waiting("new", 3.0, held_ns={"kv_total": 3_000_000_000})
    assert line(Look(queue=queue(back, new)), "longest")["head"] == "new, 3.00\u00a0s:"
    said = line(Look(queue=queue(back)), "longest")
    assert said["head"] == "back, 2.00\u00a0s:"
    assert "; it came 60.0\u00a0s ago and ran meanwhile" in said["rest"]


def test_one_first_token_is_no_p99() -> None:
    tail = TailShare(q=0.99, ttft_s=3.2, count=1, ttft_ns=1000, parts_ns={"queue": 850}, blockers_ns={})
    said = line(Look(breakdown=breakdown(tails=(tail,), firsts_total=1)), "queueing")["rest"]
    assert said == "of 3.20\u00a0s, the one first token of the last 10\u00a0min: 1 request has no p99"
    tile = _latency_tile("ttft", Quantiles(3.2, 3.2, 1), "last 60 s", [], goal=None)
    assert (tile["values"], tile["sub"]) == ([["", "3.20", "s"]], "last 60 s · 1 request")
    assert len(_latency_tile("ttft", Quantiles(3.2, 3.2, 2), "last 60 s", [], goal=None)["values"]) == 2


def test_a_request_that_owns_its_pages_is_not_said_to_be_held_by_itself(engine: FakeEngine) -> None:
    pages = engine.pages()
    one = pages.owners[0].model_copy(update={"kind": "request", "label": "r7", "holders": ("r7",)})
    said = line(Look(pages=pages.model_copy(update={"owners": (one, *pages.owners[1:])})), "owner")
    assert said["head"] == "r7:"
    assert said["rest"].endswith("of the pool; private pages of this request")
    shared = one.model_copy(update={"kind": "node", "label": "node 3", "holders": ()})
    said = line(Look(pages=pages.model_copy(update={"owners": (shared, *pages.owners[1:])})), "owner")
    assert said["rest"].endswith("; a shared prefix, held by nobody now")
    (row, *_) = owners_table((one,), 100, 1, LIGHT).rows
    assert row["cells"][5][4] == "by itself"


def test_less_than_a_page_of_a_budget_is_not_called_spent() -> None:
    short = waiting("a", 1.0, blocker="chunk", reason="chunk_below_page", need=16, have=7)
    said = line(Look(queue=queue(short)), "longest")["rest"]
    assert said == "chunk: less than one page is left of the chunk budget of a step (needs 16 tok, has 7)"
    spent = waiting("a", 1.0, blocker="chunk", reason="chunk_exhausted")
    assert line(Look(queue=queue(spent)), "longest")["rest"] == "chunk: the chunk budget of a step is spent"


def test_behind_others_the_limit_that_held_those_is_named() -> None:
    held, ends = {"order": 6_000_000_000, "chunk": 1}, {"kv_total_exhausted": 6_000_000_000}
    entry = waiting("a", 6.0, blocker="chunk", held_ns=held, order_ns=ends)
    said = line(Look(queue=queue(entry)), "longest")["rest"]
    assert said.startswith("order (passes ended by KV total exhausted 100\u00a0%) held it for 6.00")


def test_the_ledger_that_ends_most_passes_is_named_with_how_often() -> None:
    look = Look(passes=passes("chunk_exhausted", "queue_end", "kv_total_exhausted", "kv_total_exhausted", None))
    said = line(look, "ledger")
    assert said["head"] == "KV total:"
    assert said["rest"] == "it held admission in 2 of the last 5 steps; chunk 1"
    assert said["go"] == {"view": "admission", "step": 4}


def test_the_answer_leads_to_the_refusal_not_to_a_pass_that_looked_at_nobody() -> None:
    told = passes("kv_total_exhausted", "-full_flag_set", "-full_flag_set")
    refused = o.DecisionRow.model_construct(rid="a", reason="kv_total_exhausted")
    rows = (told.passes[0].model_copy(update={"candidates": (refused,)}), *told.passes[1:])
    said = line(Look(passes=o.PassesAnswer(**head(), passes=rows)), "ledger")
    assert said["rest"] == "it held admission in 3 of the last 3 steps (2 of them made no pass because of it)"
    assert said["go"] == {"view": "admission", "step": 1}


def test_a_batch_that_is_still_full_counts_for_what_filled_it() -> None:
    look = Look(
        passes=passes("-full_flag_set", "kv_now_exhausted", "-full_flag_set", "-full_flag_set", "chunk_exhausted")
    )
    said = line(look, "ledger")
    assert said["head"] == "KV current:"
    assert said["rest"] == "it held admission in 3 of the last 5 steps (2 of them made no pass because of it); chunk 1"
    assert line(Look(passes=passes("-full_flag_set")), "ledger")["head"] == "full flag set:"


def test_a_full_flag_older_than_the_rows_is_told_by_the_refusal_that_set_it() -> None:
    """The flag lets no pass begin, so that its cause soon leaves the steps shown: the rows know it still."""
    told = passes("-full_flag_set", "-full_flag_set")
    older = {"full_by": "kv_total_exhausted", "full_since": 0}
    rows = tuple(row.model_copy(update=older) for row in told.passes)
    said = line(Look(passes=o.PassesAnswer(**head(), passes=rows)), "ledger")
    assert said["head"] == "KV total:"
    assert said["rest"] == (
        "it held admission in 2 of the last 2 steps (2 of them made no pass because of it); "
        "step 0 refused somebody for it, and since then the full flag let no pass look at anybody"
    )
    assert said["go"] == {"view": "admission", "step": 0}


def test_steps_of_an_empty_queue_are_no_passes_and_rows_name_their_setting() -> None:
    idle = line(Look(passes=passes("-queue_end", "-queue_end")), "ledger")
    assert idle["head"] == "No pass in the last 2 steps."
    said = line(Look(passes=passes("queue_end", "-queue_end", "-rows_exhausted", "-chunk_exhausted")), "ledger")
    assert said["head"] == "rows (max_running_requests):"
    assert said["rest"] == "it held admission in 1 of the last 4 steps (1 of them made no pass because of it)"


def test_queueing_is_told_of_the_slowest_hundredth() -> None:
    tails = (
        TailShare(q=0.0, ttft_s=0.1, count=100, ttft_ns=100, parts_ns={"queue": 1}, blockers_ns={}),
        TailShare(
            q=0.99,
            ttft_s=3.2,
            count=4,
            ttft_ns=1000,
            parts_ns={"queue": 850, "commit": 150},
            blockers_ns={"kv_total": 600, "order": 250},
        ),
    )
    said = line(Look(breakdown=breakdown(tails=tails)), "queueing")
    assert said["head"] == "85\u00a0%"
    told = "of 3.20\u00a0s at p99 of the last 10\u00a0min (the slowest 4); most of the wait: KV total"
    assert said["rest"] == told
    beyond = (tails[0], tails[1].model_copy(update={"waiting_longer": 12}))
    said = line(Look(breakdown=breakdown(tails=beyond)), "queueing")
    assert said["rest"] == f"{told}; 12 wait longer than that for their first token"


def overtaken(**last: Any) -> o.QueueEntry:
    by = o.Overtaker(**{"rid": "b", "step": 7, "policy": "lpm", **last})
    return waiting("a", 30.0, times_passed_over=4, overtaken_by=9, overtaker=by)


def test_who_was_overtaken_is_told_by_how_many_under_which_rule_and_what_bounds_it() -> None:
    said = line(Look(queue=queue(overtaken(order_key="cached_tokens", key=512, own_key=0))), "longest")["rest"]
    assert "; 9 later requests overtook it in 4 passes by policy lpm (cached prefix 0 against 512 tok of b)" in said
    assert said.endswith("; max_overtakes, starvation_limit_s or schedule_policy=fcfs would change that")
    unseen = overtaken(order_key="cached_tokens", key=512)
    assert "policy lpm (cached prefix 512 tok of b); max" in line(Look(queue=queue(unseen)), "longest")["rest"]
    # A policy without a number to compare is named alone, and where no record has it, nobody is.
    assert "in 4 passes by policy random; max" in line(Look(queue=queue(overtaken(policy="random"))), "longest")["rest"]
    assert "in 4 passes; max" in line(Look(queue=queue(overtaken(policy=""))), "longest")["rest"]
    assert "overtook" not in line(Look(queue=queue(waiting("a", 30.0))), "longest")["rest"]
    pieces = overtaken().model_copy(update={"overtaken_by": 0})
    assert "; passed over in 4 passes for further pieces of" in line(Look(queue=queue(pieces)), "longest")["rest"]


def test_one_is_told_in_the_singular() -> None:
    once = overtaken().model_copy(update={"times_passed_over": 1, "overtaken_by": 1})
    assert "; 1 later request overtook it in 1 pass by policy lpm" in line(Look(queue=queue(once)), "longest")["rest"]
    speak(CHINESE)
    try:
        said = line(Look(queue=queue(once)), "longest")["rest"]
    finally:
        speak(ENGLISH)
    assert "1 轮中有 1 个后到的请求越过了它，所用策略为 lpm" in said
    assert line(Look(passes=passes("-queue_end")), "ledger")["head"] == "No pass in the last step."
    assert line(Look(passes=passes("queue_end")), "ledger")["rest"] == "The last pass reached the end of the queue."
    held = line(Look(passes=passes("-rows_exhausted")), "ledger")["rest"]
    assert held == "it held admission in the last step (which made no pass because of it)"


def test_where_both_numbers_are_one_the_tie_break_is_told() -> None:
    entry = overtaken(order_key="cached_tokens", key=96, own_key=96)
    said = line(Look(queue=queue(entry)), "longest")["rest"]
    assert "by policy lpm (cached prefix 96 tok, like b: between equals, who stood first in the last pass" in said


def test_fcfs_is_no_cure_where_it_is_the_policy() -> None:
    """There it is a priority that lets later ones go first."""
    entry = overtaken(policy="fcfs", order_key="priority", key=5, own_key=0)
    said = line(Look(queue=queue(entry)), "longest")["rest"]
    assert "by policy fcfs (priority 0 against 5 of b)" in said
    assert said.endswith("; max_overtakes or starvation_limit_s would change that")


def test_half_the_chunk_in_force_is_what_the_link_to_what_if_tries(engine: FakeEngine) -> None:
    limited = o.PassRow(step=1, t_wall_s=1.0, kind="mixed", end="budget", limits=o.Ledgers(rem_chunk=200.0))
    look = Look(
        breakdown=breakdown(gaps=100, late={"long_prefill": 9, "kernel": 1}),
        passes=o.PassesAnswer(**head(), passes=(limited,)),
        pages=engine.pages(),
    )
    said = line(look, "chunk")
    assert engine.pages().page_size == 16
    assert said["go"] == {"view": "what_if", "whatif": "scheduler.chunked_prefill_size=96"}, "in whole pages"
    assert said["rest"].endswith("; try it: What if with chunked_prefill_size=96")
    # Nothing is tried where it would hardly help, or where chunking is off.
    hardly = Look(breakdown=breakdown(gaps=100, late={"kernel": 9}), passes=look.passes, pages=look.pages)
    assert line(hardly, "chunk")["go"] == {"view": "what_if"}
    unlimited = limited.model_copy(update={"limits": o.Ledgers()})
    off = Look(breakdown=look.breakdown, passes=o.PassesAnswer(**head(), passes=(unlimited,)), pages=look.pages)
    assert line(off, "chunk")["go"] == {"view": "what_if"}


@pytest.mark.parametrize(
    ("late", "word"),
    [
        ({"long_prefill": 6, "mixed_sat_out": 2, "kernel": 2}, "Likely:"),
        ({"long_prefill": 3, "kernel": 7}, "For some:"),
        ({"kernel": 9, "queue_position": 1}, "Hardly:"),
        # Judged as it is written: 19.6 % is said as 20 %.
        ({"long_prefill": 196, "kernel": 804}, "For some:"),
        ({"long_prefill": 194, "kernel": 806}, "Hardly:"),
        ({}, "No need:"),
    ],
)
def test_a_smaller_chunk_is_judged_by_the_causes_of_late_tokens(late: dict[str, int], word: str) -> None:
    assert line(Look(breakdown=breakdown(gaps=100, late=late)), "chunk")["head"] == word


def test_the_largest_owner_leads_to_one_of_its_pages(engine: FakeEngine) -> None:
    pages = engine.pages()
    said = line(Look(pages=pages), "owner")
    facts = page_facts(pages, said["go"]["page"])
    assert facts is not None
    assert facts.owner == pages.owners[0]
    assert said["rest"].startswith(f"{pages.owners[0].pages} pages")


def test_nothing_is_guessed_where_nothing_is_known() -> None:
    for look in (Look(), Look(queue=queue(), passes=passes(), breakdown=breakdown())):
        assert [each["rest"] for each in answer_lines(look)] == [""] * 5


def test_every_line_is_answered_by_a_recorded_run() -> None:
    from tests.telemetry.recorded_run import JOURNAL

    recording = Recording(JOURNAL, in_background=False)
    source = RecordedSource(recording)
    source.seek(recording.at_step(300))
    look = Look(status=source.status(), **{part: ask(source) for part, ask in ASKS.items()})
    assert all(each["head"] for each in answer_lines(look))
    assert line(look, "queueing")["head"].endswith("%")
