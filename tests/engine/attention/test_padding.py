"""Padding: padded rows own a page that is nobody's, and real rows stay what they were."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.attention.padding import all_padding, captured_sizes, padded, smallest_fit
from tests.engine.attention.ragged import Shape, build

ARRAYS = ("qo_indptr", "kv_indptr", "kv_indices", "last_page_len", "out_slots", "positions")


@given(contexts=st.lists(st.integers(1, 60), min_size=1, max_size=6), more=st.integers(0, 5), page=st.integers(1, 9))
def test_padded_rows_read_and_write_the_spare_page_only(contexts: list[int], more: int, page: int) -> None:
    batch = build([(1, context) for context in contexts], Shape(page_size=page, kv_heads=1, group=1, dim=2))
    meta, spare = batch.metadata, batch.num_pages
    filled = padded(meta, len(contexts) + more, spare)
    assert filled.batch_size == filled.num_rows == len(contexts) + more
    assert filled.seq_lens.tolist() == [*contexts, *[1] * more]
    assert filled.qo_lens.tolist() == [1] * filled.batch_size
    for name in ARRAYS:
        was, now = getattr(meta, name), getattr(filled, name)
        assert now.dtype == was.dtype
        assert np.array_equal(now[: len(was)], was)
    assert (filled.kv_indices[len(meta.kv_indices) :] == spare).all()
    assert (filled.out_slots[len(contexts) :] // page == spare).all()
    if more < 2:
        # One padded row keeps even the page laws, of a pool that is one page larger.
        filled.validate(batch.num_pages + 1)


def test_only_decode_rows_that_fit_are_padded() -> None:
    shape = Shape(kv_heads=1, group=1, dim=2)
    with pytest.raises(ValueError, match="3 rows of 2 requests; at most 4 of one row each"):
        padded(build([(2, 9), (1, 3)], shape).metadata, 4, 99)
    with pytest.raises(ValueError, match="2 rows of 2 requests; at most 1 "):
        padded(build([(1, 9), (1, 3)], shape).metadata, 1, 99)


def test_a_batch_of_padding_alone() -> None:
    meta = all_padding(3, page_size=16, spare_page=7)
    assert meta.kv_indices.tolist() == [7, 7, 7]
    assert meta.out_slots.tolist() == [112, 112, 112]
    assert meta.seq_lens.tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("largest", "sizes"),
    [
        (0, ()), (1, (1,)), (2, (1, 2)), (3, (1, 2, 3)), (16, (1, 2, 4, 8, 16)), (17, (1, 2, 4, 8, 16, 17)),
        (48, (1, 2, 4, 8, 16, 32, 48)),
    ],
)  # fmt: skip
def test_sizes_end_with_the_largest(largest: int, sizes: tuple[int, ...]) -> None:
    assert captured_sizes(largest) == sizes


@given(largest=st.integers(1, 300), rows=st.integers(1, 310))
def test_every_batch_up_to_the_largest_fits_and_pads_little(largest: int, rows: int) -> None:
    fit = smallest_fit(captured_sizes(largest), rows)
    if rows > largest:
        assert fit is None
    else:
        assert fit is not None
        assert rows <= fit < max(2 * rows, rows + 16)
