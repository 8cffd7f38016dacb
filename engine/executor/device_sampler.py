"""DeviceSampler. Owns: choosing tokens where the logits are, with nothing read back in between.

What the rows ask for is known before their logits are: seeds and positions as keys, temperatures, filters, forbidden
end tokens, who wants log-probabilities. It goes to the device in one copy; how many rows ask for what gives every
shape. So the host starts all of it and goes on, and the next batch takes its tokens from where this one leaves them.

The tokens are those of `Sampler` for the same logits. One thing is done in another way: how far top_p reaches without a
top_k. `Sampler` looks at some hundred best tokens, and at more where these do not do, which it has to read. Here the
smallest logit that survives is searched for over all tokens, in a fixed number of rounds.

Penalties, biases and grammars are not for here: they hang on tokens, or are masks that the host makes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from engine.attention.device import DeviceRuntime
from engine.attention.staging import SETS, Rotation, Staging
from engine.executor.base import SampledToken, SamplingRow, TokenLogprobs
from engine.executor.sampler import BLOCK, Sampler, in_blocks, largest_token, last_survivor, refuse_non_finite
from engine.executor.shaping import end_tokens

#: Rows whose nucleus is searched for at once: they take 40 bytes for each token of the vocabulary meanwhile.
NUCLEUS_ROWS: Final = 64
#: Each round of the search tries so many logits, and leaves a 16th of the range: 8 rounds for the 32 bits of a float.
_TRIES: Final = 15
_STRIDES: Final = tuple(16**power for power in reversed(range(8)))
#: All bits but the sign.
_MAGNITUDE: Final = 0x7FFFFFFF


class Chosen(NamedTuple):
    """What a batch chose, on the device.

    tokens    [S] int64
    integers  [I] int64 for the host: the tokens, then the ids of the best ones for log-probabilities
    floats    [F] float32 for the host: each row's largest logit, then log-probabilities
    """

    tokens: torch.Tensor
    integers: torch.Tensor
    floats: torch.Tensor


@dataclass(slots=True)
class _Asked:
    """What rows ask for, as places among them; drawn rows are then counted by themselves.

    drawn, keys, temperatures     rows that are not greedy
    limited, limits, shares       among the drawn: those with a top_k, and their top_p
    open, open_shares             among the drawn: those with a top_p alone
    deep, depths                  among the drawn: those with a min_p, and its logarithm
    early, ends                   rows below `min_new_tokens`, one for each of their end tokens
    asking                        rows that want log-probabilities
    """

    drawn: list[int] = field(default_factory=list)
    keys: list[int] = field(default_factory=list)
    temperatures: list[float] = field(default_factory=list)
    limited: list[int] = field(default_factory=list)
    limits: list[int] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)
    open: list[int] = field(default_factory=list)
    open_shares: list[float] = field(default_factory=list)
    deep: list[int] = field(default_factory=list)
    depths: list[float] = field(default_factory=list)
    early: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    asking: list[int] = field(default_factory=list)

    def arrays(self) -> list[NDArray[np.int64]]:
        """In the order of `_Sent`."""
        return [
            *map(_integers, (self.drawn, self.keys, self.limited, self.limits, self.open)),
            *map(_integers, (self.deep, self.early, self.ends, self.asking)),
            *map(_float_bits, (self.temperatures, self.shares, self.open_shares, self.depths)),
        ]


class _Sent(NamedTuple):
    """The same on the device; floats are float64."""

    drawn: torch.Tensor
    keys: torch.Tensor
    limited: torch.Tensor
    limits: torch.Tensor
    open: torch.Tensor
    deep: torch.Tensor
    early: torch.Tensor
    ends: torch.Tensor
    asking: torch.Tensor
    temperatures: torch.Tensor
    shares: torch.Tensor
    open_shares: torch.Tensor
    depths: torch.Tensor


class DeviceSampler:
    """Chooses as `sampler` does, whose keys are on the device of `runtime`. `sets`: see Rotation."""

    def __init__(self, sampler: Sampler, runtime: DeviceRuntime, *, sets: int = SETS) -> None:
        self._sampler = sampler
        #: Tokens of the vocabulary in whole blocks: a top_k beyond it is none.
        self._width = -(-sampler.vocab_size // BLOCK) * BLOCK
        self._stagings = Rotation(lambda: Staging(runtime, torch.int64), sets)

    def choose(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> Chosen:
        """Start choosing a token for each row. logits [S, vocab], any float type, not modified.

        Every row has to be one that `is_chosen_on_device`.
        """
        if not rows:
            none = torch.empty(0, dtype=torch.int64, device=logits.device)
            return Chosen(none, none, torch.empty(0, device=logits.device))
        asked = self._asked(rows)
        sent = self._send(asked)
        shaped = logits
        if sent is not None and asked.early:
            shaped = logits.float() if logits.dtype is not torch.float32 else logits.clone()
            shaped.index_put_((sent.early, sent.ends), shaped.new_full((), -math.inf))
        allowed = in_blocks(shaped)
        block_best = allowed.amax(dim=-1)
        best = block_best.amax(dim=-1).float()
        if sent is None or not asked.drawn:
            tokens = largest_token(allowed, block_best)
        elif len(asked.drawn) == len(rows):
            tokens = self._draw(allowed.float(), asked, sent)
        else:
            drawn = self._draw(allowed.index_select(0, sent.drawn).float(), asked, sent)
            tokens = largest_token(allowed, block_best).index_copy_(0, sent.drawn, drawn)
        if sent is None or not asked.asking:
            return Chosen(tokens, tokens, best)
        widest = max(row.params.logprobs or 0 for row in rows)
        return _with_logprobs(logits.index_select(0, sent.asking), tokens, best, sent.asking, widest)

    def _asked(self, rows: Sequence[SamplingRow]) -> _Asked:
        asked = _Asked()
        for place, row in enumerate(rows):
            params = row.params
            if row.output_index < params.min_new_tokens:
                ends = end_tokens(params, self._sampler.eos_token_ids, self._sampler.vocab_size)
                asked.ends += ends
                asked.early += [place] * len(ends)
            if params.logprobs is not None:
                asked.asking.append(place)
            if params.is_greedy:
                continue
            among = len(asked.drawn)
            asked.drawn.append(place)
            asked.keys.append(self._sampler.row_key(row))
            asked.temperatures.append(params.temperature)
            if 0 < params.top_k < self._width and (params.top_p < 1.0 or params.top_k < self._sampler.vocab_size):
                asked.limited.append(among)
                asked.limits.append(params.top_k)
                asked.shares.append(params.top_p)
            elif params.top_p < 1.0:
                asked.open.append(among)
                asked.open_shares.append(params.top_p)
            if params.min_p > 0.0:
                asked.deep.append(among)
                asked.depths.append(math.log(params.min_p))
        return asked

    def _send(self, asked: _Asked) -> _Sent | None:
        """One copy of all of it; None where nothing is asked, as of greedy rows."""
        arrays = asked.arrays()
        if not any(map(len, arrays)):
            return None
        staging = self._stagings.next()
        staging.pack(arrays)
        views = staging.upload()
        staging.sent()
        first_float = _Sent._fields.index("temperatures")
        return _Sent(*views[:first_float], *(view.view(torch.float64) for view in views[first_float:]))

    def _draw(self, logits: torch.Tensor, asked: _Asked, sent: _Sent) -> torch.Tensor:
        """One random token of each drawn row. logits [D, blocks, BLOCK] float32."""
        scaled = logits / sent.temperatures.float()[:, None, None]
        flat = scaled.view(len(scaled), -1)
        best = flat.amax(dim=-1)
        if asked.limited or asked.open or asked.deep:
            floors = torch.full((len(scaled),), -math.inf, device=logits.device)
            if asked.limited:
                most = flat.index_select(0, sent.limited).topk(max(asked.limits), dim=-1).values
                floors.index_copy_(0, sent.limited, limited_floors(most, sent.limits, sent.shares))
            for first in range(0, len(asked.open), NUCLEUS_ROWS):
                part = slice(first, first + NUCLEUS_ROWS)
                subset = scaled.index_select(0, sent.open[part])
                floors.index_copy_(0, sent.open[part], nucleus_floors(subset, sent.open_shares[part]))
            if asked.deep:
                depths = best.index_select(0, sent.deep) + sent.depths.float()
                floors.index_copy_(0, sent.deep, floors.index_select(0, sent.deep).maximum(depths))
            flat.masked_fill_(flat < floors[:, None], -math.inf)
        return self._sampler.pick(scaled, best, sent.keys)


def is_chosen_on_device(row: SamplingRow) -> bool:
    """Whether a row's token can be chosen without the host."""
    return row.history is None and row.grammar is None


def limited_floors(best: torch.Tensor, limits: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """The smallest logit that survives in each row, [S].

    best    [S, n] the n largest in order, n at least each limit
    limits  [S] int64 top_k
    shares  [S] float64 top_p
    """
    reach = (best - best[:, :1]).double().exp_().cumsum(dim=-1)
    last = limits[:, None] - 1
    place, _ = last_survivor(reach, last, shares, reach.gather(1, last).squeeze(1))
    return best.gather(1, place[:, None]).squeeze(1)


def nucleus_floors(scaled: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """The largest logit of each row at and above which the probabilities reach its share, [S]; -inf where none does.

    Blocks are sorted, and the sums from each of their places to the end are kept. What lies at and above any logit is
    then found in each block by bisection, and added up over the blocks. Logits are tried by their place in the order of
    all floats, from the highest digit to the lowest. Sums are of another order than those of `Sampler`: the two could
    part where a share is met within a rounding of float64.

    scaled  [S, blocks, BLOCK] float32
    shares  [S] float64, below 1
    """
    flat = scaled.view(len(scaled), -1)
    best = flat.amax(dim=-1)
    goal = shares * (flat - best[:, None]).exp_().sum(dim=-1, dtype=torch.float64)
    ordered = scaled.sort(dim=-1).values
    weights = (ordered - best[:, None, None]).double().exp_()
    # From a place to the end of its block; behind the end there is nothing.
    held = torch.nn.functional.pad(weights.flip(-1).cumsum(dim=-1).flip(-1), (0, 1))
    highest = _place_among_floats(best)
    found = _place_among_floats(torch.full_like(best, -math.inf))
    steps = torch.arange(1, _TRIES + 1, device=scaled.device)
    for stride in _STRIDES:
        # Not beyond the largest, where NaN begins.
        tries = (found[:, None] + stride * steps).minimum(highest[:, None])
        values = _float_at(tries)[:, None, :].expand(-1, scaled.shape[1], -1).contiguous()
        sums = held.gather(-1, torch.searchsorted(ordered, values)).sum(dim=1)
        found = tries.where(sums >= goal[:, None], found[:, None]).amax(dim=-1)
    return _float_at(found)


def answers(rows: Sequence[SamplingRow], integers: Sequence[int], floats: Sequence[float]) -> tuple[SampledToken, ...]:
    """What came back of `Chosen` for these rows. Raises NonFiniteLogits, naming the request."""
    count = len(rows)
    refuse_non_finite(floats[:count], rows)
    asking = [place for place, row in enumerate(rows) if row.params.logprobs is not None]
    ids, values = integers[count:], floats[count + len(asking) :]
    widest = len(ids) // max(1, len(asking))
    logprobs: dict[int, TokenLogprobs] = {}
    for at, place in enumerate(asking):
        first, wanted = at * widest, min(rows[place].params.logprobs or 0, widest)
        top = zip(ids[first : first + wanted], values[first : first + wanted], strict=True)
        logprobs[place] = TokenLogprobs(token_id=integers[place], logprob=floats[count + at], top=tuple(top))
    return tuple(
        SampledToken(rid=row.rid, token_id=integers[place], logprobs=logprobs.get(place))
        for place, row in enumerate(rows)
    )


def _with_logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, best: torch.Tensor, asking: torch.Tensor, widest: int
) -> Chosen:
    """Adds log-probabilities, from the raw logits [L, vocab] of the rows that ask, of the token and the `widest`."""
    logprobs = logits.float().log_softmax(dim=-1)
    chosen = logprobs.gather(1, tokens.index_select(0, asking)[:, None]).squeeze(1)
    values, ids = logprobs.topk(min(widest, logits.shape[1]), dim=-1)
    return Chosen(tokens, torch.cat((tokens, ids.flatten())), torch.cat((best, chosen, values.flatten())))


def _place_among_floats(x: torch.Tensor) -> torch.Tensor:
    """Integers that are ordered as the float32 are, int64."""
    bits = x.view(torch.int32).long()
    return torch.where(bits < 0, bits ^ _MAGNITUDE, bits)


def _float_at(place: torch.Tensor) -> torch.Tensor:
    """The float32 at a place of that order."""
    return torch.where(place < 0, place ^ _MAGNITUDE, place).int().view(torch.float32)


def _integers(values: Sequence[int]) -> NDArray[np.int64]:
    return np.array(values, dtype=np.int64)


def _float_bits(values: Sequence[float]) -> NDArray[np.int64]:
    """The bits of float64: all that is staged is int64."""
    return np.array(values, dtype=np.float64).view(np.int64)
