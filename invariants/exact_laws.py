"""Prices under exact accounting, worked out a second time from events. Owns: INV-BUDGET-03 of an `exact` admission.

Units are tokens; every figure but compute is a multiple of the page size. Promises are in `Shadow.exact_future`.
"""

from __future__ import annotations

from engine.events import AdmissionDecided
from engine.scheduler.decision import LedgerView
from invariants.shadow import Shadow
from invariants.violation import Report


def price(books: Shadow, event: AdmissionDecided, before: LedgerView, after: LedgerView, report: Report) -> None:
    """Compute falls by the extend; KV now by the pages of the piece, in all by what the request needs, once."""
    request = books.requests.get(event.rid)
    if request is None:
        return
    held = books.pages(event.prefix_len) if event.is_continuation else event.prefix_len
    claim = books.pages(event.extend_end) - held
    pinned = before.remaining_current - after.remaining_current - claim
    most = 0 if event.is_continuation else event.prefix_len
    if not 0 <= pinned <= most or pinned % books.page_size:
        report(
            "INV-BUDGET-03",
            f"remaining_current to drop by {claim} + whole pages of the prefix, at most {most}",
            f"a drop of {before.remaining_current - after.remaining_current}",
            rid=event.rid,
        )
    need = 0 if event.is_continuation else books.whole(request) - event.prefix_len
    reserved = 0 if event.is_continuation else books.growth(request)
    chunk = None if before.rem_chunk is None else before.rem_chunk - event.selected_extend
    due = (before.rem_input - event.selected_extend, chunk, before.remaining_total - need - pinned, reserved)
    found = (after.rem_input, after.rem_chunk, after.remaining_total, event.reserved_new_tokens)
    if due != found:
        report(
            "INV-BUDGET-03",
            f"(rem_input, rem_chunk, remaining_total, reserved) {due} after {event.selected_extend} tokens and a need "
            f"of {need}",
            f"{found}",
            rid=event.rid,
        )
    if min(after.remaining_total, after.remaining_current) < 0:
        report("INV-BUDGET-01", "KV ledgers at 0 or above, without exception", f"{found}", rid=event.rid)
    books.pinned_tokens += pinned
