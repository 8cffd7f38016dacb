"""Answers about lanes. Owns: what `/observe/lanes` says of many requests at once: one lane of spans for each."""

from __future__ import annotations

from telemetry.observe_base import Head, Value


class LaneSpan(Value):
    """One stretch of one request, [start_ns, end_ns) on the engine's clock; spans of one lane never overlap.

    kind     intake | waiting | chunk | between | decode
    blocker, reason, who, passes  of `waiting`: in the queue, or refused between two chunks
    step, tokens, decode_rows     of `chunk`: tokens computed, and decode rows in the same step
    """

    kind: str
    start_ns: int
    end_ns: int
    blocker: str | None = None
    reason: str | None = None
    who: str | None = None
    passes: int = 0
    step: int | None = None
    tokens: int = 0
    decode_rows: int = 0


class Stall(Value):
    """A token that came late: the gap before it, and its cause. It lies over the spans of the lane."""

    start_ns: int
    end_ns: int
    cause: str


class Lane(Value):
    """One request from acceptance to its end, or to now.

    retracted_ns    when it was pushed back to the queue
    first_token_ns  when its first token was applied
    spans           in order of time; of more than 64 the longest, `spans_left_out` counts the others
    """

    rid: str
    state: str
    accepted_ns: int
    end_ns: int
    accepted_wall_s: float
    prompt_len: int
    cached_tokens: int | None = None
    outputs: int = 0
    finish: str | None = None
    first_token_ns: int | None = None
    retracted_ns: tuple[int, ...] = ()
    spans: tuple[LaneSpan, ...] = ()
    spans_left_out: int = 0
    stalls: tuple[Stall, ...] = ()


class LanesAnswer(Head):
    """The latest arrivals, live or finished, in order of arrival. `total`: requests that the engine remembers."""

    lanes: tuple[Lane, ...]
    total: int
