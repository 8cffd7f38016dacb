"""The stored signatures against the real package: `make test-flashinfer`, by hand, in an environment of its own.

It imports flashinfer, which needs neither a GPU nor a compiler, and calls no kernel.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from engine.attention import flashinfer as ours
from tests.engine.attention.late_device import LateDevice
from tests.engine.attention.ragged import Shape, build
from tests.engine.attention.shaped_flashinfer import ShapedFlashInfer
from tests.flashinfer.signatures import changes, described, signature, stored

REAL: dict[str, Any] = described()


@pytest.mark.parametrize("call", stored()["calls"])
def test_nothing_that_is_stored_has_changed(call: str) -> None:
    assert changes(stored()["calls"][call], REAL["calls"][call]) == []


@pytest.mark.parametrize("mixed", ours.MixedKernel)
def test_our_calls_bind_to_the_real_signatures(mixed: ours.MixedKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ours, "WORKSPACE_BYTES", 1024)
    device = LateDevice()
    module = ShapedFlashInfer(device)
    heads = ours.HeadShape(6, 2, 8)
    backend = ours.FlashInferBackend(
        runtime=device, heads=heads, dtype=torch.bfloat16, windows=(0, 9), mixed=mixed, kernels=module
    )
    for lens in ([(7, 20), (1, 30)], [(1, 3), (1, 40)]):
        batch = build(lens, Shape(), dtype=torch.bfloat16)
        backend.prepare(batch.metadata)
        for layer in range(2):
            backend.run(batch.q, batch.k_cache, batch.v_cache, layer)
    assert {call.name for call in module.calls} == set(REAL["calls"])
    for call in module.calls:
        signature(REAL["calls"][call.name]).bind(None, **call.given)


def test_the_backend_takes_the_real_module_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU its constructor gets as far as this: the module has what will be called."""
    monkeypatch.setattr(ours, "WORKSPACE_BYTES", 1024)
    backend = ours.FlashInferBackend(runtime=LateDevice(), heads=ours.HeadShape(6, 2, 8), dtype=torch.bfloat16)
    kernels = backend._kernels
    assert kernels.__name__ == "flashinfer"
    for call in REAL["calls"]:
        name, method = call.split(".")
        assert inspect.isfunction(inspect.unwrap(getattr(getattr(kernels, name), method)))
