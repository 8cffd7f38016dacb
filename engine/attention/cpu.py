"""CpuBackend. Owns: the production attention of CPU executors.

`prepare` turns the batch into a short list of work items; `run` walks it once per layer with no mask building and no
read-back. Two kinds of item:

- a bucket of decode rows of similar context: one SDPA for all. Their K/V are gathered by *token*, not by page, and the
  padding repeats a token of the request itself, so a slot that was never written is never read;
- a block of a prompt piece: the group's K/V as a view when its pages are consecutive, else gathered by page, then one
  SDPA. The mask is a window of one triangle that is kept for the life of the backend.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from engine.attention.metadata import PagedMetadata

#: Decode rows whose contexts fall in the same window of this many tokens share a bucket: bounds the padding.
BUCKET_TOKENS: Final = 128
#: Most tokens (rows x padded context) that one bucket gathers: bounds its temporary memory.
BUCKET_MAX_TOKENS: Final = 65_536
#: Query rows of one masked block: later keys are skipped block by block, and the triangle stays this narrow.
BLOCK_ROWS: Final = 256


@dataclass(frozen=True, slots=True)
class _DecodeBucket:
    """Requests of one query row each.

    rows    [n] their rows; None when they are exactly [first, first + n)
    tokens  [n * length] int64 flat K/V slots, padded with the request's own first slot
    mask    [n, 1, 1, length] additive, None when nothing is padded
    """

    first: int
    count: int
    length: int
    rows: torch.Tensor | None
    tokens: torch.Tensor
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class _Block:
    """Rows [first, first + count) of a piece, which see keys [0, seen) of it. `mask` None with `causal`: top-left."""

    first: int
    count: int
    seen: int
    causal: bool
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class _Piece:
    """A prompt piece: its K/V, as slots [start, start + seq_len) or as page ids, and its blocks."""

    seq_len: int
    start: int
    pages: torch.Tensor | None
    blocks: tuple[_Block, ...]


class CpuBackend:
    """Scaled-dot-product attention over gathered or viewed pages. `dtype` is the type of q and of the caches."""

    name = "cpu"

    def __init__(self, *, dtype: torch.dtype = torch.float32) -> None:
        self._dtype = dtype
        self._triangle = torch.empty(0, 0, dtype=dtype)
        self._reach = -1
        self._buckets: list[_DecodeBucket] = []
        self._pieces: list[_Piece] = []

    def prepare(self, metadata: PagedMetadata) -> None:
        """Build the work list of one step."""
        self._buckets, self._pieces = [], []
        qo_lens, seq_lens = metadata.qo_lens, metadata.seq_lens
        self._grow_triangle(int((seq_lens - 1).max(initial=-1)) if (qo_lens > 1).any() else -1)
        decodes = np.flatnonzero(qo_lens == 1)
        for bucket in _bucketed(decodes, seq_lens):
            self._buckets.append(self._decode_bucket(metadata, bucket, seq_lens[bucket]))
        for i in np.flatnonzero(qo_lens > 1).tolist():
            self._pieces.append(self._piece(metadata, i, int(qo_lens[i]), int(seq_lens[i])))

    def run(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        layer: int,  # noqa: ARG002 - of the protocol: the caches given are this layer's
    ) -> torch.Tensor:
        """Attention of every row: q [R, Hq, D], caches [num_pages, page_size, Hkv, D] -> [R, Hq, D]."""
        num_pages, page_size, kv_heads, head_dim = k_cache.shape
        heads = q.shape[1]
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        if self._buckets:
            # One token of K or V is one row, contiguous in memory.
            k_tokens = k_cache.view(num_pages * page_size, kv_heads * head_dim)
            v_tokens = v_cache.view(num_pages * page_size, kv_heads * head_dim)
            for bucket in self._buckets:
                shape = (bucket.count, bucket.length, kv_heads, head_dim)
                k = k_tokens.index_select(0, bucket.tokens).view(shape).transpose(1, 2)
                v = v_tokens.index_select(0, bucket.tokens).view(shape).transpose(1, 2)
                end = bucket.first + bucket.count
                rows = q[bucket.first : end] if bucket.rows is None else q.index_select(0, bucket.rows)
                # The heads of a group become the query axis: no repetition of K/V, no causal mask.
                grouped = rows.reshape(bucket.count, kv_heads, heads // kv_heads, head_dim)
                got = scaled_dot_product_attention(grouped, k, v, attn_mask=bucket.mask)
                got = got.reshape(bucket.count, heads, head_dim)
                if bucket.rows is None:
                    out[bucket.first : end] = got
                else:
                    out.index_copy_(0, bucket.rows, got)
        for piece in self._pieces:
            k, v = _piece_kv(piece, k_cache), _piece_kv(piece, v_cache)
            for block in piece.blocks:
                rows = q[block.first : block.first + block.count].transpose(0, 1)[None]
                got = scaled_dot_product_attention(
                    rows,
                    k[:, :, : block.seen],
                    v[:, :, : block.seen],
                    attn_mask=block.mask,
                    is_causal=block.causal,
                    enable_gqa=heads != kv_heads,
                )
                out[block.first : block.first + block.count] = got[0].transpose(0, 1)
        return out

    def _decode_bucket(self, meta: PagedMetadata, members: np.ndarray, seq_lens: np.ndarray) -> _DecodeBucket:
        """One work item for the decode requests `members` ([n] indices) of contexts `seq_lens` ([n])."""
        count, length = len(members), int(seq_lens.max())
        position = np.arange(length)[None, :]
        padded = position >= seq_lens[:, None]
        # Padding points at token 0 of the same request: written, so finite.
        position = np.where(padded, 0, position)
        page = meta.kv_indices[meta.kv_indptr[members][:, None] + position // meta.page_size].astype(np.int64)
        tokens = torch.from_numpy((page * meta.page_size + position % meta.page_size).reshape(-1))
        mask = None
        if padded.any():
            mask = torch.zeros(count, 1, 1, length, dtype=self._dtype)
            mask.masked_fill_(torch.from_numpy(padded)[:, None, None, :], float("-inf"))
        row = meta.qo_indptr[members].astype(np.int64)
        first = int(row[0])
        is_range = bool((np.diff(row) == 1).all())
        rows = None if is_range else torch.from_numpy(row)
        return _DecodeBucket(first=first, count=count, length=length, rows=rows, tokens=tokens, mask=mask)

    def _piece(self, meta: PagedMetadata, request: int, qo_len: int, seq_len: int) -> _Piece:
        """The work item of one prompt piece of more than one row."""
        pages = meta.kv_indices[meta.kv_indptr[request] : meta.kv_indptr[request + 1]]
        consecutive = bool((np.diff(pages) == 1).all())
        return _Piece(
            seq_len=seq_len,
            start=int(pages[0]) * meta.page_size,
            pages=None if consecutive else torch.from_numpy(pages.astype(np.int64)),
            blocks=tuple(self._blocks(int(meta.qo_indptr[request]), qo_len, seq_len, causal=meta.causal)),
        )

    def _blocks(self, first: int, qo_len: int, seq_len: int, *, causal: bool) -> Iterator[_Block]:
        if not causal:
            yield _Block(first=first, count=qo_len, seen=seq_len, causal=False, mask=None)
            return
        if qo_len == seq_len:
            # SDPA's own causal mask is aligned top left: right only when there is no prefix.
            yield _Block(first=first, count=qo_len, seen=seq_len, causal=True, mask=None)
            return
        prefix_len = seq_len - qo_len
        for start in range(0, qo_len, BLOCK_ROWS):
            count = min(BLOCK_ROWS, qo_len - start)
            seen = prefix_len + start + count
            left = self._reach - (prefix_len + start)
            mask = self._triangle[:count, left : left + seen]
            yield _Block(first=first + start, count=count, seen=seen, causal=False, mask=mask)

    def _grow_triangle(self, reach: int) -> None:
        """Make windows for prefixes up to `reach` possible.

        triangle[j, c] is 0 while c <= j + reach, else -inf. The window that starts at column reach - p is the mask of
        a block whose row j sits at position p + j: bottom-right alignment for every p without building a mask.
        """
        if reach <= self._reach:
            return
        self._reach = max(reach, 2 * self._reach, 1023)
        full = torch.full((BLOCK_ROWS, self._reach + BLOCK_ROWS), float("-inf"), dtype=self._dtype)
        self._triangle = full.triu_(self._reach + 1)


def _bucketed(members: np.ndarray, seq_lens: np.ndarray) -> Iterator[np.ndarray]:
    """Split the decode requests `members` into buckets of similar context, each within the memory bound."""
    if not len(members):
        return
    windows = (seq_lens[members] - 1) // BUCKET_TOKENS
    for window in np.unique(windows).tolist():
        bucket = members[windows == window]
        most = max(1, BUCKET_MAX_TOKENS // ((window + 1) * BUCKET_TOKENS))
        for start in range(0, len(bucket), most):
            yield bucket[start : start + most]


def _piece_kv(piece: _Piece, cache: torch.Tensor) -> torch.Tensor:
    """K or V of one piece, [1, Hkv, seq_len, D]: a view when the pages are consecutive. Unwritten slots are cut off."""
    num_pages, page_size, kv_heads, head_dim = cache.shape
    if piece.pages is None:
        tokens = cache.view(num_pages * page_size, kv_heads, head_dim)[piece.start : piece.start + piece.seq_len]
    else:
        gathered = cache.view(num_pages, page_size * kv_heads * head_dim).index_select(0, piece.pages)
        tokens = gathered.view(-1, kv_heads, head_dim)[: piece.seq_len]
    return tokens.transpose(0, 1)[None]
