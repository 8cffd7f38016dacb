"""Configurations by chance. Owns: every setting of scheduler and cache, drawn so that small pools do everything."""

from __future__ import annotations

from random import Random
from typing import Any, Literal

from pydantic import ValidationError

from engine.config import EngineConfig, Policy

#: Fewest pages with which an engine starts, and most, by page size.
_PAGES = {1: (4, 120), 2: (3, 80), 16: (3, 30), 64: (3, 12)}


#: What a seed is about. Chance alone would bring the others up too seldom. Eleven, so that each meets every policy.
Theme = Literal["any", "squeezed", "no tree", "crowd"]
_THEMES: tuple[Theme, ...] = (
    *("any", "squeezed", "no tree", "any", "any", "crowd"),
    *("any", "squeezed", "no tree", "any", "any"),
)


def theme_of(seed: int) -> Theme:
    """squeezed: a half-prefilled prompt and long answers fight for memory. no tree: lengths known in advance.
    crowd: many run and many wait.
    """
    return _THEMES[seed % len(_THEMES)]


def draw_config(rng: Random, seed: int) -> dict[str, dict[str, Any]]:
    """Sections `scheduler` and `cache`. Draws again where settings contradict each other.

    16 seeds in a row have every policy under both accountings; all else is left to chance.
    """
    policies = list(Policy)
    policy, accounting = policies[seed % len(policies)], ("reference", "exact")[seed // len(policies) % 2]
    while True:
        config = _themed(rng, theme_of(seed), _draw(rng, policy, accounting))
        try:
            EngineConfig.model_validate(config)
        except ValidationError:
            continue
        return config


def _draw(rng: Random, policy: Policy, accounting: str) -> dict[str, dict[str, Any]]:
    page = rng.choice([1, 2, 16, 16, 64])
    least, most = _PAGES[page]
    pages = least + int((most - least) * rng.random() ** 2)
    radix = rng.random() < 0.7
    chunk = rng.choice([None, None, None, page, page, 2 * page, 3 * page, 3 * page + 1, 5 * page + 3, 4096])
    rows = rng.choice([1, 2, 3, 4, 6, 6, 12])
    scheduler: dict[str, Any] = {
        "schedule_policy": policy.value,
        "kv_accounting": accounting,
        "chunked_prefill_size": chunk,
        "max_prefill_tokens": rng.choice([8, 64, 64, 8192]),
        "max_running_requests": rows,
        "prefill_max_requests": rng.choice([None, None, None, 1, 2]),
        "enable_mixed_chunk": rng.random() < 0.6,
        "schedule_conservativeness": rng.choice([0.01, 0.01, 0.1, 0.3, 1.0]),
        "clip_max_new_tokens": rng.choice([1, 1, 8, 4096]),
        "random_seed": rng.randrange(5),
        "incremental_order": rng.random() < 0.8,
    }
    if policy in (Policy.FCFS, Policy.LOF) and rng.random() < 0.7:
        scheduler["enable_priority_scheduling"] = True
        scheduler["enable_priority_preemption"] = rng.random() < 0.7
        scheduler["priority_preemption_threshold"] = rng.choice([0, 0, 3])
        scheduler["low_priority_values_first"] = rng.random() < 0.3
    for name, chance, values in (
        ("truncation_align_size", 0.25, [page, 2 * page, 3]),
        ("lpm_fallback_threshold", 0.2, [1, 3]),
        ("starvation_limit_s", 0.2, [0.002, 0.02, 1.0]),
        ("max_overtakes", 0.2, [1, 3, 10]),
        ("min_free_rows", 0.2, [1, 2, rows]),
        ("target_step_ms", 0.25 if chunk is not None else 0.0, [0.05, 1.0, 20.0]),
    ):
        if rng.random() < chance:
            scheduler[name] = rng.choice(values)
    if rng.random() < 0.15:
        scheduler["prefill_delay_max_passes"] = rng.choice([1, 3, 9])
        scheduler["prefill_delay_until_waiting"] = rng.choice([2, 4])
    return {"scheduler": scheduler, "cache": {"page_size": page, "num_pages": pages, "enable_radix": radix}}


def _themed(rng: Random, theme: Theme, config: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    scheduler, cache = config["scheduler"], config["cache"]
    page = cache["page_size"]
    if theme == "squeezed":
        # Beside rows that grow by a page or half a page a step, a long prompt needs many steps.
        page, rows = rng.choice([1, 1, 2]), rng.choice([2, 3, 4, 6])
        scheduler |= {"schedule_conservativeness": 0.01, "clip_max_new_tokens": 1, "max_prefill_tokens": 8192}
        scheduler |= {"chunked_prefill_size": rows + rng.choice([2, 3, 5]), "max_running_requests": rows}
        scheduler |= {"enable_mixed_chunk": rng.random() < 0.9, "target_step_ms": None}
        cache |= {"page_size": page, "num_pages": rng.randint(30, 80)}
    elif theme == "no tree" and scheduler["schedule_policy"] != Policy.SHORTEST_PREFILL_FIRST:
        # A slice that is no whole number of pages leaves a rest behind a cut, which only a length known may take.
        page = rng.choice([2, 16, 16])
        scheduler |= {"chunked_prefill_size": rng.randint(3, 8) * page + rng.choice([1, page - 1])}
        scheduler |= {"schedule_conservativeness": rng.choice([0.01, 0.3]), "max_running_requests": 6}
        scheduler |= {"max_prefill_tokens": 8192, "prefill_max_requests": None, "target_step_ms": None}
        cache |= {"page_size": page, "enable_radix": False, "num_pages": rng.randint(16, 40)}
    elif theme == "crowd":
        scheduler |= {"max_running_requests": rng.choice([16, 32]), "max_prefill_tokens": 8192}
        scheduler |= {"chunked_prefill_size": rng.choice([1, 4, 16]) * page, "prefill_max_requests": None}
        cache["num_pages"] = rng.randint(100, 300) if page < 16 else rng.randint(40, 100)
    return config
