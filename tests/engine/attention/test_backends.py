"""Both attention backends against a float64 loop, on ragged mixed batches in a cache that is NaN where unwritten."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.attention import cpu
from engine.attention.base import AttentionBackend
from engine.attention.cpu import CpuBackend
from engine.attention.torch_reference import TorchReferenceBackend
from tests.engine.attention.ragged import Ragged, Shape, build, float64_loop, lengths

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}
MIXED = [(40, 40), (17, 60), (1, 1), (1, 75), (1, 16), (0, 12), (1, 33), (5, 5), (1, 76)]


def backend_of(name: str, dtype: torch.dtype, windows: tuple[int, ...] = ()) -> AttentionBackend:
    return CpuBackend(dtype=dtype, windows=windows) if name == "cpu" else TorchReferenceBackend(windows=windows)


def attend(backend: AttentionBackend, batch: Ragged) -> torch.Tensor:
    batch.metadata.validate(batch.num_pages)
    backend.prepare(batch.metadata)
    return backend.run(batch.q, batch.k_cache, batch.v_cache, 0)


def decode_alone(backend: AttentionBackend, company: Ragged, i: int) -> torch.Tensor:
    """Attention of request `i` of a batch of decode rows, in a batch of its own."""
    meta = company.metadata
    pages = meta.kv_indices[meta.kv_indptr[i] : meta.kv_indptr[i + 1]]
    alone = dataclasses.replace(
        meta,
        qo_indptr=np.array([0, 1], dtype=np.int32),
        kv_indptr=np.array([0, len(pages)], dtype=np.int32),
        kv_indices=pages,
        last_page_len=meta.last_page_len[i : i + 1],
        out_slots=meta.out_slots[i : i + 1],
        positions=meta.positions[i : i + 1],
    )
    backend.prepare(alone)
    return backend.run(company.q[i : i + 1], company.k_cache, company.v_cache, 0)


def largest_error(got: torch.Tensor, want: np.ndarray) -> float:
    assert got.shape == want.shape
    return float(np.abs(got.double().numpy() - want).max(initial=0.0))


@pytest.mark.parametrize("name", ["cpu", "reference"])
@given(
    lens=lengths(),
    page=st.sampled_from([1, 3, 16, 32]),
    group=st.sampled_from([1, 3, 4, 7]),
    dim=st.sampled_from([8, 16, 64]),
    shared=st.booleans(),
    page_seed=st.one_of(st.none(), st.integers(0, 999)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
@settings(max_examples=60)
def test_backend_equals_the_float64_loop(
    name: str, lens: list[tuple[int, int]], page: int, group: int, dim: int, shared: bool, page_seed: int | None,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    shape = Shape(page_size=page, kv_heads=2, group=group, dim=dim)
    batch = build(lens, shape, shared=shared, page_seed=page_seed, dtype=dtype)
    # NaN in any slot that the batch may not read would show here as well.
    assert largest_error(attend(backend_of(name, dtype), batch), float64_loop(batch)) < TOLERANCE[dtype]


def test_reference_in_float64_is_the_loop_to_rounding() -> None:
    batch = build(MIXED, Shape(), page_seed=1, dtype=torch.float64)
    assert largest_error(attend(TorchReferenceBackend(), batch), float64_loop(batch)) < 1e-13


def test_reference_can_compute_float32_inputs_in_float64() -> None:
    batch = build(MIXED, Shape(), page_seed=1)
    coarse = largest_error(attend(TorchReferenceBackend(), batch), float64_loop(batch))
    fine = largest_error(attend(TorchReferenceBackend(compute_dtype=torch.float64), batch), float64_loop(batch))
    assert fine <= coarse
    assert fine < 2e-7


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("group", [1, 3, 4, 7])
def test_mixed_batch_in_small_buckets_and_blocks(monkeypatch: pytest.MonkeyPatch, page: int, group: int) -> None:
    """Bounds far below the usual ones, so that every bucket and block boundary is crossed."""
    monkeypatch.setattr(cpu, "BUCKET_TOKENS", 16)
    monkeypatch.setattr(cpu, "BUCKET_MAX_TOKENS", 96)
    monkeypatch.setattr(cpu, "BLOCK_ROWS", 7)
    batch = build(MIXED, Shape(page_size=page, group=group), page_seed=3)
    assert largest_error(attend(CpuBackend(), batch), float64_loop(batch)) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("windows", [(), (50,)])
def test_a_decode_row_is_the_same_bits_alone_and_in_company(dtype: torch.dtype, windows: tuple[int, ...]) -> None:
    contexts = [1, 40, 63, 64, 65, 100, 300, 301, 449, 513]
    shape = Shape(page_size=16, group=3, dim=64)
    company = build([(1, length) for length in contexts], shape, page_seed=5, dtype=dtype)
    together = attend(CpuBackend(dtype=dtype, windows=windows), company)
    for i, length in enumerate(contexts):
        assert torch.equal(decode_alone(CpuBackend(dtype=dtype, windows=windows), company, i), together[i : i + 1]), (
            length
        )


@pytest.mark.parametrize(("most", "gatherings"), [(64, 6), (200, 4), (500, 2), (16_384, 1)])
def test_buckets_gathered_together_or_one_by_one_give_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, most: int, gatherings: int
) -> None:
    contexts = [20, 64, 70, 130, 65, 1]  # padded: 64, 64, 128, 192, 128, 64
    batch = build([(1, length) for length in contexts], Shape(page_size=16, group=3, dim=64), page_seed=8)
    want = attend(CpuBackend(), batch)
    monkeypatch.setattr(cpu, "BUCKET_MAX_TOKENS", most)
    backend = CpuBackend()
    with torch.inference_mode():  # and memory made within it serves outside
        assert torch.equal(attend(backend, batch), want)
    assert len(backend._full.gatherings) == gatherings
    assert torch.equal(attend(backend, batch), want)


def test_gathered_memory_stays_until_a_longer_context_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "BUCKET_MAX_TOKENS", 128)
    shape = Shape(page_size=16, group=3, dim=64)
    backend = CpuBackend(kv_width=build([(1, 1)], shape, page_seed=1).k_cache[0, 0].numel())
    homes = []
    for length in (10, 100, 128, 200, 20):
        batch = build([(1, length), (1, 5)], shape, page_seed=length)
        assert largest_error(attend(backend, batch), float64_loop(batch)) < 1e-5
        homes.append(backend._gathered.data_ptr())
    assert homes[0] == homes[1] == homes[2]
    assert homes[3] == homes[4]
    assert homes[2] != homes[3]


def test_permuted_page_ids_give_the_same_output() -> None:
    straight = build(MIXED, Shape(), page_seed=None)
    permuted = build(MIXED, Shape(), page_seed=5)
    assert not np.array_equal(straight.metadata.kv_indices, permuted.metadata.kv_indices)
    assert torch.allclose(attend(CpuBackend(), straight), attend(CpuBackend(), permuted), atol=1e-6)


def test_shared_pages_are_really_shared_and_read_right() -> None:
    lens = [(1, 64), (6, 50), (1, 49)]
    batch = build(lens, Shape(page_size=16), shared=True)
    ids = batch.metadata.kv_indices.tolist()
    assert len(set(ids)) < len(ids)
    assert largest_error(attend(CpuBackend(), batch), float64_loop(batch)) < 1e-5


def test_one_backend_serves_steps_of_different_shape() -> None:
    """The triangle of masks grows with the longest prefix and stays right for shorter ones."""
    backend = CpuBackend()
    for lens in ([(3, 9)], [(2, 1400)], [(300, 700)], [(1, 3), (4, 8)], [(5, 2200)]):
        batch = build(lens, Shape(kv_heads=1, group=2), seed=len(lens))
        assert largest_error(attend(backend, batch), float64_loop(batch)) < 1e-5


def test_without_causality_every_row_sees_the_whole_context() -> None:
    import dataclasses

    batch = build([(4, 20), (6, 6)], Shape())
    batch.metadata = dataclasses.replace(batch.metadata, causal=False)
    assert torch.allclose(attend(CpuBackend(), batch), attend(TorchReferenceBackend(), batch), atol=1e-5)


def test_reading_one_slot_too_many_would_be_seen() -> None:
    """The poison works: a context one token longer than what was written answers NaN."""
    import dataclasses

    batch = build([(1, 20)], Shape())
    meta = batch.metadata
    batch.metadata = dataclasses.replace(meta, last_page_len=meta.last_page_len + 1)
    for backend in (CpuBackend(), TorchReferenceBackend()):
        backend.prepare(batch.metadata)
        assert backend.run(batch.q, batch.k_cache, batch.v_cache, 0).isnan().any()


def test_run_before_prepare_is_refused_by_the_reference() -> None:
    batch = build([(1, 2)], Shape())
    with pytest.raises(RuntimeError, match="prepare"):
        TorchReferenceBackend().run(batch.q, batch.k_cache, batch.v_cache, 0)


@pytest.mark.parametrize("name", ["cpu", "reference"])
@given(
    lens=lengths(),
    page=st.sampled_from([1, 3, 16]),
    window=st.sampled_from([1, 2, 7, 16, 33, 90, 200]),
    block_rows=st.sampled_from([4, 256]),
    page_seed=st.one_of(st.none(), st.integers(0, 999)),
)
@settings(max_examples=60)
def test_layers_with_a_window_equal_the_float64_loop_and_the_others_see_everything(
    name: str, lens: list[tuple[int, int]], page: int, window: int, block_rows: int, page_seed: int | None
) -> None:
    batch = build(lens, Shape(page_size=page), seed=len(lens), page_seed=page_seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "BLOCK_ROWS", block_rows)
        backend = backend_of(name, torch.float32, (0, window, 0, window))
        backend.prepare(batch.metadata)
        layers = [backend.run(batch.q, batch.k_cache, batch.v_cache, layer) for layer in range(4)]
    assert largest_error(layers[0], float64_loop(batch)) < 1e-5
    assert largest_error(layers[1], float64_loop(batch, window=window)) < 1e-5
    assert torch.equal(layers[0], layers[2])
    assert torch.equal(layers[1], layers[3])


def test_pages_that_a_window_hides_are_never_read() -> None:
    """Everything before the window is NaN: a decode and a piece of a prompt must not meet it."""
    batch = build([(1, 200), (20, 180)], Shape(page_size=16))
    indices, indptr = batch.metadata.kv_indices, batch.metadata.kv_indptr
    hidden = [*indices[: (200 - 30) // 16], *indices[indptr[1] : indptr[1] + (160 - 29) // 16]]
    for cache in (batch.k_cache, batch.v_cache):
        cache[[int(page) for page in hidden]] = float("nan")
    backend = CpuBackend(windows=(30,))
    assert largest_error(attend(backend, batch), float64_loop(batch, window=30)) < 1e-5
