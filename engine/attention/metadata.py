"""PagedMetadata. Owns: the one description of a ragged batch that every attention backend reads, and its laws."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]


_SHAPES: Final = (
    ("qo_indptr", np.int32),
    ("kv_indptr", np.int32),
    ("kv_indices", np.int32),
    ("last_page_len", np.int32),
    ("out_slots", np.int64),
    ("positions", np.int32),
)


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

    def validate(self, num_pages: int) -> None:
        """Raise MetadataError at the first broken law; `num_pages` is the size of the pool.

        Kernels check none of this: a wrong length reads memory that was never written, a wrong page id another
        request's memory. Cost is a few NumPy passes over the arrays, far below one step.
        """
        self._check_arrays(num_pages)
        _check_indptr("qo_indptr", self.qo_indptr, total=self.num_rows, of="query rows")
        _check_indptr("kv_indptr", self.kv_indptr, total=len(self.kv_indices), of="kv_indices")
        self._check_lengths()
        self._check_pages(num_pages)
        self._check_rows()

    def _check_arrays(self, num_pages: int) -> None:
        if self.page_size < 1:
            raise MetadataError(f"page_size is {self.page_size}; at least 1 is needed")
        if num_pages < 1:
            raise MetadataError(f"num_pages is {num_pages}; at least 1 is needed")
        for name, dtype in _SHAPES:
            array = getattr(self, name)
            if array.dtype != dtype:
                raise MetadataError(f"{name} has dtype {array.dtype}; {np.dtype(dtype)} is needed")
            if array.ndim != 1:
                raise MetadataError(f"{name} has {array.ndim} dimensions; 1 is needed")
        batch = self.batch_size
        for name in ("qo_indptr", "kv_indptr"):
            if (entries := len(getattr(self, name))) != batch + 1:
                raise MetadataError(
                    f"{name} has {entries} entries; last_page_len has {batch}, so {batch + 1} are needed"
                )
        if len(self.out_slots) != self.num_rows:
            raise MetadataError(f"out_slots has {len(self.out_slots)} entries; positions has {self.num_rows}")

    def _check_lengths(self) -> None:
        bad = (self.last_page_len < 1) | (self.last_page_len > self.page_size)
        if bad.any():
            i = int(bad.argmax())
            raise MetadataError(f"last_page_len[{i}] is {self.last_page_len[i]}; 1 to {self.page_size} is allowed")
        pages = np.diff(self.kv_indptr)
        if (pages < 1).any():
            i = int((pages < 1).argmax())
            raise MetadataError(f"kv_indptr gives request {i} no page; its context cannot be empty")
        too_long = self.qo_lens > self.seq_lens
        if too_long.any():
            i = int(too_long.argmax())
            rows, context = self.qo_lens[i], self.seq_lens[i]
            raise MetadataError(f"request {i} has {rows} query rows but a context of {context} tokens")

    def _check_pages(self, num_pages: int) -> None:
        ids = self.kv_indices
        outside = (ids < 0) | (ids >= num_pages)
        if outside.any():
            i = int(outside.argmax())
            raise MetadataError(f"kv_indices[{i}] is page {ids[i]}; the pool has pages 0 to {num_pages - 1}")
        owners = np.repeat(np.arange(self.batch_size), np.diff(self.kv_indptr))
        order = np.lexsort((owners, ids))
        sorted_ids, sorted_owners = ids[order], owners[order]
        same_page = sorted_ids[1:] == sorted_ids[:-1]
        twice = same_page & (sorted_owners[1:] == sorted_owners[:-1])
        if twice.any():
            i = int(twice.argmax())
            raise MetadataError(f"request {sorted_owners[i]} lists page {sorted_ids[i]} twice in kv_indices")
        # Only the last page of a request may be part full.
        part_full = np.zeros(len(ids), dtype=bool)
        part_full[self.kv_indptr[1:] - 1] = self.last_page_len < self.page_size
        sorted_part = part_full[order]
        shared_part = same_page & (sorted_part[1:] | sorted_part[:-1])
        if shared_part.any():
            i = int(shared_part.argmax())
            raise MetadataError(
                f"page {sorted_ids[i]} is shared by requests {sorted_owners[i]} and {sorted_owners[i + 1]} "
                "but is not full in both; kv_indices may share full pages only"
            )

    def _check_rows(self) -> None:
        owners = np.repeat(np.arange(self.batch_size), self.qo_lens)
        first = (self.seq_lens - self.qo_lens - self.qo_indptr[:-1])[owners]
        expected = np.arange(self.num_rows) + first
        wrong = self.positions != expected
        if wrong.any():
            i = int(wrong.argmax())
            raise MetadataError(
                f"positions[{i}] is {self.positions[i]}; row {i} of request {owners[i]} sits at position {expected[i]}"
            )
        slots = np.sort(self.out_slots)
        repeated = slots[1:] == slots[:-1]
        if repeated.any():
            raise MetadataError(f"out_slots holds slot {slots[int(repeated.argmax())]} twice; each row needs its own")
        pages = self.kv_indices[self.kv_indptr[:-1][owners] + expected // self.page_size]
        home = pages.astype(np.int64) * self.page_size + expected % self.page_size
        stray = self.out_slots != home
        if stray.any():
            i = int(stray.argmax())
            raise MetadataError(
                f"out_slots[{i}] is {self.out_slots[i]}; position {expected[i]} of request {owners[i]} "
                f"lives in slot {home[i]}"
            )


def _check_indptr(name: str, indptr: NDArray[Any], *, total: int, of: str) -> None:
    """Starts at 0, never falls, ends at `total`."""
    if indptr[0] != 0:
        raise MetadataError(f"{name}[0] is {indptr[0]}; 0 is needed")
    falls = np.diff(indptr) < 0
    if falls.any():
        i = int(falls.argmax())
        raise MetadataError(f"{name} falls from {indptr[i]} to {indptr[i + 1]} at entry {i + 1}")
    if indptr[-1] != total:
        raise MetadataError(f"{name} ends at {indptr[-1]}; there are {total} {of}")
