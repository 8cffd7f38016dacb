"""Sampler. Owns: turning logits into tokens and log-probabilities, one row at a time in meaning, in batches in speed.

Random choice is Gumbel-max over the tokens that survive the filters, with the noise of `engine.executor.noise`: a
request with a seed gets the same whatever its batch peers, its slot, or a retraction in between. It is done in two
exact steps, so that noise is made for hundreds of numbers and not for a whole vocabulary: first a block of tokens,
weighed by the sum of its probabilities, then a token of it.

`Sampler` reads values on the host where that is quicker: how far a nucleus reaches, who asks for what. On a GPU that
would wait for the device; `engine.executor.device_sampler` does the same without.

Order: what `engine.executor.shaping` changes, temperature, top_k, top_p over the k best, min_p. Tokens that tie with
the last survivor survive.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from hashlib import blake2b
from typing import Final

import torch

from engine.executor.base import SampledToken, SamplingRow, TokenLogprobs
from engine.executor.noise import gumbel, row_key, token_keys
from engine.executor.shaping import shape

#: Tokens of one block of the two-step draw.
BLOCK: Final = 256
#: Best tokens that a top_p row is looked at with first; eight times as many while they do not reach top_p.
NUCLEUS: Final = 512
#: Noise of blocks and of tokens comes from different counters.
_BLOCK_DOMAIN: Final = 0x5851F42D4C957F2D


class NonFiniteLogits(ArithmeticError):
    """The model produced NaN or infinity: a fault of weights or K/V memory, not of the request."""


class Sampler:
    """Samples rows of a vocabulary of `vocab_size` tokens.

    eos_token_ids   tokens that `min_new_tokens` forbids
    secret          8 or more bytes that seed requests without a seed; None: from the operating system
    device          where the logits are; None: the CPU
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        secret: bytes | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.eos_token_ids = tuple(eos_token_ids)
        self.vocab_size = vocab_size
        self._secret = os.urandom(16) if secret is None else secret
        blocks = -(-vocab_size // BLOCK)
        self._token_keys = token_keys(blocks * BLOCK).view(blocks, BLOCK).to(device)
        self._block_keys = token_keys(blocks).to(device)

    def sample(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> tuple[SampledToken, ...]:
        """One token for each row. logits [S, vocab], any float type, not modified; `rows` in the same order.

        Raises NonFiniteLogits, naming the request, when a row's logits hold NaN or +infinity.
        """
        if not rows:
            return ()
        allowed = in_blocks(shape(logits, rows, self.eos_token_ids))
        block_best = allowed.amax(dim=-1)
        best = block_best.amax(dim=-1)
        if not bool(best.isfinite().all()):
            refuse_non_finite(best.tolist(), rows)
        drawn = [i for i, row in enumerate(rows) if not row.params.is_greedy]
        picks = [0] * len(rows)
        if len(drawn) < len(rows):
            picks = largest_token(allowed, block_best).tolist()
        if drawn:
            subset = allowed if len(drawn) == len(rows) else allowed[drawn]
            for i, token_id in zip(drawn, self._draw(subset.float(), [rows[i] for i in drawn]), strict=True):
                picks[i] = token_id
        logprobs = _logprobs(logits, rows, picks)
        return tuple(
            SampledToken(rid=row.rid, token_id=pick, logprobs=logprob)
            for row, pick, logprob in zip(rows, picks, logprobs, strict=True)
        )

    def _draw(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[int]:
        """One random token of each row. logits [S, blocks, BLOCK] float32."""
        params, device = [row.params for row in rows], logits.device
        scaled = logits / torch.tensor([p.temperature for p in params], device=device)[:, None, None]
        flat = scaled.view(len(rows), -1)
        best = flat.amax(dim=-1)
        filtered = [i for i, p in enumerate(params) if p.top_p < 1.0 or 0 < p.top_k < self.vocab_size]
        shared = [i for i, p in enumerate(params) if p.min_p > 0.0]
        if filtered or shared:
            every_floor = torch.full((len(rows),), -math.inf, device=device)
            if filtered:
                subset = flat if len(filtered) == len(rows) else flat[filtered]
                every_floor[filtered] = _floors(
                    subset, [params[i].top_k for i in filtered], [params[i].top_p for i in filtered]
                )
            if shared:
                depths = torch.tensor([math.log(params[i].min_p) for i in shared], device=device)
                every_floor[shared] = every_floor[shared].maximum(best[shared] + depths)
            flat.masked_fill_(flat < every_floor[:, None], -math.inf)
        row_keys = torch.tensor([self.row_key(row) for row in rows], device=device)
        tokens: list[int] = self.pick(scaled, best, row_keys).tolist()
        return tokens

    def pick(self, scaled: torch.Tensor, best: torch.Tensor, row_keys: torch.Tensor) -> torch.Tensor:
        """A random token of each row, [S] int64, where the logits are and without waiting for it.

        scaled    [S, blocks, BLOCK] float32, divided by the temperature, -inf where a filter is
        best      [S] the largest of each row
        row_keys  [S] int64, of `row_key`
        """
        keys = row_keys[:, None]
        weights = (scaled - best[:, None, None]).exp_().sum(dim=-1)
        block = (weights.double().log_() + gumbel(self._block_keys, keys ^ _BLOCK_DOMAIN)).argmax(dim=-1)
        members = scaled[torch.arange(len(scaled), device=scaled.device), block].double()
        offset = (members + gumbel(self._token_keys.index_select(0, block), keys)).argmax(dim=-1)
        return block * BLOCK + offset

    def row_key(self, row: SamplingRow) -> int:
        """A signed 64-bit key of (seed, position); a request without a seed has one of its own in this process."""
        seed = row.params.seed
        if seed is None:
            seed = int.from_bytes(blake2b(row.rid.encode(), key=self._secret, digest_size=8).digest())
        return row_key(seed, row.position)


def in_blocks(logits: torch.Tensor) -> torch.Tensor:
    """[S, vocab] -> [S, blocks, BLOCK]; a last block that is not full is padded with -inf."""
    if missing := -logits.shape[1] % BLOCK:
        logits = torch.nn.functional.pad(logits, (0, missing), value=-math.inf)
    return logits.reshape(len(logits), -1, BLOCK)


def largest_token(logits: torch.Tensor, block_best: torch.Tensor) -> torch.Tensor:
    """The first largest token of each row, [S] int64: much faster in two steps than argmax over the vocabulary.

    logits [S, blocks, BLOCK], block_best [S, blocks]
    """
    block = block_best.argmax(dim=-1)
    offset = logits[torch.arange(len(logits), device=logits.device), block].argmax(dim=-1)
    return block * BLOCK + offset


def _floors(scaled: torch.Tensor, top_k: Sequence[int], top_p: Sequence[float]) -> torch.Tensor:
    """The smallest logit that survives in each row, [S]; -inf where all do. scaled [S, vocab] float32.

    A row's floor depends on its own values only: sums run best first, one after another, however many are looked at.
    """
    vocab, device = scaled.shape[1], scaled.device
    limits = torch.tensor([k if 0 < k < vocab else vocab for k in top_k], device=device)
    shares = torch.tensor(top_p, dtype=torch.float64, device=device)
    count = max((k for k in top_k if k < vocab), default=0)
    if min(top_p) < 1.0:
        count = max(count, NUCLEUS)
    count = min(max(count, 1), vocab)
    floors = torch.full((len(scaled),), -math.inf, device=device)
    open_rows = torch.arange(len(scaled), device=device)
    while len(open_rows):
        rows = scaled if len(open_rows) == len(scaled) else scaled.index_select(0, open_rows)
        best = rows.topk(count, dim=-1).values
        limit, share = limits[open_rows], shares[open_rows]
        reach = (best - best[:, :1]).double().exp_().cumsum(dim=-1)
        last = limit.clamp(max=count)[:, None] - 1
        total = reach.gather(1, last).squeeze(1)
        if bool(((limit == vocab) & (share < 1.0)).any()):
            everything = (rows - best[:, :1]).exp_().sum(dim=-1, dtype=torch.float64)
            total = torch.where(limit == vocab, everything, total)
        place, found = last_survivor(reach, last, share, total)
        done = found | (limit <= count) | (share == 1.0)
        floor = best.gather(1, place[:, None]).squeeze(1)
        # Neither filter binds: everything survives.
        floors[open_rows[done]] = floor.masked_fill_(~found & (limit == vocab), -math.inf)[done]
        open_rows = open_rows[~done]
        count = min(vocab, count * 8)
    return floors


def last_survivor(
    reach: torch.Tensor, last: torch.Tensor, share: torch.Tensor, total: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where each row's last survivor stands among its best, [S], and whether its share is reached there.

    reach  [S, n] probability of the best 1, 2, …, in any unit
    last   [S, 1] place of the last that top_k keeps
    share  [S] top_p; 1 means: as far as top_k goes
    total  [S] what the share is of, in the unit of `reach`
    """
    enough = (reach >= (share * total)[:, None]) & (torch.arange(reach.shape[1], device=reach.device) <= last)
    found = enough.any(dim=-1) & (share < 1.0)
    return torch.where(found, enough.int().argmax(dim=-1), last.squeeze(1)), found


def _logprobs(logits: torch.Tensor, rows: Sequence[SamplingRow], picks: Sequence[int]) -> list[TokenLogprobs | None]:
    """Log-probabilities of the rows that ask, from the raw logits: before temperature, filters and forbidden ends."""
    asking = [i for i, row in enumerate(rows) if row.params.logprobs is not None]
    answers: list[TokenLogprobs | None] = [None] * len(rows)
    if not asking:
        return answers
    logprobs = logits[asking].float().log_softmax(dim=-1)
    wanted_ids = torch.tensor([[picks[i]] for i in asking], device=logits.device)
    chosen = logprobs.gather(1, wanted_ids).squeeze(1).tolist()
    most = min(max(rows[i].params.logprobs or 0 for i in asking), logits.shape[1])
    values, ids = (part.tolist() for part in logprobs.topk(most, dim=-1))
    for place, i in enumerate(asking):
        wanted = rows[i].params.logprobs or 0
        top = tuple(zip(ids[place][:wanted], values[place][:wanted], strict=True))
        answers[i] = TokenLogprobs(token_id=picks[i], logprob=chosen[place], top=top)
    return answers


def refuse_non_finite(best: Sequence[float], rows: Sequence[SamplingRow]) -> None:
    """Raise NonFiniteLogits for the first row whose largest logit is not finite: NaN in a row makes it NaN."""
    for row, logit in zip(rows, best, strict=True):
        if not math.isfinite(logit):
            where = f"request {row.rid}, position {row.position}"
            raise NonFiniteLogits(f"{where}: the best logit is {logit}; a finite number is needed")
