"""Every fault. Owns: the list of modules that register them, and which of them answer a known fault of this class."""

from __future__ import annotations

from typing import Final

from tests.sabotage import (
    cache_faults,
    engine_faults,
    event_faults,
    exact_faults,
    index_faults,
    life_faults,
    meter_faults,
    overlap_faults,
    span_faults,
    watch_faults,
)
from tests.sabotage.scenario import FAULTS

MODULES: Final = (
    cache_faults,
    engine_faults,
    event_faults,
    exact_faults,
    index_faults,
    life_faults,
    meter_faults,
    overlap_faults,
    span_faults,
    watch_faults,
)

#: Faults that engines of this kind have had → the sabotage that has it.
KNOWN: Final = {
    "double charge": "an admission charged twice",
    "forgotten unlock": "an end that forgets to unlock",
    "page in two places, sums balanced": "a page in two places, sums balanced",
    "token from a middle chunk": "a token from a middle piece",
    "early free on abort": "pages given back while the step still writes them",
    "stale flag": "a full flag that an end does not clear",
    "decode rows charged twice": "decode rows charged twice",
    "promise without pin": "a prefix counted on and not pinned",
    "skipped growth of running requests": "a promise that skips the last running request",
    "row leaked on client hang-up": "a row that a hang-up leaks",
    "lost end": "an end that is never told",
    "double end": "two ends of one abort",
    "negative wait": "a negative wait after a way back",
    "counter reset": "a counter that is reset",
    "zero-length chunk": "a piece of length zero",
    "eviction of a locked node": "an eviction of a locked node",
    "retract twice": "a request pushed back twice in one step",
    "wrong owner after split": "the wrong owner after a split",
    "span left open": "a span left open by an abort",
}

__all__ = ["FAULTS", "KNOWN", "MODULES"]
