"""Accounting. Owns: how an admission is priced in KV memory. One protocol, so that a second pricing can stand beside.

`ReferenceAccounting` prices in tokens exactly as SGLang 0.5.23 does (rule book sections 4.2, 4.3, 4e, 4g): a flat extra
page per request, estimates of running requests times the new-token ratio, the continuation's rest not promised.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from engine.request import Request
from engine.scheduler.ledgers import Cost


class KvAccounting(Protocol):
    """Prices in tokens."""

    def running_growth(self, request: Request, ratio: float) -> float:
        """Tokens still promised to a running request."""
        ...

    def need(self, request: Request, candidate_extend: int) -> int:
        """Tokens that must fit before a whole admission; compared strictly with remaining_total."""
        ...

    def price(self, request: Request, *, extend: int, is_cut: bool, pinned_tokens: int) -> Cost:
        """What admitting `extend` tokens takes from each ledger."""
        ...

    def reserved(self, request: Request, *, is_cut: bool) -> int:
        """Output tokens promised at admission."""
        ...


class ReferenceAccounting:
    """The reference's pricing."""

    def __init__(self, *, page_size: int, clip_max_new_tokens: int) -> None:
        self._page_size = page_size
        self._clip = clip_max_new_tokens

    def _ceil(self, tokens: int) -> int:
        return -(-tokens // self._page_size) * self._page_size

    def running_growth(self, request: Request, ratio: float) -> float:
        """min(max_new - outputs, clip) x ratio; the ratio is 1 when EOS is ignored, since the length is known."""
        left = min(request.max_new_tokens - request.output_len, self._clip)
        return left * (1.0 if request.ignore_eos else ratio)

    def need(self, request: Request, candidate_extend: int) -> int:
        """4e: extend, unrounded, plus what it may still produce, plus one page."""
        left = min(max(request.max_new_tokens - request.output_len, 0), self._clip)
        return candidate_extend + left + self._page_size

    def price(self, request: Request, *, extend: int, is_cut: bool, pinned_tokens: int) -> Cost:
        """4g: the extend rounded up to pages, one page more for memory, the output estimate unless cut."""
        rounded = self._ceil(extend)
        current = rounded + self._page_size
        return Cost(rounded, rounded, pinned_tokens, current, current + self.reserved(request, is_cut=is_cut))

    def reserved(self, request: Request, *, is_cut: bool) -> int:
        """4g: outputs already made are *not* subtracted here, unlike in `need`."""
        return 0 if is_cut else min(request.max_new_tokens, self._clip)


def promised_growth(accounting: KvAccounting, running: Iterable[Request], ratio: float) -> float:
    """Sum of `running_growth` over the running list, in list order (float addition is ordered)."""
    return sum(accounting.running_growth(request, ratio) for request in running)
