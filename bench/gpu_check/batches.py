"""Batches. Owns: random paged batches on the device, their answers in float64, and how far an answer may be off."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from bench.gpu_check.report import Finding
from bench.gpu_check.rig import Rig
from engine.attention.flashinfer import HeadShape
from engine.attention.metadata import PagedMetadata
from engine.attention.torch_reference import TorchReferenceBackend

#: Largest error of one element, and how much more than that of torch's own attention the root of the mean square is.
MOST_ERROR = 2e-2
MOST_RMS_RATIO = 1.5

#: (query rows, context) of each request. Contexts of the longest are cut for tests.
KINDS: dict[str, list[tuple[int, int]]] = {
    "decode": [(1, context) for context in (1, 17, 100, 511, 1000, 2048)],
    "prefill": [(1, 1), (40, 40), (257, 257), (1000, 1000)],
    "prefix": [(17, 600), (128, 1024), (3, 2000)],
    "mixed": [(257, 257), (128, 1024), (1, 1), (1, 100), (1, 2048)],
    "one-token prefill": [(1, 1), (1, 1), (1, 1)],
    "context 32k": [(1, 32_768), (16, 32_768)],
    "mixed 32k": [(16, 32_768), (1, 32_768), (1, 3)],
}


@dataclass(slots=True)
class Batch:
    """q [R, Hq, D], caches [num_pages, page_size, Hkv, D], on the device."""

    metadata: PagedMetadata
    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor


def shrunk(lens: list[tuple[int, int]], shrink: int) -> list[tuple[int, int]]:
    """The same kind of batch with everything `shrink` times shorter, at least 1."""
    return [(max(1, rows // shrink), max(1, rows // shrink, context // shrink)) for rows, context in lens]


def metadata_of(
    lens: list[tuple[int, int]], page_size: int, rng: np.random.Generator, *, num_pages: int, shared_pages: int = 0
) -> PagedMetadata:
    """Pages in random order out of `num_pages`. All requests begin with the same `shared_pages`, which must be full."""
    free = rng.permutation(num_pages).astype(np.int32)
    common, free = free[:shared_pages], free[shared_pages:]
    tables, taken = [], 0
    for rows, context in lens:
        needed = -(-context // page_size)
        used = min(shared_pages, (context - rows) // page_size)
        tables.append(np.concatenate((common[:used], free[taken : taken + needed - used])))
        taken += needed - used
    positions = [np.arange(context - rows, context) for rows, context in lens]
    slots = [
        table[position // page_size].astype(np.int64) * page_size + position % page_size
        for table, position in zip(tables, positions, strict=True)
    ]
    return PagedMetadata(
        qo_indptr=_offsets([rows for rows, _ in lens]),
        kv_indptr=_offsets([len(table) for table in tables]),
        kv_indices=np.concatenate(tables),
        last_page_len=np.array([(context - 1) % page_size + 1 for _, context in lens], dtype=np.int32),
        out_slots=np.concatenate(slots),
        positions=np.concatenate(positions).astype(np.int32),
        page_size=page_size,
    )


def random_batch(
    rig: Rig, heads: HeadShape, lens: list[tuple[int, int]], page_size: int, *, shared_pages: int = 0
) -> Batch:
    """Random q, and random K/V in every slot of a pool three pages larger than needed."""
    num_pages = sum(-(-context // page_size) for _, context in lens) + shared_pages + 3
    metadata = metadata_of(lens, page_size, rig.rng, num_pages=num_pages, shared_pages=shared_pages)
    metadata.validate(num_pages)
    generator = torch.Generator(device=rig.device).manual_seed(int(rig.rng.integers(2**31)))

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=rig.device).to(rig.sizes.dtype)

    cache = (num_pages, page_size, heads.num_kv_heads, heads.head_dim)
    return Batch(metadata, draw(metadata.num_rows, heads.num_heads, heads.head_dim), draw(*cache), draw(*cache))


def exact(batch: Batch, window: int = 0) -> torch.Tensor:
    """The answer in float64, [R, Hq, D]. window: tokens that a row sees, itself included; 0: all before it."""
    backend = TorchReferenceBackend(windows=(window,))
    backend.prepare(batch.metadata)
    return backend.run(batch.q.double(), batch.k_cache.double(), batch.v_cache.double(), 0)


def torch_answer(batch: Batch, window: int = 0) -> torch.Tensor:
    """The answer of torch's own attention, request by request, in the type of the batch: the yardstick of rounding."""
    meta, out = batch.metadata, torch.empty_like(batch.q)
    for i, context in enumerate(meta.seq_lens.tolist()):
        first, end = meta.qo_indptr[i : i + 2].tolist()
        pages = torch.from_numpy(meta.kv_indices[meta.kv_indptr[i] : meta.kv_indptr[i + 1]].astype(np.int64))
        pages = pages.to(batch.q.device)
        k, v = (cache[pages].flatten(0, 1)[:context].transpose(0, 1)[None] for cache in (batch.k_cache, batch.v_cache))
        rows = torch.arange(context - (end - first), context, device=batch.q.device)[:, None]
        tokens = torch.arange(context, device=batch.q.device)[None, :]
        seen = (tokens <= rows) & (tokens > rows - (window or context))
        got = scaled_dot_product_attention(
            batch.q[first:end].transpose(0, 1)[None], k, v, attn_mask=seen, enable_gqa=True
        )
        out[first:end] = got[0].transpose(0, 1)
    return out


def compared(name: str, got: torch.Tensor, want: torch.Tensor, yardstick: torch.Tensor) -> Finding:
    """Is `got` as near to `want` (float64) as rounding lets it be: `yardstick` is another's answer in the same type."""
    error, usual = got.double() - want, yardstick.double() - want
    most = float(error.abs().max())
    rms, usual_rms = (float(e.square().mean().sqrt()) for e in (error, usual))
    ok = bool(got.isfinite().all()) and most <= MOST_ERROR and rms <= MOST_RMS_RATIO * max(usual_rms, 1e-12)
    return Finding(name, ok, value=most, limit=MOST_ERROR, note=f"rms {rms:.2e}, torch's own {usual_rms:.2e}")


def _offsets(lengths: list[int]) -> np.ndarray:
    return np.cumsum([0, *lengths]).astype(np.int32)
