"""PagedMetadata.validate: good batches pass, and each law, broken once, is refused by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.attention.metadata import MetadataError, PagedMetadata
from tests.engine.attention.ragged import Shape, build, lengths, metadata_of


@given(lens=lengths(), page=st.sampled_from([1, 2, 16]), shared=st.booleans(), page_seed=st.integers(0, 99))
def test_every_well_formed_batch_is_accepted(
    lens: list[tuple[int, int]], page: int, shared: bool, page_seed: int
) -> None:
    batch = build(lens, Shape(page_size=page, kv_heads=1, group=1, dim=2), shared=shared, page_seed=page_seed)
    batch.metadata.validate(batch.num_pages)
    assert batch.metadata.seq_lens.tolist() == [seq for _, seq in lens]
    assert batch.metadata.qo_lens.tolist() == [rows for rows, _ in lens]


#: Request 0 prefills 6 tokens; request 1 has 10 and adds 3, sharing request 2's first page; request 2 decodes.
PAGES = [[4, 0], [7, 2, 5], [7, 3]]
LENGTHS = [(6, 6), (3, 10), (1, 8)]
PAGE_SIZE, NUM_PAGES = 4, 8


def changed(**arrays: Any) -> Callable[[PagedMetadata], PagedMetadata]:
    return lambda meta: dataclasses.replace(meta, **arrays)


def poked(name: str, index: int, value: int) -> Callable[[PagedMetadata], PagedMetadata]:
    def poke(meta: PagedMetadata) -> PagedMetadata:
        array = getattr(meta, name).copy()
        array[index] = value
        return dataclasses.replace(meta, **{name: array})

    return poke


def cast(name: str, dtype: type) -> Callable[[PagedMetadata], PagedMetadata]:
    return lambda meta: dataclasses.replace(meta, **{name: getattr(meta, name).astype(dtype)})


BROKEN: dict[str, tuple[Callable[[PagedMetadata], PagedMetadata], str]] = {
    "qo_indptr int64": (cast("qo_indptr", np.int64), r"qo_indptr has dtype int64; int32"),
    "kv_indptr int64": (cast("kv_indptr", np.int64), r"kv_indptr has dtype int64; int32"),
    "kv_indices int64": (cast("kv_indices", np.int64), r"kv_indices has dtype int64; int32"),
    "last_page_len int64": (cast("last_page_len", np.int64), r"last_page_len has dtype int64; int32"),
    "out_slots int32": (cast("out_slots", np.int32), r"out_slots has dtype int32; int64"),
    "positions float": (cast("positions", np.float64), r"positions has dtype float64; int32"),
    "two dimensions": (lambda m: dataclasses.replace(m, positions=m.positions[None]), r"positions has 2 dimensions"),
    "page size zero": (changed(page_size=0), r"page_size is 0"),
    "fewer qo entries": (lambda m: dataclasses.replace(m, qo_indptr=m.qo_indptr[:-1]), r"qo_indptr has 3 entries"),
    "fewer kv entries": (lambda m: dataclasses.replace(m, kv_indptr=m.kv_indptr[:-1]), r"kv_indptr has 3 entries"),
    "fewer slots": (lambda m: dataclasses.replace(m, out_slots=m.out_slots[:-1]), r"out_slots has 9 entries"),
    "qo starts late": (poked("qo_indptr", 0, 1), r"qo_indptr\[0\] is 1"),
    "qo falls": (poked("qo_indptr", 2, 5), r"qo_indptr falls from 6 to 5"),
    "qo ends early": (poked("qo_indptr", 3, 9), r"qo_indptr ends at 9; there are 10 query rows"),
    "kv starts late": (poked("kv_indptr", 0, 1), r"kv_indptr\[0\] is 1"),
    "kv falls": (poked("kv_indptr", 2, 1), r"kv_indptr falls from 2 to 1"),
    "kv ends late": (poked("kv_indptr", 3, 8), r"kv_indptr ends at 8; there are 7 kv_indices"),
    "empty context": (poked("kv_indptr", 1, 5), r"kv_indptr gives request 1 no page"),
    "last page empty": (poked("last_page_len", 1, 0), r"last_page_len\[1\] is 0; 1 to 4"),
    "last page overfull": (poked("last_page_len", 1, 5), r"last_page_len\[1\] is 5; 1 to 4"),
    "query longer than context": (poked("last_page_len", 0, 1), r"request 0 has 6 query rows but a context of 5"),
    "page id negative": (poked("kv_indices", 0, -1), r"kv_indices\[0\] is page -1; the pool has pages 0 to 7"),
    "page id too large": (poked("kv_indices", 0, 8), r"kv_indices\[0\] is page 8"),
    "page twice": (poked("kv_indices", 3, 7), r"request 1 lists page 7 twice"),
    "part-full page shared": (poked("kv_indices", 6, 5), r"page 5 is shared by requests 1 and 2 but is not full"),
    "position off": (poked("positions", 7, 9), r"positions\[7\] is 9; row 7 of request 1 sits at position 8"),
    "slot twice": (poked("out_slots", 0, 17), r"out_slots holds slot 17 twice"),
    "slot elsewhere": (poked("out_slots", 9, 4), r"out_slots\[9\] is 4; position 7 of request 2 lives in slot 15"),
}


@pytest.mark.parametrize("law", BROKEN)
def test_each_broken_law_is_refused(law: str) -> None:
    good = metadata_of(LENGTHS, PAGES, PAGE_SIZE)
    good.validate(NUM_PAGES)
    change, message = BROKEN[law]
    with pytest.raises(MetadataError, match=message):
        change(good).validate(NUM_PAGES)


def test_the_pool_must_hold_the_pages() -> None:
    good = metadata_of(LENGTHS, PAGES, PAGE_SIZE)
    with pytest.raises(MetadataError, match=r"is page 7; the pool has pages 0 to 6"):
        good.validate(7)
    with pytest.raises(MetadataError, match=r"num_pages is 0"):
        good.validate(0)


@given(
    lens=lengths(max_requests=4),
    page=st.sampled_from([1, 3, 16]),
    name=st.sampled_from(["qo_indptr", "kv_indptr", "kv_indices", "last_page_len", "out_slots", "positions"]),
    data=st.data(),
)
def test_any_single_changed_entry_is_noticed_or_still_a_batch(
    lens: list[tuple[int, int]], page: int, name: str, data: st.DataObject
) -> None:
    """One entry changed: refused, or (a free page id swapped in for one of a request's prefix) still well formed."""
    batch = build(lens, Shape(page_size=page, kv_heads=1, group=1, dim=2))
    array = getattr(batch.metadata, name)
    if not len(array):
        return
    index = data.draw(st.integers(0, len(array) - 1))
    value = data.draw(st.integers(-3, 200).filter(lambda v: v != array[index]))
    broken = poked(name, index, value)(batch.metadata)
    if name in {"positions", "out_slots", "qo_indptr"}:
        with pytest.raises(MetadataError):
            broken.validate(batch.num_pages)
        return
    try:
        broken.validate(batch.num_pages)
    except MetadataError:
        return
    # Accepted: then every row still writes into the page that holds its position.
    for i, (rows, _) in enumerate(lens):
        ids = broken.kv_indices[broken.kv_indptr[i] : broken.kv_indptr[i + 1]]
        assert len(set(ids.tolist())) == len(ids)
        assert broken.qo_lens[i] == rows <= broken.seq_lens[i]
