"""Trace context. Owns: the ids of one HTTP request: ours, the caller's request id, and W3C `traceparent`.

The internal id alone is used as a key. What a caller sends is echoed and recorded, never trusted to be unique.
"""

from __future__ import annotations

import re
import secrets
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

_TRACEPARENT: Final = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_CLIENT_ID: Final = re.compile(r"[A-Za-z0-9._:/+=@,~-]{1,128}")


@dataclass(frozen=True, slots=True)
class RequestContext:
    """Ids of one HTTP request.

    internal_id     32 hexadecimal digits, the stem of the engine's request ids
    request_id      what `x-request-id` answers: the caller's when it is well formed, else the internal id
    trace_id        the caller's, or a random one
    parent_span_id  the caller's span, "" without one
    flags           two hexadecimal digits
    """

    internal_id: str
    request_id: str
    trace_id: str
    parent_span_id: str
    flags: str

    @property
    def is_sampled(self) -> bool:
        """The caller's sampled flag."""
        return bool(int(self.flags, 16) & 1)

    @property
    def traceparent(self) -> str:
        """The response header: the caller's trace and our span."""
        return f"00-{self.trace_id}-{self.internal_id[:16]}-{self.flags}"


def server_span_id(rid: str) -> str:
    """Span id of the server span of request `rid` (`cmpl-<internal_id>...`): what `traceparent` told the caller."""
    return rid.partition("-")[2][:16]


def context_of(headers: Iterable[tuple[bytes, bytes]]) -> RequestContext:
    """Ids from raw request headers. What is malformed counts as absent."""
    client_id = parent = ""
    for name, value in headers:
        if name == b"x-request-id":
            client_id = value.decode("latin-1")
        elif name == b"traceparent":
            parent = value.decode("latin-1").strip()
    internal = uuid.uuid4().hex
    trace_id, span_id, flags = parse_traceparent(parent) or (secrets.token_hex(16), "", "00")
    return RequestContext(
        internal, client_id if _CLIENT_ID.fullmatch(client_id) else internal, trace_id, span_id, flags
    )


def parse_traceparent(value: str) -> tuple[str, str, str] | None:
    """(trace id, span id, flags), or None when `value` is not a valid traceparent."""
    match = _TRACEPARENT.fullmatch(value)
    if match is None:
        return None
    version, trace_id, span_id, flags, rest = match.groups()
    if version == "ff" or (version == "00" and rest) or not int(trace_id, 16) or not int(span_id, 16):
        return None
    return trace_id, span_id, flags
