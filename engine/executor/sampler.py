"""Sampler. Owns: turning logits into tokens and log-probabilities, one row at a time in meaning, in batches in speed.

Random choice is Gumbel-max over the tokens that survive the filters, with noise from an integer hash of
(seed, position, token id). No generator, no state: a request with a seed gets the same noise whatever its batch peers,
its slot, or a retraction in between.

Order of the filters: temperature, top_k, then top_p over what top_k left. Tokens that tie with the last survivor
survive.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from hashlib import blake2b
from typing import Final

import torch

from engine.executor.base import SampledToken, SamplingRow, TokenLogprobs

_MASK64: Final = (1 << 64) - 1
#: Odd constants of a 64-bit finaliser (splitmix64), as signed integers because torch has no unsigned arithmetic.
_GOLDEN: Final = 0x9E3779B97F4A7C15
_MIX_1: Final = 0xBF58476D1CE4E5B9
_MIX_2: Final = 0x94D049BB133111EB
#: Best tokens looked at before a top_p row pays for a full sort.
_NUCLEUS: Final = 512


class NonFiniteLogits(ArithmeticError):
    """The model produced NaN or infinity: a fault of weights or K/V memory, not of the request."""


class Sampler:
    """Samples rows of a vocabulary of `vocab_size` tokens.

    eos_token_ids   tokens that `min_new_tokens` forbids
    secret          8 or more bytes that seed requests without a seed; None: from the operating system
    """

    def __init__(self, *, vocab_size: int, eos_token_ids: Sequence[int], secret: bytes | None = None) -> None:
        self._eos = tuple(eos_token_ids)
        self._secret = os.urandom(16) if secret is None else secret
        self._token_keys = _mix(torch.arange(vocab_size, dtype=torch.int64) * _signed(_GOLDEN))

    def sample(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> tuple[SampledToken, ...]:
        """One token for each row. logits [S, vocab], any float type, not modified; `rows` in the same order.

        Raises NonFiniteLogits, naming the request, when a row's best logit is not finite.
        """
        if not rows:
            return ()
        chosen_from = self._forbid_early_ends(logits, rows)
        best, tokens = chosen_from.max(dim=-1)
        _check_finite(best, rows)
        picks: list[int] = tokens.tolist()
        for i, row in enumerate(rows):
            if not row.params.is_greedy:
                picks[i] = self._draw(chosen_from[i].to(torch.float32), row)
        logprobs = _logprobs(logits, rows, picks)
        return tuple(
            SampledToken(rid=row.rid, token_id=pick, logprobs=logprob)
            for row, pick, logprob in zip(rows, picks, logprobs, strict=True)
        )

    def _forbid_early_ends(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
        """`logits`, or a copy in which the end tokens of rows below their `min_new_tokens` are -inf."""
        masked = logits
        for i, row in enumerate(rows):
            if row.output_index >= row.params.min_new_tokens:
                continue
            ends = row.params.stop_token_ids if row.params.ignore_eos else (*self._eos, *row.params.stop_token_ids)
            if ends:
                masked = logits.clone() if masked is logits else masked
                masked[i, [end for end in ends if 0 <= end < logits.shape[1]]] = -math.inf
        return masked

    def _draw(self, logits: torch.Tensor, row: SamplingRow) -> int:
        """One random token. logits [vocab] float32."""
        params = row.params
        scaled = logits / params.temperature
        survivors = _survivors(scaled, top_k=params.top_k, top_p=params.top_p)
        seed = self._seed_of(row.rid) if params.seed is None else params.seed
        row_key = _mix_int(_mix_int(seed & _MASK64) ^ (row.position & _MASK64))
        if survivors is None:
            return int((scaled.double() + _gumbel(self._token_keys, row_key)).argmax())
        noise = _gumbel(self._token_keys.index_select(0, survivors), row_key)
        return int(survivors[(scaled.index_select(0, survivors).double() + noise).argmax()])

    def _seed_of(self, rid: str) -> int:
        """The seed of a request that brought none: fixed for this process and this rid, not guessable."""
        return int.from_bytes(blake2b(rid.encode(), key=self._secret, digest_size=8).digest())


def _survivors(scaled: torch.Tensor, *, top_k: int, top_p: float) -> torch.Tensor | None:
    """Token ids that pass top_k and top_p, ascending; None means all. scaled [vocab] float32."""
    vocab = len(scaled)
    limits_k, limits_p = 0 < top_k < vocab, top_p < 1.0
    if not limits_k and not limits_p:
        return None
    if not limits_p:
        floor = scaled.topk(top_k).values[-1]
        return (scaled >= floor).nonzero().squeeze(1)
    # Probabilities are shares of what top_k left; ties of the k-th token count.
    if limits_k:
        floor = scaled.topk(top_k).values[-1]
        scaled = scaled.masked_fill(scaled < floor, -math.inf)
    total = scaled.double().logsumexp(dim=0)
    count = min(_NUCLEUS, vocab)
    while True:
        # Tokens of the best `count`, best first; enough of them when they reach top_p.
        best = scaled.topk(count).values
        reached = (best.double() - total).exp().cumsum(dim=0) >= top_p
        if count == vocab or bool(reached[-1]):
            break
        count = vocab
    # Rounding can leave the sum of all a hair below top_p: then everything stays.
    last = int(reached.int().argmax()) if bool(reached[-1]) else count - 1
    floor = best[last]
    if floor == -math.inf:
        return scaled.isfinite().nonzero().squeeze(1)
    return (scaled >= floor).nonzero().squeeze(1)


def _logprobs(logits: torch.Tensor, rows: Sequence[SamplingRow], picks: Sequence[int]) -> list[TokenLogprobs | None]:
    """Log-probabilities of the rows that ask, from the raw logits: before temperature, filters and forbidden ends."""
    asking = [i for i, row in enumerate(rows) if row.params.logprobs is not None]
    answers: list[TokenLogprobs | None] = [None] * len(rows)
    if not asking:
        return answers
    logprobs = logits[asking].float().log_softmax(dim=-1)
    chosen = logprobs.gather(1, torch.tensor([[picks[i]] for i in asking])).squeeze(1).tolist()
    most = min(max(rows[i].params.logprobs or 0 for i in asking), logits.shape[1])
    values, ids = (part.tolist() for part in logprobs.topk(most, dim=-1))
    for place, i in enumerate(asking):
        wanted = rows[i].params.logprobs or 0
        top = tuple(zip(ids[place][:wanted], values[place][:wanted], strict=True))
        answers[i] = TokenLogprobs(token_id=picks[i], logprob=chosen[place], top=top)
    return answers


def _check_finite(best: torch.Tensor, rows: Sequence[SamplingRow]) -> None:
    """`best` [S]: the largest logit of each row. NaN anywhere in a row makes its maximum NaN."""
    finite = best.isfinite()
    if not bool(finite.all()):
        i = int(finite.int().argmin())
        where = f"request {rows[i].rid}, position {rows[i].position}"
        raise NonFiniteLogits(f"{where}: the best logit is {best[i].item()}; a finite number is needed")


def _gumbel(token_keys: torch.Tensor, row_key: int) -> torch.Tensor:
    """Standard Gumbel noise of each token for one row, float64. token_keys [n] int64."""
    bits = _mix(token_keys ^ _signed(row_key))
    # 53 random bits to the middle of their cell in (0, 1): neither logarithm meets 0.
    uniform = (_shift_right(bits, 11).double() + 0.5) * 2.0**-53
    return uniform.log_().neg_().log_().neg_()


def _mix(x: torch.Tensor) -> torch.Tensor:
    """The 64-bit finaliser on int64 elements (multiplication wraps around)."""
    x = (x ^ _shift_right(x, 30)) * _signed(_MIX_1)
    x = (x ^ _shift_right(x, 27)) * _signed(_MIX_2)
    return x ^ _shift_right(x, 31)


def _mix_int(x: int) -> int:
    """The same finaliser on one Python integer of 64 bits, after a step of the golden ratio."""
    x = (x + _GOLDEN) & _MASK64
    x = ((x ^ (x >> 30)) * _MIX_1) & _MASK64
    x = ((x ^ (x >> 27)) * _MIX_2) & _MASK64
    return x ^ (x >> 31)


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift: torch's own copies the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(x: int) -> int:
    """The signed 64-bit integer with the same bits."""
    return x - (1 << 64) if x >= 1 << 63 else x
