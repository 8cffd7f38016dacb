"""ForwardBatch from a plan. Owns: how a StepPlan, the token store and the page tables become one flattened batch.

Prompt pieces come first, in plan order, then decode rows. A middle chunk is not in `plan.sampling`, so it gets no row
in the sampler and cannot emit a token.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from engine.attention.metadata import I32, PagedMetadata
from engine.executor.base import ForwardBatch, SamplingRow
from engine.kvcache.kv_cache import KvLease
from engine.scheduler.plan import StepPlan
from engine.token_store import TokenStore


def from_plan(plan: StepPlan, *, tokens: TokenStore, leases: Mapping[str, KvLease], page_size: int) -> ForwardBatch:
    """One batch for all rows of `plan`, which must be committed (the leases cover its tokens)."""
    spans = [(row.rid, row.prefix_len, row.extend_end) for row in plan.prefills]
    for rid in plan.decodes:
        length = tokens.length(rid)
        spans.append((rid, length - 1, length))
    starts = np.array([start for _, start, _ in spans], dtype=np.int64)
    ends = np.array([end for _, _, end in spans], dtype=np.int64)
    lengths = ends - starts
    used = -(-ends // page_size)
    qo_indptr = _offsets(lengths)
    kv_indptr = _offsets(used)
    token_ids = np.empty(int(qo_indptr[-1]), dtype=np.int64)
    kv_indices = np.empty(int(kv_indptr[-1]), dtype=np.int32)
    rows, places = qo_indptr.tolist(), kv_indptr.tolist()
    for index, (rid, start, end) in enumerate(spans):
        token_ids[rows[index] : rows[index + 1]] = tokens.slice(rid, start, end)
        kv_indices[places[index] : places[index + 1]] = leases[rid].pages[: places[index + 1] - places[index]]
    # Each query row's position in its sequence, then the page and slot that hold that position.
    positions = np.arange(len(token_ids), dtype=np.int64) + np.repeat(starts - qo_indptr[:-1], lengths)
    pages = kv_indices[np.repeat(kv_indptr[:-1], lengths) + positions // page_size].astype(np.int64)
    metadata = PagedMetadata(
        qo_indptr=qo_indptr,
        kv_indptr=kv_indptr,
        kv_indices=kv_indices,
        last_page_len=(ends - (used - 1) * page_size).astype(np.int32),
        out_slots=pages * page_size + positions % page_size,
        positions=positions.astype(np.int32),
        page_size=page_size,
    )
    last_row = {rid: rows[index + 1] - 1 for index, (rid, _, _) in enumerate(spans)}
    sampling = tuple(
        SamplingRow(
            rid=rid,
            row=last_row[rid],
            position=tokens.length(rid),
            output_index=tokens.output_index(rid),
            params=tokens.params(rid),
        )
        for rid in plan.sampling
    )
    return ForwardBatch(
        step=plan.step,
        rids=tuple(rid for rid, _, _ in spans),
        token_ids=token_ids,
        metadata=metadata,
        sampling=sampling,
    )


def _offsets(lengths: NDArray[np.int64]) -> I32:
    """[0, l0, l0 + l1, …], int32."""
    offsets = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=offsets[1:])
    return offsets
