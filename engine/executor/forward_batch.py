"""ForwardBatch from a plan. Owns: how a StepPlan, the token store and the page tables become one flattened batch.

Prompt pieces come first, in plan order, then decode rows. A middle chunk is not in `plan.sampling`, so it gets no row
in the sampler and cannot emit a token.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import numpy as np

from engine.attention.metadata import I32, PagedMetadata
from engine.executor.base import ForwardBatch, SamplingRow
from engine.kvcache.kv_cache import KvLease
from engine.scheduler.plan import StepPlan
from engine.token_store import TokenStore


class _Counting:
    """0, 1, 2, …, kept: to make them anew gives the interpreter away, and who waits for it wakes up in vain."""

    def __init__(self) -> None:
        self._numbers = _up_to(4096)

    def first(self, count: int) -> I32:
        """[count] int32 from 0; writing to it raises ValueError. Any thread: engines of one process share this."""
        numbers = self._numbers
        if count > len(numbers):
            # Kept by this name too: another thread may put a shorter one in its place.
            numbers = self._numbers = _up_to(2 * count)
        return numbers[:count]


def _up_to(count: int) -> I32:
    numbers = np.arange(count, dtype=np.int32)
    numbers.flags.writeable = False
    return numbers


_COUNTING: Final = _Counting()
#: In place of a token that is not known yet.
_UNKNOWN: Final = np.zeros(1, dtype=np.int64)
#: Nothing is under way: the step before was applied.
_NONE: Final[Mapping[str, int]] = MappingProxyType({})


def from_plan(
    plan: StepPlan,
    *,
    tokens: TokenStore,
    leases: Mapping[str, KvLease],
    page_size: int,
    under_way: Mapping[str, int] = _NONE,
) -> ForwardBatch:
    """One batch for all rows of `plan`, which must have some and be committed (the leases cover its tokens).

    under_way  request -> place of its token in the batch launched before, whose values the host does not know yet
    """
    spans = [(row.rid, row.prefix_len, row.extend_end) for row in plan.prefills]
    for rid in plan.decodes:
        length = tokens.length(rid) + (rid in under_way)
        spans.append((rid, length - 1, length))
    rids, firsts, lasts = zip(*spans, strict=True)
    starts, ends = np.array(firsts, dtype=np.int32), np.array(lasts, dtype=np.int32)
    lengths = ends - starts
    used = -(-ends // page_size)
    qo_indptr = _offsets(lengths)
    kv_indptr = _offsets(used)
    tables = [leases[rid].pages[:count] for rid, count in zip(rids, used.tolist(), strict=True)]
    kv_indices = np.concatenate(tables)
    # Each query row's position in its sequence, then its slot: page * size + position % size, in few passes over R.
    positions = _COUNTING.first(int(qo_indptr[-1])) + np.repeat(starts - qo_indptr[:-1], lengths)
    page_numbers = positions // page_size
    # By the machine's own integers: by others numpy gives the interpreter away for a moment, as to `arange`.
    slots = kv_indices[(page_numbers + np.repeat(kv_indptr[:-1], lengths)).astype(np.intp)].astype(np.int64)
    slots -= page_numbers
    slots *= page_size
    slots += positions
    metadata = PagedMetadata(
        qo_indptr=qo_indptr,
        kv_indptr=kv_indptr,
        kv_indices=kv_indices,
        last_page_len=ends - (used - 1) * page_size,
        out_slots=slots,
        positions=positions,
        page_size=page_size,
    )
    last_rows = dict(zip(rids, (qo_indptr[1:] - 1).tolist(), strict=True))
    if not under_way:
        return ForwardBatch(
            step=plan.step,
            rids=rids,
            token_ids=np.concatenate([tokens.slice(*span) for span in spans]),
            metadata=metadata,
            sampling=tuple(SamplingRow(rid, last_rows[rid], *tokens.row(rid)) for rid in plan.sampling),
        )
    late = under_way.keys() & set(plan.decodes)
    return ForwardBatch(
        step=plan.step,
        rids=rids,
        token_ids=np.concatenate([_UNKNOWN if span[0] in late else tokens.slice(*span) for span in spans]),
        metadata=metadata,
        sampling=tuple(_sampling(rid, last_rows[rid], tokens, is_late=rid in late) for rid in plan.sampling),
        carried=tuple((last_rows[rid], under_way[rid]) for rid in plan.decodes if rid in late),
    )


def _sampling(rid: str, row: int, tokens: TokenStore, *, is_late: bool) -> SamplingRow:
    """How to sample a row. `is_late`: the token before this one is not known yet."""
    position, output_index, params, history, grammar = tokens.row(rid)
    if not is_late:
        return SamplingRow(rid, row, position, output_index, params, history, grammar)
    hangs = history is not None or grammar is not None
    assert not hangs, f"request {rid}: sampling hangs on a token that is not known yet"
    return SamplingRow(rid, row, position + 1, output_index + 1, params)


def _offsets(lengths: I32) -> I32:
    """[0, l0, l0 + l1, …], int32."""
    offsets = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=offsets[1:])
    return offsets
