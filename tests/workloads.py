"""Workloads for property tests. Owns: strategies of whole configurations and of jobs that share documents."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal
from zlib import crc32

from hypothesis import strategies as st

from engine.config import EngineConfig
from tests.builders import engine_config

#: More steps than any of these workloads takes: who reaches it hangs.
MAX_STEPS: Final = 20_000
_POLICIES: Final = ("fcfs", "lpm", "shortest-prefill-first", "dfs-weight", "hrrn", "lof")
_PREEMPTING: Final = ("fcfs", "lof")


@dataclass(frozen=True)
class Job:
    """One request: `shared` tokens from the start of one of a few documents, `own` tokens that nobody has."""

    arrives: int
    document: int
    shared: int
    own: int
    max_new: int
    ignore_eos: bool
    priority: int | None
    aborted_after: int | None

    def prompt(self, index: int) -> tuple[int, ...]:
        common = [(100 * self.document + 7 * place) % 500 for place in range(self.shared)]
        return (*common, *[crc32(f"{index}/{place}".encode()) % 500 for place in range(self.own)])


JOBS: Final = st.lists(
    st.builds(
        Job,
        arrives=st.integers(0, 40),
        document=st.integers(1, 2),
        shared=st.integers(0, 150),
        own=st.integers(1, 150),
        max_new=st.integers(1, 80),
        ignore_eos=st.booleans(),
        priority=st.sampled_from([None, 0, 5, 9]),
        aborted_after=st.one_of(st.none(), st.none(), st.integers(0, 30)),
    ),
    min_size=1,
    max_size=14,
)


@st.composite
def configs(draw: st.DrawFn, *, accounting: Literal["reference", "exact"] = "reference") -> EngineConfig:
    """Page sizes 1 to 64, chunking and mixing on and off, tight and roomy pools, every order, preemption.

    Under exact accounting pools are tinier, cuts may be aligned, and a pass may always compute a page: what it promises
    holds from there on.
    """
    is_exact = accounting == "exact"
    page = draw(st.sampled_from([1, 2, 16, 64]))
    chunk = draw(st.one_of(st.none(), st.integers(max(page, 8), 200)))
    preempts = draw(st.booleans())
    policy = draw(st.sampled_from(_PREEMPTING if preempts else _POLICIES))
    align = None
    if is_exact and chunk is not None:
        align = draw(st.sampled_from([None, None, page, 3 * page]))
        if align is not None and align > chunk:
            align = None
    radix = draw(st.booleans()) or policy == "shortest-prefill-first"
    pool = draw(st.integers(60, 500) if is_exact else st.integers(120, 900))
    max_prefill = draw(st.sampled_from([32, 64, 300, 8192]))
    return engine_config(
        kv_accounting=accounting,
        page_size=page,
        num_pages=max(3 if is_exact else 4, pool // page),
        enable_radix=radix,
        chunked_prefill_size=chunk,
        truncation_align_size=align,
        max_prefill_tokens=max(page, align or 0, max_prefill) if is_exact else max_prefill,
        enable_mixed_chunk=draw(st.booleans()),
        max_running_requests=draw(st.sampled_from([1, 2, 4, 16])),
        prefill_max_requests=draw(st.sampled_from([None, None, 1, 3])),
        schedule_policy=policy,
        schedule_conservativeness=draw(st.sampled_from([0.01, 0.3, 1.0])),
        clip_max_new_tokens=draw(st.sampled_from([1, 16, 4096])),
        enable_priority_scheduling=preempts,
        enable_priority_preemption=preempts,
        priority_preemption_threshold=1,
    )
