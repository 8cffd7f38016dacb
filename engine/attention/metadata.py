"""PagedMetadata. Owns: the one description of a ragged batch that every attention backend reads, and its laws."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]


class MetadataError(ValueError):
    """A batch description breaks a law; the message names the array, the place and the values."""


@dataclass(frozen=True, slots=True)
class PagedMetadata:
    """One ragged batch over paged K/V. Built once per step on the host. B requests, R query rows.

    qo_indptr      [B+1] int32   rows of request i are [qo_indptr[i], qo_indptr[i+1])
    kv_indptr      [B+1] int32   in pages: page ids of request i are kv_indices[kv_indptr[i]:kv_indptr[i+1]]
    kv_indices     [kv_indptr[-1]] int32   page ids, each < num_pages
    last_page_len  [B] int32     1 … page_size, tokens in the last page, this step's rows included
    out_slots      [R] int64     flat slot page*page_size + offset where each row's K/V is written
    positions      [R] int32     position of each row in its sequence, for RoPE

    Query row j of request i sits at position seq_len[i] - qo_len[i] + j (mask aligned bottom right). K/V are written
    before attention runs.
    """

    qo_indptr: I32
    kv_indptr: I32
    kv_indices: I32
    last_page_len: I32
    out_slots: I64
    positions: I32
    page_size: int
    causal: bool = True

    @property
    def batch_size(self) -> int:
        return len(self.last_page_len)

    @property
    def num_rows(self) -> int:
        return len(self.positions)

    @property
    def seq_lens(self) -> I32:
        """[B] tokens of context of each request, this step's rows included."""
        pages = np.diff(self.kv_indptr)
        return ((pages - 1) * self.page_size + self.last_page_len).astype(np.int32)

    @property
    def qo_lens(self) -> I32:
        """[B] query rows of each request."""
        return np.diff(self.qo_indptr).astype(np.int32)
