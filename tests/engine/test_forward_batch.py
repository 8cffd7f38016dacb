"""The flattened batch: prompt pieces first, then decode rows; laws of its metadata; tokens and slots in place."""

from __future__ import annotations

import numpy as np
import pytest

from engine.executor.base import ForwardBatch
from engine.executor.forward_batch import _Counting, from_plan
from engine.scheduler.plan import StepKind, StepOutcome, StepPlan
from tests.builders import engine_config
from tests.engine.stub_model import StubRun


def test_rows_of_a_mixed_step() -> None:
    """Two decodes beside a middle chunk: row 0 is the piece, and only the decodes are sampled."""
    run = StubRun(engine_config(page_size=16, num_pages=64, chunked_prefill_size=48))
    run.add("a", range(40, 60), 9)
    run.add("b", range(60, 70), 9)
    run.step()
    run.add("L", [33] * 100, 2)
    run.step()
    batch = run.model.batches[-1]
    meta = batch.metadata
    assert batch.rids == ("L", "a", "b")
    # Chunk 48 - 2 decode rows = 46, floored to pages: 32 tokens.
    assert meta.qo_indptr.tolist() == [0, 32, 33, 34]
    assert meta.kv_indptr.tolist() == [0, 2, 4, 5]
    assert meta.last_page_len.tolist() == [16, 5, 11]
    assert meta.seq_lens.tolist() == [32, 21, 11]
    assert meta.positions.tolist() == [*range(32), 20, 10]
    assert batch.token_ids[:32].tolist() == [33] * 32
    assert batch.token_ids[32:].tolist() == [run.tokens("a")[0], run.tokens("b")[0]]
    assert [(row.rid, row.row, row.position, row.output_index) for row in batch.sampling] == [
        ("a", 32, 21, 1),
        ("b", 33, 11, 1),
    ]


@pytest.mark.parametrize("page_size", [1, 2, 16])
@pytest.mark.parametrize("mixed", [True, False])
@pytest.mark.parametrize("policy", ["fcfs", "lpm"])
def test_every_batch_keeps_the_laws(page_size: int, mixed: bool, policy: str) -> None:
    """Metadata valid, tokens those of the store, one sampling row per last row of who is not a middle chunk."""
    config = engine_config(
        page_size=page_size,
        num_pages=320 // page_size,
        chunked_prefill_size=48,
        enable_mixed_chunk=mixed,
        schedule_policy=policy,
        schedule_conservativeness=0.05,
        max_running_requests=5,
    )
    run = StubRun(config)
    engine = run.engine
    for number in range(12):
        shared = [50 + i % 40 for i in range((0, 40, 70)[number % 3])]
        run.add(f"r{number}", [*shared, *(35 + (number * 13 + i * 7) % 90 for i in range(5 + number * 9 % 60))], 12)
    kinds = set()
    while run.state.has_work:
        engine.scheduler.prepare(0)
        plan = engine.scheduler.commit(engine.scheduler.plan(0))
        kinds.add(plan.kind)
        if plan.kind is not StepKind.IDLE:
            batch = from_plan(plan, tokens=engine.tokens, leases=run.kv.leases, page_size=page_size)
            check(batch, plan, run)
        result = run.model.execute(batch) if plan.kind is not StepKind.IDLE else None
        rows = tuple(engine.tokens.settle(token.rid, token.token_id).row for token in (result.tokens if result else ()))
        engine.scheduler.apply(plan, StepOutcome(plan.step, rows))
        engine.scheduler.complete(StepOutcome(plan.step, rows).times)
    assert StepKind.DECODE in kinds
    assert (StepKind.MIXED in kinds) == mixed


def check(batch: ForwardBatch, plan: StepPlan, run: StubRun) -> None:
    meta = batch.metadata
    meta.validate(run.kv.num_pages)
    rows = [(row.rid, row.prefix_len, row.extend_end) for row in plan.prefills]
    decodes = [(rid, run.engine.tokens.length(rid) - 1, run.engine.tokens.length(rid)) for rid in plan.decodes]
    for index, (rid, start, end) in enumerate([*rows, *decodes]):
        first, last = int(meta.qo_indptr[index]), int(meta.qo_indptr[index + 1])
        assert batch.rids[index] == rid
        assert last - first == end - start
        assert batch.token_ids[first:last].tolist() == run.engine.tokens.slice(rid, start, end).tolist()
        assert meta.positions[first:last].tolist() == list(range(start, end))
        table = run.kv.leases[rid].pages
        used = meta.kv_indices[int(meta.kv_indptr[index]) : int(meta.kv_indptr[index + 1])]
        assert used.tolist() == table[: len(used)].tolist()
        # What is written lies in this request's own pages, never in one that the tree shares.
        written = np.unique(meta.out_slots[first:last] // meta.page_size)
        assert set(written.tolist()) <= set(table[run.kv.leases[rid].shared :].tolist())
    middle = {row.rid for row in plan.prefills if not row.is_last}
    assert [row.rid for row in batch.sampling] == [rid for rid in batch.rids if rid not in middle]
    ends = {rid: int(meta.qo_indptr[index + 1]) - 1 for index, rid in enumerate(batch.rids)}
    assert all(row.row == ends[row.rid] for row in batch.sampling)


def test_the_kept_numbers_count_to_any_length_and_nobody_writes_to_them() -> None:
    counting = _Counting()
    for count in (0, 1, 4096, 4097, 10_000, 3, 8194):
        assert np.array_equal(counting.first(count), np.arange(count, dtype=np.int32))
        assert counting.first(count).dtype == np.int32
    with pytest.raises(ValueError, match="read-only"):
        counting.first(8)[0] = 7


def test_another_engine_that_counts_less_far_takes_nothing_away() -> None:
    class Late(_Counting):
        """Each time it is set, another thread that made a shorter array sets that behind it."""

        def __setattr__(self, name: str, numbers: object) -> None:
            object.__setattr__(self, name, numbers)
            object.__setattr__(self, name, np.arange(4100, dtype=np.int32))

    assert len(Late().first(20_000)) == 20_000
