"""FlashInferBackend on a CPU: a module of FlashInfer's shape, and a device that does everything as late as it may."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.attention import flashinfer
from engine.attention.flashinfer import FlashInferBackend, HeadShape, MixedKernel
from engine.attention.torch_reference import TorchReferenceBackend
from tests.engine.attention.late_device import LateDevice, NotPinned, PoisonRead
from tests.engine.attention.ragged import Ragged, Shape, build, lengths
from tests.engine.attention.shaped_flashinfer import ShapedFlashInfer

PREFILL, DECODE = "BatchPrefillWithPagedKVCacheWrapper", "BatchDecodeWithPagedKVCacheWrapper"
MIXED = [(40, 40), (17, 60), (1, 1), (1, 75), (1, 16), (0, 12), (5, 5), (1, 33), (1, 76)]
DECODES = [(1, 1), (1, 75), (1, 16), (1, 33)]


@pytest.fixture(autouse=True)
def _small_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashinfer, "WORKSPACE_BYTES", 1024)


class Rig:
    """A backend over a recording module and a late device."""

    def __init__(
        self,
        shape: Shape,
        *,
        windows: tuple[int, ...] = (),
        mixed: MixedKernel = MixedKernel.RAGGED,
        sets: int = 2,
        dtype: torch.dtype = torch.float32,
        **device: bool,
    ) -> None:
        self.device = LateDevice(**device)
        self.module = ShapedFlashInfer(self.device)
        self.backend = FlashInferBackend(
            runtime=self.device,
            heads=HeadShape(shape.heads, shape.kv_heads, shape.dim),
            dtype=dtype,
            windows=windows,
            mixed=mixed,
            kernels=self.module,
            sets=sets,
        )

    def start(self, batch: Ragged, layer: int = 0) -> torch.Tensor:
        """Prepare and run; nothing is computed yet."""
        self.backend.prepare(batch.metadata)
        return self.backend.run(batch.q, batch.k_cache, batch.v_cache, layer)


def reference(batch: Ragged, layer: int = 0, windows: tuple[int, ...] = ()) -> torch.Tensor:
    backend = TorchReferenceBackend(windows=windows)
    backend.prepare(batch.metadata)
    return backend.run(batch.q, batch.k_cache, batch.v_cache, layer)


@given(
    steps=st.lists(lengths(max_requests=5, max_len=60), min_size=1, max_size=5),
    page=st.sampled_from([1, 3, 16]),
    group=st.sampled_from([1, 3, 7]),
    shared=st.booleans(),
    mixed=st.sampled_from(MixedKernel),
    windows=st.sampled_from([(), (0, 9), (20, 20)]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
@settings(max_examples=35)
def test_any_steps_started_before_any_is_done_equal_the_reference(
    steps: list[list[tuple[int, int]]], page: int, group: int, shared: bool, mixed: MixedKernel,
    windows: tuple[int, ...], dtype: torch.dtype,
) -> None:  # fmt: skip
    shape = Shape(page_size=page, group=group, dim=4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flashinfer, "WORKSPACE_BYTES", 1024)
        rig = Rig(shape, windows=windows, mixed=mixed, dtype=dtype)
    started = []
    for seed, lens in enumerate(steps):
        batch = build(lens, shape, seed=seed, shared=shared, page_seed=seed, dtype=dtype)
        rig.backend.prepare(batch.metadata)
        for layer in range(2):
            out = rig.backend.run(batch.q, batch.k_cache, batch.v_cache, layer)
            started.append((out, reference(batch, layer, windows)))
    rig.device.synchronize()
    for out, want in started:
        assert torch.equal(out, want)


def test_the_batch_chooses_the_wrapper() -> None:
    rig = Rig(Shape())
    for lens in (MIXED, DECODES, [(6, 6)], [(1, 1)]):
        rig.start(build(lens, Shape()))
    planned = [call.name.removesuffix(".plan") for call in rig.module.calls if call.name.endswith(".plan")]
    assert planned == [PREFILL, DECODE, PREFILL, DECODE]


def test_one_plan_serves_all_layers() -> None:
    rig = Rig(Shape())
    batch = build(MIXED, Shape())
    rig.backend.prepare(batch.metadata)
    for layer in range(7):
        rig.backend.run(batch.q, batch.k_cache, batch.v_cache, layer)
    assert len(rig.module.named(f"{PREFILL}.plan")) == 1
    assert len(rig.module.named(f"{PREFILL}.run")) == 7


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_types_scale_and_integers_are_named_in_every_plan(dtype: torch.dtype) -> None:
    shape = Shape(dim=16)
    rig = Rig(shape, dtype=dtype)
    for lens in (MIXED, DECODES):
        rig.start(build(lens, shape, dtype=dtype))
    for given_ in (*rig.module.named(f"{PREFILL}.plan"), *rig.module.named(f"{DECODE}.plan")):
        assert given_["q_data_type"] is given_["kv_data_type"] is dtype
        assert given_["sm_scale"] == 16**-0.5
        assert given_["window_left"] == -1
        assert {value.dtype for value in given_.values() if isinstance(value, torch.Tensor)} == {torch.int32}
    assert rig.module.named(f"{DECODE}.__init__")[0]["use_tensor_cores"] is True


def test_wrappers_are_made_once_for_each_of_two_sets_and_share_the_workspace() -> None:
    rig = Rig(Shape())
    for _ in range(5):
        for lens in (MIXED, MIXED, DECODES, DECODES):
            rig.start(build(lens, Shape()))
    made = [*rig.module.named(f"{PREFILL}.__init__"), *rig.module.named(f"{DECODE}.__init__")]
    assert len(made) == 4
    assert len({id(given_["float_workspace_buffer"]) for given_ in made}) == 1


def test_windows_that_hide_something_get_plans_of_their_own() -> None:
    rig = Rig(Shape(), windows=(0, 30, 500, 30))
    batch = build(MIXED, Shape())
    outs = []
    rig.backend.prepare(batch.metadata)
    for layer in range(4):
        outs.append(rig.backend.run(batch.q, batch.k_cache, batch.v_cache, layer))
    assert sorted(given_["window_left"] for given_ in rig.module.named(f"{PREFILL}.plan")) == [-1, 29]
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
    started = []
    for seed, lens in enumerate([[(3, 3), (1, 40)], [(4, 4)], [(1, 20), (1, 9)]]):
        batch = build(lens, Shape(), seed=seed)
        started.append((rig.start(batch), reference(batch)))
    rig.device.synchronize()
    assert all(torch.equal(out, want) for out, want in started)


def test_without_causality_every_row_sees_the_whole_context() -> None:
    rig = Rig(Shape())
    batch = build([(4, 20), (6, 6)], Shape())
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


def steps_ahead(rig: Rig, count: int) -> None:
    """Start `count` steps of different lengths, then let the device do them; PoisonRead where one reads another's."""
    started = []
    for step in range(count):
        batch = build([(1, 20 + step), (1, 40 - step)], Shape(), seed=step, page_seed=step)
        started.append((rig.start(batch), reference(batch)))
    rig.device.synchronize()
    for out, want in started:
        assert torch.equal(out, want)


@pytest.mark.parametrize("sets", [1, 2, 3])
def test_waiting_for_the_event_makes_any_number_of_sets_right(sets: int) -> None:
    steps_ahead(Rig(Shape(), sets=sets), 7)


def test_with_two_sets_a_step_is_planned_while_the_one_before_has_not_begun() -> None:
    rig = Rig(Shape())
    rig.start(build(DECODES, Shape()))
    waiting = len(rig.device.waiting)
    rig.start(build(DECODES, Shape()))
    assert rig.device.done == 0, "the host waited for the device"
    assert len(rig.device.waiting) == 2 * waiting
    rig.start(build(DECODES, Shape()))
    assert rig.device.done > 0, "the third step uses the first one's buffers and has to wait"


def test_sabotage_one_set_that_does_not_wait_reads_poison() -> None:
    with pytest.raises(PoisonRead):
        steps_ahead(Rig(Shape(), sets=1, deaf=True), 2)


def test_sabotage_two_sets_that_do_not_wait_read_poison_when_two_steps_ahead() -> None:
    steps_ahead(Rig(Shape(), sets=2, deaf=True), 2)
    with pytest.raises(PoisonRead):
        steps_ahead(Rig(Shape(), sets=2, deaf=True), 3)


def test_sabotage_an_event_recorded_before_the_plan_reads_poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan's own copies come after ours: an event between them says too early that the set is free."""
    from engine.attention.staging import Staging

    steps_ahead(Rig(Shape(), sets=1), 2)
    upload, sent = Staging.upload, Staging.sent

    def hasty(staging: Staging) -> list[torch.Tensor]:
        views = upload(staging)
        sent(staging)
        return views

    monkeypatch.setattr(Staging, "upload", hasty)
    monkeypatch.setattr(Staging, "sent", lambda _: None)
    with pytest.raises(PoisonRead):
        steps_ahead(Rig(Shape(), sets=1), 2)


def test_each_step_copies_once_and_records_after_the_plan() -> None:
    rig = Rig(Shape())
    batch = build(DECODES, Shape())
    rig.start(batch)
    meta = batch.metadata
    packed = sum(
        map(len, (meta.kv_indices, meta.qo_indptr, meta.kv_indptr, meta.last_page_len, meta.seq_lens)), start=0
    )
    log = rig.device.log
    assert log[: log.index(f"copy {packed}")] == ["wait", "wait"]
    assert log[-1] == "record"
    assert log.count("record") == 1


def test_what_a_plan_reads_on_the_host_lies_in_pinned_memory() -> None:
    rig = Rig(Shape())
    for lens in (MIXED, DECODES):
        rig.start(build(lens, Shape()))
    for name in (PREFILL, DECODE):
        for given_ in rig.module.named(f"{name}.plan"):
            on_device = [key for key in given_ if key.endswith("indices")]
            host = [v for k, v in given_.items() if isinstance(v, torch.Tensor) and k not in on_device]
            assert len(host) >= 3
            assert all(rig.device.is_pinned(array) for array in host)


def test_the_double_refuses_copies_from_ordinary_memory() -> None:
    device = LateDevice()
    with pytest.raises(NotPinned):
        device.copy(torch.zeros(3, dtype=torch.int32), torch.from_numpy(np.zeros(3, dtype=np.int32)))
