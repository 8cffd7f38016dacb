"""The measurements of the scheduler bench. Owns: what is timed, and over which load. Milliseconds and microseconds."""

from __future__ import annotations

import gc
import statistics
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import msgspec
import numpy as np

from bench.scheduler_load import (
    ALL,
    FILLER_TOKENS,
    PREFIX_TOKENS,
    PREFIXES,
    PROMPT_TOKENS,
    Prompts,
    Rig,
    Watch,
    cpu_ns,
)
from engine.clock import VirtualClock
from engine.config import EngineConfig
from engine.executor.forward_batch import from_plan
from engine.executor.simulated import SimulatedExecutor
from engine.kvcache.kv_cache import KvCache
from engine.llm_engine import EngineRequest, LLMEngine
from engine.sampling_params import SamplingParams
from engine.scheduler.decision import AdmissionDecision
from engine.scheduler.publisher import Publisher
from engine.scheduler.scheduler import Arrival
from engine.token_store import TokenStore

STEPS = 40
EVICTIONS = 8
ARRIVALS = 4


class Spread(msgspec.Struct, frozen=True):
    """Median and least of some repeats."""

    median: float
    least: float

    @classmethod
    def of(cls, nanoseconds: Sequence[float], unit_ns: float) -> Spread:
        return cls(statistics.median(nanoseconds) / unit_ns, min(nanoseconds) / unit_ns)


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One measured line; what does not apply is None."""

    bench: str
    page_size: int
    watch: Watch
    policy: str | None = None
    waiting: int | None = None
    first_ms: Spread | None = None
    steady_ms: Spread | None = None
    admit_us: Spread | None = None
    pass_us: Spread | None = None
    insert_us: Spread | None = None
    match_us: Spread | None = None
    evict_us: Spread | None = None


def timed(work: Callable[[], object]) -> int:
    """CPU nanoseconds of one call."""
    began = cpu_ns()
    work()
    return cpu_ns() - began


def _warm(rig: Rig, prompts: Prompts, fillers: int) -> None:
    """Cache old prompts that evictions may take, then the shared prefixes."""
    for number in range(fillers):
        rig.add(f"old-{number}", prompts.fresh(FILLER_TOKENS))
        rig.step()
    for number in range(PREFIXES):
        rig.add(f"prefix-{number}", prompts.prefix(number))
        rig.step()


def order(policy: str, waiting: int, page_size: int, watch: Watch, *, steps: int = STEPS, cached: int = 0) -> Row:
    """Whole steps under a queue: what finished enters the tree, 4 arrive, 8 leaves go, the queue is ordered, one runs.

    first    the ordering that meets all `waiting` at once, and the plan
    steady   everything the scheduler does in a step, arrivals and evictions included
    """
    tokens = (steps + 4) * (PROMPT_TOKENS + EVICTIONS * FILLER_TOKENS) + cached * FILLER_TOKENS + 64 * PROMPT_TOKENS
    rig = Rig(policy=policy, page_size=page_size, num_pages=tokens // page_size, watch=watch, prefill_max_requests=1)
    prompts = Prompts(page_size)
    _warm(rig, prompts, steps * EVICTIONS + cached)
    for number in range(waiting):
        rig.add(f"r{number}", prompts.prompt(number))
    gc.collect()
    first = cpu_ns()
    plan = rig.order_and_plan()
    first = cpu_ns() - first
    rig.settle(plan)
    per_eviction = FILLER_TOKENS // page_size
    took = []
    for step in range(steps):
        new = [prompts.prompt(step * ARRIVALS + at) for at in range(ARRIVALS)]
        began = cpu_ns()
        for at, keys in enumerate(new):
            rig.add(f"s{step}-{at}", keys)
        rig.step(evict_pages=EVICTIONS * per_eviction)
        took.append(cpu_ns() - began)
    return Row(
        bench="order",
        policy=policy,
        waiting=waiting,
        page_size=page_size,
        watch=watch,
        first_ms=Spread.of([first], 1e6),
        steady_ms=Spread.of(took, 1e6),
    )


def rekey(policy: str, waiting: int, page_size: int, watch: Watch, *, repeats: int = 3) -> Row:
    """The one ordering after a prefix that everybody shares became cached."""
    took = []
    for _ in range(repeats):
        tokens = 64 * PROMPT_TOKENS
        rig = Rig(
            policy=policy, page_size=page_size, num_pages=tokens // page_size, watch=watch, prefill_max_requests=1
        )
        prompts = Prompts(page_size)
        for number in range(waiting):
            rig.add(f"r{number}", prompts.prompt(0))
        gc.collect()
        plan = rig.order_and_plan()
        assert len(plan.prefills) == 1
        rig.settle(plan)
        # The first one runs, ends and brings the prefix into the tree; this ordering finds out.
        took.append(timed(rig.order_and_plan))
    return Row(
        bench="rekey", policy=policy, waiting=waiting, page_size=page_size, watch=watch, first_ms=Spread.of(took, 1e6)
    )


class _TimedRecords:
    """A publisher whose records of decisions are timed."""

    def __init__(self, publisher: Publisher) -> None:
        self._publisher = publisher
        self.spent_ns = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._publisher, name)

    def decided(self, decision: AdmissionDecision, *, stopped_pass: bool) -> None:
        self.spent_ns += timed(lambda: self._publisher.decided(decision, stopped_pass=stopped_pass))


def admission(
    page_size: int, watch: Watch, *, candidates: int = 512, prompt_tokens: int = PROMPT_TOKENS, repeats: int = 3
) -> Row:
    """One pass that admits everybody.

    admit   match, price, admit, and the record of each decision, per candidate
    whole   ordering of all as arrivals, plan, commit with locks and pages, and the batch that an executor gets
    """
    admits, wholes = [], []
    for _ in range(repeats):
        rig, store = _queued(page_size, watch, candidates, prompt_tokens)
        rig.scheduler.prepare(rig.now_ns)
        began = cpu_ns()
        plan = rig.scheduler.plan(rig.now_ns)
        planned = cpu_ns() - began
        assert len(plan.prefills) == candidates, f"{len(plan.prefills)} of {candidates} admitted: {plan.pass_end}"
        recording = _TimedRecords(rig.scheduler.publisher)
        rig.scheduler.publisher = recording  # a proxy
        rig.scheduler.commit(plan)
        admits.append((planned + recording.spent_ns) / candidates)

        rig, store = _queued(page_size, watch, candidates, prompt_tokens)
        began = cpu_ns()
        rig.scheduler.prepare(rig.now_ns)
        plan = rig.scheduler.commit(rig.scheduler.plan(rig.now_ns))
        from_plan(plan, tokens=store, leases=rig.scheduler.kv.leases, page_size=page_size)
        wholes.append((cpu_ns() - began) / candidates)
    return Row(
        bench="admit",
        policy="lpm",
        waiting=candidates,
        page_size=page_size,
        watch=watch,
        admit_us=Spread.of(admits, 1e3),
        pass_us=Spread.of(wholes, 1e3),
    )


def _queued(page_size: int, watch: Watch, candidates: int, prompt_tokens: int) -> tuple[Rig, TokenStore]:
    tokens = 2 * (candidates + 8) * (prompt_tokens + page_size)
    rig = Rig(
        policy="lpm",
        page_size=page_size,
        num_pages=tokens // page_size,
        watch=watch,
        rows=candidates + 8,
        max_prefill_tokens=1 << 30,
        chunked_prefill_size=None,
    )
    store = TokenStore(page_size=page_size, secret=b"", eos_token_ids=(0,))
    rng = np.random.default_rng(3)
    shared = min(PREFIX_TOKENS, prompt_tokens // 2)
    heads = [tuple(rng.integers(1, 50_000, shared).tolist()) for _ in range(PREFIXES)]

    def add(rid: str, ids: tuple[int, ...]) -> None:
        keys = store.add(rid, ids, SamplingParams(max_new_tokens=1))
        rig.scheduler.add(
            Arrival(
                rid=rid,
                prompt_len=len(ids),
                max_new_tokens=1,
                page_keys=keys.page_keys,
                head32_key=keys.head32_key,
            ),
            rig.now_ns,
        )

    for number, head in enumerate(heads):
        add(f"prefix-{number}", head)
    rig.run()
    for number in range(candidates):
        tail = tuple(rng.integers(1, 50_000, prompt_tokens - shared).tolist())
        add(f"r{number}", heads[number % PREFIXES] + tail)
    gc.collect()
    return rig, store


def radix(page_size: int, watch: Watch, *, tokens: int = 8192, cached: int = 64, repeats: int = 30) -> Row:
    """The tree alone: a prompt of `tokens` enters, is matched again, and a leaf of half its size is evicted.

    The checker follows whole engines, not a tree by itself: it is not part of this.
    """
    events = Publisher(Watch(records=watch.records, checker=False).sink())
    pool = (cached + 2 * repeats + 4) * tokens // page_size
    kv = KvCache(num_pages=pool, page_size=page_size, num_rows=4, events=events)
    prompts = Prompts(page_size)

    def put(keys: np.ndarray) -> int:
        lease = kv.acquire("bench", keys[:0])
        kv.extend(lease, len(keys) * page_size)
        pages = lease.pages
        began = cpu_ns()
        kv.tree.insert(keys, pages, locked_by=None)
        took = cpu_ns() - began
        lease.shared = lease.count  # all of it is the tree's now
        kv.release(lease, None)
        return took

    for _ in range(repeats):
        put(prompts.fresh(tokens // 2))
    for _ in range(cached):
        put(prompts.fresh(tokens))
    inserts, matches, evicts = [], [], []
    for _ in range(repeats):
        keys = prompts.fresh(tokens)
        inserts.append(put(keys))
        again = keys.copy()
        matches.append(min(timed(partial(kv.match, again)) for _ in range(3)))
        evicts.append(timed(lambda: kv.evict_until_free(kv.free_pages + tokens // 2 // page_size)))
    return Row(
        bench="radix",
        page_size=page_size,
        watch=Watch(records=watch.records, checker=False),
        insert_us=Spread.of(inserts, 1e3),
        match_us=Spread.of(matches, 1e3),
        evict_us=Spread.of(evicts, 1e3),
    )


def waiting_bytes(watch: Watch, *, prompts: int = 4096, tokens: int = 8192, page_size: int = 16) -> float:
    """Bytes that one more waiting prompt costs beyond its token ids, in scheduler and listeners, after an ordering."""
    rig = Rig(policy="lpm", page_size=page_size, num_pages=64 * tokens // page_size, watch=watch, rows=1)
    made = Prompts(page_size)
    _warm(rig, made, 0)
    arrivals = [rig.arrival(f"r{number}", made.prompt(number, tokens)) for number in range(prompts)]
    gc.collect()
    tracemalloc.start()
    try:
        for arrival in arrivals:
            rig.scheduler.add(arrival, rig.now_ns)
        rig.order_and_plan()
        gc.collect()
        return tracemalloc.get_traced_memory()[0] / prompts
    finally:
        tracemalloc.stop()


class Slice(msgspec.Struct, frozen=True):
    """After so many requests: objects that the interpreter tracks, resident memory, live requests' leftovers."""

    requests: int
    objects: int
    resident_kib: int
    microseconds: float


def long_run(total: int, watch: Watch, *, slices: int = 10) -> Iterator[Slice]:
    """`total` short requests through the simulated engine, measured each time it is empty."""
    config = EngineConfig.model_validate(
        {
            "scheduler": {"max_running_requests": 64, "schedule_policy": "lpm", "chunked_prefill_size": 512},
            "cache": {"page_size": 16, "num_pages": 1024},
            "executor": {"kind": "simulated"},
        }
    )
    clock = VirtualClock()
    engine = LLMEngine(config, executor=SimulatedExecutor(config), clock=clock, sink=watch.sink())
    rng = np.random.default_rng(11)
    heads = [tuple(rng.integers(1, 500, 64).tolist()) for _ in range(PREFIXES)]
    done = 0
    for _ in range(slices):
        began = cpu_ns()
        for number in range(done, done + total // slices):
            prompt = heads[number % PREFIXES] + tuple(rng.integers(1, 500, 48).tolist())
            params = SamplingParams(max_new_tokens=4)
            engine.add_request(EngineRequest(rid=f"r{number}", prompt_ids=prompt, params=params))
            while engine.num_waiting > 128:
                clock.advance_ns(1_000_000)
                engine.step()
        while engine.has_work:
            clock.advance_ns(1_000_000)
            engine.step()
        done += total // slices
        spent = cpu_ns() - began
        gc.collect()
        resident = next(
            int(line.split()[1])
            for line in Path("/proc/self/status").read_text("utf-8").splitlines()
            if line.startswith("VmRSS")
        )
        yield Slice(done, len(gc.get_objects()), resident, spent / 1e3 / (total // slices))


__all__ = ["ALL", "Row", "Slice", "Spread", "admission", "long_run", "order", "radix", "rekey", "waiting_bytes"]
