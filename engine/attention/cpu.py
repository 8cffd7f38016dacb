"""CpuBackend. Owns: the production attention of CPU executors.

`prepare` turns the batch into a short list of work items; `run` walks it once per layer with no mask building and no
read-back. Two kinds of item:

- a bucket of decode rows of similar context: one SDPA for all. Their K/V are gathered by *token*, not by page, and the
  padding repeats a token of the request itself, so a slot that was never written is never read. Buckets are gathered
  together, into memory that stays: large temporary memory may be given back and faulted in for every layer. The length
  depends on the row's own context alone: kernels sum in an order that depends on it, and a row must not depend on its
  company;
- a block of a prompt piece: the group's K/V as a view when its pages are consecutive, else gathered by page, then one
  SDPA. The mask is a window of one triangle that is kept for the life of the backend.

Layers with a sliding window walk a list of their own, in steps where the window hides something.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from engine.attention.metadata import PagedMetadata

#: Decode rows are padded to a multiple of this many tokens; those of the same length share a bucket.
BUCKET_TOKENS: Final = 64
#: Most tokens (rows x padded context) that are gathered at once, unless one row alone has more: bounds what is kept.
BUCKET_MAX_TOKENS: Final = 16_384
#: Query rows of one masked block: later keys are skipped block by block, and the triangle stays this narrow.
BLOCK_ROWS: Final = 256


@dataclass(frozen=True, slots=True)
class _DecodeBucket:
    """Requests of one query row each.

    rows    [n] their rows; None when they are exactly [first, first + n)
    tokens  [n * length] int64 flat K/V slots, padded with the request's own first slot
    mask    [n, 1, 1, length] additive
    heads   K and V where they were gathered to, each [n, Hkv, length, D]; known from the first layer on
    """

    first: int
    count: int
    length: int
    rows: torch.Tensor | None
    tokens: torch.Tensor
    mask: torch.Tensor
    heads: list[torch.Tensor]


@dataclass(frozen=True, slots=True)
class _Gathering:
    """Buckets whose K/V are gathered together.

    tokens  [T] int64 slots of all buckets
    memory  for K and for V, each [T, Hkv * D]; known from the first layer on
    """

    buckets: list[_DecodeBucket]
    tokens: torch.Tensor
    memory: list[torch.Tensor]


@dataclass(frozen=True, slots=True)
class _Block:
    """Rows [first, first + count) of a piece, which see its keys [skip, seen). `mask` None with `causal`: top-left."""

    first: int
    count: int
    skip: int
    seen: int
    causal: bool
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class _Piece:
    """A prompt piece: its K/V, as slots [start, start + length) or as page ids, and its blocks."""

    length: int
    start: int
    pages: torch.Tensor | None
    blocks: tuple[_Block, ...]


@dataclass(frozen=True, slots=True)
class _Work:
    """The work list of one step, for all layers of the same window."""

    gatherings: list[_Gathering]
    pieces: list[_Piece]


class CpuBackend:
    """Scaled-dot-product attention over gathered or viewed pages.

    dtype     type of q and of the caches
    windows   see LlamaConfig.windows; () when every layer sees everything
    kv_width  Hkv * D, if known: memory for gathered K/V is then asked for at once, and touched when used
    """

    name = "cpu"

    def __init__(self, *, dtype: torch.dtype = torch.float32, windows: tuple[int, ...] = (), kv_width: int = 0) -> None:
        self._dtype = dtype
        self._windows = windows
        self._triangle = torch.empty(0, 0, dtype=dtype)
        self._reach = -1
        self._full = _Work([], [])
        #: Window -> work, for those windows that hide something in this step.
        self._windowed: dict[int, _Work] = {}
        #: K and V of one gathering at a time.
        self._gathered = torch.empty(2, BUCKET_MAX_TOKENS * kv_width, dtype=dtype)

    def prepare(self, metadata: PagedMetadata, *, only_pieces: bool = False) -> None:
        """Build the work lists of one step. `only_pieces`: decode rows are somebody else's, see `run_pieces`."""
        self._full = self._work(metadata, window=0, only_pieces=only_pieces)
        self._windowed = {
            window: self._work(metadata, window=window, only_pieces=only_pieces)
            for window in binding_windows(self._windows, metadata)
        }

    def _work(self, metadata: PagedMetadata, *, window: int, only_pieces: bool) -> _Work:
        """Everything that attention has to do for layers of this `window`, 0: no window."""
        qo_lens, seq_lens = metadata.qo_lens, metadata.seq_lens
        self._grow_triangle(int((seq_lens - 1).max(initial=-1)) if (qo_lens > 1).any() else -1)
        decodes = np.flatnonzero(qo_lens == 1) if not only_pieces else np.empty(0, dtype=np.int64)
        visible = np.minimum(seq_lens, window) if window else seq_lens
        return _Work(
            _gatherings(
                self._decode_bucket(metadata, bucket, visible[bucket], seq_lens[bucket] - visible[bucket])
                for bucket in _bucketed(decodes, visible)
            ),
            [
                self._piece(metadata, i, int(qo_lens[i]), int(seq_lens[i]), window)
                for i in np.flatnonzero(qo_lens > 1).tolist()
            ],
        )

    def run(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        layer: int,
    ) -> torch.Tensor:
        """Attention of every row: q [R, Hq, D], caches [num_pages, page_size, Hkv, D] -> [R, Hq, D]."""
        work = self._work_of(layer)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        for gathering in work.gatherings:
            self._gather(gathering, k_cache, v_cache)
            for bucket in gathering.buckets:
                if bucket.count == len(q):
                    return _decode(bucket, q)
                if bucket.rows is None:
                    of_bucket = slice(bucket.first, bucket.first + bucket.count)
                    out[of_bucket] = _decode(bucket, q[of_bucket])
                else:
                    out.index_copy_(0, bucket.rows, _decode(bucket, q.index_select(0, bucket.rows)))
        self.run_pieces(q, k_cache, v_cache, layer, out)
        return out

    def run_pieces(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, layer: int, out: torch.Tensor
    ) -> None:
        """Attention of the rows of prompt pieces, into `out` [R, Hq, D]; the other arguments are those of `run`."""
        heads, kv_heads = q.shape[1], k_cache.shape[2]
        for piece in self._work_of(layer).pieces:
            k, v = _piece_kv(piece, k_cache), _piece_kv(piece, v_cache)
            for block in piece.blocks:
                rows = q[block.first : block.first + block.count].transpose(0, 1)[None]
                got = scaled_dot_product_attention(
                    rows,
                    k[:, :, block.skip : block.seen],
                    v[:, :, block.skip : block.seen],
                    attn_mask=block.mask,
                    is_causal=block.causal,
                    enable_gqa=heads != kv_heads,
                )
                out[block.first : block.first + block.count] = got[0].transpose(0, 1)

    def _work_of(self, layer: int) -> _Work:
        return self._windowed.get(self._windows[layer], self._full) if self._windowed else self._full

    def _gather(self, gathering: _Gathering, k_cache: torch.Tensor, v_cache: torch.Tensor) -> None:
        """Copy the K/V of one layer to where its buckets read them."""
        kv_heads, head_dim = k_cache.shape[2:]
        if not gathering.memory:
            self._find_room(gathering, kv_heads, head_dim)
        k, v = gathering.memory
        # One token of K or V is one row, contiguous in memory.
        torch.index_select(k_cache.view(-1, kv_heads * head_dim), 0, gathering.tokens, out=k)
        torch.index_select(v_cache.view(-1, kv_heads * head_dim), 0, gathering.tokens, out=v)

    def _find_room(self, gathering: _Gathering, kv_heads: int, head_dim: int) -> None:
        """Say where K and V are gathered to. All gatherings use the same memory, one after the other."""
        width = kv_heads * head_dim
        size = len(gathering.tokens) * width
        if size > self._gathered.shape[1]:
            step = BUCKET_MAX_TOKENS * width
            with torch.inference_mode(False):  # memory made within that mode cannot be written outside
                self._gathered = torch.empty(2, -(-size // step) * step, dtype=self._dtype)
        for memory in self._gathered[:, :size]:
            gathering.memory.append(memory.view(-1, width))
            shares = memory.split([bucket.count * bucket.length * width for bucket in gathering.buckets])
            for bucket, share in zip(gathering.buckets, shares, strict=True):
                bucket.heads.append(share.view(bucket.count, bucket.length, kv_heads, head_dim).transpose(1, 2))

    def _decode_bucket(
        self, meta: PagedMetadata, members: np.ndarray, visible: np.ndarray, hidden: np.ndarray
    ) -> _DecodeBucket:
        """One work item for the decode requests `members` ([n] indices): `visible` tokens each, after `hidden` ones."""
        count, length = len(members), -(-int(visible.max()) // BUCKET_TOKENS) * BUCKET_TOKENS
        position = np.arange(length)[None, :]
        padded = position >= visible[:, None]
        # Padding points at the first of the request's own tokens: written, so finite.
        position = np.where(padded, 0, position) + hidden[:, None]
        page = meta.kv_indices[meta.kv_indptr[members][:, None] + position // meta.page_size].astype(np.int64)
        tokens = torch.from_numpy((page * meta.page_size + position % meta.page_size).reshape(-1))
        mask = torch.zeros(count, 1, 1, length, dtype=self._dtype)
        mask.masked_fill_(torch.from_numpy(padded)[:, None, None, :], float("-inf"))
        row = meta.qo_indptr[members].astype(np.int64)
        first = int(row[0])
        is_range = bool((np.diff(row) == 1).all())
        rows = None if is_range else torch.from_numpy(row)
        return _DecodeBucket(first=first, count=count, length=length, rows=rows, tokens=tokens, mask=mask, heads=[])

    def _piece(self, meta: PagedMetadata, request: int, qo_len: int, seq_len: int, window: int) -> _Piece:
        """The work item of one prompt piece of more than one row."""
        pages = meta.kv_indices[meta.kv_indptr[request] : meta.kv_indptr[request + 1]]
        first, size = int(meta.qo_indptr[request]), meta.page_size
        gone = 0
        if 0 < window < seq_len and meta.causal:
            # Pages that no row of this piece sees are not read.
            gone = max(0, seq_len - qo_len - window + 1) // size
            pages = pages[gone:]
            blocks = self._windowed_blocks(first, qo_len, seq_len - gone * size, window)
        else:
            blocks = self._blocks(first, qo_len, seq_len, causal=meta.causal)
        consecutive = bool((np.diff(pages) == 1).all())
        return _Piece(
            length=seq_len - gone * size,
            start=int(pages[0]) * size,
            pages=None if consecutive else torch.from_numpy(pages.astype(np.int64)),
            blocks=tuple(blocks),
        )

    def _blocks(self, first: int, qo_len: int, seq_len: int, *, causal: bool) -> Iterator[_Block]:
        if not causal:
            yield _Block(first=first, count=qo_len, skip=0, seen=seq_len, causal=False, mask=None)
            return
        if qo_len == seq_len:
            # SDPA's own causal mask is aligned top left: right only when there is no prefix.
            yield _Block(first=first, count=qo_len, skip=0, seen=seq_len, causal=True, mask=None)
            return
        prefix_len = seq_len - qo_len
        for start in range(0, qo_len, BLOCK_ROWS):
            count = min(BLOCK_ROWS, qo_len - start)
            seen = prefix_len + start + count
            left = self._reach - (prefix_len + start)
            mask = self._triangle[:count, left : left + seen]
            yield _Block(first=first + start, count=count, skip=0, seen=seen, causal=False, mask=mask)

    def _windowed_blocks(self, first: int, qo_len: int, length: int, window: int) -> Iterator[_Block]:
        """Blocks of the last `qo_len` of `length` tokens, each of which sees `window` tokens, itself included."""
        prefix_len = length - qo_len
        for start in range(0, qo_len, BLOCK_ROWS):
            count = min(BLOCK_ROWS, qo_len - start)
            position = prefix_len + start
            skip, seen = max(0, position - window + 1), position + count
            behind = torch.arange(position, seen)[:, None] - torch.arange(skip, seen)[None, :]
            mask = torch.zeros(count, seen - skip, dtype=self._dtype)
            mask.masked_fill_((behind < 0) | (behind >= window), float("-inf"))
            yield _Block(first=first + start, count=count, skip=skip, seen=seen, causal=False, mask=mask)

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


def binding_windows(windows: tuple[int, ...], metadata: PagedMetadata) -> set[int]:
    """Those of a model's windows that hide something in this step."""
    longest = int(metadata.seq_lens.max(initial=0))
    return {window for window in windows if 0 < window < longest}


def _bucketed(members: np.ndarray, seq_lens: np.ndarray) -> Iterator[np.ndarray]:
    """Split the decode requests `members` into buckets of the same padded context, each within the memory bound."""
    if not len(members):
        return
    windows = (seq_lens[members] - 1) // BUCKET_TOKENS
    for window in np.unique(windows).tolist():
        bucket = members[windows == window]
        most = max(1, BUCKET_MAX_TOKENS // ((window + 1) * BUCKET_TOKENS))
        for start in range(0, len(bucket), most):
            yield bucket[start : start + most]


def _gatherings(buckets: Iterable[_DecodeBucket]) -> list[_Gathering]:
    """As few as the memory bound permits."""
    groups: list[list[_DecodeBucket]] = []
    room = 0
    for bucket in buckets:
        if len(bucket.tokens) > room:
            groups.append([])
            room = BUCKET_MAX_TOKENS
        groups[-1].append(bucket)
        room -= len(bucket.tokens)
    return [_Gathering(group, torch.cat([bucket.tokens for bucket in group]), []) for group in groups]


def _decode(bucket: _DecodeBucket, rows: torch.Tensor) -> torch.Tensor:
    """Attention of the rows [n, Hq, D] of one bucket, whose K/V are gathered -> [n, Hq, D]."""
    count, heads, head_dim = rows.shape
    k, v = bucket.heads
    # The heads of a group become the query axis: no repetition of K/V, no causal mask.
    grouped = rows.reshape(count, k.shape[1], heads // k.shape[1], head_dim)
    got = scaled_dot_product_attention(grouped, k, v, attn_mask=bucket.mask)
    return got.reshape(count, heads, head_dim)


def _piece_kv(piece: _Piece, cache: torch.Tensor) -> torch.Tensor:
    """K or V of one piece, [1, Hkv, length, D]: a view when the pages are consecutive. Unwritten slots are cut off."""
    num_pages, page_size, kv_heads, head_dim = cache.shape
    if piece.pages is None:
        tokens = cache.view(num_pages * page_size, kv_heads, head_dim)[piece.start : piece.start + piece.length]
    else:
        gathered = cache.view(num_pages, page_size * kv_heads * head_dim).index_select(0, piece.pages)
        tokens = gathered.view(-1, kv_heads, head_dim)[: piece.length]
    return tokens.transpose(0, 1)[None]
