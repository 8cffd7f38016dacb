"""ExactAccounting. Owns: pricing by the pages that the allocator will hand out, none more and none less.

Every figure is in tokens and a multiple of the page size. Three rules:

* a request needs the pages of its longest possible K/V (prompt and outputs, less the last token, which is never
  written) beyond those that it finds cached; they are promised from its first piece on and stay promised until it runs;
* a running request is promised the pages of its K/V after left x ratio further tokens, beyond those that it holds;
* what a step claims is taken from remaining_current page by page, decode rows included.

remaining_total <= remaining_current always, so an admission that fits its future fits this moment, and a claim that
the ledger allowed is one that the pool can meet.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from engine.request import Request
from engine.scheduler.accounting import Opening, Refusal, Slice
from engine.scheduler.decision import Reason
from engine.scheduler.ledgers import Budget, Cost


class ExactAccounting:
    """Pages, counted."""

    walks_known_lengths = False
    latches_full = False
    evicts_spare = False
    preempts_for_memory = True

    def __init__(self, *, page_size: int, clip_max_new_tokens: int) -> None:
        self._page_size = page_size
        self._clip = clip_max_new_tokens
        self.cut_unit = page_size

    def _pages(self, tokens: float) -> int:
        """Tokens of the pages that `tokens` tokens occupy."""
        return math.ceil(tokens / self._page_size) * self._page_size

    def _left(self, request: Request) -> int:
        return min(max(request.max_new_tokens - request.output_len, 0), self._clip)

    def _held(self, request: Request) -> int:
        assert request.lease is not None, f"request {request.rid} holds no lease"
        return request.lease.count * self._page_size

    def _whole(self, request: Request) -> int:
        """Pages of a waiting or half-prefilled request at its longest, as far as the clip promises it."""
        return self._pages(request.seq_len + max(self._left(request) - 1, 0))

    def rounded(self, tokens: int) -> int:
        """Compute is counted in tokens, not in pages."""
        return tokens

    def largest_output(self, prompt_len: int, pool_tokens: int) -> int:
        """The whole pool: the last output token is never written."""
        return pool_tokens - prompt_len + 1

    def running_growth(self, request: Request, ratio: float) -> float:
        """pages(computed + left x ratio) - pages held."""
        left = self._left(request) * (1.0 if request.ignore_eos else ratio)
        # At least the next token: then decode rows never claim now what was not promised.
        return max(0, self._pages(request.computed_len + max(left, 1)) - self._held(request))

    def continuation_promise(self, request: Request) -> int:
        """The rest of its prompt and its output."""
        return self._whole(request) - self._held(request)

    def opening(self, riding: Sequence[Request], promised: float) -> Opening:
        """Decode rows take the pages that they will claim in this step; their growth is promised already."""
        page = self._page_size
        return Opening(sum(page for request in riding if request.computed_len % page == 0), promised)

    def need(self, request: Request, prefix_len: int) -> int:
        return self._whole(request) - prefix_len

    def fits(self, need: float, have: float) -> bool:
        return need <= have

    def slice_of(self, budget: Budget) -> Slice | None:
        """Both compute ledgers: neither is overdrawn."""
        rem_chunk, rem_input = budget.chunk.remaining, budget.compute.remaining
        if rem_chunk is None:
            return None
        if rem_input < rem_chunk:
            return Slice(rem_input, Reason.COMPUTE_EXHAUSTED)
        return Slice(rem_chunk, Reason.CHUNK_BELOW_PAGE)

    def refused_unchunked(self, charge: int, budget: Budget) -> bool:
        return charge > budget.compute.remaining

    def continue_by(self, request: Request, budget: Budget, *, cap: int | None, unit: int) -> int | Refusal:
        """As much as the slice allows, while its promise is whole; a cut ends on a boundary."""
        piece = self.slice_of(budget)
        assert piece is not None, "a continuation without chunking"
        promise, total = self.continuation_promise(request), budget.kv.remaining_total
        if total < 0:
            # Others grew past what was left of its promise. With total at 0 or more any piece of it fits at once.
            return Refusal(Reason.KV_TOTAL_EXHAUSTED, promise, promise + total)
        tokens = piece.tokens if cap is None else min(piece.tokens, max(cap, unit))
        rest = request.seq_len - request.computed_len
        if rest <= tokens:
            return rest
        # Pieces begin on a page boundary, so a length of whole pages ends on one.
        extend = tokens // unit * unit
        return extend if extend > 0 else Refusal(piece.bound_by, unit, tokens)

    def price(
        self,
        request: Request,
        *,
        prefix_len: int,
        extend: int,
        is_cut: bool,  # noqa: ARG002 - protocol
        pinned_tokens: int,
    ) -> Cost:
        """Now: the pages of this piece. In all: everything it needs, once; later pieces of it cost nothing more."""
        held = prefix_len if request.lease is None else self._held(request)
        current = max(0, self._pages(prefix_len + extend) - held)
        total = 0 if request.lease is not None else self.need(request, prefix_len)
        return Cost(extend, extend, pinned_tokens, current, total)

    def reserved(self, request: Request, *, is_cut: bool) -> int:  # noqa: ARG002 - protocol
        """The output it may still produce, promised with the first piece."""
        return 0 if request.lease is not None else self._left(request)

    def lacking(self, request: Request, prefix_len: int, budget: Budget, *, last_extend: int) -> float:  # noqa: ARG002 - protocol
        return self.need(request, prefix_len) - budget.kv.remaining_total

    def counts_held_pages(self) -> bool:
        return True
