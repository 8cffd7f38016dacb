"""Results of a simulation. Owns: their schema, and how they are put together from what was measured.

The JSON of `admitscope sim --json` is a `SimResult`. Times are seconds of virtual time unless a name says otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping

from telemetry.sim.cost_model import CostModel, Estimator, most_outside, outside_words
from telemetry.sim.loop import Loop
from telemetry.sim.measure import Histogram, Measure, Served
from telemetry.sim.parts import CostUsed, Part, Spread, digits

RESULT_VERSION = 1


class SimResult(Part):
    """One simulated run."""

    result_version: int = RESULT_VERSION
    """Raised when a field changes its meaning."""
    workload: str
    """File that the requests came from."""
    settings: dict[str, str]
    """What was set otherwise than in the base configuration."""
    policy: str
    """Order of the waiting queue."""
    requests: int
    """Requests that entered the engine."""
    served: int
    """Ended by themselves."""
    cut: int
    """Ended early: their client left, or they were turned away."""
    refused: int
    """Could never fit, or used the id of a live request."""
    duration_s: float
    """From the first arrival to the last token."""
    prompt_tokens: int
    """Of requests that ended."""
    output_tokens: int
    """Of requests that ended."""
    tokens_per_s: float
    """Output tokens a second."""
    prefill_tokens_per_s: float
    """Prompt tokens a second that were computed, not found in the cache."""
    cache_hit_rate: float | None
    """Prompt tokens found in the cache at first admission, of all prompt tokens."""
    steps: int
    """Steps, idle ones included."""
    steps_by_kind: dict[str, int]
    """Steps that computed something, by kind."""
    ttft: Spread
    """Time to first token."""
    tbt: Spread
    """Time between two tokens of a request."""
    e2e: Spread
    """From arrival to the last token."""
    retractions: int
    """Times that a running request was pushed back."""
    reasons: dict[str, int]
    """Decisions by reason."""
    guards: dict[str, int]
    """Times that a guard acted."""
    cost: CostUsed
    violations: int | None
    """Broken laws of the engine; None: nobody checked."""
    violations_by_law: dict[str, int]
    """Those that broke."""
    journal: str | None
    """First file of the journal that was written."""
    plots: tuple[str, ...] = ()
    """SVG files that were drawn."""
    event_hash: str | None
    """Hash of the events, as in the journal's checkpoints; equal hashes, equal runs."""
    wall_s: float
    """Real seconds that the simulation took."""
    notes: tuple[str, ...]
    """What the reader of these numbers has to know."""


class Totals:
    """Adds up requests as they end, in fixed memory."""

    def __init__(self) -> None:
        self.ttft, self.tbt, self.e2e = Histogram(), Histogram(), Histogram()
        self.served = self.cut = 0
        self.prompt_tokens = self.output_tokens = self.cached_tokens = self.admitted_prompts = 0

    def add(self, served: Served) -> None:
        self.prompt_tokens += served.prompt_len
        self.output_tokens += served.output_len
        if served.cached_len is not None:
            self.cached_tokens += served.cached_len
            self.admitted_prompts += served.prompt_len
        if served.ttft_ns is not None:
            self.ttft.add(served.ttft_ns)
        self.tbt.add_bins(served.gaps)
        if served.is_whole:
            self.served += 1
            self.e2e.add(served.e2e_ns)
        else:
            self.cut += 1

    @property
    def hit_rate(self) -> float | None:
        return round(self.cached_tokens / self.admitted_prompts, 4) if self.admitted_prompts else None


def spread(histogram: Histogram) -> Spread:
    """Quantiles, to four digits."""
    return Spread(
        count=int(histogram.counts.sum()),
        p50=digits(histogram.quantile_s(0.5)),
        p90=digits(histogram.quantile_s(0.9)),
        p99=digits(histogram.quantile_s(0.99)),
        most=digits(histogram.most_ns / 1e9 if histogram.most_ns else histogram.quantile_s(1.0)),
    )


def cost_used(estimator: Estimator) -> CostUsed:
    """What is to be said of a cost model after its use."""
    model: CostModel = estimator.model
    held = model.held_out
    note, most = outside_words(estimator), most_outside(estimator)
    if not model.is_measured:
        note = "the cost model was computed, not fitted to measurements: compare configurations, do not believe times"
    note = "; ".join(part for part in (model.misfit, note) if part)
    return CostUsed(
        name=model.name,
        source=model.source,
        fitted_steps=model.fitted_steps,
        held_out_steps=held.steps if held else None,
        median_error=held.median if held else None,
        p95_error=held.p95 if held else None,
        bias=held.bias if held else None,
        is_measured=model.is_measured,
        steps=estimator.steps,
        steps_outside=estimator.outside,
        share_outside=round(estimator.outside_ns / max(estimator.total_ns, 1), 4),
        most_outside=most,
        most_asked=None if most is None else estimator.asked[most],
        most_fitted=None if most is None else round(model.largest[most]),
        note=note,
    )


def result_of(  # noqa: PLR0913 - one value for each part of a run
    *,
    workload: str,
    settings: Mapping[str, str],
    loop: Loop,
    measure: Measure,
    totals: Totals,
    estimator: Estimator,
    violations: Mapping[str, int] | None,
    journal: str | None,
    event_hash: str | None,
    wall_s: float,
    notes: tuple[str, ...],
) -> SimResult:
    """The result of a run that is over."""
    duration_s = max(measure.end_ns - (measure.start_ns or 0), 1) / 1e9
    return SimResult(
        workload=workload,
        settings=dict(settings),
        policy=loop.config.scheduler.schedule_policy.value,
        requests=loop.arrived,
        served=totals.served,
        cut=totals.cut,
        refused=loop.refused,
        duration_s=round(duration_s, 3),
        prompt_tokens=totals.prompt_tokens,
        output_tokens=totals.output_tokens,
        tokens_per_s=digits(totals.output_tokens / duration_s) or 0.0,
        prefill_tokens_per_s=digits(measure.tokens_computed / duration_s) or 0.0,
        cache_hit_rate=totals.hit_rate,
        steps=loop.steps,
        steps_by_kind={str(kind): count for kind, count in sorted(measure.steps_by_kind.items())},
        ttft=spread(totals.ttft),
        tbt=spread(totals.tbt),
        e2e=spread(totals.e2e),
        retractions=measure.retractions,
        reasons={str(reason): count for reason, count in measure.reasons.most_common()},
        guards={str(guard): count for guard, count in sorted(measure.guards.items())},
        cost=cost_used(estimator),
        violations=None if violations is None else sum(violations.values()),
        violations_by_law={law: count for law, count in (violations or {}).items() if count},
        journal=journal,
        event_hash=event_hash,
        wall_s=round(wall_s, 2),
        notes=notes,
    )
