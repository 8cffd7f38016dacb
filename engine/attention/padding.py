"""Padding. Owns: a batch of decode rows filled up to a size that a graph was captured with.

A padded row is a request of one token in a page that belongs to nobody: its K/V are written there, and nobody reads
what it computes. The page is beyond the pool, so no law counts it and no request is ever given it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np

from engine.attention.metadata import PagedMetadata

#: Sizes up to here are captured one by one; beyond, one in `_STRIDE`.
_SMALL: Final = (1, 2, 4, 8)
_STRIDE: Final = 16


def captured_sizes(largest: int) -> tuple[int, ...]:
    """Batch sizes to capture for up to `largest` rows: 1, 2, 4, 8, 16, every 16th, and `largest`; ascending."""
    small = [size for size in _SMALL if size < largest]
    return (*small, *range(_STRIDE, largest, _STRIDE), largest) if largest else ()


def smallest_fit(sizes: tuple[int, ...], rows: int) -> int | None:
    """The smallest of the ascending `sizes` that holds `rows`; None where none does."""
    return next((size for size in sizes if size >= rows), None)


def padded(metadata: PagedMetadata, size: int, spare_page: int) -> PagedMetadata:
    """A batch of decode rows with padded rows behind them, `size` in all. It breaks the page laws on purpose."""
    missing = size - metadata.batch_size
    if missing < 0 or metadata.num_rows != metadata.batch_size:
        raise ValueError(
            f"{metadata.num_rows} rows of {metadata.batch_size} requests; at most {size} of one row each are needed"
        )
    if not missing:
        return metadata
    ones = np.ones(missing, dtype=np.int32)
    return replace(
        metadata,
        qo_indptr=np.arange(size + 1, dtype=np.int32),
        kv_indptr=np.concatenate((metadata.kv_indptr, metadata.kv_indptr[-1] + np.cumsum(ones, dtype=np.int32))),
        kv_indices=np.concatenate((metadata.kv_indices, spare_page * ones)),
        last_page_len=np.concatenate((metadata.last_page_len, ones)),
        out_slots=np.concatenate((metadata.out_slots, spare_page * metadata.page_size * ones.astype(np.int64))),
        positions=np.concatenate((metadata.positions, 0 * ones)),
    )


def all_padding(size: int, *, page_size: int, spare_page: int) -> PagedMetadata:
    """`size` padded rows: what a graph is captured with."""
    none = np.zeros(0, dtype=np.int32)
    start = np.zeros(1, dtype=np.int32)
    empty = PagedMetadata(
        qo_indptr=start, kv_indptr=start, kv_indices=none, last_page_len=none,
        out_slots=none.astype(np.int64), positions=none, page_size=page_size,
    )  # fmt: skip
    return padded(empty, size, spare_page)
