"""Accounting. Owns: the protocol by which an admission is priced, and the pricing of the reference.

`ReferenceAccounting` prices in tokens exactly as SGLang 0.5.23 does (rule book sections 4.2, 4.3, 4e, 4g): a flat extra
page per request, estimates of running requests times the new-token ratio, the continuation's rest not promised.
`ExactAccounting` (engine/scheduler/exact.py) counts pages. Adder, planner, records and checker are the same for both.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from engine.request import Request
from engine.scheduler.decision import Reason
from engine.scheduler.ledgers import Budget, Cost


class Opening(NamedTuple):
    """What is taken from the KV ledgers before anyone is considered, in tokens: at this moment, and promised in all."""

    current: int
    total: float


class Refusal(NamedTuple):
    """Why nothing may be computed, and the two sides of the test that says so."""

    reason: Reason
    need: float
    have: float


class Slice(NamedTuple):
    """Prefill tokens that the compute ledgers leave to the next request, and which ledger says so."""

    tokens: int
    bound_by: Reason


class KvAccounting(Protocol):
    """Prices in tokens."""

    #: Requests of known length without a prefix tree take the reference's own walk (engine/scheduler/eos_walk.py).
    walks_known_lengths: bool
    #: The full flag holds until somebody leaves; otherwise each pass finds out anew.
    latches_full: bool
    #: Running requests give way also to a more important one that lacks memory, not only to one that lacks a row.
    preempts_for_memory: bool
    #: Evictions leave room beyond what the step claims: a page per member, 20 tokens per row after a retraction.
    evicts_spare: bool
    #: What the length of a continuation's cut is a multiple of, in tokens, when nothing else is configured.
    cut_unit: int

    def largest_output(self, prompt_len: int, pool_tokens: int) -> int:
        """Most output tokens that a prompt may ask of the empty pool; below 1 it fits never."""
        ...

    def running_growth(self, request: Request, ratio: float) -> float:
        """Tokens still promised to a running request."""
        ...

    def continuation_promise(self, request: Request) -> int:
        """Tokens that stay promised to a half-prefilled request between steps."""
        ...

    def opening(self, riding: Sequence[Request], promised: float) -> Opening:
        """The KV ledgers of a pass. `riding`: decode rows that join the step; `promised`: growth and continuation."""
        ...

    def need(self, request: Request, prefix_len: int) -> int:
        """Tokens that must fit, beside its cached prefix, before a request is admitted."""
        ...

    def fits(self, need: float, have: float) -> bool:
        """The memory test, have = remaining_total less what the prefix lock takes."""
        ...

    def slice_of(self, budget: Budget) -> Slice | None:
        """What the compute ledgers leave for one request; None when chunking is off."""
        ...

    def rounded(self, tokens: int) -> int:
        """What computing `tokens` is charged to the compute ledgers."""
        ...

    def refused_unchunked(self, charge: int, budget: Budget) -> bool:
        """Without chunking: whether a further request of this charge is too much for the step."""
        ...

    def continue_by(self, request: Request, budget: Budget, *, cap: int | None, unit: int) -> int | Refusal:
        """Tokens of a half-prefilled request to compute now, or why it has to wait. Guards are not applied here."""
        ...

    def price(self, request: Request, *, prefix_len: int, extend: int, is_cut: bool, pinned_tokens: int) -> Cost:
        """What computing [prefix_len, prefix_len + extend) takes from each ledger."""
        ...

    def reserved(self, request: Request, *, is_cut: bool) -> int:
        """Output tokens promised by this admission."""
        ...

    def lacking(self, request: Request, prefix_len: int, budget: Budget, *, last_extend: int) -> float:
        """Tokens that preempted requests must give back before `request` could be admitted."""
        ...

    def counts_held_pages(self) -> bool:
        """Whether pages that a victim holds count towards what a preemption gives back, beside its promise."""
        ...


class ReferenceAccounting:
    """The reference's pricing."""

    walks_known_lengths = True
    latches_full = True
    evicts_spare = True
    preempts_for_memory = False
    cut_unit = 1

    def __init__(self, *, page_size: int, clip_max_new_tokens: int) -> None:
        self._page_size = page_size
        self._clip = clip_max_new_tokens

    def rounded(self, tokens: int) -> int:
        """Whole pages."""
        return -(-tokens // self._page_size) * self._page_size

    def largest_output(self, prompt_len: int, pool_tokens: int) -> int:
        """The intake clip of rule book section 2: one page is kept as slack."""
        return pool_tokens - self.rounded(prompt_len) - self._page_size - 1

    def running_growth(self, request: Request, ratio: float) -> float:
        """min(max_new - outputs, clip) x ratio; the ratio is 1 when EOS is ignored, since the length is known."""
        left = min(request.max_new_tokens - request.output_len, self._clip)
        return left * (1.0 if request.ignore_eos else ratio)

    def continuation_promise(self, request: Request) -> int:  # noqa: ARG002 - protocol
        """Nothing: the rest of a continuation is not promised."""
        return 0

    def opening(self, riding: Sequence[Request], promised: float) -> Opening:
        """4.2: one token for each decode row, on both sides."""
        return Opening(len(riding), len(riding) + promised)

    def need(self, request: Request, prefix_len: int) -> int:
        """4e: extend, unrounded, plus what it may still produce, plus one page."""
        left = min(max(request.max_new_tokens - request.output_len, 0), self._clip)
        return request.seq_len - prefix_len + left + self._page_size

    def fits(self, need: float, have: float) -> bool:
        """Strictly."""
        return need < have

    def slice_of(self, budget: Budget) -> Slice | None:
        """4f: the chunk ledger alone; with chunking on, the input ledger does not bound a request's size."""
        rem_chunk = budget.chunk.remaining
        return None if rem_chunk is None else Slice(rem_chunk, Reason.CHUNK_BELOW_PAGE)

    def refused_unchunked(self, charge: int, budget: Budget) -> bool:
        return charge >= budget.compute.remaining

    def continue_by(self, request: Request, budget: Budget, *, cap: int | None, unit: int) -> int | Refusal:
        """Step 3: no rounding to pages, and it runs although the memory ledger says no."""
        rem_chunk = budget.chunk.remaining
        assert rem_chunk is not None, "a continuation without chunking"
        rest = request.seq_len - request.computed_len
        limit = min(rem_chunk, int(budget.kv.remaining_total))
        if limit <= 0:
            limit = rem_chunk
        if cap is not None:
            limit = min(limit, max(cap, unit))
        if unit == 1 or rest <= limit:
            return min(rest, limit)
        # A truncation alignment counts the length of a cut, wherever it starts.
        extend = limit // unit * unit
        return extend if extend > 0 else Refusal(Reason.CHUNK_BELOW_PAGE, unit, limit)

    def price(
        self,
        request: Request,
        *,
        prefix_len: int,  # noqa: ARG002 - protocol
        extend: int,
        is_cut: bool,
        pinned_tokens: int,
    ) -> Cost:
        """4g: the extend rounded up to pages, one page more for memory, the output estimate unless cut."""
        rounded = self.rounded(extend)
        current = rounded + self._page_size
        return Cost(rounded, rounded, pinned_tokens, current, current + self.reserved(request, is_cut=is_cut))

    def reserved(self, request: Request, *, is_cut: bool) -> int:
        """4g: outputs already made are *not* subtracted here, unlike in `need`."""
        return 0 if is_cut else min(request.max_new_tokens, self._clip)

    def lacking(self, request: Request, prefix_len: int, budget: Budget, *, last_extend: int) -> float:  # noqa: ARG002 - protocol
        """The extend of its last consideration and its promised output, less remaining_total."""
        return last_extend + min(request.max_new_tokens, self._clip) - budget.kv.remaining_total

    def counts_held_pages(self) -> bool:
        return False


class CutUnits(NamedTuple):
    """Tokens that the length of a cut is a multiple of: a prompt's first piece, and a later one."""

    first: int
    later: int


def cut_units(accounting: KvAccounting, *, page_size: int, align: int | None) -> CutUnits:
    """Whole pages, and whole multiples of `align` where it is set; later pieces as the accounting has it."""
    unit = math.lcm(page_size, align or 1)
    return CutUnits(unit, accounting.cut_unit if align is None else unit)


def promised_growth(accounting: KvAccounting, running: Iterable[Request], ratio: float) -> float:
    """Sum of `running_growth` over the running list, in list order (float addition is ordered)."""
    return sum(accounting.running_growth(request, ratio) for request in running)
