"""Choices. Owns: how the tokens of one engine request become the text, log-probabilities and end of one choice."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from engine.executor.base import TokenLogprobs
from engine.llm_engine import TokenOutput
from engine.request import FinishReason
from engine.sampling_params import SamplingParams
from engine.text.stops import StoppingText
from engine.text.tokenizer import Tokenizer

#: JSON has no minus infinity.
_LOWEST_LOGPROB = -9999.0


@dataclass(frozen=True, slots=True)
class TokenText:
    """A token as text (U+FFFD for a part of a character), as bytes, and its natural log-probability."""

    text: str
    data: bytes
    logprob: float


@dataclass(frozen=True, slots=True)
class LogprobEntry:
    """One output token with its alternatives, best first; `offset` is where its text begins, in characters."""

    token: TokenText
    top: tuple[TokenText, ...]
    offset: int


@dataclass(slots=True)
class Delta:
    """What one token added. `finish` is the API's word, None while the choice goes on."""

    text: str = ""
    entries: list[LogprobEntry] = field(default_factory=list)
    finish: str | None = None


class Choice:
    """One choice of a response. `failure` is set instead of a finish when the engine did not end it by itself."""

    def __init__(
        self,
        *,
        rid: str,
        index: int,
        prompt_tokens: int,
        params: SamplingParams,
        tokenizer: Tokenizer,
    ) -> None:
        self.rid = rid
        self.index = index
        self.prompt_tokens = prompt_tokens
        self.cached_tokens = 0
        self.completion_tokens = 0
        self.failure: tuple[FinishReason, str] | None = None
        self._tokenizer = tokenizer
        self._include_stop = params.include_stop
        self._text = StoppingText(
            tokenizer, params.stop, include_stop=params.include_stop, min_new_tokens=params.min_new_tokens
        )
        self._held = Delta()

    def push(self, output: TokenOutput) -> Delta | None:
        """Take one output; what may be sent now, None when that is nothing."""
        held = self._held
        self.cached_tokens = max(self.cached_tokens, output.cached_tokens)
        if output.token_id is not None:
            self.completion_tokens += 1
            offset = self._text.position
            if not self._is_silent(output):
                held.text += self._text.push(output.token_id)
            if output.logprobs is not None:
                held.entries.append(self._entry(output.logprobs, offset))
        if output.finish is not None:
            held.text += self._text.finish()
            if output.finish in (FinishReason.STOP, FinishReason.LENGTH):
                held.finish = output.finish.value
            else:
                self.failure = (output.finish, output.detail)
                return None
        elif not held.text:
            return None  # no empty events: log-probabilities wait for the text they belong to
        self._held = Delta()
        return held

    def _is_silent(self, output: TokenOutput) -> bool:
        """The token that ended the request by its id is not text, unless stops are to be included."""
        if output.finish is not FinishReason.STOP:
            return False
        return output.detail == "eos" or (output.detail == "stop_token" and not self._include_stop)

    def _entry(self, logprobs: TokenLogprobs, offset: int) -> LogprobEntry:
        return LogprobEntry(
            self._token(logprobs.token_id, logprobs.logprob),
            tuple(self._token(token_id, logprob) for token_id, logprob in logprobs.top),
            offset,
        )

    def _token(self, token_id: int, logprob: float) -> TokenText:
        data = self._tokenizer.token_bytes(token_id)
        finite = logprob if math.isfinite(logprob) else _LOWEST_LOGPROB
        return TokenText(data.decode("utf-8", "replace"), data, max(finite, _LOWEST_LOGPROB))
