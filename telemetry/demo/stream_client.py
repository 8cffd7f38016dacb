"""A streaming client of the OpenAI API. Owns: one request, the clock readings of its events, what the usage said.

Works with any server that speaks `/v1/completions` or `/v1/chat/completions` over server-sent events. Times are this
process's own monotonic clock, in nanoseconds: what a user of the server sees, network included.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

_ERROR_CHARS = 300


@dataclass(slots=True)
class StreamRecord:
    """One request as its client saw it.

    response_id          the `id` of its events, which `admitscope explain` knows it by
    sent_ns, token_ns    when it was sent; when each event that carried a token arrived
    output_tokens        `usage.completion_tokens`; events seen, where the server sent no usage
    cached_tokens        prompt tokens the server says it found in its cache
    error                None, or what went wrong in one line
    """

    sent_ns: int
    response_id: str = ""
    token_ns: list[int] = field(default_factory=list)
    done_ns: int = 0
    text: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    has_usage: bool = False
    error: str | None = None

    @property
    def ttft_ns(self) -> int | None:
        """Time to first token; None when none arrived."""
        return self.token_ns[0] - self.sent_ns if self.token_ns else None

    def gaps_ns(self) -> list[int]:
        """Times between consecutive token events (TBT)."""
        return [after - before for before, after in zip(self.token_ns, self.token_ns[1:], strict=False)]


class StreamProtocolError(Exception):
    """The server's stream is not what the API promises."""


async def stream_request(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> StreamRecord:
    """POST `body` with streaming and usage on, and read the stream to its end. Failures land in `record.error`."""
    record = StreamRecord(sent_ns=time.monotonic_ns())
    request = body | {"stream": True, "stream_options": {"include_usage": True}}
    try:
        async with client.stream("POST", path, json=request) as response:
            if response.status_code != httpx.codes.OK:
                detail = (await response.aread()).decode("utf-8", "replace")
                record.error = f"HTTP {response.status_code}: {detail[:_ERROR_CHARS]}"
            else:
                await _read(response, record)
    except (httpx.HTTPError, StreamProtocolError) as error:
        record.error = f"{type(error).__name__}: {str(error)[:_ERROR_CHARS]}"
    record.done_ns = time.monotonic_ns()
    return record


async def _read(response: httpx.Response, record: StreamRecord) -> None:
    """Fill `record` from the events of `response`; raises StreamProtocolError when the stream is cut or malformed."""
    closing_ns: int | None = None
    is_complete = False
    async for line in response.aiter_lines():
        if not line.startswith("data:"):
            continue
        now_ns = time.monotonic_ns()
        payload = line[5:].strip()
        if payload == "[DONE]":
            is_complete = True
            break
        try:
            event = json.loads(payload)
        except json.JSONDecodeError as error:
            raise StreamProtocolError(f"an event is not JSON: {error}") from error
        if not isinstance(event, dict):
            raise StreamProtocolError(f"an event is a {type(event).__name__}, not an object")
        if "error" in event:
            raise StreamProtocolError(f"error event: {json.dumps(event['error'])}")
        if _take_event(event, now_ns, record):
            closing_ns = now_ns
    if not is_complete:
        raise StreamProtocolError(f"the stream ended after {len(record.token_ns)} token events without [DONE]")
    # Some servers send the end in an event of its own, others with the last token whose text may be empty: the count
    # of tokens tells which.
    if closing_ns is not None and record.has_usage and len(record.token_ns) < record.output_tokens:
        record.token_ns.append(closing_ns)
    if not record.has_usage:
        record.output_tokens = len(record.token_ns)


def _take_event(event: dict[str, Any], now_ns: int, record: StreamRecord) -> bool:
    """Account for one event. True when it is an end without text, which may or may not stand for a token."""
    record.response_id = record.response_id or str(event.get("id") or "")
    usage = event.get("usage")
    if usage:
        record.has_usage = True
        record.prompt_tokens = int(usage.get("prompt_tokens") or 0)
        record.output_tokens = int(usage.get("completion_tokens") or 0)
        details = usage.get("prompt_tokens_details") or {}
        record.cached_tokens = int(details.get("cached_tokens") or 0)
    choices = event.get("choices")
    if not choices:
        return False
    choice = choices[0]
    delta = choice.get("delta")
    text = (choice.get("text") if delta is None else delta.get("content")) or ""
    finish = choice.get("finish_reason")
    if finish is not None:
        record.finish_reason = str(finish)
    announces_role = delta is not None and "role" in delta
    if text or (finish is None and not announces_role):
        record.token_ns.append(now_ns)
        record.text.append(text)
        return False
    return finish is not None


def quantile(values: Iterable[float], share: float) -> float:
    """The value below or at which `share` (0 to 1) of `values` lie, by nearest rank; NaN of nothing."""
    ordered = sorted(values)
    if not ordered:
        return math.nan
    return ordered[max(math.ceil(share * len(ordered)), 1) - 1]


def failures(records: Sequence[StreamRecord]) -> list[str]:
    """The error lines of `records`, in order."""
    return [record.error for record in records if record.error is not None]
