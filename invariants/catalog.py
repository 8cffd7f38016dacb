"""The catalogue. Owns: every law of the engine, with its sentence, tier, group and reach.

`docs/reference/invariants.md` is generated from here, `violations_total{id}` takes its label values from here, and a
test fails when a law has no sabotage that trips it.
"""

from __future__ import annotations

from typing import Final

from invariants.catalog_watch import WATCH_LAWS
from invariants.law import ALWAYS as _ALWAYS
from invariants.law import Group, Law

CATALOG: Final[tuple[Law, ...]] = (
    Law(
        "INV-CHUNK-01",
        "An admitted request computes at least one token.",
        1,
        Group.CHUNK,
        "O(1) per decision",
        "always; with guards off a continuation may be given 0 or less, as the reference does",
        "An admitting decision or a prefill row with an extend of 0 or less: a cut rounded down to nothing, "
        "or a budget that opened at or below zero.",
        properties=("CHK-BUDGET",),
    ),
    Law(
        "INV-CHUNK-02",
        "A piece of a prompt ends at prefix_len + selected_extend, and the next piece starts there.",
        1,
        Group.CHUNK,
        "O(1) per decision and prefill row",
        _ALWAYS,
        "A gap or an overlap between two pieces, a last piece that does not reach the end, or a plan row that "
        "differs from its decision.",
        properties=("CHK-CURSOR",),
    ),
    Law(
        "INV-CHUNK-03",
        "A middle piece adds no output token; the last piece adds exactly one.",
        1,
        Group.CHUNK,
        "O(1) per sampled row",
        _ALWAYS,
        "A row that is sampled before its prompt is complete, or a finished prompt without its token.",
        properties=("CHK-CURSOR",),
    ),
    Law(
        "INV-CHUNK-04",
        "At most one request is partly prefilled, and it is considered first.",
        1,
        Group.CHUNK,
        "O(1) per decision and step",
        _ALWAYS,
        "A second cut while a continuation exists, or a pass that looks at someone else before the continuation.",
        properties=("CHK-CURSOR",),
    ),
    Law(
        "INV-CHUNK-05",
        "The first cut of a prompt ends on a page boundary.",
        1,
        Group.CHUNK,
        "O(1) per decision",
        "under exact accounting for every cut; under reference accounting cuts with the radix tree off and ignore_eos "
        "are not rounded, nor is a continuation's",
        "An absolute end that is not a multiple of the page size.",
        properties=("CHK-CURSOR",),
    ),
    Law(
        "INV-BUDGET-01",
        "Page-rounded charges of a pass stay within every ledger, except by a named overdraft.",
        1,
        Group.BUDGET,
        "O(1) per decision",
        "reference accounting: first_unchunked (chunking off; first of the batch, or ignore_eos with the tree off), "
        "input_by_chunk (chunking on), chunk_page_rounding (by less than a page), kv_rounding, continuation; exact "
        "accounting: first_unchunked alone",
        "A ledger below zero after an admission whose record names no overdraft that this configuration allows.",
        properties=("CHK-BUDGET",),
    ),
    Law(
        "INV-BUDGET-02",
        "Decode rows that may ride along are charged once to each ledger, before any prefill, and once only.",
        1,
        Group.BUDGET,
        "O(1) per pass",
        _ALWAYS,
        "Opening ledgers that differ from limits minus running rows: rows forgotten, or charged twice.",
        properties=("CHK-BUDGET",),
    ),
    Law(
        "INV-BUDGET-03",
        "Each decision starts from what the previous one left; an admission takes exactly its page-rounded cost, "
        "a refusal takes nothing.",
        1,
        Group.BUDGET,
        "O(1) per decision",
        "always, with the price of the accounting in force; a preemption may give KV back in between",
        "A broken chain of before and after, a double charge, or a refusal that cost something.",
        properties=("CHK-BUDGET", "CHK-PROMISE"),
    ),
    Law(
        "INV-BUDGET-04",
        "The promise to running requests covers the growth of every one of them.",
        1,
        Group.BUDGET,
        "O(1) per pass, O(1) per token",
        "reference accounting: min(max_new_tokens - outputs, clip) x new_token_ratio, ratio 1 for ignore_eos; "
        "exact accounting: pages(computed + left x ratio) - pages held, and the rest of the half-prefilled request",
        "remaining_total that opens above what the second books leave: a running request was not counted.",
        properties=("CHK-PROMISE",),
    ),
    Law(
        "INV-LOCK-01",
        "A waiting or refused request holds no lock, row, page or place in the plan.",
        1,
        Group.LOCK,
        "O(1) per refusal and per return to the queue",
        _ALWAYS,
        "A temporary lock that was not taken back, a leaked row, or a refused request that runs.",
        properties=("CHK-OWN", "CHK-LOCK"),
    ),
    Law(
        "INV-LOCK-02",
        "A request has a row exactly while it is in prefill or decode, and a row has one request.",
        2,
        Group.LOCK,
        "O(1) per transition",
        _ALWAYS,
        "A running request without a row, two requests on one row, or a row outside the configured range.",
        properties=("CHK-OWN", "CHK-FLAG"),
    ),
    Law(
        "INV-LOCK-03",
        "The lock count of a node is the number of requests that hold it, and is never negative.",
        2,
        Group.LOCK,
        "O(1) per lock change; the audit is O(nodes + leases x depth)",
        _ALWAYS,
        "A lock taken twice, released twice, or not carried over to the new half of a split node.",
        properties=("CHK-LOCK",),
    ),
    Law(
        "INV-PAGE-01",
        "The four page counts sum to the pool and, like the evictions of a step, equal a recount.",
        2,
        Group.PAGE,
        "O(1) per step; the audit is O(pages)",
        _ALWAYS,
        "Counters that drift from the moves: a page lost, or counted twice.",
        properties=("CHK-OWN", "CHK-GAUGE"),
    ),
    Law(
        "INV-PAGE-02",
        "Every page has exactly one owner and changes hands only by a legal move from where it is.",
        2,
        Group.PAGE,
        "O(pages moved); the audit is O(pages + page tables)",
        _ALWAYS,
        "A move that the table of states does not have, from a state or an owner that the page is not in, or (audit) "
        "a page in two places although the sums balance.",
        properties=("CHK-OWN",),
    ),
    Law(
        "INV-PAGE-03",
        "Nothing locked is evicted, and no page is both claimed and evictable within one commit.",
        1,
        Group.PAGE,
        "O(pages evicted)",
        _ALWAYS,
        "An eviction that takes a prefix someone runs on, or one that takes what the same commit just claimed.",
        properties=("CHK-LOCK", "CHK-PROMISE"),
    ),
    Law(
        "INV-PAGE-04",
        "The tree gets whole pages of tokens whose step was applied, and no page that a step in flight still writes.",
        1,
        Group.PAGE,
        "O(1) per insertion",
        "where steps overlap (executor.overlap); elsewhere nothing is in flight when the tree gets pages",
        "A prefix that others find before it was computed, or that stays although its step failed.",
        properties=("CHK-OWN", "CHK-CURSOR"),
    ),
    Law(
        "INV-STEP-01",
        "Every planned step is applied once, in order, and its outcome has exactly the rows that were to be sampled.",
        1,
        Group.STEP,
        "O(rows)",
        "always; a failed step has no rows. Where steps overlap one more step may be planned before an outcome, whose "
        "rows are then those of the requests that have not ended since",
        "A step applied twice or never, an outcome with other rows than the plan, or a request that ended while its "
        "step was still under way.",
        properties=("CHK-CURSOR", "CHK-EXIT"),
    ),
    Law(
        "INV-STEP-02",
        "Event numbers are contiguous; steps and time never fall.",
        1,
        Group.STEP,
        "O(1) per event",
        "always; where steps overlap the events of an outcome have the number of its step, behind the next plan",
        "A lost or repeated event, or a clock that went back.",
        properties=("CHK-TIME",),
    ),
    Law(
        "INV-STEP-03",
        "A step decodes every running request or none, and never one that it pushed back to the queue.",
        1,
        Group.STEP,
        "O(rows)",
        "always; where steps overlap, who has his last token under way runs no more",
        "A running request that lost its turn, or a victim that is also scheduled.",
        properties=("CHK-VICTIM", "CHK-BYPASS"),
    ),
    Law(
        "INV-STEP-04",
        "Reported numbers of waiting and running requests, and of tokens waiting, equal a recount.",
        2,
        Group.STEP,
        "O(1) per step",
        _ALWAYS,
        "A gauge that drifted, or a request that left a list without an event.",
        properties=("CHK-GAUGE", "CHK-FLAG"),
    ),
    Law(
        "INV-STEP-05",
        "A request changes state only along the table of transitions, from the state it is in.",
        1,
        Group.STEP,
        "O(1) per transition",
        "always; where steps overlap a token that was under way may end a request that was pushed back meanwhile",
        "A transition that the table does not have, or from another state than the last event left.",
        properties=("CHK-VICTIM", "CHK-EXIT"),
    ),
    Law(
        "INV-EXIT-01",
        "A request has exactly one end, and afterwards owns nothing.",
        1,
        Group.STEP,
        "O(1) per end",
        _ALWAYS,
        "A second end, an end that never came although the last token or an abort did, or a lock, row or page kept.",
        properties=("CHK-EXIT",),
    ),
    Law(
        "INV-PROG-01",
        "While a request is unfinished, at most K steps in a row do no work.",
        1,
        Group.STEP,
        "O(1) per step",
        "always; K is given to the checker, 64 by default",
        "Idle steps with a queue that is not empty: a latched flag, a request that can never fit, a lost wake-up.",
        properties=("CHK-PROGRESS",),
    ),
    Law(
        "INV-INDEX-01",
        "A waiting request's place in the order is the one that a full match would give it.",
        2,
        Group.INDEX,
        "O(sample x depth) per audit, with a sample of 64: 0.2 to 0.3 ms at 8,192 waiting prompts of 1,024 tokens",
        "under lpm, shortest-prefill-first and dfs-weight with incremental_order, for requests that nothing happened "
        "to since the last ordering; each audit takes the next stretch of the queue, so a queue that stands is covered "
        "after waiting / 63 audits",
        "The index has a match end elsewhere than a walk of all keys does (a prefix that became cached, or an "
        "eviction, that it was not told of), the order went by another number of cached tokens, or two neighbours "
        "stand against the policy's key.",
        properties=("CHK-FLAG", "CHK-BYPASS"),
    ),
    *WATCH_LAWS,
)

LAWS: Final[dict[str, Law]] = {law.id: law for law in CATALOG}

__all__ = ["CATALOG", "LAWS", "Group", "Law"]
