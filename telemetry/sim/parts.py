"""Parts of results. Owns: what both answers of the simulator are made of. Imports nothing of it: readers stay light."""

from __future__ import annotations

from typing import Final

from pydantic import BaseModel, ConfigDict

#: A larger median error on steps that a fit did not see, and nothing is recommended or found by it.
MOST_STEP_ERROR: Final = 0.30


class Part(BaseModel):
    """A frozen part of a result."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)


class Spread(Part):
    """Durations of many, in seconds; None when there is none. Within half a percent."""

    count: int
    p50: float | None
    p90: float | None
    p99: float | None
    most: float | None


class Measured(Part):
    """Figures of one run, by the names of `objectives.MEASURES`: seconds of virtual time; None where there are none."""

    ttft_p50: float | None
    ttft_p90: float | None
    ttft_p99: float | None
    tbt_p50: float | None
    tbt_p99: float | None
    e2e_p50: float | None
    e2e_p99: float | None
    throughput: float | None
    """Output tokens a second."""
    longest_gap_p99: float | None
    """The longest time between two tokens of a request, 99th percentile of the requests."""


class CostUsed(Part):
    """The cost model behind the times, and how far it was asked beyond what it was fitted on."""

    name: str
    source: str
    fitted_steps: int
    """Steps that it was fitted on; 0: not fitted, but computed."""
    held_out_steps: int | None
    """Recorded steps that the fit did not see."""
    median_error: float | None
    """Median of |predicted / measured - 1| over them."""
    p95_error: float | None
    """95th percentile of the same."""
    bias: float | None
    """Predicted over measured time of them in sum, minus 1."""
    is_measured: bool
    """Whether it was fitted to measurements; else its times are computed."""
    steps: int
    """Simulated steps."""
    steps_outside: int
    """Simulated steps larger than any that was fitted."""
    share_outside: float
    """Their share of the simulated time."""
    most_outside: str | None
    """What most of those steps exceed: prefill_tokens, prefill_context, prefill_rows, decode_rows, decode_context."""
    most_asked: int | None
    """The most of it in a simulated step."""
    most_fitted: int | None
    """The most of it that was fitted."""
    note: str
    """What is to be said of it in words: that it does not fit, what was beyond. Empty when there is nothing."""

    @property
    def does_fit(self) -> bool:
        """Whether its times are to be believed; one that was computed has nothing to fit to."""
        return self.median_error is None or self.median_error <= MOST_STEP_ERROR


def digits(value: float | None) -> float | None:
    """Four significant digits."""
    return None if value is None else float(f"{value:.4g}")
