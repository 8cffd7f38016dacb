"""SamplingParams. Owns: what a request may ask of the sampler and of the stop rules."""

from __future__ import annotations

from typing import Literal

import msgspec


class GrammarSpec(msgspec.Struct, frozen=True):
    """What an output must be: text that a JSON schema or a regular expression accepts. `text` is either."""

    kind: Literal["json_schema", "regex"]
    text: str


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How to choose tokens and when to stop. Plain values; their ranges are checked at the HTTP edge.

    temperature   0 means greedy (argmax); otherwise logits are divided by it, at most 2
    top_p         keep the smallest set of tokens whose probability reaches this, (0, 1]
    top_k         keep this many tokens, 0 = all
    min_p         keep tokens at least this probable, as a share of the most probable one, [0, 1]; 0 = all
    repetition_penalty   above 1 makes every token of prompt and output less likely, below 1 more, [0.01, 2]
    presence_penalty, frequency_penalty   taken off the logit of a token of the output, once or for each time, [-2, 2]
    logit_bias    (token id, what is added to its logit)
    grammar       what the output must be; None: anything
    seed          with a seed a request's tokens do not depend on its batch peers or slot
    logprobs      None: none; n >= 0: log-probability of each output token and of the n best
    max_new_tokens at most this many output tokens, at least 1
    stop          stop strings; the text ends before the first completed one
    """

    max_new_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    grammar: GrammarSpec | None = None
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

    @property
    def shapes_logits(self) -> bool:
        """Whether the sampler needs the tokens so far: something but the end tokens changes the logits."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or bool(self.logit_bias)
            or self.grammar is not None
        )
