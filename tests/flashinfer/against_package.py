"""The stored signatures against the real package: `make test-flashinfer`, by hand, in an environment of its own.

It imports flashinfer, which needs neither a GPU nor a compiler, and calls no kernel: its own Python runs on CPU
tensors, and computes with the readable backend, or with torch, where a compiled module would.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from engine.attention import flashinfer as ours
from engine.attention.padding import padded
from engine.attention.torch_reference import TorchReferenceBackend
from engine.models.flashinfer_ops import FlashInferOps
from engine.models.linear import Linear
from engine.models.ops import HeadNorms, Ops, TorchOps
from tests.engine.attention.late_device import LateDevice
from tests.engine.attention.ragged import Ragged, Shape, build
from tests.engine.attention.shaped_flashinfer import ShapedFlashInfer
from tests.engine.executor.tiny import CONFIG
from tests.flashinfer.real_mixed import real_mixed
from tests.flashinfer.real_wrappers import CompiledModule, CompiledOperators, real_operators, real_wrappers
from tests.flashinfer.signatures import changes, described, signature, stored

torch.set_num_threads(1)

REAL: dict[str, Any] = described()


@pytest.mark.parametrize("call", stored()["calls"])
def test_nothing_that_is_stored_has_changed(call: str) -> None:
    assert changes(stored()["calls"][call], REAL["calls"][call]) == []


def test_our_calls_bind_to_the_real_signatures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ours, "WORKSPACE_BYTES", 1024)
    device = LateDevice()
    module = ShapedFlashInfer(device)
    for mixed in ours.MixedKernel:
        backend = ours.FlashInferBackend(
            runtime=device,
            heads=ours.HeadShape(6, 2, 8),
            dtype=torch.bfloat16,
            windows=(0, 9),
            mixed=mixed,
            kernels=module,
        )
        for lens in ([(7, 20), (1, 30)], [(1, 3), (1, 40)]):
            batch = build(lens, Shape(), dtype=torch.bfloat16)
            backend.prepare(batch.metadata)
            for layer in range(2):
                backend.run(batch.q, batch.k_cache, batch.v_cache, layer)
    assert {call.name for call in module.calls} == {name for name in REAL["calls"] if "." in name}
    for call in module.calls:
        signature(REAL["calls"][call.name]).bind(None, **call.given)


def test_the_backend_takes_the_real_module_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU its constructor gets as far as this: the module has what will be called."""
    monkeypatch.setattr(ours, "WORKSPACE_BYTES", 1024)
    backend = ours.FlashInferBackend(runtime=LateDevice(), heads=ours.HeadShape(6, 2, 8), dtype=torch.bfloat16)
    kernels = backend._library.module
    assert kernels.__name__ == "flashinfer"
    for call in REAL["calls"]:
        name, _, method = call.partition(".")
        called = getattr(kernels, name)
        assert inspect.isfunction(inspect.unwrap(getattr(called, method) if method else called))


MIXED = [(40, 40), (17, 60), (1, 1), (1, 75), (1, 16), (5, 5), (1, 33), (1, 76)]
DECODES = [(1, 1), (1, 75), (1, 16), (1, 33)]


def reference(batch: Ragged, layer: int = 0, windows: tuple[int, ...] = ()) -> torch.Tensor:
    backend = TorchReferenceBackend(windows=windows)
    backend.prepare(batch.metadata)
    return backend.run(batch.q, batch.k_cache, batch.v_cache, layer)


def real_backend(patch: pytest.MonkeyPatch, shape: Shape, **settings: Any) -> ours.FlashInferBackend:
    patch.setattr(ours, "WORKSPACE_BYTES", 1024 * 1024)
    package = real_wrappers(patch)
    real_mixed(patch, CompiledModule)
    return ours.FlashInferBackend(
        runtime=LateDevice(late=False),
        heads=ours.HeadShape(shape.heads, shape.kv_heads, shape.dim),
        dtype=torch.bfloat16,
        kernels=package,
        **settings,
    )


@pytest.mark.parametrize("mixed", ours.MixedKernel)
@pytest.mark.parametrize("prefill", ours.PrefillKernel)
@pytest.mark.parametrize(("page", "group"), [(1, 5), (16, 1), (16, 3), (16, 7)])
@pytest.mark.parametrize("windows", [(), (0, 30)])
def test_the_real_wrappers_hand_their_kernel_what_we_mean(
    monkeypatch: pytest.MonkeyPatch,
    mixed: ours.MixedKernel,
    prefill: ours.PrefillKernel,
    page: int,
    group: int,
    windows: tuple[int, ...],
) -> None:
    shape = Shape(page_size=page, group=group, dim=64)
    backend = real_backend(monkeypatch, shape, mixed=mixed, prefill=prefill, windows=windows)
    for seed, lens in enumerate([MIXED, DECODES, [(6, 6)], DECODES[::-1], MIXED[::-1], [(1, 1)]]):
        batch = build(lens, shape, seed=seed, page_seed=seed, dtype=torch.bfloat16)
        backend.prepare(batch.metadata)
        for layer in range(2):
            out = backend.run(batch.q, batch.k_cache, batch.v_cache, layer)
            assert torch.equal(out, reference(batch, layer, windows))
    for _, q, kv, out_type, index, dim, *_ in CompiledModule.made:
        assert (q, kv, out_type, index, dim) == (*[torch.bfloat16] * 3, torch.int32, 64)
    assert {kernel for kernel, *_ in CompiledModule.made} == {"fa2", prefill}


def test_the_real_graph_wrapper_fills_its_own_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contexts that grow and shrink, batches filled up: always the arrays that a graph was captured with."""
    shape = Shape(page_size=16, group=3, dim=64)
    backend = real_backend(monkeypatch, shape)
    backend.reserve_captured(5, max_indices=40)
    buffers = set()
    for seed, contexts in enumerate([[1, 75, 16], [100, 90, 80, 70, 60], [3], [2, 2]]):
        batch = build([(1, context) for context in contexts], shape, seed=seed, page_seed=seed, dtype=torch.bfloat16)
        spare = batch.num_pages
        caches = [torch.cat((cache, torch.zeros_like(cache[:1]))) for cache in (batch.k_cache, batch.v_cache)]
        q = torch.zeros(5, shape.heads, shape.dim, dtype=torch.bfloat16)
        q[: len(contexts)] = batch.q
        backend.prepare_captured(padded(batch.metadata, 5, spare))
        wrapper = backend._running[0]._wrapper
        buffers.add(tuple(t.data_ptr() for t in (wrapper._paged_kv_indptr_buf, wrapper._paged_kv_indices_buf)))
        out = backend.run(q, *caches, 0)
        assert torch.equal(out[: len(contexts)], reference(batch))
    assert len(buffers) == 1


def test_the_real_graph_wrapper_refuses_another_batch_size(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = Shape(page_size=16, group=3, dim=64)
    backend = real_backend(monkeypatch, shape)
    backend.reserve_captured(5, max_indices=40)
    backend._captured[4] = backend._captured[5]
    batch = build([(1, 20)] * 4, shape, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="batch size should be fixed"):
        backend.prepare_captured(batch.metadata)


def layer_of(ops: Ops, dtype: torch.dtype) -> list[torch.Tensor]:
    """What a layer of a tiny model makes of drawn rows between its products, with head norms and without."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator).to(dtype)

    heads, kv_heads, dim, hidden = CONFIG.num_heads, CONFIG.num_kv_heads, CONFIG.head_dim, CONFIG.hidden_size
    norms = HeadNorms(
        q := 1 + drawn(dim), k := 1 + drawn(dim), torch.cat((q.expand(heads, -1), k.expand(kv_heads, -1)))
    )
    product, weight, positions = Linear(drawn(hidden, hidden)), 1 + drawn(hidden), torch.arange(7) * 9
    ops.reserve_positions(64)
    qkv = drawn(7, (heads + 2 * kv_heads) * dim)
    before = qkv.clone()
    made = [ops.rms_norm(drawn(7, hidden), weight), *ops.add_norm(drawn(7, hidden), product, drawn(7, hidden), weight)]
    made += [*ops.turned(qkv.clone(), norms, ops.angles(positions)), *ops.turned(qkv, None, ops.angles(positions))]
    assert torch.equal(qkv[:, (heads + kv_heads) * dim :], before[:, (heads + kv_heads) * dim :])
    return [*made, ops.silu_and_mul(drawn(7, 2 * CONFIG.intermediate_size))]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_real_small_operators_hand_their_kernels_what_we_mean(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    like = torch.empty(0, dtype=dtype)
    module = ShapedFlashInfer(LateDevice(late=False))
    want = layer_of(FlashInferOps(CONFIG, like, kernels=module), dtype)
    for call in module.calls:
        signature(REAL["calls"][call.name]).bind(**call.given)
    assert {call.name for call in module.calls} == {name for name in REAL["calls"] if "." not in name}
    real_operators(monkeypatch)
    ops = FlashInferOps(CONFIG, like)
    assert ops._module.__name__ == "flashinfer"
    assert all(torch.equal(got, ours) for got, ours in zip(layer_of(ops, dtype), want, strict=True))
    assert CompiledOperators.types == {dtype}
    for got, torchs in zip(want, layer_of(TorchOps(CONFIG, like), dtype), strict=True):
        torch.testing.assert_close(got, torchs, rtol=0.02, atol=0.05)


def test_the_real_rope_refuses_a_table_in_another_type(monkeypatch: pytest.MonkeyPatch) -> None:
    """Why ours is float32 whatever the model's type."""
    package = real_operators(monkeypatch)
    q, k = torch.zeros(2, 16, dtype=torch.bfloat16), torch.zeros(2, 8, dtype=torch.bfloat16)
    table = torch.zeros(4, 8, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="should be float32"):
        package.apply_rope_with_cos_sin_cache_inplace(torch.arange(2), q, k, 8, table)


def test_the_real_batch_attention_has_no_windows() -> None:
    """Why layers with one are computed by another kernel."""
    assert not [name for name, *_ in REAL["calls"]["BatchAttention.plan"] if "window" in str(name)]


def test_the_real_plan_takes_float16_when_no_type_is_named() -> None:
    """Why every plan of ours names it."""
    plan = REAL["calls"]["BatchPrefillWithPagedKVCacheWrapper.plan"]
    assert [default for name, _, default in plan if name == "q_data_type"] == [repr("float16")]
