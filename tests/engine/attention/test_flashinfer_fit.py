"""Kernels that a device or a model is nothing for are refused when the backend is made, with what is needed."""

from __future__ import annotations

import pytest
import torch

from engine.attention import flashinfer
from engine.attention.flashinfer import FlashInferBackend, HeadShape, MixedKernel, PrefillKernel, UnfitKernel
from tests.engine.attention import shaped_mixed
from tests.engine.attention.late_device import LateDevice
from tests.engine.attention.shaped_flashinfer import ShapedFlashInfer


@pytest.fixture(autouse=True)
def _small_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashinfer, "WORKSPACE_BYTES", 1024)


def backend(
    capability: tuple[int, int] = (9, 0),
    heads: tuple[int, int] = (6, 2),
    *,
    mixed: MixedKernel = MixedKernel.RAGGED,
    prefill: PrefillKernel = PrefillKernel.FA2,
    holistic_heads: int | None = None,
) -> FlashInferBackend:
    device = LateDevice(capability=capability)
    module = ShapedFlashInfer(device, holistic_heads=holistic_heads)
    return FlashInferBackend(
        runtime=device,
        heads=HeadShape(*heads, 8),
        dtype=torch.bfloat16,
        mixed=mixed,
        prefill=prefill,
        kernels=module,
    )


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0)])
def test_fa3_is_for_hopper(capability: tuple[int, int]) -> None:
    backend(prefill=PrefillKernel.FA3)
    has = ".".join(map(str, capability))
    with pytest.raises(UnfitKernel, match=rf"fa3: .* 9\.0 \(Hopper\), this GPU has {has}: use fa2") as refused:
        backend(capability, prefill=PrefillKernel.FA3)
    assert refused.value.kernel is PrefillKernel.FA3


@pytest.mark.parametrize("capability", [(8, 6), (8, 9), (10, 0), (12, 0)])
def test_pod_is_for_what_its_counting_was_tried_on(capability: tuple[int, int]) -> None:
    for known in ((8, 0), (9, 0)):
        backend(known, mixed=MixedKernel.POD)
    has = ".".join(map(str, capability))
    with pytest.raises(UnfitKernel, match=rf"pod: .* 8\.0 and 9\.0, this GPU has {has}: use split") as refused:
        backend(capability, mixed=MixedKernel.POD)
    assert refused.value.kernel is MixedKernel.POD


def test_pod_is_for_groups_that_fit_a_tile() -> None:
    backend(heads=(32, 2), mixed=MixedKernel.POD)
    with pytest.raises(UnfitKernel, match=r"pod: .* hold 16 query heads of a K/V head, the model has 17: use split"):
        backend(heads=(34, 2), mixed=MixedKernel.POD)


def test_what_batch_attention_refuses_in_any_plan_is_refused_before_the_first_batch() -> None:
    backend(heads=(8, 8), mixed=MixedKernel.HOLISTIC, holistic_heads=8)
    with pytest.raises(UnfitKernel, match=r"holistic: .* 16 K/V heads of 8: Buffer overflow .* holistic_partial_o"):
        backend(heads=(16, 16), mixed=MixedKernel.HOLISTIC, holistic_heads=8)


def test_memory_that_is_refused_is_no_fault_of_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **kwargs: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    for method in ("__init__", "plan"):
        with monkeypatch.context() as patch:
            patch.setattr(shaped_mixed.ShapedHolistic, method, full)
            with pytest.raises(torch.OutOfMemoryError):
                backend(mixed=MixedKernel.HOLISTIC)


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0)])
def test_every_gpu_has_the_defaults_and_what_is_of_the_same_modules(capability: tuple[int, int]) -> None:
    for mixed in (MixedKernel.RAGGED, MixedKernel.SPLIT):
        backend(capability, (64, 1), mixed=mixed)
