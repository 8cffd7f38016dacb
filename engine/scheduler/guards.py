"""Guards. Owns: what each guard is, as data, and the page made of it: docs/reference/guards.md.

`python -m engine.scheduler.guards` rewrites the page; a test fails when it is not current. A guard acts where the
reference would do what no engine should, and nowhere else: a legal decision of the reference stays as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from engine.scheduler.decision import Guard

PAGE: Final = Path(__file__).resolve().parents[2] / "docs" / "reference" / "guards.md"


@dataclass(frozen=True, slots=True)
class GuardEntry:
    """One guard.

    vectors  ids of recorded cases that hold what this guard forbids, and are played with guards off
    """

    guard: Guard
    when: str
    reference: str
    here: str
    worked: str
    vectors: tuple[str, ...] = ()


GUARDS: Final[tuple[GuardEntry, ...]] = (
    GuardEntry(
        Guard.CONTINUATION_PARKED,
        "A half-prefilled prompt comes up and its piece would be 0 tokens or less, or would claim pages that are not "
        "there.",
        "Sends the piece to the model: its limit falls back to rem_chunk when memory says no, and rem_chunk itself may "
        "be 0 or negative. A claim that misses ends the process.",
        "The continuation keeps its place and its memory and waits one step: `parked_by_guard` with need and have. "
        "Nobody is admitted in its stead; the running requests decode, finish or are retracted, and it goes on.",
        "Page 16, chunk 64, 3 pages of room, 200 tokens left: the piece of 64 needs 4 pages. need 64, have 48, parked.",
    ),
    GuardEntry(
        Guard.MIXED_SAT_OUT,
        "Decode rows that ride along would leave less than the smallest possible piece of the slice, or of the input "
        "limit under exact accounting: 1 token for a continuation; under exact accounting a page, and with "
        "`truncation_align_size` that many, also for the first piece of a prompt.",
        "Computes rem_chunk = chunk - running and gives the continuation that: 0, or a negative number. With a page "
        "or an alignment as smallest piece it refuses the prompt as long as that many requests decode.",
        "The decode rows sit this step out and the prompt gets the whole slice; in the next step no pass is made and "
        "they decode. Prompt and decodes take turns until fewer run.",
        "Chunk 16, 18 running: rem_chunk would be -2. Here the piece is 16 tokens, and the 18 decode in the next step.",
    ),
    GuardEntry(
        Guard.ALLOC_MISS,
        "A request passes the memory test, but the pages of its piece are not there; or a planned allocation misses "
        "for a reason outside the scheduler.",
        "Builds the batch; the allocation fails after admission and ends the process.",
        "The request is refused with `kv_now_exhausted`, need and have. If a planned allocation misses, nothing of the "
        "step happens: everyone keeps queue place, row and pages, and the next step tries again.",
        "Three prompts of 50 tokens planned, 12 pages of 16: the allocation misses once, the step is idle with "
        "`claim_failed`, the next one admits all three. The first kind stands behind arithmetic: a claim of "
        "ceil(50) = 64 tokens is below the need of 50 + 1 + 16 = 67 that was tested against a tighter ledger.",
    ),
    GuardEntry(
        Guard.KV_POOL_EXHAUSTED,
        "The last running request cannot grow by one token and nobody else holds memory.",
        "Aborts it with an error.",
        "It ends with finish reason `length` and detail `kv_pool_exhausted`, keeping what it said so far.",
        "Pool of 64 tokens, prompt 40, 24 outputs written: token 65 has no place. End after one retraction at most.",
    ),
    GuardEntry(
        Guard.LAST_PUSHED_BACK,
        "The last running request cannot grow by one token, and a half-prefilled prompt holds the memory it lacks.",
        "Aborts it with an error, although it fits as soon as the prompt is through.",
        "It goes back to the queue with its outputs kept, and comes again after the prompt.",
        "Pool of 20 pages: continuation holds 15, the runner 5 and needs a sixth. It waits until the 15 move on.",
    ),
    GuardEntry(
        Guard.SECOND_CUT,
        "A prompt would have to be cut in a pass that leaves another prompt half-prefilled.",
        "Cuts it too, and forgets the first one: the active chunk is one variable. Shortest-prefill-first alone "
        "checks; elsewhere rounding to pages, or lengths known in advance (radix off, ignore_eos), can get there.",
        "The pass ends with `chunk_slot_taken`; the prompt starts when the half-prefilled one is through.",
        "Page 16, chunk 130: a prompt of 64 leaves 66, the next, of 200, is cut to 64 and leaves 2; the third, with "
        "ignore_eos and no tree, is cut to 2. Here it waits: need 83, have 2.",
        ("pass/232",),
    ),
    GuardEntry(
        Guard.LONE_REFUSED,
        "The walk for known lengths (radix off, ignore_eos) refuses the head of the queue although nobody else holds "
        "memory and intake accepted it; and the step before, for the same reason, did nothing.",
        "Refuses it in every pass, for ever: the walk wants one token more than the largest output that intake "
        "lets through.",
        "From the second refusal on it is admitted, since prompt and output fit the pool.",
        "Pool 608, page 16, prompt 50, max_new 527 (the intake's largest: 608 - 64 - 16 - 1): 608 - 80 - 527 = 1 is "
        "not above the 1 token that the walk keeps aside.",
    ),
)

_HEAD: Final = """\
# Guards

Generated from `engine/scheduler/guards.py` by `python -m engine.scheduler.guards`. Do not edit.

The scheduler decides as SGLang 0.5.23 does. Where that would select nothing or less, keep an acceptable request waiting
for ever, or miss an allocation, a guard acts instead. Each is counted in
`admitscope_guard_activations_total{guard}` and named in `guards` of the step's `StepPlanned`.

`scheduler.guards=false` turns them off, to compare with the reference; then a run may end in an error. The recorded
cases of `tests/golden/conformance` are played with guards on. Where a guard acted and the recording has the fault, the
case is played again with guards off, and has to agree then; those cases are named below.

Under `kv_accounting="exact"` only `mixed_sat_out` and `last_pushed_back` have work to do, and `alloc_miss` for misses
from outside: a claim that the exact ledger allows is one that the pool can meet, and a continuation that does not fit
waits with `kv_total_exhausted`, which is accounting and no guard.
"""

_TAIL: Final = """\
## What needs no guard

- A request that can never fit is refused at the door (HTTP 400, `never_fits`); with the largest output that intake lets
  through, need is below the pool. Pool 1,024, page 16, prompt 100: largest output 1,024 - 112 - 16 - 1 = 895, and
  need 100 + 895 + 16 = 1,011 < 1,024.
- The latched full flag is cleared when nothing runs, when anybody leaves (an aborted waiting request included), and by
  a retraction, so it never outlives the requests it waits for. Under `exact` it does not latch.
- Reference accounting, a new prompt, and less of the slice left than a page: `chunk_below_page` until fewer decode. No
  one is admitted meanwhile, so the running ones do become fewer: a wait, and a legal one. Chunk 24, page 16, 10
  running: 14 left; the first piece of 16 comes when 8 run.
"""


def _section(entry: GuardEntry) -> str:
    vectors = ", ".join(f"`{case}`" for case in entry.vectors) or "none"
    return (
        f"## `{entry.guard.value}`\n\n**When.** {entry.when}\n\n**The reference.** {entry.reference}\n\n"
        f"**Here.** {entry.here}\n\n**A worked number.** {entry.worked}\n\n"
        f"**Recorded cases that need it off.** {vectors}.\n"
    )


def render() -> str:
    """The whole page."""
    return "\n".join([_HEAD, *(_section(entry) for entry in GUARDS), _TAIL])


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
