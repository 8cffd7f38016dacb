"""Objectives. Owns: what a search is to make better, what it must keep, and the faults that both can have."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from telemetry.settings import UsageError
from telemetry.sim.report import duration

THROUGHPUT: Final = "throughput"
LONGEST_GAP: Final = "longest_gap_p99"
#: Measures of a run; all but throughput are times, of which less is better. Percentiles of TBT are of all gaps between
#: tokens, so one long stall among a thousand short gaps is not in them; the longest gap of each request is.
MEASURES: Final = {
    "ttft_p50": "TTFT p50",
    "ttft_p90": "TTFT p90",
    "ttft_p99": "TTFT p99",
    "tbt_p50": "TBT p50",
    "tbt_p99": "TBT p99",
    "e2e_p50": "end-to-end p50",
    "e2e_p99": "end-to-end p99",
    THROUGHPUT: "throughput",
    LONGEST_GAP: "longest gap of a request p99",
}
#: Those that a search can be for.
OBJECTIVES: Final = tuple(name for name in MEASURES if name != LONGEST_GAP)
#: The three of the front.
FRONT: Final = ("ttft_p99", "tbt_p99", THROUGHPUT)
_AMOUNT: Final = re.compile(r"(\d+(?:\.\d+)?|\.\d+)(ms|s|x)?")
_MOST_S: Final = 1e6
#: What the other measures of the front count beside the objective: of configurations that are as good as equal in it,
#: the one that is better otherwise is wanted.
_OTHERS: Final = 0.05
_LEAST: Final = 1e-9

Figures = Mapping[str, float | None]


@dataclass(frozen=True, slots=True)
class Limit:
    """A time that a recommended configuration must not exceed; `factor` in units of the baseline's own."""

    measure: str
    seconds: float | None
    factor: float | None

    def most(self, baseline: Figures) -> float | None:
        """Seconds; None when the baseline has no such time."""
        if self.seconds is not None:
            return self.seconds
        was = baseline.get(self.measure)
        return None if was is None or self.factor is None else was * self.factor

    def holds(self, figures: Figures, baseline: Figures) -> bool:
        """Whether a run keeps it; a run without that time does."""
        value, most = figures.get(self.measure), self.most(baseline)
        return value is None or most is None or value <= most

    def words(self, baseline: Figures) -> str:
        """As a reader is told of it."""
        most = self.most(baseline)
        return f"{MEASURES[self.measure]} at most {duration(most)}" if most is not None else ""


def objective_of(name: str) -> str:
    """The measure that `name` means. Raises UsageError."""
    found = name.strip().lower().replace("-", "_")
    if found in OBJECTIVES:
        return found
    near = difflib.get_close_matches(found, OBJECTIVES, n=1)
    guess = f" (did you mean {near[0]}?)" if near else ""
    raise UsageError(f"--objective {name}: no such objective{guess}; one of {', '.join(OBJECTIVES)}")


def limits_of(words: Sequence[str]) -> tuple[Limit, ...]:
    """`tbt_p99=200ms`, `tbt_p99=0.2`, `tbt_p99=1.1x` (times the baseline's). Raises UsageError."""
    return tuple(map(_limit, words))


def _limit(word: str) -> Limit:
    name, equals, text = word.partition("=")
    measure = name.strip().lower().replace("-", "_")
    if not equals:
        raise UsageError(f"--at-most {word}: must look like measure=time, as in tbt_p99=200ms")
    if measure not in MEASURES or measure == THROUGHPUT:
        times = ", ".join(known for known in MEASURES if known != THROUGHPUT)
        raise UsageError(f"--at-most {word}: {name.strip() or 'nothing'} is not a time of a run; one of {times}")
    match = _AMOUNT.fullmatch(text.strip())
    amount = float(match[1]) if match else 0.0
    if match is None or not 0 < amount <= _MOST_S:
        raise UsageError(
            f"--at-most {word}: {text.strip() or 'nothing'} is no time; above 0 to {_MOST_S:,.0f}, in s or ms, or as "
            "1.1x of the baseline"
        )
    if match[2] == "x":
        return Limit(measure, None, amount)
    return Limit(measure, amount / 1e3 if match[2] == "ms" else amount, None)


def is_better(objective: str, one: float, other: float) -> bool:
    """Whether `one` is strictly better than `other`."""
    return one > other if objective == THROUGHPUT else one < other


def gain(objective: str, before: float, after: float) -> float:
    """How much better `after` is, in the measure's unit; below 0 when it is worse."""
    return after - before if objective == THROUGHPUT else before - after


def score(objective: str, figures: Figures, baseline: Figures) -> float:
    """How good a run is, less is better, 0 for the baseline: mostly its objective, a little the rest of the front."""
    found = _log_ratio(objective, figures, baseline)
    return found + _OTHERS * sum(_log_ratio(name, figures, baseline) for name in FRONT if name != objective)


def _log_ratio(measure: str, figures: Figures, baseline: Figures) -> float:
    here, there = figures.get(measure), baseline.get(measure)
    if here is None or there is None:
        return 0.0 if here is there else math.inf
    found = math.log(max(here, _LEAST) / max(there, _LEAST))
    return -found if measure == THROUGHPUT else found


def dominates(one: Figures, other: Figures) -> bool:
    """Whether `one` is at least as good in all three measures of the front, and better in one. A missing time is 0."""
    pairs = [(name, one.get(name) or 0.0, other.get(name) or 0.0) for name in FRONT]
    return all(not is_better(name, there, here) for name, here, there in pairs) and any(
        is_better(name, here, there) for name, here, there in pairs
    )
