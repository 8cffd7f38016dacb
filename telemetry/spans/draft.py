"""Span drafts. Owns: one finished span as a plain value, and the ids of spans and traces.

Ids are chosen, not drawn: they follow from the request's id, so whoever knows a record can name its span. Times are
nanoseconds on the engine's monotonic clock until `telemetry.spans.export` moves them to the wall clock.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

AttributeValue = str | bool | int | float | tuple[str, ...]
Attributes = dict[str, AttributeValue]


class DraftEvent(NamedTuple):
    """Something that happened at one instant of a span."""

    name: str
    t_ns: int
    attributes: Attributes


class SpanDraft(NamedTuple):
    """One finished span.

    parent_id   None: the root of its trace
    links       (trace id, span id) of related spans in other traces
    error       `error.type` and status ERROR when set
    """

    name: str
    trace_id: int
    span_id: int
    parent_id: int | None
    start_ns: int
    end_ns: int
    attributes: Attributes
    events: tuple[DraftEvent, ...] = ()
    links: tuple[tuple[int, int], ...] = ()
    is_server: bool = False
    error: str | None = None


def derived_id(*parts: str | int, size: int = 8) -> int:
    """An id of `size` bytes that follows from `parts`; never 0, which would be invalid."""
    text = "\x1f".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=size).digest(), "big") or 1


def request_trace_id(trace_id: str, engine_id: str, rid: str, accepted_ns: int) -> int:
    """The trace of a request: the one it was given, or one that follows from who it is."""
    return int(trace_id, 16) if trace_id else derived_id(engine_id, rid, accepted_ns, size=16)


def request_span_id(trace_id: int, rid: str) -> int:
    """The request's own span. A server told its caller the first 16 digits of the id behind the dash."""
    stem = rid.partition("-")[2]
    head = stem[:16]
    if "." not in stem or stem.endswith(".0"):
        try:
            return int(head, 16) if len(head) == 16 else derived_id(trace_id, rid)
        except ValueError:
            pass
    return derived_id(trace_id, rid)


def step_ids(engine_id: str, step: int) -> tuple[int, int]:
    """(trace id, span id) of a step's span."""
    return derived_id(engine_id, "step", step, size=16), derived_id(engine_id, "step", step)
