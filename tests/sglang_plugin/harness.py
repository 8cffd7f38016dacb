"""SGLang's own scheduler on a CPU, with a virtual model. For `make test-sglang`, in its own environment.

What is under test is the published package's: `Scheduler.get_next_batch_to_run` and all that it calls,
`SchedulePolicy`, `PrefillAdder`, its budget, `ScheduleBatch`, the radix cache, the pools, the queue's door and the
processing of results. In place of the model, its process and its sockets stand: made-up tokens (`forward`), and
collaborators that do nothing (`Quiet`): metrics, streams to the detokenizer, publishers of load.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.managers.schedule_policy import SchedulePolicy
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_components.batch_result_processor import SchedulerBatchResultProcessor
from sglang.srt.managers.scheduler_components.new_token_ratio_tracker import NewTokenRatioTracker
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.srt.runtime_context import SpawnRanks, publish
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from tests.sglang_plugin.scenarios import Scenario, aborts, traffic

END_TOKEN = 0
VOCABULARY = 1_000_000


class Quiet:
    """A collaborator that does nothing and answers None."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None


class Unset:
    """Settings of a model that has nothing special: each is None."""

    def __init__(self, **known: Any) -> None:
        vars(self).update(known)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


class Sums(Quiet):
    """Counts and sizes that SGLang adds up; metrics are off."""

    enable_metrics = False

    def __getattr__(self, name: str) -> Any:
        return 0 if name.startswith(("num_", "forward_")) else super().__getattr__(name)


def forward(scheduler: Any, batch: Any, *_: Any, **__: Any) -> GenerationBatchResult:
    """The virtual model: one token for each row. It stands for `Scheduler.run_batch`, which the hooks wrap."""
    tokens = [scheduler.virtual.token_of(req) for req in batch.reqs]
    batch.input_ids = torch.tensor(tokens, dtype=torch.int64)
    said = LogitsProcessorOutput(next_token_logits=None)
    return GenerationBatchResult(next_token_ids=torch.tensor(tokens, dtype=torch.int64), logits_output=said)


def idle(scheduler: Any) -> None:
    """Stands for `Scheduler.on_idle`: of its housekeeping only the ratio is about scheduling."""
    if not (scheduler.waiting_queue or scheduler.running_batch.reqs or scheduler.chunked_req):
        scheduler.new_token_ratio_tracker.reset()


Scheduler.run_batch = forward
Scheduler.on_idle = idle


class Virtual:
    """What the model will say: `stop_after` output tokens, then the end token."""

    def __init__(self) -> None:
        self.stop_after: dict[str, int] = {}

    def token_of(self, req: Any) -> int:
        last = self.stop_after.get(req.rid)
        return END_TOKEN if last is not None and len(req.output_ids) + 1 >= last else len(req.output_ids) + 1


def scheduler(
    *,
    page_size: int = 16,
    pool: int = 4096,
    max_running: int = 32,
    chunk: int | None = 256,
    max_prefill: int = 512,
    policy: str = "fcfs",
    mixed: bool = False,
    overlap: bool = False,
    radix: bool = True,
    priorities: bool = False,
    conservativeness: float = 1.0,
    prefill_max: int | None = None,
) -> Any:
    """A scheduler as `Scheduler.__init__` would leave it, as far as scheduling goes."""
    args = ServerArgs(model_path="dummy", device="cpu")
    settings = {
        "page_size": page_size,
        "chunked_prefill_size": chunk,
        "max_prefill_tokens": max_prefill,
        "enable_mixed_chunk": mixed,
        "schedule_policy": policy,
        "schedule_conservativeness": conservativeness,
        "disable_radix_cache": not radix,
        "enable_priority_scheduling": priorities,
        "prefill_max_requests": prefill_max,
        "max_running_requests": max_running,
        "prefill_decode_interval": 0,
        "pp_max_micro_batch_size": max_running,
        "radix_eviction_policy": "lru",
        "served_model_name": "virtual",
        "attention_backend": "virtual",
        "enable_hisparse": False,
        "schedule_low_priority_values_first": False,
        "disable_priority_preemption": False,
    }
    for name, value in settings.items():
        if hasattr(args, name):
            setattr(args, name, value)
    publish(args, role="scheduler", ranks=SpawnRanks(world_rank=0, dp_rank=None, gpu_id=0))
    made = Scheduler.__new__(Scheduler)
    rows = ReqToTokenPool(max_running, pool + 64, "cpu", enable_memory_saver=False)
    kv = SimpleNamespace(size=pool, page_size=page_size)
    pages: Any = (
        TokenToKVPoolAllocator(pool, torch.bfloat16, "cpu", kv, need_sort=False)
        if page_size == 1
        else PagedTokenToKVPoolAllocator(pool, page_size, torch.bfloat16, "cpu", kv, need_sort=False)
    )
    tree = RadixCache(
        CacheInitParams(
            disable=not radix, req_to_token_pool=rows, token_to_kv_pool_allocator=pages, page_size=page_size
        )
    )
    model = Unset(
        vocab_size=VOCABULARY, is_encoder_decoder=False, is_multimodal=False, context_len=pool, hf_config=None
    )
    vars(made).update(
        server_args=args,
        model_config=model,
        page_size=page_size,
        max_prefill_tokens=max_prefill,
        max_running_requests=max_running,
        max_total_num_tokens=pool,
        max_queued_requests=None,
        chunked_prefill_size=chunk,
        is_mixed_chunk=mixed and chunk is not None,
        chunked_req=None,
        enable_overlap=overlap,
        enable_overlap_mlx=False,
        enable_priority_scheduling=priorities,
        enable_priority_preemption=priorities,
        priority_scheduling_preemption_threshold=10,
        schedule_low_priority_values_first=False,
        abort_on_priority_when_disabled=False,
        enable_hierarchical_cache=False,
        enable_hicache_storage=False,
        enable_lmcache=False,
        enable_unified_cache_external_linker=False,
        enable_lora=False,
        lora_drainer=None,
        enable_hisparse=False,
        hisparse_coordinator=None,
        dllm_config=None,
        is_hybrid_swa=False,
        require_mlp_sync=False,
        truncation_align_size=None,
        disaggregation_mode=DisaggregationMode.NULL,
        spec_algorithm=SpeculativeAlgorithm.NONE,
        token_to_kv_pool_allocator=pages,
        req_to_token_pool=rows,
        tree_cache=tree,
        waiting_queue=[],
        running_batch=ScheduleBatch(reqs=[], batch_is_full=False),
        last_batch=None,
        result_queue=deque(),
        cur_batch_for_debug=None,
        processed_tokens_counter=0,
        forward_ct=0,
        min_free_slots_delayer=None,
        prefill_delayer=None,
        max_prefill_bs=0,
        dynamic_chunk_sizer=None,
        decode_offload_manager=None,
        enable_continuous_input_polling=False,
        enable_skip_finishing_decode=False,
        mm_receiver=None,
        enable_fpm=False,
        is_generation=True,
        prefill_decode_interval=0,
        prefill_decode_interval_min_bs=0,
        _prefill_decode_interval_remaining=0,
        _pending_chunked_abort_req=None,
        _sched_idled=False,
        schedule_policy=policy,
        device="cpu",
        grammar_manager=SimpleNamespace(
            has_waiting_grammars=lambda: False, abort_requests=lambda recv: None, grammar_queue=[]
        ),
        beam_coordinator=SimpleNamespace(
            pending_member_rows=lambda batch: 0,
            retire_group=lambda req: None,
            commit_decode=lambda batch: set(),
        ),
        dp_attn_adapter=SimpleNamespace(
            maybe_prepare_mlp_sync_batch=lambda batch, need_sync=None: batch,
            maybe_convert_decode_to_extend=lambda batch: batch,
            drop_sync_wait_carry=lambda: None,
        ),
        ngram_embedding_manager=SimpleNamespace(prepare_for_forward=lambda batch, chunked_req=None: batch),
        load_inquirer=SimpleNamespace(_get_num_pending_tokens=lambda chunk_deduct=0: 0, get_loads=None),
        metrics_reporter=Sums(),
        rust_server=None,
        scheduler_stage_metrics=None,
        output_streamer=Quiet(),
        load_publisher=Quiet(),
        tp_worker=SimpleNamespace(
            model_runner=SimpleNamespace(attn_backend=SimpleNamespace(), prefill_aware_swa=False)
        ),
        future_map=Quiet(),
        virtual=Virtual(),
    )
    made.policy = SchedulePolicy(policy, tree, False, priorities, False)
    made.new_token_ratio_tracker = NewTokenRatioTracker.from_config()
    made.batch_result_processor = SchedulerBatchResultProcessor(
        is_generation=True,
        disaggregation_mode=DisaggregationMode.NULL,
        enable_overlap=overlap,
        enable_overlap_mlx=False,
        model_config=model,
        token_to_kv_pool_allocator=pages,
        tree_cache=tree,
        hisparse_coordinator=None,
        req_to_token_pool=rows,
        decode_offload_manager=None,
        metrics_collector=Quiet(),
        metrics_reporter=made.metrics_reporter,
        draft_worker=None,
        model_worker=None,
        logprob_result_processor=Quiet(),
        output_streamer=made.output_streamer,
        beam_coordinator=made.beam_coordinator,
        abort_request=made.abort_request,
    )
    for silent in (
        "publish_load_snapshot",
        "_maybe_clear_mm_inputs",
        "maybe_send_health_check_signal",
        "_record_step_counters",
        "send_control_output",
        "_prefetch_kvcache",
        "_process_hicache_events",
        "maybe_sleep_on_idle",
    ):
        setattr(made, silent, lambda *args, **kwargs: None)
    made.sent_aborts = []
    made.ipc_channels = SimpleNamespace(
        send_to_tokenizer=SimpleNamespace(send_output=lambda output, req=None: made.sent_aborts.append(output))
    )
    return made


def request(
    made: Any,
    rid: str,
    prompt: list[int],
    max_new: int,
    *,
    stop_after: int | None = None,
    ignore_eos: bool = False,
    priority: int | None = None,
) -> Any:
    """A request at the scheduler's door, queued if it is let in."""
    params = SamplingParams(max_new_tokens=max_new, temperature=0.0, ignore_eos=ignore_eos)
    params.normalize(None)
    req = Req(rid, "", array("q", prompt), params, eos_token_ids={END_TOKEN}, vocab_size=VOCABULARY, priority=priority)
    if stop_after is not None:
        made.virtual.stop_after[rid] = stop_after
    made._add_request_to_queue(req)
    return req


def turn(made: Any) -> Any:
    """One turn of SGLang's event loop, overlapped or not, as `event_loop_normal` and `event_loop_overlap` make it."""
    plan = made.get_next_batch_to_run(running_batch=made.running_batch, last_batch=made.last_batch)
    made.running_batch = plan.running_batch
    batch = plan.batch_to_run
    if not made.enable_overlap:
        if batch:
            made.processed_tokens_counter += batch.extend_num_tokens or 0
            made.process_batch_result(batch, made.run_batch(batch))
        else:
            made.on_idle()
    else:
        made.enable_skip_finishing_decode = True
        if batch:
            made.processed_tokens_counter += batch.extend_num_tokens or 0
            result = made.run_batch(batch)
            made.result_queue.append((batch.copy(), result))
        if made.last_batch:
            made.process_batch_result(*made.result_queue.popleft())
        elif batch is None:
            made.on_idle()
    made.last_batch = batch
    return batch


def is_empty(made: Any) -> bool:
    """Whether nothing is left to do."""
    return not (
        made.waiting_queue or made.running_batch.reqs or made.chunked_req or made.last_batch or made.result_queue
    )


def play(
    made: Any, scenario: Scenario, *, most_turns: int = 20_000, turn_of: Callable[[Any], Any] = turn
) -> list[tuple[Any, ...]]:
    """Drive the scheduler through a scenario until nothing is left. Returns what it decided, turn by turn."""
    coming, to_abort = deque(traffic(scenario)), aborts(scenario)
    decided = []
    for number in range(most_turns):
        while coming and coming[0]["turn"] <= number:
            found = dict(coming.popleft())
            del found["turn"]
            request(made, found.pop("rid"), found.pop("prompt"), found.pop("max_new"), **found)
        if number in to_abort:
            made.abort_request(
                SimpleNamespace(rid=to_abort[number], abort_all=False, abort_message=None, finished_reason=None)
            )
        batch = turn_of(made)
        decided.append(_decided(made, batch))
        if not coming and is_empty(made):
            turn_of(made)
            return decided
    raise AssertionError(f"not done after {most_turns} turns: {len(made.waiting_queue)} wait")


def _decided(made: Any, batch: Any) -> tuple[Any, ...]:
    """All that a turn decided: the batch, the queue's order, the flag, the ratio, the pool."""
    return (
        [(req.rid, req.prefix_len, req.extend_end, len(req.output_ids)) for req in batch.reqs] if batch else None,
        [req.rid for req in made.waiting_queue],
        made.chunked_req.rid if made.chunked_req is not None else None,
        made.running_batch.batch_is_full,
        made.new_token_ratio_tracker.current,
        made.token_to_kv_pool_allocator.available_size(),
        made.tree_cache.evictable_size(),
    )
