"""NativeBackend. Owns: attention of a CPU whose decode rows read K/V where they lie, by a kernel in C.

A decode row costs what reading its context once costs: nothing is gathered, and no row waits for a longer one. Prompt
pieces go the way of CpuBackend.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from engine.attention.cpu import CpuBackend, binding_windows
from engine.attention.metadata import I32, PagedMetadata
from engine.native.library import CUT, Decode, Library


class NativeBackend:
    """Attention over bfloat16 pages. head_dim: a multiple of 32.

    windows   see LlamaConfig.windows; () when every layer sees everything
    """

    name = "native"

    def __init__(self, library: Library, *, windows: tuple[int, ...] = ()) -> None:
        self._library = library
        self._windows = windows
        self._pieces = CpuBackend(dtype=torch.bfloat16, windows=windows)
        self._has_pieces = False
        #: Decode rows of this step: those that see everything, and by window, where it hides something.
        self._full: _Decodes | None = None
        self._windowed: dict[int, _Decodes] = {}
        self._partial = torch.empty(0)

    def prepare(self, metadata: PagedMetadata) -> None:
        """Cut the contexts of decode rows into parts; see CpuBackend for prompt pieces."""
        rows = np.flatnonzero(metadata.qo_lens == 1)
        self._full, self._windowed = None, {}
        if len(rows):
            self._full = _Decodes(metadata, rows, window=0)
            self._windowed = {
                window: _Decodes(metadata, rows, window=window) for window in binding_windows(self._windows, metadata)
            }
        self._has_pieces = len(rows) < metadata.batch_size
        if self._has_pieces:
            self._pieces.prepare(metadata, only_pieces=True)

    def run(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, layer: int) -> torch.Tensor:
        """Attention of every row: q [R, Hq, D], caches [num_pages, page_size, Hkv, D] -> [R, Hq, D]."""
        out = torch.empty(q.shape, dtype=q.dtype)
        decodes = self._windowed.get(self._windows[layer], self._full) if self._windowed else self._full
        if decodes is not None:
            self._library.decode_attention(self._call(decodes, q, k_cache, v_cache, out))
        if self._has_pieces:
            self._pieces.run_pieces(q, k_cache, v_cache, layer, out)
        return out

    def _call(
        self, decodes: _Decodes, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, out: torch.Tensor
    ) -> Any:
        """The argument of the kernel: of one layer only q, K/V and the place of the result are new."""
        call = decodes.call
        if not call.q_heads:
            _, heads, dim = q.shape
            partial = len(decodes.parts) * heads * (dim + 2)
            if len(self._partial) < partial:
                with torch.inference_mode(False):  # memory made within that mode cannot be written outside
                    self._partial = torch.empty(partial)
            call.partial = self._partial.data_ptr()
            call.q_stride, call.out_stride = q.stride(0), heads * dim
            call.q_heads, call.kv_heads, call.dim = heads, k_cache.shape[2], dim
            call.scale, call.threads = dim**-0.5, torch.get_num_threads()
        call.q, call.out = q.data_ptr(), out.data_ptr()
        call.k, call.v = k_cache.data_ptr(), v_cache.data_ptr()
        return ctypes.byref(call)


class _Decodes:
    """Decode rows of one step, for layers of the same window, and the call of the kernel for them.

    parts   [P, 6] int32: row, first page id, first position, end, number of the part, parts of the row
    """

    def __init__(self, metadata: PagedMetadata, members: NDArray[np.int64], *, window: int) -> None:
        """`members`: indices of the requests with one row. A row is cut by what it sees alone."""
        self.parts = _parts(metadata, members, window)
        self._page_ids = np.ascontiguousarray(metadata.kv_indices)
        self.call = Decode(
            page_ids=self._page_ids.ctypes.data,
            parts=self.parts.ctypes.data,
            num_parts=len(self.parts),
            page_size=metadata.page_size,
        )


def _parts(metadata: PagedMetadata, members: NDArray[np.int64], window: int) -> I32:
    ends = metadata.seq_lens[members]
    firsts = ends - np.minimum(ends, window) if window else np.zeros_like(ends)
    counts = -(-(ends - firsts) // CUT)
    number = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    parts = np.empty((len(number), 6), dtype=np.int32)
    parts[:, 0] = np.repeat(metadata.qo_indptr[members], counts)
    parts[:, 1] = np.repeat(metadata.kv_indptr[members], counts)
    parts[:, 2] = np.repeat(firsts, counts) + number * CUT
    parts[:, 3] = np.minimum(parts[:, 2] + CUT, np.repeat(ends, counts))
    parts[:, 4] = number
    parts[:, 5] = np.repeat(counts, counts)
    return parts
