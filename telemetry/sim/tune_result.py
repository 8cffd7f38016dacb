"""The answer of `tune`. Owns: its schema; a change of meaning raises `result_version`. Times are seconds."""

from __future__ import annotations

from typing import Literal

from telemetry.sim.parts import CostUsed, Measured, Part
from telemetry.sim.whatif_result import Compared, ModelCheck

TUNE_VERSION = 1

#: gain: better, and by more than the simulator's error where that is known; direction: clearly better, by less than
#: that error; unclear: the interval of the gain has 0 in it; none: nothing that was tried is better; unfit: the cost
#: model does not fit, so nothing is recommended.
Verdict = Literal["gain", "direction", "unclear", "none", "unfit"]


class Candidate(Measured):
    """One configuration that was simulated."""

    trial: int
    """In the order of the search; 0 is the baseline."""
    settings: dict[str, str]
    """What it changes of the baseline."""
    share_outside: float
    """Share of its time in steps larger than any that the cost model was fitted on."""
    is_on_front: bool
    """Nothing that was tried is at least as good in TTFT p99, TBT p99 and throughput, and better in one."""
    why_not: str
    """Why it cannot be recommended; empty when it can."""


class TuneResult(Part):
    """What `admitscope tune --json` prints."""

    result_version: int = TUNE_VERSION
    workload: str
    requests: int
    objective: str
    limits: tuple[str, ...]
    """What a recommendation has to keep, in words."""
    varied: dict[str, tuple[str, ...]]
    """The settings that were varied, and the values of each."""
    base: dict[str, str]
    """The baseline's values of them."""
    space: int
    """Configurations that there are."""
    tried: int
    """Configurations that were simulated, the baseline and those that undo a change of the best included."""
    tried_to_undo: int = 0
    """Of them, those that were tried after --trials to see which changes of the best can be left out."""
    ended_by: Literal["trials", "time", "space"]
    """trials: as many as asked for; time: --timeout-s; space: there were no more."""
    seed: int
    resamples: int
    verdict: Verdict
    sentence: str
    recommended: dict[str, str]
    """Settings to change; empty when the present ones are as good as any that were tried."""
    best: dict[str, str]
    """Settings of the best that was tried, which `compared` is about; recommended only when its gain is clear."""
    command: str
    """The recommendation as flags of `admitscope serve`; empty without one."""
    gain: float | None
    """Of the objective, in its unit, above 0: better."""
    gain_low: float | None
    """Of 95 % of the draws of requests; None for throughput, which a run has once."""
    gain_high: float | None
    luck: float | None
    """How much of the gain is expected to come from having chosen the best of several on these very requests."""
    simulator_error: float | None
    """Simulated / recorded - 1 of the objective in the recorded run; None where nothing was recorded."""
    compared: tuple[Compared, ...]
    """The best beside the baseline; empty when that is the baseline."""
    candidates: tuple[Candidate, ...]
    """Everything that was tried, best first."""
    model_checks: tuple[ModelCheck, ...]
    """The recorded run beside its simulation; empty where nothing comparable was recorded."""
    cost: CostUsed
    violations: int
    """Broken laws of the engine, in the runs of baseline and recommendation."""
    plot: str | None
    """SVG file that was drawn."""
    wall_s: float
    notes: tuple[str, ...]
