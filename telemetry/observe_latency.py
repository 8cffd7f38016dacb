"""Answers about latency. Owns: what `/observe/breakdown` says of the parts of TTFT, of gaps, and of objectives."""

from __future__ import annotations

from pydantic import Field

from telemetry.observe_base import Head, Value


class PartsSlot(Value):
    """First tokens and gaps of one slot of `LatencyBreakdown.slot_s` seconds that ends at `t_wall_s`.

    count        requests that got their first token; the sums below are theirs, `emit` once their first byte is sent
    parts_ns     TTFT_PARTS above zero; they add up to ttft_ns exactly
    blockers_ns  they add up to parts_ns["queue"] + refused_between_ns exactly
    order_ns     blockers_ns["order"] by what ended the passes; empty where the source does not know
    gaps, late   tokens that followed another one, and those of them that came late, by cause
    """

    t_wall_s: float
    count: int = 0
    ttft_ns: int = 0
    parts_ns: dict[str, int] = Field(default_factory=dict)
    blockers_ns: dict[str, int] = Field(default_factory=dict)
    order_ns: dict[str, int] = Field(default_factory=dict)
    refused_between_ns: int = 0
    gaps: int = 0
    late: dict[str, int] = Field(default_factory=dict)


class FirstToken(Value):
    """One request with its first token.

    part     the part of TTFT that took longest
    blocker  of part `queue`, what held it longest; else None
    """

    rid: str
    t_wall_s: float
    prompt_len: int
    cached_tokens: int
    ttft_s: float
    part: str
    blocker: str | None = None


class ObjectiveShare(Value):
    """Requests whose prompts were from `prompt_from` to `prompt_to` tokens long, and those within the objective."""

    prompt_from: int
    prompt_to: int
    count: int
    within: int


class TailShare(Value):
    """The parts of TTFT of the slowest requests: those at or above the quantile `q`, which is `ttft_s`. q 0: of all.

    waiting_longer  live requests without a first token that have waited longer than `ttft_s`: they are in no quantile.
                    None where the source does not know
    """

    q: float
    ttft_s: float
    count: int
    ttft_ns: int
    parts_ns: dict[str, int]
    blockers_ns: dict[str, int]
    order_ns: dict[str, int] = Field(default_factory=dict)
    refused_between_ns: int = 0
    waiting_longer: int | None = None


class RecentFirsts(Value):
    """First tokens of the last `window_s` seconds, all of them up to the latest 4,096.

    p50_s, p99_s    of their TTFT; None when there were none
    queue_share     of the sum of their TTFT, what was spent in the queue, 0 to 1
    waiting_longer  live requests without a first token that have waited longer than `p99_s`
    """

    window_s: float
    count: int = 0
    p50_s: float | None = None
    p99_s: float | None = None
    queue_share: float | None = None
    waiting_longer: int = 0


class LatencyBreakdown(Head):
    """Where time goes, over the last `window_s` seconds.

    slots         oldest first; a slot without first tokens and gaps is left out
    gap_bounds_s  upper bounds of the histogram of gaps; `gap_counts` has one more, for those above the last
    late          late tokens by cause, of all `gaps`
    firsts        a sample of at most 1,000 of the `firsts_total` latest first tokens; all at or above p99 are in it
    deciles       by prompt length, over the same first tokens
    tails         all, and the slowest tenth and hundredth; empty before the first token
    recent        the latest first tokens alone; None where the source does not know
    """

    slot_s: float
    window_s: float
    slots: tuple[PartsSlot, ...]
    ttft_objective_s: float
    gap_objective_s: float
    gap_bounds_s: tuple[float, ...]
    gap_counts: tuple[int, ...]
    gaps: int
    late: dict[str, int]
    firsts: tuple[FirstToken, ...]
    firsts_total: int
    deciles: tuple[ObjectiveShare, ...]
    tails: tuple[TailShare, ...]
    recent: RecentFirsts | None = None
