"""Random ragged batches. Owns: logical K/V per request, scattered into a paged cache whose other slots are NaN."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import strategies as st

from engine.attention.metadata import PagedMetadata


@dataclass(frozen=True)
class Shape:
    """Sizes of one attention problem."""

    page_size: int = 16
    kv_heads: int = 2
    group: int = 3
    dim: int = 8

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group


@dataclass
class Ragged:
    """keys[i], values[i] [S_i, Hkv, D] float64 are what request i holds, whatever the pages say."""

    shape: Shape
    metadata: PagedMetadata
    lengths: list[tuple[int, int]]
    keys: list[np.ndarray]
    values: list[np.ndarray]
    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor

    @property
    def num_pages(self) -> int:
        return self.k_cache.shape[0]


def lengths(max_requests: int = 6, max_len: int = 90) -> st.SearchStrategy[list[tuple[int, int]]]:
    """(query rows, context) of each request: prefills, continuations, decodes, one-token prefills, empty rows."""
    context = st.integers(1, max_len)
    one = context.flatmap(lambda s: st.tuples(st.one_of(st.just(1), st.just(s), st.integers(0, s)), st.just(s)))
    return st.lists(one, min_size=1, max_size=max_requests)


def build(
    lens: list[tuple[int, int]],
    shape: Shape,
    *,
    seed: int = 0,
    shared: bool = False,
    page_seed: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> Ragged:
    """A batch of `lens`. `shared`: later requests take full prefix pages of the first. `page_seed` permutes ids."""
    rng = np.random.default_rng(seed)
    page = shape.page_size
    tokens_at_most = sum(-(-seq // page) for _, seq in lens)
    num_pages = tokens_at_most + 3
    order = np.arange(num_pages) if page_seed is None else np.random.default_rng(page_seed).permutation(num_pages)
    free = order.tolist()[::-1]
    keys, values, pages = [], [], []
    for i, (rows, seq) in enumerate(lens):
        k, v = (rng.standard_normal((seq, shape.kv_heads, shape.dim)) for _ in range(2))
        common = 0
        if shared and i:
            # Full in both, and nothing in it is written by either in this step.
            common = min(lens[0][1] - lens[0][0], seq - rows) // page
        if common:
            k[: common * page], v[: common * page] = keys[0][: common * page], values[0][: common * page]
        keys.append(k)
        values.append(v)
        own = [free.pop() for _ in range(-(-seq // page) - common)]
        pages.append((pages[0][:common] if i else []) + own)
    caches = []
    for held in (keys, values):
        cache = torch.full((num_pages, page, shape.kv_heads, shape.dim), float("nan"), dtype=dtype)
        for content, ids in zip(held, pages, strict=True):
            for position, token in enumerate(content):
                cache[ids[position // page], position % page] = torch.from_numpy(token).to(dtype)
        caches.append(cache)
    if dtype is not torch.float64:
        # The oracle must see the rounded values.
        keys = [torch.from_numpy(k).to(dtype).double().numpy() for k in keys]
        values = [torch.from_numpy(v).to(dtype).double().numpy() for v in values]
    rows = sum(n for n, _ in lens)
    # As the model hands it over: a slice of a wider matrix, rows not adjacent.
    wide = torch.from_numpy(rng.standard_normal((rows, shape.heads + 2 * shape.kv_heads, shape.dim))).to(dtype)
    return Ragged(
        shape=shape,
        metadata=metadata_of(lens, pages, page),
        lengths=lens,
        keys=keys,
        values=values,
        q=wide[:, : shape.heads],
        k_cache=caches[0],
        v_cache=caches[1],
    )


def metadata_of(lens: list[tuple[int, int]], pages: list[list[int]], page: int) -> PagedMetadata:
    """The batch description of `lens` over `pages`, written as plainly as possible."""
    positions = [p for rows, seq in lens for p in range(seq - rows, seq)]
    slots = [
        ids[p // page] * page + p % page
        for (rows, seq), ids in zip(lens, pages, strict=True)
        for p in range(seq - rows, seq)
    ]
    return PagedMetadata(
        qo_indptr=np.cumsum([0] + [rows for rows, _ in lens]).astype(np.int32),
        kv_indptr=np.cumsum([0] + [len(ids) for ids in pages]).astype(np.int32),
        kv_indices=np.array([p for ids in pages for p in ids], dtype=np.int32),
        last_page_len=np.array([(seq - 1) % page + 1 for _, seq in lens], dtype=np.int32),
        out_slots=np.array(slots, dtype=np.int64),
        positions=np.array(positions, dtype=np.int32),
        page_size=page,
    )


def float64_loop(batch: Ragged, *, window: int = 0) -> np.ndarray:
    """Attention by its definition: one row, one head at a time, in float64, from the logical K/V. [R, Hq, D].

    `window`: tokens that a row sees, itself included; 0: all before it.
    """
    out = []
    rows = batch.q.double().numpy()
    row = 0
    for (count, seq), keys, values in zip(batch.lengths, batch.keys, batch.values, strict=True):
        for j in range(count):
            visible = seq - count + j + 1
            seen = slice(max(0, visible - window) if window else 0, visible)
            per_head = []
            for head in range(batch.shape.heads):
                kv = head // batch.shape.group
                scores = keys[seen, kv] @ rows[row, head] / np.sqrt(batch.shape.dim)
                weights = np.exp(scores - scores.max())
                per_head.append(weights @ values[seen, kv] / weights.sum())
            out.append(per_head)
            row += 1
    return np.array(out).reshape(row, batch.shape.heads, batch.shape.dim)
