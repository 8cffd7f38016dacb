"""Steps that are planned while those before are under way: what is waited for, and what reads poison if it is not."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.attention.flashinfer import MixedKernel, PrefillKernel
from tests.engine.attention.flashinfer_rig import DECODES, EVERY_MIXED, MIXED, Rig, reference
from tests.engine.attention.late_device import LateDevice, NotPinned, PoisonRead
from tests.engine.attention.ragged import Shape, build


def steps_ahead(rig: Rig, count: int, rows: tuple[int, int] = (1, 1)) -> None:
    """Start `count` steps of different lengths, then let the device do them; PoisonRead where one reads another's.

    rows   of the two requests of each step
    """
    started = []
    for step in range(count):
        batch = build([(rows[0], 20 + step), (rows[1], 40 - step)], Shape(), seed=step, page_seed=step)
        started.append((rig.start(batch), reference(batch)))
    rig.device.synchronize()
    for out, want in started:
        assert torch.equal(out, want)


#: A mixed kernel, one of pieces, and the rows of two requests that they compute.
EVERY_KERNEL = pytest.mark.parametrize(
    ("mixed", "prefill", "rows"),
    [
        (MixedKernel.RAGGED, PrefillKernel.FA2, (1, 1)),
        *((mixed, PrefillKernel.FA2, (3, 1)) for mixed in MixedKernel),
        (MixedKernel.RAGGED, PrefillKernel.FA3, (3, 5)),
        (MixedKernel.SPLIT, PrefillKernel.FA3, (3, 1)),
    ],
)


@pytest.mark.parametrize("sets", [1, 2, 3])
@EVERY_KERNEL
def test_waiting_for_the_event_makes_any_number_of_sets_right(
    mixed: MixedKernel, prefill: PrefillKernel, rows: tuple[int, int], sets: int
) -> None:
    steps_ahead(Rig(Shape(), sets=sets, mixed=mixed, prefill=prefill), 7, rows)


def test_with_two_sets_a_step_is_planned_while_the_one_before_has_not_begun() -> None:
    rig = Rig(Shape())
    rig.start(build(DECODES, Shape()))
    waiting = len(rig.device.waiting)
    rig.start(build(DECODES, Shape()))
    assert rig.device.done == 0, "the host waited for the device"
    assert len(rig.device.waiting) == 2 * waiting
    rig.start(build(DECODES, Shape()))
    assert rig.device.done > 0, "the third step uses the first one's buffers and has to wait"


def test_batch_attention_has_the_host_wait_for_the_step_before() -> None:
    """What it costs where steps overlap."""
    rig = Rig(Shape(), mixed=MixedKernel.HOLISTIC)
    rig.start(build(MIXED, Shape()))
    waiting = len(rig.device.waiting)
    done = rig.device.done
    rig.start(build(MIXED, Shape()))
    assert rig.device.done >= done + waiting


@EVERY_KERNEL
def test_sabotage_one_set_that_does_not_wait_reads_poison(
    mixed: MixedKernel, prefill: PrefillKernel, rows: tuple[int, int]
) -> None:
    rig = Rig(Shape(), sets=1, deaf=True, mixed=mixed, prefill=prefill)
    if mixed is MixedKernel.HOLISTIC:
        steps_ahead(rig, 2, rows)  # its plan waits for everything, our copies included
        rig = Rig(Shape(), sets=1, deaf=True, mixed=mixed, holistic_waits=False)
    with pytest.raises(PoisonRead):
        steps_ahead(rig, 2, rows)


def test_sabotage_one_batch_attention_for_two_sets_that_does_not_wait_in_its_plan_reads_poison() -> None:
    steps_ahead(Rig(Shape(), mixed=MixedKernel.HOLISTIC), 2, (3, 1))
    with pytest.raises(PoisonRead):
        steps_ahead(Rig(Shape(), mixed=MixedKernel.HOLISTIC, holistic_waits=False), 2, (3, 1))


def test_sabotage_pods_answers_joined_before_they_are_there_are_no_answers() -> None:
    """Without the operators' lateness the double would not see that they are joined in the stream."""
    rig = Rig(Shape(), mixed=MixedKernel.POD)
    batch = build(MIXED, Shape())
    rig.backend.prepare(batch.metadata)
    out = rig.backend.run(batch.q, batch.k_cache, batch.v_cache, 0)
    rig.device.synchronize()
    assert bool(out.isnan().all())


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


@EVERY_MIXED
def test_what_a_plan_reads_on_the_host_lies_in_pinned_memory(mixed: MixedKernel) -> None:
    rig = Rig(Shape(), mixed=mixed)
    for lens in (MIXED, DECODES):
        rig.start(build(lens, Shape()))
    for given_ in rig.plans():
        host = [v for k, v in given_.items() if isinstance(v, torch.Tensor) and "indices" not in k]
        assert len(host) >= 3
        assert all(rig.device.is_pinned(array) for array in host)
        assert not any(rig.device.is_pinned(v) for k, v in given_.items() if "indices" in k)


def test_the_double_refuses_copies_from_ordinary_memory() -> None:
    device = LateDevice()
    with pytest.raises(NotPinned):
        device.copy(torch.zeros(3, dtype=torch.int32), torch.from_numpy(np.zeros(3, dtype=np.int32)))
