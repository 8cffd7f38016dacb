"""SamplingParams. Owns: what a request may ask of the sampler and of the stop rules."""

from __future__ import annotations

import msgspec


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How to choose tokens and when to stop. Plain values; validated at the HTTP edge and by `validate`.

    temperature   0 means greedy (argmax); otherwise logits are divided by it, at most 2
    top_p         keep the smallest set of tokens whose probability reaches this, (0, 1]
    top_k         keep this many tokens, 0 = all
    seed          with a seed a request's tokens do not depend on its batch peers or slot
    logprobs      None: none; n >= 0: log-probability of each output token and of the n best
    max_new_tokens at most this many output tokens, at least 1
    stop          stop strings; the text ends before the first completed one
    """

    max_new_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    logprobs: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop: bool = False
    min_new_tokens: int = 0

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0
