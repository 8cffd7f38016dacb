"""FlashInferBackend on a CPU: what computes which batch, and that it computes it right, whatever is still under way."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.attention.flashinfer import MixedKernel, PrefillKernel, first_decode
from tests.engine.attention.flashinfer_rig import (
    DECODE,
    DECODES,
    EVERY_MIXED,
    HOLISTIC,
    MIXED,
    POD,
    PREFILL,
    WRAPPERS,
    Rig,
    reference,
)
from tests.engine.attention.ragged import Shape, build, lengths


@given(
    steps=st.lists(lengths(max_requests=5, max_len=60), min_size=1, max_size=5),
    page=st.sampled_from([1, 3, 16]),
    group=st.sampled_from([1, 3, 7]),
    shared=st.booleans(),
    mixed=st.sampled_from(MixedKernel),
    prefill=st.sampled_from(PrefillKernel),
    windows=st.sampled_from([(), (0, 9), (20, 20)]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
@settings(max_examples=60)
def test_any_steps_started_before_any_is_done_equal_the_reference(
    steps: list[list[tuple[int, int]]], page: int, group: int, shared: bool, mixed: MixedKernel,
    prefill: PrefillKernel, windows: tuple[int, ...], dtype: torch.dtype,
) -> None:  # fmt: skip
    shape = Shape(page_size=page, group=group, dim=4)
    rig = Rig(shape, windows=windows, mixed=mixed, prefill=prefill, dtype=dtype)
    started = []
    for seed, lens in enumerate(steps):
        batch = build(lens, shape, seed=seed, shared=shared, page_seed=seed, dtype=dtype)
        rig.backend.prepare(batch.metadata)
        for layer in range(2):
            out = rig.run(batch, layer)
            assert out.is_contiguous()
            started.append((out, reference(batch, layer, windows)))
    rig.device.synchronize()
    for out, want in started:
        assert torch.equal(out, want)


BOTH_BY = {
    MixedKernel.RAGGED: [PREFILL],
    MixedKernel.SPLIT: [PREFILL, DECODE],
    MixedKernel.HOLISTIC: [HOLISTIC],
    MixedKernel.POD: [POD],
}


@EVERY_MIXED
def test_the_batch_chooses_the_wrapper(mixed: MixedKernel) -> None:
    rig = Rig(Shape(), mixed=mixed)
    for lens in (MIXED, DECODES, [(6, 6)], [(1, 1)], [(3, 9), (1, 4)], [(1, 4), (3, 9)]):
        rig.start(build(lens, Shape()))
    assert rig.planned() == [*BOTH_BY[mixed], DECODE, PREFILL, DECODE, *BOTH_BY[mixed], PREFILL]


@EVERY_MIXED
def test_fa3_is_for_pieces_that_no_decode_rows_share_a_call_with(mixed: MixedKernel) -> None:
    rig = Rig(Shape(), mixed=mixed, prefill=PrefillKernel.FA3)
    for lens in (MIXED, MIXED, [(6, 6)], [(9, 20), (6, 6)], DECODES):
        rig.start(build(lens, Shape()))
    made = [given_["backend"] for given_ in rig.module.named(f"{PREFILL}.__init__")]
    assert made == (["fa2", "fa2", "fa3", "fa3"] if mixed is MixedKernel.RAGGED else ["fa3", "fa3"])


@pytest.mark.parametrize(
    ("lens", "first"),
    [
        (DECODES, 0),
        ([(5, 5)], 1),
        ([(1, 3), (5, 5)], 2),
        ([(5, 5), (1, 3), (1, 4)], 1),
        ([(0, 3), (5, 5), (1, 4)], 2),
        ([(0, 3), (1, 4)], 2),
        ([(5, 5), (0, 3)], 2),
    ],
)
def test_decode_rows_are_what_follows_the_last_piece(lens: list[tuple[int, int]], first: int) -> None:
    assert first_decode(build(lens, Shape()).metadata) == first


def test_requests_without_rows_before_decode_rows_are_no_part_of_their_own() -> None:
    """POD divides by the number of tiles of either part."""
    rig = Rig(Shape(), mixed=MixedKernel.POD)
    batch = build([(0, 12), (1, 5)], Shape())
    out = rig.start(batch)
    rig.device.synchronize()
    assert rig.planned() == [PREFILL]
    assert torch.equal(out, reference(batch))


def test_one_plan_serves_all_layers() -> None:
    rig = Rig(Shape())
    batch = build(MIXED, Shape())
    rig.backend.prepare(batch.metadata)
    for layer in range(7):
        rig.backend.run(batch.q, batch.k_cache, batch.v_cache, layer)
    assert len(rig.module.named(f"{PREFILL}.plan")) == 1
    assert len(rig.module.named(f"{PREFILL}.run")) == 7


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@EVERY_MIXED
def test_types_scale_and_integers_are_named_in_every_plan(mixed: MixedKernel, dtype: torch.dtype) -> None:
    shape = Shape(dim=16)
    rig = Rig(shape, mixed=mixed, dtype=dtype)
    for lens in (MIXED, DECODES):
        rig.start(build(lens, shape, dtype=dtype))
    for name, given_ in zip(rig.planned(), rig.plans(), strict=True):
        assert given_["q_data_type"] is given_["kv_data_type"] is dtype
        assert given_["sm_scale"] == 16**-0.5
        assert name == HOLISTIC or given_["window_left"] == -1
        assert {value.dtype for value in given_.values() if isinstance(value, torch.Tensor)} == {torch.int32}
    assert rig.module.named(f"{DECODE}.__init__")[0]["use_tensor_cores"] is True


@pytest.mark.parametrize(
    ("mixed", "count"),
    [(MixedKernel.RAGGED, 4), (MixedKernel.SPLIT, 4), (MixedKernel.HOLISTIC, 3), (MixedKernel.POD, 4)],
)
def test_wrappers_are_made_once_for_each_of_two_sets_and_share_the_workspace(mixed: MixedKernel, count: int) -> None:
    rig = Rig(Shape(), mixed=mixed)
    for _ in range(5):
        for lens in (MIXED, MIXED, DECODES, DECODES):
            rig.start(build(lens, Shape()))
    made = [given_ for name in WRAPPERS for given_ in rig.module.named(f"{name}.__init__")]
    assert len(made) == count, "BatchAttention waits in each plan, so one does for both sets"
    shared = [given_["float_workspace_buffer"] for given_ in made if "float_workspace_buffer" in given_]
    assert len({id(workspace) for workspace in shared}) == 1


def test_the_memory_of_batch_attention_is_taken_before_the_first_batch() -> None:
    assert len(Rig(Shape(), mixed=MixedKernel.HOLISTIC).module.named(f"{HOLISTIC}.__init__")) == 1
    assert not Rig(Shape()).module.named(f"{HOLISTIC}.__init__")


WINDOWED_BY = {MixedKernel.HOLISTIC: [HOLISTIC, PREFILL], MixedKernel.SPLIT: [PREFILL, DECODE, PREFILL, DECODE]}


@EVERY_MIXED
def test_windows_that_hide_something_get_plans_of_their_own(mixed: MixedKernel) -> None:
    rig = Rig(Shape(), windows=(0, 30, 500, 30), mixed=mixed)
    batch = build(MIXED, Shape())
    outs = []
    rig.backend.prepare(batch.metadata)
    for layer in range(4):
        outs.append(rig.run(batch, layer))
    assert rig.planned() == WINDOWED_BY.get(mixed, 2 * BOTH_BY[mixed])
    windows = [given_.get("window_left", -1) for given_ in rig.plans()]
    assert windows == ([-1, -1, 29, 29] if mixed is MixedKernel.SPLIT else [-1, 29])
    rig.device.synchronize()
    assert torch.equal(outs[2], outs[0])
    assert torch.equal(outs[1], reference(batch, 0, (30,)))


def test_split_sends_pieces_and_decode_rows_to_a_call_each() -> None:
    rig = Rig(Shape(), mixed=MixedKernel.SPLIT)
    batch = build(MIXED, Shape())
    out = rig.start(batch)
    rig.device.synchronize()
    assert torch.equal(out, reference(batch))
    # What follows the last piece: here the two decode rows at the end.
    assert len(rig.module.named(f"{DECODE}.plan")[0]["last_page_len"]) == 2
    assert len(rig.module.named(f"{PREFILL}.plan")[0]["paged_kv_last_page_len"]) == 7


def test_a_wrapper_is_free_only_when_the_set_is_whichever_buffer_it_was_planned_from() -> None:
    """Decode rows behind pieces use the second buffer of a set; alone, two steps later, the first."""
    rig = Rig(Shape(), mixed=MixedKernel.SPLIT)
    started: list[tuple[torch.Tensor, torch.Tensor]] = []
    for seed, lens in enumerate([[(3, 3), (1, 40)], [(4, 4)], [(1, 20), (1, 9)]]):
        batch = build(lens, Shape(), seed=seed)
        started.append((rig.start(batch), reference(batch)))
    rig.device.synchronize()
    assert all(torch.equal(out, want) for out, want in started)


@EVERY_MIXED
def test_without_causality_every_row_sees_the_whole_context(mixed: MixedKernel) -> None:
    rig = Rig(Shape(), mixed=mixed)
    batch = build([(4, 20), (6, 6), (1, 9)], Shape())
    batch.metadata = dataclasses.replace(batch.metadata, causal=False)
    out = rig.start(batch)
    rig.device.synchronize()
    assert torch.equal(out, reference(batch))


def test_buffers_grow_with_the_step() -> None:
    shape = Shape(page_size=1, kv_heads=1, group=1, dim=2)
    rig = Rig(shape)
    started = []
    for lens in ([(1, 9)], [(1, 5000)], [(3, 7000), (2, 4000)], [(1, 20_000)], [(1, 9)]):
        batch = build(lens, shape)
        started.append((rig.start(batch), reference(batch)))
    rig.device.synchronize()
    assert all(torch.equal(out, want) for out, want in started)


@EVERY_MIXED
@pytest.mark.parametrize("prefill", PrefillKernel)
def test_graphs_are_of_the_decode_wrapper_whatever_else_is_chosen(mixed: MixedKernel, prefill: PrefillKernel) -> None:
    rig = Rig(Shape(), mixed=mixed, prefill=prefill)
    rig.module.calls.clear()
    rig.backend.reserve_captured(len(DECODES), max_indices=40)
    batch = build(DECODES, Shape())
    rig.backend.prepare_captured(batch.metadata)
    out = rig.run(batch)
    rig.device.synchronize()
    assert torch.equal(out, reference(batch))
    assert [call.name for call in rig.module.calls] == [f"{DECODE}.__init__", f"{DECODE}.plan", f"{DECODE}.run"]
