"""Situations that SGLang's scheduler is driven through. Owns: their settings, their traffic, what they are for."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any, Final


@dataclass(frozen=True)
class Scenario:
    """One of them. `settings`: for `harness.scheduler`; `holds`: reason codes and causes that must occur in it."""

    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    count: int = 24
    seed: int = 7
    has_priorities: bool = False
    known_lengths: bool = False
    long_answers: bool = False
    aborts: bool = False
    holds: tuple[str, ...] = ()


SCENARIOS: Final = (
    Scenario("plain", {"pool": 4096}, holds=("admitted_first_chunk", "admitted_last_chunk", "chunk_exhausted")),
    Scenario("overlapped", {"overlap": True}, holds=("admitted_first_chunk", "admitted_last_chunk")),
    Scenario("mixed", {"mixed": True, "policy": "lpm", "pool": 2000}, holds=("kv_total_exhausted", "full_flag_set")),
    Scenario(
        "retracted",
        {"pool": 1200, "max_running": 12, "conservativeness": 0.05},
        long_answers=True,
        holds=("retract", "kv_total_exhausted"),
    ),
    Scenario(
        "retracted-overlapped",
        {"pool": 1200, "max_running": 12, "conservativeness": 0.05, "overlap": True, "mixed": True, "page_size": 1},
        long_answers=True,
        holds=("retract",),
    ),
    Scenario(
        "preempted",
        {"pool": 2000, "max_running": 4, "priorities": True},
        has_priorities=True,
        holds=("preempt", "rows_exhausted"),
    ),
    Scenario("aborted", {"pool": 2000, "max_running": 6}, aborts=True, holds=("abort",)),
    Scenario("aborted-overlapped", {"pool": 2000, "max_running": 6, "overlap": True}, aborts=True, holds=("abort",)),
    Scenario(
        "shortest-first",
        {"policy": "shortest-prefill-first", "chunk": 128, "mixed": True},
        holds=("admitted_next_chunk",),
    ),
    Scenario("one-at-a-time", {"policy": "hrrn", "prefill_max": 1}, holds=("prefill_max_reached",)),
    Scenario(
        "known-lengths",
        {"radix": False, "chunk": 128, "pool": 1500},
        known_lengths=True,
        holds=("kv_total_exhausted",),
    ),
    Scenario("unchunked", {"chunk": None, "radix": False, "max_prefill": 400}, holds=("compute_exhausted",)),
)


def traffic(scenario: Scenario) -> list[dict[str, Any]]:
    """Requests with shared prefixes, by seed: turn of arrival, prompt, bounds."""
    rng = random.Random(scenario.seed)
    stems = [[rng.randrange(1, 1_000_000) for _ in range(length)] for length in (0, 0, 40, 200)]
    found = []
    for number in range(scenario.count):
        lengths = (5, 30, 90) if scenario.long_answers else (5, 30, 90, 300, 700)
        own = [rng.randrange(1, 1_000_000) for _ in range(rng.choice(lengths))]
        max_new = rng.choice((120, 200) if scenario.long_answers else (4, 20, 60, 120))
        found.append(
            {
                "turn": rng.randrange(0, scenario.count),
                "rid": f"r{number}",
                "prompt": rng.choice(stems) + own,
                "max_new": max_new,
                "stop_after": rng.randrange(1, max_new + 1)
                if rng.random() < 0.5 and not scenario.long_answers
                else None,
                "ignore_eos": rng.random() < (0.7 if scenario.known_lengths else 0.1),
                "priority": rng.choice((0, 5, 20, 40)) if scenario.has_priorities else None,
            }
        )
    return sorted(found, key=lambda each: each["turn"])


def aborts(scenario: Scenario) -> dict[int, str]:
    """Turn -> whom to abort at it."""
    rng = random.Random(scenario.seed + 1)
    return {turn: f"r{rng.randrange(scenario.count)}" for turn in range(2, 60, 4)} if scenario.aborts else {}
