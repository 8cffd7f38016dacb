"""Sections 2 to 4. Owns: attention against float64, K/V writes that touch nothing else, and answers that do not depend
on company."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from bench.gpu_check.batches import KINDS, Batch, compared, exact, random_batch, shrunk, torch_answer
from bench.gpu_check.report import Finding
from bench.gpu_check.rig import Rig
from engine.attention.flashinfer import FlashInferBackend, HeadShape, MixedKernel

#: Kinds of batches whose requests begin with the same full pages.
SHARED_PAGES = 3


def attention(rig: Rig) -> Iterator[Finding]:
    """Section 2: every shape of heads, page size and kind of batch, through the wrappers that the engine uses."""
    for kv_heads, dim, group in rig.sizes.heads:
        heads = HeadShape(kv_heads * group, kv_heads, dim)
        backends = {kernel: rig.backend(heads, mixed=kernel) for kernel in MixedKernel}
        for page_size in rig.sizes.pages:
            for kind, batch in _kinds(rig, heads, page_size):
                want, yardstick = exact(batch), torch_answer(batch)
                for kernel, backend in backends.items():
                    if kernel is MixedKernel.SPLIT and kind != "mixed":
                        continue  # the same calls as ragged
                    name = f"D {dim}, group {group}, page {page_size}, {kind}, {kernel}"
                    yield compared(name, _run(rig, backend, batch), want, yardstick)


def _kinds(rig: Rig, heads: HeadShape, page_size: int) -> Iterator[tuple[str, Batch]]:
    for kind, lens in KINDS.items():
        yield kind, random_batch(rig, heads, shrunk(lens, rig.sizes.shrink), page_size)
    shared = [(rows, context + SHARED_PAGES * page_size) for rows, context in shrunk(KINDS["mixed"], rig.sizes.shrink)]
    yield "shared pages", random_batch(rig, heads, shared, page_size, shared_pages=SHARED_PAGES)


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
