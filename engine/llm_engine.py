"""LLMEngine. Owns: one step at a time — plan, commit, execute, settle, apply — on whichever thread calls it."""

from __future__ import annotations

import msgspec

from engine.executor.base import TokenLogprobs
from engine.request import FinishReason
from engine.sampling_params import SamplingParams


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a caller hands to the engine. Token ids stay in the token store."""

    rid: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    priority: int | None = None
    routing_key: str | None = None
    accepted_ns: int = 0
    trace_id: str = ""
    parent_span_id: str = ""


class TokenOutput(msgspec.Struct, frozen=True):
    """One output token, or an end without a token (abort, error: token_id None).

    cached_tokens  prompt tokens found in the cache at the request's first admission
    stop_hit       a stop string was completed by this token
    """

    rid: str
    token_id: int | None
    output_index: int
    logprobs: TokenLogprobs | None = None
    finish: FinishReason | None = None
    detail: str = ""
    cached_tokens: int = 0
    prompt_tokens: int = 0
