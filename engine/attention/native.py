"""NativeBackend. Owns: attention of a CPU by kernels in C, which read K/V where they lie.

A decode row costs what reading its context once costs: nothing is gathered, and no row waits for a longer one. Rows
that see what comes after them go the way of CpuBackend.

What a row computes depends on itself alone: bits are the same alone and in company, in a whole prompt, in any piece of
it, behind any cached prefix, and as a decode row.
"""

from __future__ import annotations

import ctypes
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from engine.attention.cpu import CpuBackend, binding_windows
from engine.attention.metadata import I32, PagedMetadata
from engine.native.library import COLUMNS, PART, STEP, Attention, Decode, Library, Prefill

#: `Attention` of kernels/forward.c, for each of the model's `distinct_windows`.
Calls = ctypes.Array[Attention]


def distinct_windows(windows: tuple[int, ...]) -> tuple[int, ...]:
    """Of LlamaConfig.windows: layers of one of them compute the same attention. Those without any see everything, 0."""
    return tuple(sorted(set(windows))) or (0,)


class NativeBackend:
    """Attention over pages in the library's type. head_dim: a multiple of 32, at most MOST_DIM.

    windows   see LlamaConfig.windows; () when every layer sees everything
    """

    name = "native"

    def __init__(self, library: Library, *, windows: tuple[int, ...] = ()) -> None:
        self._library = library
        self._windows = windows
        self._distinct = distinct_windows(windows)
        self._torchs = CpuBackend(dtype=library.dtype, windows=windows)
        self._is_torchs = False
        #: Work of this step: for layers that see everything, and by window, where it hides something.
        self._full: list[_Decodes | _Pieces] = []
        self._windowed: dict[int, list[_Decodes | _Pieces]] = {}
        self._memory = _Memory(library.dtype)

    def prepare(self, metadata: PagedMetadata) -> None:
        """Cut contexts and prompt pieces into tasks."""
        lens = metadata.qo_lens
        rows, pieces = np.flatnonzero(lens == 1), np.flatnonzero(lens > 1)
        self._is_torchs = bool(len(pieces)) and not metadata.causal
        if self._is_torchs:
            self._torchs.prepare(metadata, only_pieces=True)
            pieces = pieces[:0]
        self._full = self._work(metadata, rows, pieces, 0)
        self._windowed = {
            window: self._work(metadata, rows, pieces, window) for window in binding_windows(self._windows, metadata)
        }

    def _work(
        self, metadata: PagedMetadata, rows: NDArray[np.int64], pieces: NDArray[np.int64], window: int
    ) -> list[_Decodes | _Pieces]:
        work: list[_Decodes | _Pieces] = []
        if len(rows):
            work.append(_Decodes(self._library, metadata, rows, window))
        if len(pieces):
            work.append(_Pieces(self._library, metadata, pieces, window))
        return work

    @property
    def runs_within(self) -> bool:
        """Whether `calls` says all that this step computes."""
        return not self._is_torchs

    def calls(self, q: torch.Tensor, out: torch.Tensor, kv_heads: int) -> Calls:
        """What layers compute in this step, for q [R, Hq, D] -> `out` [R, Hq, D]. Valid until the next `prepare`."""
        everything = [self._full, *self._windowed.values()]
        # Twice: memory that one of them needs more of moves.
        for _ in range(2):
            for work in (work for works in everything for work in works):
                if not work.call.q_heads:
                    work.suit(q, kv_heads)
                work.place(self._memory)
                work.call.q, work.call.out = q.data_ptr(), out.data_ptr()
        found = (Attention * len(self._distinct))()
        for entry, window in zip(found, self._distinct, strict=True):
            for work in self._windowed.get(window, self._full):
                setattr(entry, work.name, ctypes.addressof(work.call))
        return found

    def run(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, layer: int) -> torch.Tensor:
        """Attention of every row: q [R, Hq, D], caches [num_pages, page_size, Hkv, D] -> [R, Hq, D]."""
        out = torch.empty(q.shape, dtype=q.dtype)
        for work in self._windowed.get(self._windows[layer], self._full) if self._windowed else self._full:
            if not work.call.q_heads:
                work.suit(q, k_cache.shape[2])
            work.place(self._memory)
            work.call.q, work.call.out = q.data_ptr(), out.data_ptr()
            work.call.k, work.call.v = k_cache.data_ptr(), v_cache.data_ptr()
            work.run(ctypes.byref(work.call))
        if self._is_torchs:
            self._torchs.run_pieces(q, k_cache, v_cache, layer, out)
        return out


class _Memory:
    """Memory that kernels leave things in between their parts, for all layers."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._floats = torch.empty(0)
        self._layouts = torch.empty(0, dtype=dtype)

    def floats(self, count: int) -> int:
        """A pointer to `count` float32."""
        if len(self._floats) < count:
            with torch.inference_mode(False):  # memory made within that mode cannot be written outside
                self._floats = torch.empty(count)
        return self._floats.data_ptr()

    def layouts(self, count: int) -> tuple[int, int]:
        """Pointers to twice `count` numbers of K/V."""
        if len(self._layouts) < 2 * count:
            with torch.inference_mode(False):
                self._layouts = torch.empty(2 * count, dtype=self._dtype)
        return self._layouts.data_ptr(), self._layouts[count:].data_ptr()


class _Decodes:
    """Decode rows of one step, for layers of the same window, and the kernel's argument.

    name    among the calls of a layer
    parts   [P, 7] int32, see `Part` of kernels/decode.h
    """

    name: Final = "rows"

    def __init__(self, library: Library, metadata: PagedMetadata, members: NDArray[np.int64], window: int) -> None:
        """`members`: indices of the requests with one row. A row is cut by what it sees alone."""
        self.run = library.decode_attention
        self._floats = 0
        self.parts = _parts(metadata, members, window)
        self._page_ids = np.ascontiguousarray(metadata.kv_indices)
        self.call = Decode(
            page_ids=self._page_ids.ctypes.data,
            parts=self.parts.ctypes.data,
            num_parts=len(self.parts),
            page_size=metadata.page_size,
        )

    def suit(self, q: torch.Tensor, kv_heads: int) -> None:
        """What is known from the first layer on."""
        self._floats = len(self.parts) * q.shape[1] * (q.shape[2] + 2)
        _fill_in(self.call, q, kv_heads)

    def place(self, memory: _Memory) -> None:
        """Where the parts are put for this layer: the memory moves when layers of another window need more."""
        self.call.partial = memory.floats(self._floats)


class _Pieces:
    """Prompt pieces of one step, for layers of the same window, and the kernel's argument.

    name      among the calls of a layer
    pieces    [n, 8] int32, see `Piece` of kernels/prefill.c
    layouts   [L, 3] int32: piece, 0, block of tokens
    """

    name: Final = "pieces"

    def __init__(self, library: Library, metadata: PagedMetadata, members: NDArray[np.int64], window: int) -> None:
        """`members`: indices of the requests with more rows than one."""
        self.run = library.prefill_attention
        rows, length = metadata.qo_lens[members], metadata.seq_lens[members]
        prefix = length - rows
        first = np.maximum(prefix - window + 1, 0) // STEP * STEP if window else np.zeros_like(rows)
        padded = -(-(length - first) // STEP) * STEP
        ends = np.cumsum(padded)
        self.pieces = np.ascontiguousarray(
            np.stack(
                (
                    metadata.qo_indptr[members], rows, prefix, length,
                    metadata.kv_indptr[members], first, padded, ends - padded,
                ),
                axis=1,
            ),
            dtype=np.int32,
        )  # fmt: skip
        self._tokens, self._layout = int(ends[-1]), 0
        piece, block = _numbered(padded // STEP)
        self.layouts = np.stack((piece, np.zeros_like(piece), block), axis=1).astype(np.int32)
        self._items: I32 = np.empty((0, 3), dtype=np.int32)
        self._page_ids = np.ascontiguousarray(metadata.kv_indices)
        self.call = Prefill(
            page_ids=self._page_ids.ctypes.data,
            pieces=self.pieces.ctypes.data,
            layouts=self.layouts.ctypes.data,
            num_layouts=len(self.layouts),
            page_size=metadata.page_size,
            window=window,
        )

    def suit(self, q: torch.Tensor, kv_heads: int) -> None:
        """What is known from the first layer on."""
        heads, dim = q.shape[1:]
        piece, block = _numbered(np.repeat(-(-self.pieces[:, 1] * (heads // kv_heads) // COLUMNS), kv_heads))
        self._items = np.stack((piece // kv_heads, piece % kv_heads, block), axis=1).astype(np.int32)
        self.call.items, self.call.num_items = self._items.ctypes.data, len(self._items)
        self._layout = self._tokens * kv_heads * dim
        _fill_in(self.call, q, kv_heads)

    def place(self, memory: _Memory) -> None:
        """Where contexts are laid out for this layer."""
        self.call.laid_k, self.call.laid_v = memory.layouts(self._layout)


def _fill_in(call: Any, q: torch.Tensor, kv_heads: int) -> None:
    """What the arguments of both kernels have of q [R, Hq, D]."""
    _, heads, dim = q.shape
    call.q_stride, call.out_stride = q.stride(0), heads * dim
    call.q_heads, call.kv_heads, call.dim = heads, kv_heads, dim
    call.scale, call.threads = dim**-0.5, torch.get_num_threads()


def _numbered(counts: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """For `counts` [n] things each: whose each is, and its number among them."""
    number = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.repeat(np.arange(len(counts)), counts), number


def _parts(metadata: PagedMetadata, members: NDArray[np.int64], window: int) -> I32:
    ends = metadata.seq_lens[members]
    seen_from = np.maximum(ends - window, 0) if window else np.zeros_like(ends)
    firsts = seen_from // STEP * STEP
    counts = -(-ends // PART) - firsts // PART
    whose, number = _numbered(counts)
    border = (firsts // PART)[whose] + number
    columns = (
        metadata.qo_indptr[members][whose], metadata.kv_indptr[members][whose],
        np.maximum(border * PART, firsts[whose]), np.minimum((border + 1) * PART, ends[whose]),
        seen_from[whose], number, counts[whose],
    )  # fmt: skip
    return np.ascontiguousarray(np.stack(columns, axis=1), dtype=np.int32)
