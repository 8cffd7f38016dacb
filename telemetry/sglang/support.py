"""Support. Owns: which SGLang schedulers are recorded, how one is described, what a record lacks, which laws it keeps.

What is refused here is refused because a record of it would say something wrong, not because it would be thin.
"""

from __future__ import annotations

import importlib
import json
from dataclasses import dataclass
from typing import Any, Final

from pydantic import ValidationError

from engine.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig

#: Record or field -> why a journal from SGLang does not have it.
ABSENT: Final[dict[str, str]] = {
    "PagesMoved": "SGLang has no single place at which pages change hands; the four page counts are told",
    "LockChanged": "tree nodes are locked in several classes, which differ by cache",
    "ResponseSent": "responses are sent by another process",
    "RequestArrived.page_keys": "keys would be made of token ids, which the recorder never reads",
    "RequestArrived.head32_key": "as page_keys",
    "RequestArrived.trace_id": "SGLang's trace context has a format of its own",
    "RequestTransitioned.detail": "stop strings are text",
    "StepPlanned.evicted_pages": "evictions are made inside several caches; 0 stands for not told",
    "StepPlanned.guards": "guards are this engine's",
    "OutcomePart.new_page_key": "as page_keys",
}

_OVERLAP: Final = "with overlapped scheduling a pass is made before the step in flight has its outcome"
_PAGES: Final = "page moves and locks are not recorded"
_OWN: Final = "the recorder works this value out itself, so it would be compared with itself"
_LISTENER: Final = "about what listeners of a live engine show"

#: Laws that a journal from SGLang cannot be held to, and why. All others are judged.
NOT_JUDGED: Final[dict[str, str]] = {
    "INV-LOCK-01": _PAGES,
    "INV-LOCK-03": _PAGES,
    "INV-PAGE-01": _PAGES,
    "INV-PAGE-02": _PAGES,
    "INV-PAGE-03": _PAGES,
    "INV-PAGE-04": _PAGES,
    "INV-INDEX-01": "about this engine's index",
    "INV-REQ-02": "SGLang makes no such promise: this engine's guards do",
    "INV-REQ-04": _OWN,
    "INV-FLAG-01": _OWN,
    "INV-FLAG-02": "an end in the queue does not clear SGLang's flag, and does clear this engine's",
    "INV-FLAG-03": _OWN,
    "INV-TIME-02": _LISTENER,
    "INV-METER-01": _LISTENER,
    "INV-METER-02": _LISTENER,
    "INV-METER-03": _LISTENER,
    "INV-SPAN-01": _LISTENER,
    "INV-SPAN-02": _LISTENER,
}

#: The same, in addition, for a scheduler that overlaps.
NOT_JUDGED_OVERLAPPED: Final[dict[str, str]] = dict.fromkeys(
    (
        "INV-BUDGET-02",
        "INV-BUDGET-04",
        "INV-CHUNK-03",
        "INV-CHUNK-04",
        "INV-REQ-01",
        "INV-REQ-03",
        "INV-REQ-05",
        "INV-STEP-01",
        "INV-STEP-02",
        "INV-STEP-03",
        "INV-STEP-04",
        "INV-TIME-01",
    ),
    _OVERLAP,
)


class Unsupported(Exception):
    """This scheduler is not recorded; the message says why."""


@dataclass(frozen=True, slots=True)
class Described:
    """What the first event and the header say of a scheduler."""

    config: EngineConfig
    version: str
    model: str
    attention_backend: str
    page_size: int
    num_pages: int
    rows: int
    clip: int
    overlaps: bool
    rank: str
    absent: dict[str, str]


def refusals(scheduler: Any) -> list[str]:
    """Why this scheduler is not recorded; empty when it is."""
    checks = {
        "prefill and decode are disaggregated": getattr(scheduler.disaggregation_mode, "name", "NULL") != "NULL",
        "speculative decoding yields several tokens in a step": not scheduler.spec_algorithm.is_none(),
        "sliding windows have a second pool": bool(scheduler.is_hybrid_swa),
        "state-space layers have a second pool": bool(scheduler.tree_cache.supports_mamba()),
        "diffusion models decode in blocks": scheduler.dllm_config is not None,
        "HiSparse has its own way from prefill to decode": bool(scheduler.enable_hisparse),
        "DP attention makes steps for other ranks": bool(scheduler.require_mlp_sync),
    }
    return [why for why, is_so in checks.items() if is_so]


def describe(scheduler: Any) -> Described:
    """Read a scheduler's settings. Raises Unsupported."""
    found = refusals(scheduler)
    if found:
        raise Unsupported("; ".join(found))
    context = importlib.import_module("sglang.srt.runtime_context")
    parallel, schedule = context.get_parallel(), context.get_schedule()
    if parallel.pp_size > 1:
        raise Unsupported("pipeline stages plan several batches at once")
    if parallel.tp_rank != 0:
        raise Unsupported(f"tensor-parallel rank {parallel.tp_rank} decides as rank 0 does, which is recorded")
    policy = importlib.import_module("sglang.srt.managers.schedule_policy")
    page, pool = int(scheduler.page_size), int(scheduler.max_total_num_tokens)
    args = scheduler.server_args
    try:
        config = _config(scheduler, schedule, policy, page=page, num_pages=pool // page)
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()[:3])
        raise Unsupported(f"its settings have no counterpart here: {wrong}") from error
    absent = dict(ABSENT)
    if scheduler.enable_lora:
        absent["AdmissionDecided (adapters)"] = "a request that waits for its LoRA adapter is passed over unseen"
    if scheduler.enable_hierarchical_cache:
        absent["AdmissionDecided (host tier)"] = "tokens loaded from the host count as cached"
    return Described(
        config=config,
        version=f"sglang {importlib.import_module('sglang').__version__}",
        model=str(args.served_model_name or args.model_path),
        attention_backend=str(args.attention_backend or ""),
        page_size=page,
        num_pages=pool // page,
        rows=int(scheduler.req_to_token_pool.size),
        clip=int(policy.CLIP_MAX_NEW_TOKENS),
        overlaps=bool(scheduler.enable_overlap),
        rank="" if parallel.dp_rank is None else f"dp{parallel.dp_rank}",
        absent=absent,
    )


def _config(scheduler: Any, schedule: Any, policy: Any, *, page: int, num_pages: int) -> EngineConfig:
    """Its settings under this engine's names. `guards` are off: what SGLang does wrong is to be seen."""
    return EngineConfig(
        scheduler=SchedulerConfig(
            max_prefill_tokens=scheduler.max_prefill_tokens,
            chunked_prefill_size=scheduler.chunked_prefill_size,
            max_running_requests=scheduler.max_running_requests,
            prefill_max_requests=schedule.prefill_max_requests,
            schedule_policy=scheduler.policy.policy.value,
            kv_accounting="reference",
            truncation_align_size=scheduler.truncation_align_size,
            lpm_fallback_threshold=policy.WAITING_QUEUE_PREFIX_MATCH_MAX,
            enable_mixed_chunk=bool(scheduler.is_mixed_chunk),
            schedule_conservativeness=schedule.schedule_conservativeness,
            clip_max_new_tokens=policy.CLIP_MAX_NEW_TOKENS,
            enable_priority_scheduling=bool(scheduler.enable_priority_scheduling),
            low_priority_values_first=bool(scheduler.schedule_low_priority_values_first),
            enable_priority_preemption=bool(scheduler.enable_priority_preemption),
            priority_preemption_threshold=scheduler.priority_scheduling_preemption_threshold,
            incremental_order=False,
            guards=False,
        ),
        cache=CacheConfig(page_size=page, num_pages=num_pages, enable_radix=not scheduler.tree_cache.disable),
        model=ModelConfig(),
    )


def config_json(described: Described) -> str:
    """For the first event; `source` tells readers who decided, `overlaps` how steps follow each other."""
    return json.dumps(described.config.model_dump(mode="json"))
