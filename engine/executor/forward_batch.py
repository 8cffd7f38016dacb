"""ForwardBatch from a plan. Owns: how a StepPlan, the token store and the page tables become one flattened batch.

Prompt pieces come first, in plan order, then decode rows. A middle chunk is not in `plan.sampling`, so it gets no row
in the sampler and cannot emit a token.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

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
    qo_indptr = np.zeros(len(spans) + 1, dtype=np.int32)
    kv_indptr = np.zeros(len(spans) + 1, dtype=np.int32)
    last_page_len = np.empty(len(spans), dtype=np.int32)
    ids: list[np.ndarray] = []
    positions: list[np.ndarray] = []
    slots: list[np.ndarray] = []
    pages: list[I32] = []
    last_row: dict[str, int] = {}
    for index, (rid, start, end) in enumerate(spans):
        used = -(-end // page_size)
        table = leases[rid].pages[:used]
        place = np.arange(start, end, dtype=np.int64)
        ids.append(tokens.slice(rid, start, end))
        positions.append(place.astype(np.int32))
        slots.append(table[place // page_size].astype(np.int64) * page_size + place % page_size)
        pages.append(table)
        qo_indptr[index + 1] = qo_indptr[index] + end - start
        kv_indptr[index + 1] = kv_indptr[index] + used
        last_page_len[index] = end - (used - 1) * page_size
        last_row[rid] = int(qo_indptr[index + 1]) - 1
    metadata = PagedMetadata(
        qo_indptr=qo_indptr,
        kv_indptr=kv_indptr,
        kv_indices=np.concatenate(pages).astype(np.int32),
        last_page_len=last_page_len,
        out_slots=np.concatenate(slots),
        positions=np.concatenate(positions),
        page_size=page_size,
    )
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
        token_ids=np.concatenate(ids),
        metadata=metadata,
        sampling=sampling,
    )
