"""Rendering. Owns: the JSON of responses and stream events, in OpenAI's shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine.server.choices import Choice, Delta, LogprobEntry, TokenText


@dataclass(frozen=True, slots=True)
class Envelope:
    """What every event of one response repeats. `created` is Unix seconds."""

    response_id: str
    created: int
    model: str
    is_chat: bool
    include_usage: bool
    wants_logprobs: bool

    def event(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """One stream event. With include_usage every event but the last says `usage: null`."""
        kind = "chat.completion.chunk" if self.is_chat else "text_completion"
        body = self._head(kind) | {"choices": choices}
        return body | {"usage": None} if self.include_usage else body

    def usage_event(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The last event of a stream that asked for usage: no choices."""
        return self.event([]) | {"usage": usage}

    def response(self, choices: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        """The whole answer of a request that is not streamed."""
        kind = "chat.completion" if self.is_chat else "text_completion"
        return self._head(kind) | {"choices": choices, "usage": usage}

    def role_choice(self, index: int) -> dict[str, Any]:
        """First event of a chat choice."""
        return self._chat_choice(index, "delta", {"role": "assistant", "content": ""}, Delta())

    def delta_choice(self, index: int, delta: Delta) -> dict[str, Any]:
        """A choice of a stream event."""
        if self.is_chat:
            return self._chat_choice(index, "delta", {"content": delta.text} if delta.text else {}, delta)
        return self._text_choice(index, delta)

    def whole_choice(self, index: int, whole: Delta) -> dict[str, Any]:
        """A choice of an answer that is not streamed."""
        if self.is_chat:
            return self._chat_choice(index, "message", {"role": "assistant", "content": whole.text}, whole)
        return self._text_choice(index, whole)

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.response_id, "object": kind, "created": self.created, "model": self.model}

    def _text_choice(self, index: int, delta: Delta) -> dict[str, Any]:
        logprobs = _completion_logprobs(delta.entries) if self.wants_logprobs else None
        return {"index": index, "text": delta.text, "logprobs": logprobs, "finish_reason": delta.finish}

    def _chat_choice(self, index: int, key: str, content: dict[str, Any], delta: Delta) -> dict[str, Any]:
        entries = delta.entries
        wanted = self.wants_logprobs and (entries or key == "message")
        logprobs = {"content": [_chat_entry(entry) for entry in entries], "refusal": None} if wanted else None
        return {"index": index, key: content, "logprobs": logprobs, "finish_reason": delta.finish}


def usage_of(choices: Sequence[Choice], choices_per_prompt: int) -> dict[str, Any]:
    """Token counts of a response. A prompt counts once, however many choices were made from it."""
    firsts = choices[::choices_per_prompt]
    prompt = sum(choice.prompt_tokens for choice in firsts)
    completion = sum(choice.completion_tokens for choice in choices)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(choice.cached_tokens for choice in firsts)},
    }


def _completion_logprobs(entries: Sequence[LogprobEntry]) -> dict[str, Any]:
    return {
        "tokens": [entry.token.text for entry in entries],
        "token_logprobs": [entry.token.logprob for entry in entries],
        # Two ids can have the same text: the better one is kept, the chosen token always.
        "top_logprobs": [
            {token.text: token.logprob for token in (*reversed(entry.top), entry.token)} for entry in entries
        ],
        "text_offset": [entry.offset for entry in entries],
    }


def _chat_entry(entry: LogprobEntry) -> dict[str, Any]:
    return _chat_token(entry.token) | {"top_logprobs": [_chat_token(token) for token in entry.top]}


def _chat_token(token: TokenText) -> dict[str, Any]:
    return {"token": token.text, "logprob": token.logprob, "bytes": list(token.data)}
