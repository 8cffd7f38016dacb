"""Seams. Owns: every place where the plugin holds on to SGLang, and the test that a version has them as expected.

A version is judged by what it has, not by its number: each hooked function must exist with the parameters that the
hook reads, by name and in order, and each attribute that is read must be named in the source of its class. What
differs is refused before anything is wrapped, with one log line that says what is missing.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

#: The version that was read and tested; another one that passes `differences` is recorded too, and the log says so.
TESTED: Final = "0.5.23"

_SCHEDULER: Final = "sglang.srt.managers.scheduler"
_POLICY: Final = "sglang.srt.managers.schedule_policy"
_BUDGET: Final = "sglang.srt.mem_cache.prefill_budget"
_BATCH: Final = "sglang.srt.managers.schedule_batch"


@dataclass(frozen=True, slots=True)
class Seam:
    """One function that is wrapped. `parameters`: those it must begin with, after `self`."""

    module: str
    owner: str
    name: str
    parameters: tuple[str, ...]

    @property
    def target(self) -> str:
        """Its dotted path."""
        return f"{self.module}.{self.owner}.{self.name}"


SEAMS: Final = (
    Seam(_SCHEDULER, "Scheduler", "get_next_batch_to_run", ("running_batch", "last_batch")),
    Seam(_SCHEDULER, "Scheduler", "_get_new_batch_prefill_raw", ("prefill_delayer_single_pass", "running_batch")),
    Seam(
        _SCHEDULER,
        "Scheduler",
        "get_num_allocatable_reqs",
        ("running_bs", "beam_width", "running_batch", "num_held_rows"),
    ),
    Seam(_SCHEDULER, "Scheduler", "_add_request_to_queue", ("req", "is_retracted")),
    Seam(_SCHEDULER, "Scheduler", "run_batch", ("batch",)),
    Seam(_SCHEDULER, "Scheduler", "process_batch_result", ("batch", "result")),
    Seam(_SCHEDULER, "Scheduler", "abort_request", ("recv_req",)),
    Seam(_SCHEDULER, "Scheduler", "send_abort_output", ("abort_req", "req")),
    Seam(_SCHEDULER, "Scheduler", "on_idle", ()),
    Seam(_POLICY, "SchedulePolicy", "calc_priority", ("waiting_queue", "running_batch", "processed_tokens")),
    Seam(
        _POLICY,
        "PrefillAdder",
        "__init__",
        ("page_size", "tree_cache", "token_to_kv_pool_allocator", "running_batch", "new_token_ratio"),
    ),
    Seam(_POLICY, "PrefillAdder", "add_one_req", ("req", "has_chunked_req", "truncation_align_size")),
    Seam(_POLICY, "PrefillAdder", "add_chunked_req", ("req",)),
    Seam(_BUDGET, "PrefillBudget", "check_prefill", ("extend_input_len", "total_tokens")),
    Seam(_BUDGET, "PrefillBudget", "can_allocate_prefill", ("paged_input",)),
)

#: Attributes that are read, by the class whose source must name them.
_READ: Final = (
    (
        _SCHEDULER,
        "Scheduler",
        (
            "waiting_queue chunked_req policy page_size max_prefill_tokens max_running_requests max_total_num_tokens "
            "chunked_prefill_size is_mixed_chunk enable_overlap enable_priority_scheduling enable_priority_preemption "
            "priority_scheduling_preemption_threshold schedule_low_priority_values_first new_token_ratio_tracker "
            "truncation_align_size token_to_kv_pool_allocator tree_cache req_to_token_pool spec_algorithm "
            "disaggregation_mode is_hybrid_swa dllm_config enable_hisparse require_mlp_sync enable_lora "
            "enable_hicache_storage enable_hierarchical_cache prefill_delayer min_free_slots_delayer"
        ),
    ),
    (_POLICY, "SchedulePolicy", "_determine_active_policy"),
    (
        _POLICY,
        "PrefillAdder",
        (
            "can_run_list preempt_list rem_input_tokens rem_chunk_tokens memory_budget chunked_req_limit "
            "prefill_max_requests exact_chunk_fill prefill_delayer_single_pass new_chunked_req"
        ),
    ),
    (_BUDGET, "PrefillBudget", "remaining_total remaining_current total_offset current_offset"),
    (
        _BATCH,
        "Req",
        (
            "rid origin_input_ids output_ids full_untruncated_fill_ids prefix_len extend_end sampling_params priority "
            "routing_key finished_reason retraction_count time_stats num_matched_prefix_tokens kv"
        ),
    ),
    (_BATCH, "ScheduleBatch", "reqs batch_is_full forward_mode decoding_reqs"),
)

Look = Callable[[str], Any]


def differences(look: Look = importlib.import_module) -> tuple[str, ...]:
    """What this SGLang lacks of what the plugin reads; empty when it can be recorded. `look` imports a module."""
    found: list[str] = []
    for seam in SEAMS:
        owner, missing = _owner(look, seam.module, seam.owner)
        if missing:
            found.append(missing)
            continue
        function = inspect.getattr_static(owner, seam.name, None)
        if not inspect.isfunction(function):
            found.append(f"{seam.target} is no function")
            continue
        names = tuple(inspect.signature(function).parameters)[1:]
        if names[: len(seam.parameters)] != seam.parameters:
            found.append(f"{seam.target} takes {names}, not {seam.parameters} first")
    for module, name, attributes in _READ:
        owner, missing = _owner(look, module, name)
        if missing:
            found.append(missing)
            continue
        known = _names(owner)
        found += [f"{module}.{name} has no {wanted}" for wanted in attributes.split() if wanted not in known]
    return tuple(dict.fromkeys(found))


def _owner(look: Look, module: str, name: str) -> tuple[Any, str]:
    try:
        owner = getattr(look(module), name, None)
    except ImportError as error:
        return None, f"{module} cannot be imported: {error}"
    return owner, "" if inspect.isclass(owner) else f"{module} has no class {name}"


def _names(owner: type) -> set[str]:
    """Names that a class, or one it is made of, has, annotates, or that its functions use."""
    names: set[str] = set(dir(owner))
    for part in owner.__mro__[:-1]:
        names.update(getattr(part, "__annotations__", ()))
        for value in vars(part).values():
            function = getattr(value, "fget", None) or getattr(value, "__func__", value)
            code = getattr(inspect.unwrap(function) if callable(function) else function, "__code__", None)
            if code is not None:
                names.update(code.co_names)
    return names
