"""Turns recorded scenarios into scheduler inputs. Owns: token segments, configuration, virtual results."""

from __future__ import annotations

from typing import Any

from engine.config import CacheConfig, EngineConfig, Policy, SchedulerConfig
from engine.events import NullSink
from engine.kvcache.page_keys import Keys, PageKeyer
from engine.request import FinishReason
from engine.sampling_params import SamplingParams
from engine.scheduler.plan import OutcomeRow
from engine.scheduler.scheduler import Arrival, Scheduler
from engine.token_store import TokenStore

END_TOKEN = 0
SUPPORTED_POLICIES = frozenset(policy.value for policy in Policy)


def tokens_of(segments: list[list[int]]) -> list[int]:
    """Concatenate [[seed, start, len], ...]; a segment stands for seed*65536 + start + k."""
    ids: list[int] = []
    for seed, start, length in segments:
        ids.extend(range(seed * 65536 + start, seed * 65536 + start + length))
    return ids


def config_of(raw: dict[str, Any], *, guards: bool) -> EngineConfig:
    """The engine configuration of a scenario."""
    scheduler = SchedulerConfig(
        max_prefill_tokens=raw["max_prefill_tokens"],
        chunked_prefill_size=raw["chunked_prefill_size"],
        max_running_requests=raw["max_running_requests"],
        schedule_policy=Policy(raw["policy"]),
        lpm_fallback_threshold=128,
        enable_mixed_chunk=raw["enable_mixed_chunk"],
        schedule_conservativeness=raw.get("schedule_conservativeness", 1.0),
        clip_max_new_tokens=raw["clip_max_new_tokens"],
        enable_priority_scheduling=raw.get("priority_scheduling", False),
        low_priority_values_first=raw.get("low_priority_first", False),
        enable_priority_preemption=raw.get("priority_preemption", False),
        priority_preemption_threshold=raw.get("preemption_threshold") or 0,
        guards=guards,
    )
    # A limit of 0 is recorded, though a server refuses it; model_copy does not validate.
    scheduler = scheduler.model_copy(update={"prefill_max_requests": raw.get("prefill_max_requests")})
    # model_construct skips the check chunk >= page, which the reference does not make.
    cache = CacheConfig(page_size=raw["page_size"], enable_radix=raw.get("radix", True))
    return EngineConfig.model_construct(
        scheduler=scheduler,
        cache=cache,
        **{
            name: field.default
            for name, field in EngineConfig.model_fields.items()
            if name not in ("scheduler", "cache")
        },
    )


def unsupported(scenario: dict[str, Any]) -> str | None:
    """Why this build cannot run a scenario yet; None when it can."""
    config = scenario["config"]
    if config["policy"] not in SUPPORTED_POLICIES:
        return f"policy {config['policy']}"
    return None


class Virtual:
    """The reference's virtual model: output j of a request is out_seed*65536 + j, number `stop_after` is the end."""

    def __init__(self, scenario: dict[str, Any], *, guards: bool) -> None:
        config = config_of(scenario["config"], guards=guards)
        self.page_size = config.cache.page_size
        self.scheduler = Scheduler(
            config, num_pages=scenario["config"]["kv_pool_tokens"] // self.page_size, sink=NullSink()
        )
        # Recorded single passes hold requests that intake would clip or refuse.
        self.scheduler.largest_output = lambda prompt_len: 1 << 40
        self.scheduler.state.record_order = True
        self.scheduler.state.processed_tokens = scenario["config"].get("processed_tokens") or 0
        ratio = scenario["config"].get("new_token_ratio")
        if ratio is not None:
            self.scheduler.state.ratio = ratio
        secret = b"" if self.page_size > 1 else None
        self.store = TokenStore(page_size=self.page_size, secret=secret, eos_token_ids=[END_TOKEN])
        self.specs: dict[str, dict[str, Any]] = {}

    def arrive(self, spec: dict[str, Any]) -> None:
        rid = spec["rid"]
        params = SamplingParams(max_new_tokens=spec["max_new_tokens"], ignore_eos=bool(spec.get("ignore_eos")))
        ids = tokens_of(spec["tokens"])
        keys = self.store.add(rid, ids, params)
        self.specs[rid] = spec
        self.scheduler.add(
            Arrival(
                rid=rid,
                prompt_len=len(ids),
                max_new_tokens=spec["max_new_tokens"],
                page_keys=keys.page_keys,
                head32_key=keys.head32_key,
                ignore_eos=params.ignore_eos,
                priority=spec.get("priority"),
            ),
            0,
        )

    def token(self, rid: str) -> int:
        """The next output token of a request."""
        spec = self.specs[rid]
        index = self.store.output_index(rid)
        if spec.get("stop_after") is not None and index + 1 == spec["stop_after"]:
            return END_TOKEN
        return int(spec["out_seed"] * 65536 + index)

    def result(self, rid: str) -> OutcomeRow:
        return self.store.settle(rid, self.token(rid)).row

    def counts(self) -> list[int]:
        """[free, evictable, protected] tokens."""
        free, _, protected, evictable = self.scheduler.kv.pool.counts
        return [free * self.page_size, evictable * self.page_size, protected * self.page_size]

    def keys(self, segments: list[list[int]]) -> Keys:
        """Page keys of a token list."""
        return PageKeyer(self.page_size, b"" if self.page_size > 1 else None).of(tokens_of(segments))[0]

    def cached(self, segments: list[list[int]]) -> int:
        """How many tokens of a list match the tree now."""
        return self.scheduler.kv.match(self.keys(segments)).pages * self.page_size


__all__ = ["FinishReason", "Virtual", "tokens_of", "unsupported"]
