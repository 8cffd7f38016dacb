"""Laws of the ledgers. Owns: INV-BUDGET-01 to 04 — charges, overdrafts, decode rows, promises. Units are tokens."""

from __future__ import annotations

import math
from typing import Final

from engine.events import AdmissionDecided, StepPlanned
from engine.scheduler.decision import ADMITTED, Guard, LedgerView, Overdraft
from invariants import exact_laws
from invariants.members import DECODE_STEP, IDLE_STEP
from invariants.shadow import Shadow
from invariants.violation import Report

#: Fractions come from the ratio; sums of them are compared to this many tokens.
TOLERANCE: Final = 1e-6


def _before(event: AdmissionDecided) -> LedgerView:
    return LedgerView(
        event.rem_input_before, event.rem_chunk_before, event.remaining_total_before, event.remaining_current_before
    )


def _after(event: AdmissionDecided) -> LedgerView:
    return LedgerView(
        event.rem_input_after, event.rem_chunk_after, event.remaining_total_after, event.remaining_current_after
    )


def same(left: LedgerView, right: LedgerView) -> bool:
    """Equal, fractions to the tolerance."""
    return (
        left.rem_input == right.rem_input
        and left.rem_chunk == right.rem_chunk
        and left.remaining_current == right.remaining_current
        and abs(left.remaining_total - right.remaining_total) <= TOLERANCE
    )


def show(view: LedgerView) -> str:
    return (
        f"rem_input {view.rem_input}, rem_chunk {view.rem_chunk}, remaining_total {view.remaining_total:g}, "
        f"remaining_current {view.remaining_current}"
    )


def on_decision(books: Shadow, event: AdmissionDecided, report: Report) -> None:
    """The chain of before and after, the price of an admission, overdrafts."""
    before, after = _before(event), _after(event)
    if event.order != len(books.decisions):
        report("INV-BUDGET-03", f"order {len(books.decisions)}", f"order {event.order}", rid=event.rid)
    left, books.left = books.left, after
    if left is not None and left != before and not _follows(books, left, before):
        last = books.decisions[-1]
        report(
            "INV-BUDGET-03",
            f"before = what {last.rid} left: {show(left)}",
            show(before),
            rid=event.rid,
            seqs=(last.seq,),
        )
    if event.reason not in ADMITTED:
        if not same(before, after):
            report("INV-BUDGET-03", f"a refusal that costs nothing: {show(before)}", show(after), rid=event.rid)
        return
    if books.reference:
        _price(books, event, before, after, report)
    else:
        exact_laws.price(books, event, before, after, report)
    if after.rem_input < 0 or (after.rem_chunk or 0) < 0 or min(after.remaining_current, after.remaining_total) < 0:
        _overdraft(books, event, after, report)


def _follows(books: Shadow, left: LedgerView, before: LedgerView) -> bool:
    """`before` is what was left, or more KV when a preemption gave some back in between."""
    if same(left, before):
        return True
    current = before.remaining_current - left.remaining_current
    total = before.remaining_total - left.remaining_total
    if not books.config.scheduler.enable_priority_preemption or current < 0 or total < current - TOLERANCE:
        return False
    books.gained_current += current
    books.gained_total += total
    return (before.rem_input, before.rem_chunk) == (left.rem_input, left.rem_chunk)


def _preempted(books: Shadow, event: StepPlanned, report: Report) -> None:
    """What preemptions gave back within the pass is what their requests really held and were promised.

    Exact accounting: a victim that would have ridden along also gives back the page of its next token, if it needs one.
    """
    claimed = books.preempted_claim if event.mixed_rows else 0
    held = books.gained_current - claimed
    promised = books.gained_total - held
    if abs(promised - books.preempted_growth) > TOLERANCE:
        report(
            "INV-BUDGET-04",
            f"{books.preempted_growth:g} promised tokens given back by {list(event.preempted)[:8]}",
            f"{promised:g}",
        )
    page = books.page_size
    if books.pinned_tokens - held != (books.locked_pages - books.released_pages) * page:
        report(
            "INV-BUDGET-03",
            f"{books.locked_pages} pages locked and {books.released_pages} given back, x {page} tokens",
            f"{books.pinned_tokens} tokens charged, {held} given back",
        )


def _price(books: Shadow, event: AdmissionDecided, before: LedgerView, after: LedgerView, report: Report) -> None:
    """Rule book 4g: every ledger drops by the rounded extend, the KV ledgers also by a page and the pinned prefix."""
    page = books.page_size
    charge = -(-event.selected_extend // page) * page
    chunk = None if before.rem_chunk is None else before.rem_chunk - charge
    pinned = before.remaining_current - after.remaining_current - charge - page
    request = books.requests.get(event.rid)
    reserved = 0
    if not event.is_chunked and request is not None:
        reserved = min(request.max_new, books.clip)
    total = before.remaining_total - charge - page - pinned - reserved
    most = 0 if event.is_continuation else event.prefix_len
    if not 0 <= pinned <= most or pinned % page:
        report(
            "INV-BUDGET-03",
            f"remaining_current to drop by {charge} + {page} + whole pages of the prefix, at most {most}",
            f"a drop of {before.remaining_current - after.remaining_current}",
            rid=event.rid,
        )
    due = LedgerView(before.rem_input - charge, chunk, total, after.remaining_current)
    if due != after and not same(due, after):
        report(
            "INV-BUDGET-03",
            f"after a charge of {charge} and {reserved} reserved: {show(due)}",
            show(after),
            rid=event.rid,
        )
    if event.reserved_new_tokens != reserved and request is not None:
        report("INV-BUDGET-03", f"reserved_new_tokens {reserved}", f"{event.reserved_new_tokens}", rid=event.rid)
    books.pinned_tokens += pinned


def _overdraft(books: Shadow, event: AdmissionDecided, after: LedgerView, report: Report) -> None:
    """A ledger below zero names why, and the reason is one that this configuration allows."""
    named = event.overdrafts
    if after.rem_input < 0:
        request = books.requests.get(event.rid)
        # Rule book 4f bounds the requests after the first; the walk of known lengths without a tree replaces it.
        walks = request is not None and request.ignore_eos and not books.config.cache.enable_radix
        first = walks or not any(d.reason in ADMITTED for d in books.decisions)
        due = Overdraft.INPUT_BY_CHUNK if books.chunking else Overdraft.FIRST_UNCHUNKED
        if due not in named or (due is Overdraft.FIRST_UNCHUNKED and not first):
            report(
                "INV-BUDGET-01",
                f"rem_input at 0 or above, or overdraft {due}",
                f"{after.rem_input}, overdrafts {list(named)}, may be the one to exceed it {first}",
                rid=event.rid,
            )
    if after.rem_chunk is not None and after.rem_chunk < 0 and event.rem_chunk_before is not None:
        fits = event.selected_extend <= event.rem_chunk_before
        if not fits or Overdraft.CHUNK_PAGE_ROUNDING not in named:
            report(
                "INV-BUDGET-01",
                f"an extend within rem_chunk {event.rem_chunk_before}, and the overdraft "
                f"{Overdraft.CHUNK_PAGE_ROUNDING} when rounding passes it",
                f"extend {event.selected_extend}, rem_chunk {after.rem_chunk}, overdrafts {list(named)}",
                rid=event.rid,
            )
    if after.remaining_current < 0 or after.remaining_total < -TOLERANCE:
        allowed = {Overdraft.KV_ROUNDING} | ({Overdraft.CONTINUATION} if event.is_continuation else set())
        if allowed.isdisjoint(named):
            report(
                "INV-BUDGET-01",
                f"KV ledgers at 0 or above, or an overdraft of {sorted(allowed)}",
                f"{show(after)}, overdrafts {list(named)}",
                rid=event.rid,
            )


def _rows_sit_out(books: Shadow, event: StepPlanned, mixed: int, chunk: int | None) -> bool:
    """Whether `mixed` decode rows may be left out of the ledgers: beside them no piece of a prompt fits the slice."""
    scheduler = books.config.scheduler
    if not mixed or chunk is None or event.mixed_rows or not scheduler.guards:
        return False
    if event.prefills and Guard.MIXED_SAT_OUT not in event.guards:
        return False
    align = scheduler.truncation_align_size
    least = 1 if books.reference and align is None else math.lcm(books.page_size, align or 1)
    if books.view.continuation is None and least == 1:
        return False
    left = chunk if books.reference else min(chunk, scheduler.max_prefill_tokens)
    return left - mixed < least


def on_plan(books: Shadow, event: StepPlanned, report: Report) -> None:
    """Opening and closing ledgers of the pass against the second books."""
    view, scheduler = books.view, books.config.scheduler
    growth = view.eos_growth + view.plain_growth * view.ratio if books.reference else view.exact_promise
    if abs(event.promised_tokens - growth) > TOLERANCE:
        report("INV-BUDGET-04", f"{growth:g} promised to {view.running} running requests", f"{event.promised_tokens:g}")
    opened, closed = event.budget_open, event.budget_close
    if opened is None or closed is None:
        if books.decisions:
            report("INV-BUDGET-03", "ledgers of the pass that decided", "none", seqs=(books.decisions[0].seq,))
        return
    mixed = view.running if books.mixing else 0
    limit = scheduler.chunked_prefill_size
    if event.chunk_size is not None and limit is not None and books.page_size <= event.chunk_size <= limit:
        limit = event.chunk_size
    if _rows_sit_out(books, event, mixed, limit):
        mixed = 0
    chunk = None if limit is None else limit - mixed
    available = (view.free + view.evictable) * books.page_size
    riding = mixed if books.reference or not mixed else view.exact_claim
    if books.is_foreign:
        available = opened.remaining_current + riding
    current = available - riding
    found = (opened.rem_input, opened.rem_chunk, opened.remaining_current)
    if (scheduler.max_prefill_tokens - mixed, chunk, current) != found or event.mixed_rows != mixed:
        report(
            "INV-BUDGET-02",
            f"limits less {mixed} decode rows: rem_input {scheduler.max_prefill_tokens - mixed}, rem_chunk {chunk}, "
            f"remaining_current {current}",
            f"{show(opened)}, mixed_rows {event.mixed_rows}",
        )
    # Exact growth holds the page that a decode row claims now; the reference counts its token beside it.
    whole = current if books.reference else available
    if abs(opened.remaining_total - (whole - growth)) > TOLERANCE:
        report(
            "INV-BUDGET-04",
            f"remaining_total {whole} - {growth:g} of growth of {view.running} running requests",
            f"{opened.remaining_total:g}",
        )
    if books.decisions:
        first, last = books.decisions[0], books.decisions[-1]
        if not _follows(books, opened, _before(first)):
            report(
                "INV-BUDGET-03",
                f"the first decision starts from {show(opened)}",
                show(_before(first)),
                rid=first.rid,
                seqs=(first.seq,),
            )
        if not event.claim_failed and not same(closed, _after(last)):
            report(
                "INV-BUDGET-03",
                f"the pass closes with {show(_after(last))}",
                show(closed),
                rid=last.rid,
                seqs=(last.seq,),
            )
    if event.claim_failed or books.is_foreign:
        return
    if event.preempted:
        _preempted(books, event, report)
    elif books.pinned_tokens != books.locked_pages * books.page_size:
        report(
            "INV-BUDGET-03",
            f"{books.locked_pages} pages locked for prefixes, x {books.page_size} tokens charged",
            f"{books.pinned_tokens} tokens charged for them",
        )


def next_ratio(books: Shadow, event: StepPlanned) -> float:
    """new_token_ratio after this step, rule book section 6."""
    if event.kind is IDLE_STEP:
        return books.ratio if books.requests else books.first_ratio
    if event.retractions:
        stay = list(books.running.values())
        outputs = sum(request.outputs for request in stay)
        promised = sum(request.max_new for request in stay)
        return min(1.0, (outputs + 20 * len(stay)) / (promised + 1))
    if event.kind is DECODE_STEP:
        return max(books.ratio - books.ratio_decay, books.least_ratio)
    return books.ratio
