"""How hard stateful tests try. Owns: the number of examples, scaled by ADMITSCOPE_EXAMPLES."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

#: 1 in CI (390 examples in this folder), 26 in `make test-all` (10,140), 100 for a night by hand.
FACTOR = max(1, int(os.environ.get("ADMITSCOPE_EXAMPLES", "1")))


def effort(examples: int, *, steps: int = 40) -> settings:
    """`examples` programs of up to `steps` rules each, no deadline: a slow machine is not a failing test."""
    return settings(
        max_examples=examples * FACTOR,
        stateful_step_count=steps,
        deadline=None,
        # A program drives a whole engine, and rules that cannot apply are passed over.
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
    )
