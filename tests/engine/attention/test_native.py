"""Attention in C against a float64 loop, in a cache that is NaN where unwritten; the same bits alone and in company."""

from __future__ import annotations

import dataclasses
import math
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.attention.cpu import CpuBackend
from engine.attention.native import NativeBackend
from engine.attention.torch_reference import TorchReferenceBackend
from engine.native.library import PART
from tests.engine.attention.ragged import Shape, build, float64_loop, lengths
from tests.engine.attention.test_backends import TOLERANCE, attend, decode_alone, largest_error
from tests.engine.native.libraries import DTYPE, EACH, Kernels, library


@EACH
@given(
    lens=lengths(),
    page=st.sampled_from([1, 3, 16, 32]),
    group=st.sampled_from([1, 2, 3, 4, 7, 9]),
    dim=st.sampled_from([32, 64, 96]),
    shared=st.booleans(),
    page_seed=st.one_of(st.none(), st.integers(0, 999)),
)
@settings(max_examples=40)
def test_it_equals_the_float64_loop(
    kernels: Kernels, lens: list[tuple[int, int]], page: int, group: int, dim: int, shared: bool, page_seed: int | None
) -> None:
    shape = Shape(page_size=page, kv_heads=2, group=group, dim=dim)
    batch = build(lens, shape, shared=shared, page_seed=page_seed, dtype=DTYPE[kernels])
    assert (
        largest_error(attend(NativeBackend(library(kernels)), batch), float64_loop(batch)) < TOLERANCE[DTYPE[kernels]]
    )


@pytest.mark.parametrize("windows", [(), (50,), (129,), (1,)])
def test_long_contexts_in_parts_equal_torchs(windows: tuple[int, ...]) -> None:
    contexts = [1, PART - 1, PART, PART + 1, 2 * PART, 5 * PART + 17, 1000]
    batch = build([(1, n) for n in contexts], Shape(page_size=16, group=3, dim=64), page_seed=4, dtype=torch.bfloat16)
    got = attend(NativeBackend(library("no tiles"), windows=windows), batch)
    want = attend(CpuBackend(dtype=torch.bfloat16, windows=windows), batch)
    assert float((got - want).abs().max()) < 2e-2


@EACH
@pytest.mark.parametrize("windows", [(), (50,), (300,)])
def test_a_decode_row_is_the_same_bits_alone_in_company_and_with_other_threads(
    kernels: Kernels, windows: tuple[int, ...]
) -> None:
    contexts = [1, 40, 63, 64, 65, 100, 300, 301, 449, 513]
    company = build([(1, n) for n in contexts], Shape(page_size=16, group=3, dim=64), page_seed=5, dtype=DTYPE[kernels])
    together = attend(NativeBackend(library(kernels), windows=windows), company)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert torch.equal(attend(NativeBackend(library(kernels), windows=windows), company), together)
    finally:
        torch.set_num_threads(threads)
    for i, length in enumerate(contexts):
        got = decode_alone(NativeBackend(library(kernels), windows=windows), company, i)
        assert torch.equal(got, together[i : i + 1]), length


@EACH
@pytest.mark.parametrize("context", [20, 400])
@pytest.mark.parametrize("where", ["q", "k", "v"])
def test_nan_reaches_its_own_row_and_no_other(kernels: Kernels, context: int, where: str) -> None:
    batch = build([(1, context), (1, 33)], Shape(page_size=16, group=3, dim=64), page_seed=5, dtype=DTYPE[kernels])
    page = int(batch.metadata.kv_indices[0])
    if where == "q":
        batch.q[0, :, 5] = math.nan
    else:
        {"k": batch.k_cache, "v": batch.v_cache}[where][page, 3] = math.nan
    got = attend(NativeBackend(library(kernels)), batch)
    assert bool(got[0].isnan().any(dim=-1).all())
    assert bool(got[1].isfinite().all())


@EACH
def test_scores_far_apart_do_not_overflow(kernels: Kernels) -> None:
    batch = build([(1, 300)], Shape(page_size=16, group=3, dim=64), page_seed=5, dtype=DTYPE[kernels])
    batch.q.mul_(300)
    assert (
        largest_error(attend(NativeBackend(library(kernels)), batch), float64_loop(batch)) < TOLERANCE[DTYPE[kernels]]
    )


USUAL = Shape(page_size=16, group=3, dim=64)


def bits_of_pieces(
    kernels: Kernels, pieces: list[int], context: int, windows: tuple[int, ...], shape: Shape = USUAL
) -> torch.Tensor:
    """What the rows of one prompt come to, when it is computed in pieces of these lengths."""
    whole = build([(context, context)], shape, page_seed=5, dtype=DTYPE[kernels])
    meta, got, first = whole.metadata, [], 0
    for rows in pieces:
        length = first + rows
        pages = -(-length // shape.page_size)
        piece = dataclasses.replace(
            meta,
            qo_indptr=np.array([0, rows], dtype=np.int32),
            kv_indptr=np.array([0, pages], dtype=np.int32),
            kv_indices=meta.kv_indices[:pages],
            last_page_len=np.array([length - shape.page_size * (pages - 1)], dtype=np.int32),
            out_slots=meta.out_slots[first:length],
            positions=meta.positions[first:length],
        )
        backend = NativeBackend(library(kernels), windows=windows)
        backend.prepare(piece)
        got.append(backend.run(whole.q[first:length], whole.k_cache, whole.v_cache, 0))
        first = length
    return torch.cat(got)


@EACH
@pytest.mark.parametrize("windows", [(), (50,), (300,)])
def test_a_prompt_has_the_same_bits_whole_in_pieces_and_as_decode_rows(
    kernels: Kernels, windows: tuple[int, ...]
) -> None:
    whole = bits_of_pieces(kernels, [600], 600, windows)
    for pieces in ([1] * 600, [16, 584], [64, 64, 472], [2, 598], [255, 1, 1, 343], [100, 3, 7, 490]):
        assert torch.equal(bits_of_pieces(kernels, pieces, 600, windows), whole), pieces


@EACH
@pytest.mark.parametrize(
    "shape",
    [
        Shape(page_size=5, kv_heads=1, group=9, dim=96),
        Shape(page_size=1, kv_heads=3, group=4, dim=32),
        Shape(page_size=32, kv_heads=2, group=1, dim=256),
        Shape(page_size=16, kv_heads=1, group=17, dim=128),
    ],
    ids=str,
)
def test_so_it_has_with_heads_and_pages_of_other_sizes(kernels: Kernels, shape: Shape) -> None:
    whole = bits_of_pieces(kernels, [140], 140, (), shape)
    for pieces in ([1] * 140, [64, 76], [3, 1, 1, 100, 35]):
        assert torch.equal(bits_of_pieces(kernels, pieces, 140, (), shape), whole), pieces


@EACH
@pytest.mark.parametrize("windows", [(), (50,), (129,), (1,)])
@pytest.mark.parametrize("dim", [64, 256])
def test_long_pieces_equal_the_reference(kernels: Kernels, windows: tuple[int, ...], dim: int) -> None:
    lens = [(300, 300), (2, 500), (70, 333), (1, 200), (65, 65)]
    batch = build(lens, Shape(page_size=16, group=3, dim=dim), page_seed=4, dtype=DTYPE[kernels])
    got = attend(NativeBackend(library(kernels), windows=windows), batch)
    want = attend(TorchReferenceBackend(compute_dtype=torch.float64, windows=windows), batch)
    assert float((got.double() - want.double()).abs().max()) < TOLERANCE[DTYPE[kernels]]


@EACH
@pytest.mark.parametrize(("kv_heads", "group"), [(80, 1), (17, 2), (3, 100)])
def test_many_heads_fit_a_small_stack(kernels: Kernels, kv_heads: int, group: int) -> None:
    shape = Shape(page_size=16, kv_heads=kv_heads, group=group, dim=64)
    batch = build([(1, 300), (1, 20)], shape, page_seed=4, dtype=DTYPE[kernels])
    compiled, got = library(kernels), []
    threads = torch.get_num_threads()
    before = threading.stack_size(1 << 20)
    try:
        torch.set_num_threads(1)  # the kernel's task runs on this thread
        worker = threading.Thread(target=lambda: got.append(attend(NativeBackend(compiled), batch)))
        worker.start()
        worker.join()
    finally:
        threading.stack_size(before)
        torch.set_num_threads(threads)
    assert largest_error(got[0], float64_loop(batch)) < TOLERANCE[DTYPE[kernels]]


def test_one_backend_serves_steps_of_any_kind_after_each_other() -> None:
    backend, shape = NativeBackend(library("no tiles")), Shape(page_size=16, group=3, dim=64)
    for lens in ([(1, 400)] * 3, [(30, 60)], [(1, 5), (9, 9), (1, 80)], [(1, 1)], [(1, 900)] * 5):
        batch = build(lens, shape, page_seed=2, dtype=torch.bfloat16)
        with torch.inference_mode():
            assert largest_error(attend(backend, batch), float64_loop(batch)) < 3e-2


@EACH
def test_layers_of_different_windows_share_memory_that_grows_between_them(kernels: Kernels) -> None:
    windows = (40, 0, 40, 0)
    batch = build([(1, 900)] * 4 + [(70, 600)], Shape(page_size=16, group=3, dim=64), page_seed=2, dtype=DTYPE[kernels])
    backend = NativeBackend(library(kernels), windows=windows)
    backend.prepare(batch.metadata)
    got = [backend.run(batch.q, batch.k_cache, batch.v_cache, layer) for layer in range(4)]
    assert torch.equal(got[0], got[2])
    assert torch.equal(got[1], got[3])
    alone = [attend(NativeBackend(library(kernels), windows=(window,)), batch) for window in (40, 0)]
    assert torch.equal(got[0], alone[0])
    assert torch.equal(got[1], alone[1])
