"""The answer of `whatif`. Owns: its schema, which the dashboard reads; a change of meaning raises `result_version`.

"before" is the journal's own configuration, "after" the changed one; both are simulated. Durations are seconds.
"""

from __future__ import annotations

from typing import Literal

from telemetry.sim.parts import CostUsed, Part

WHATIF_VERSION = 1


class Interval(Part):
    """A number and the interval that 95 % of resamplings of the requests fall into."""

    value: float | None
    low: float | None
    high: float | None


class Compared(Part):
    """One measure, before and after."""

    name: str
    """ttft_p50, tbt_p99, …"""
    unit: Literal["s", "1/s", "share", "count"]
    before: Interval
    after: Interval
    difference: Interval
    """After minus before, of the same resampled requests."""
    is_clear: bool
    """Whether the interval of the difference lies on one side of 0."""
    model_error: float | None
    """Simulated / recorded - 1 of the same measure of the recorded run; None where none was recorded."""
    is_within_error: bool | None
    """Whether the difference is smaller than |simulated - recorded|, or its share of the value before smaller than
    |model_error|: the number is no finding, at most its sign."""


class Decile(Part):
    """A tenth of the requests, by length of their prompts."""

    decile: int
    """1: the shortest prompts."""
    prompt_from: int
    prompt_to: int
    requests: int
    ttft_p50_before: float | None
    ttft_p50_after: float | None
    ttft_p99_before: float | None
    ttft_p99_after: float | None
    tbt_p99_before: float | None
    tbt_p99_after: float | None


class Choice(Part):
    """What a pass decided about one request; everything None: it did not look at it."""

    reason: str | None
    prefix_len: int | None
    selected_extend: int | None
    need: float | None
    have: float | None


class DecisionDifference(Part):
    """A step in which the two runs differ, and the first request about which they do."""

    step: int
    """Of both simulated runs, counted from their start."""
    time_before: float
    """When that step began, since the start of the run."""
    time_after: float
    rid: str
    what: Literal["decision", "decode", "retraction", "kind"]
    """decision: an examination in the pass; decode: who decodes; retraction: who was pushed back; kind: of the step."""
    before: Choice
    after: Choice
    kind_before: str
    """Kind of the step: idle, extend, mixed, decode; "" when the run was over."""
    kind_after: str


class Pair(Part):
    """One request in both runs; `tbt` is the longest time between two of its tokens."""

    rid: str
    prompt_len: int
    output_len: int
    ttft_before: float
    ttft_after: float
    tbt_before: float | None
    tbt_after: float | None
    e2e_before: float
    e2e_after: float


class Curve(Part):
    """Quantiles 0, 1, … 100 % of a measure over all requests (of `tbt`: over all tokens)."""

    name: Literal["ttft", "tbt", "e2e"]
    before: tuple[float, ...]
    after: tuple[float, ...]


class ModelCheck(Part):
    """The recorded run beside its own simulation, of the compared requests: how far the simulator is from it."""

    name: str
    recorded: float | None
    simulated: float | None
    error: float | None
    """Simulated / recorded - 1."""


class Setting(Part):
    """A changed setting."""

    name: str
    before: str
    after: str

    @property
    def is_change(self) -> bool:
        return self.before != self.after


class WhatifResult(Part):
    """What `admitscope whatif --json` prints."""

    result_version: int = WHATIF_VERSION
    journal: str
    settings: tuple[Setting, ...]
    sentence: str
    """The answer in a sentence."""
    requests: int
    """Compared in pairs: those that ended by themselves, with a token, in the record and in both runs. Every table of
    times is of these."""
    left_out: int
    """Not compared: they ended early or never in one of the runs or in the record, or were refused."""
    unfinished: int = 0
    """Of those left out: whose end the record does not have."""
    refused_before: int
    refused_after: int
    resamples: int
    compared: tuple[Compared, ...]
    curves: tuple[Curve, ...]
    pairs: tuple[Pair, ...]
    """At most 2,000, evenly spread over the run."""
    faster: float | None
    """Share of requests whose first token comes earlier after the change (by more than 1 %)."""
    slower: float | None
    fairness: tuple[Decile, ...]
    reasons_before: dict[str, int]
    reasons_after: dict[str, int]
    first_difference: DecisionDifference | None
    """None: the same decisions throughout."""
    differences: tuple[DecisionDifference, ...]
    """The first steps that differ."""
    model_checks: tuple[ModelCheck, ...]
    """Empty for a part of the run: who waited or ran beside it is not simulated, so the two are not the same."""
    model_error: float | None
    """Median over requests of |simulated / recorded time to first token - 1|."""
    cost_before: CostUsed
    cost_after: CostUsed
    violations: int
    """Broken laws of the engine, in both runs."""
    journal_before: str | None
    journal_after: str | None
    wall_s: float
    notes: tuple[str, ...]
