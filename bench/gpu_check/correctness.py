"""Sections 2 to 4. Owns: attention against float64, K/V writes that touch nothing else, and answers that do not depend
on company."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from bench.gpu_check.batches import KINDS, Batch, compared, exact, random_batch, shrunk, torch_answer
from bench.gpu_check.report import Finding
from bench.gpu_check.rig import Rig
from engine.attention.flashinfer import FlashInferBackend, HeadShape, MixedKernel, PrefillKernel, UnfitKernel

#: Kinds of batches whose requests begin with the same full pages.
SHARED_PAGES = 3
#: Tokens that a row sees in batches with a window.
WINDOW = 200
#: What a batch is computed by as the engine has it by default: decode rows, pieces, and both.
DECODE, PIECES, MIXED = "decode", PrefillKernel.FA2.value, MixedKernel.RAGGED.value
#: What else there is, with the batches that it is for.
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    PrefillKernel.FA3.value: (PIECES, {"prefill": PrefillKernel.FA3}),
    **{kernel.value: (MIXED, {"mixed": kernel}) for kernel in MixedKernel if kernel is not MixedKernel.RAGGED},
}


def attention(rig: Rig) -> Iterator[Finding]:
    """Section 2: every shape of heads, page size and kind of batch, through the wrappers that the engine uses: first
    all of the default, then each of the others."""
    for kv_heads, dim, group in rig.sizes.heads:
        heads = HeadShape(kv_heads * group, kv_heads, dim)
        for window in (0, max(1, WINDOW // rig.sizes.shrink)):
            backend = rig.backend(heads, windows=(window,))
            for name, batch, usual in _kinds(rig, heads, window, (DECODE, PIECES, MIXED)):
                want, yardstick = exact(batch, window), torch_answer(batch, window)
                yield compared(f"{name}, {usual}", _run(rig, backend, batch), want, yardstick)
    for other in OTHERS:
        for kv_heads, dim, group in rig.sizes.heads:
            yield from _by_another(rig, HeadShape(kv_heads * group, kv_heads, dim), other)


def _by_another(rig: Rig, heads: HeadShape, other: str) -> Iterator[Finding]:
    """The batches that `other` is for; why not, where this GPU or this shape is nothing for it."""
    stands_for, settings = OTHERS[other]
    for window in (0, max(1, WINDOW // rig.sizes.shrink)):
        if window and other == MixedKernel.HOLISTIC:
            continue  # as by default
        try:
            backend = rig.backend(heads, windows=(window,), **settings)
            for name, batch, _ in _kinds(rig, heads, window, (stands_for,)):
                want, yardstick = exact(batch, window), torch_answer(batch, window)
                yield compared(f"{name}, {other}", _run(rig, backend, batch), want, yardstick)
        except UnfitKernel as error:
            yield Finding(f"{_shape(heads)}, {other}", note=f"not tried: {error.why}")
            return
        except Exception as error:  # one that cannot be compiled or launched is told, and the others are tried
            note = f"{type(error).__name__}: {str(error)[:300]}"
            yield Finding(f"{_shape(heads)}, {other}: can be used", ok=False, note=note)
            return


def _shape(heads: HeadShape) -> str:
    return f"D {heads.head_dim}, group {heads.num_heads // heads.num_kv_heads}"


def _kinds(rig: Rig, heads: HeadShape, window: int, wanted: tuple[str, ...]) -> Iterator[tuple[str, Batch, str]]:
    """Batches that one of `wanted` computes by default, with their names, and it. With a window: two kinds of them."""
    kinds = {kind: (shrunk(KINDS[kind], rig.sizes.shrink), 0) for kind in (("prefix", "mixed") if window else KINDS)}
    for page_size in rig.sizes.pages:
        if not window:
            longer = SHARED_PAGES * page_size
            shared = [(rows, context + longer) for rows, context in shrunk(KINDS["mixed"], rig.sizes.shrink)]
            kinds["shared pages"] = (shared, SHARED_PAGES)
        for kind, (lens, shared_pages) in kinds.items():
            usual = _usual(lens)
            if usual in wanted:
                name = f"{_shape(heads)}, page {page_size}, {kind}" + f", window {window}" * bool(window)
                yield name, random_batch(rig, heads, lens, page_size, shared_pages=shared_pages), usual


def _usual(lens: list[tuple[int, int]]) -> str:
    """What computes a batch of `lens` by default."""
    is_one = [rows == 1 for rows, _ in lens]
    return DECODE if all(is_one) else MIXED if is_one[-1] else PIECES


def _run(rig: Rig, backend: FlashInferBackend, batch: Batch) -> torch.Tensor:
    backend.prepare(batch.metadata)
    out = backend.run(batch.q, batch.k_cache, batch.v_cache, 0)
    rig.runtime.synchronize()
    return out


def kv_write(rig: Rig) -> Iterator[Finding]:
    """Section 3: what the model writes is what is read back, and every other slot keeps its bits."""
    for kv_heads, dim, group in rig.sizes.heads:
        heads = HeadShape(kv_heads * group, kv_heads, dim)
        for page_size in rig.sizes.pages:
            batch = random_batch(rig, heads, shrunk(KINDS["mixed"], rig.sizes.shrink), page_size)
            slots = torch.from_numpy(batch.metadata.out_slots).to(rig.device)
            cache = batch.k_cache.flatten(0, 1)
            before = cache.clone()
            # As the model has them: a slice of a wider matrix.
            wide = torch.randn(len(slots), 2 * kv_heads, dim, device=rig.device).to(rig.sizes.dtype)
            fresh = wide[:, kv_heads:]
            cache.index_copy_(0, slots, fresh)
            written = torch.zeros(len(cache), dtype=torch.bool, device=rig.device).index_fill_(0, slots, True)
            name = f"D {dim}, group {group}, page {page_size}"
            yield Finding(f"{name}: rows are read back", bool(torch.equal(cache[slots], fresh)))
            yield Finding(f"{name}: other slots keep their bits", bool(torch.equal(cache[~written], before[~written])))


#: How a context is cut into pieces: by what else is in the batch, at fixed places, or not at all.
SPLITS: dict[str, dict[str, Any]] = {
    "default": {},
    "fixed_split_size=64": {"fixed_split_size": 64},
    "disable_split_kv": {"disable_split_kv": True},
}


def invariance(rig: Rig) -> Iterator[Finding]:
    """Section 4: a request's attention alone and in a crowd, bit by bit. The engine uses the default."""
    kv_heads, dim, group = rig.sizes.heads[0]
    heads = HeadShape(kv_heads * group, kv_heads, dim)
    long, crowd = shrunk([(1, 3000)], rig.sizes.shrink), shrunk([(1, 80)] * 60, rig.sizes.shrink)
    batch = random_batch(rig, heads, [*long, *crowd], 16)
    for name, settings in SPLITS.items():
        together = _planned(rig, heads, batch, batch.metadata.batch_size, settings)[:1]
        alone = _planned(rig, heads, batch, 1, settings)
        same = bool(torch.equal(together, alone))
        if settings:
            yield Finding(f"{name}: alone and with 60 others", same)
        else:
            yield Finding(f"{name}: alone and with 60 others", note="same bits" if same else "not the same bits")


def _planned(rig: Rig, heads: HeadShape, batch: Batch, requests: int, settings: dict[str, Any]) -> torch.Tensor:
    """The first `requests` decode rows of `batch` through a wrapper of their own. [requests, Hq, D]"""
    meta = batch.metadata
    workspace = torch.zeros(128 * 1024 * 1024, dtype=torch.uint8, device=rig.device)
    wrapper = rig.kernels.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True, backend="fa2")
    indptr = meta.kv_indptr[: requests + 1]
    host = []
    for array in (indptr, meta.last_page_len[:requests], meta.seq_lens[:requests]):
        pinned = rig.runtime.pinned(len(array), torch.int32)
        pinned.numpy()[:] = array
        host.append(pinned)
    wrapper.plan(
        host[0],
        torch.from_numpy(meta.kv_indices[: indptr[-1]]).to(rig.device),
        host[1],
        *heads,
        meta.page_size,
        seq_lens=host[2],
        sm_scale=heads.head_dim**-0.5,
        window_left=-1,
        q_data_type=rig.sizes.dtype,
        kv_data_type=rig.sizes.dtype,
        **settings,
    )
    out: torch.Tensor = wrapper.run(batch.q[:requests], (batch.k_cache, batch.v_cache))
    rig.runtime.synchronize()
    return out
