"""Page keys at any page size: equal exactly as far as two requests are known to share."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from telemetry.sim.workload import Blocks

SIZES = st.sampled_from([1, 2, 3, 4, 8, 16])


def chain(ids: list[int]) -> np.ndarray:
    """Keys that stand for all before them."""
    keys, last = [], 0
    for each in ids:
        last = hash((last, each)) % 2**64
        keys.append(last)
    return np.array(keys, dtype=np.uint64)


@given(SIZES, SIZES, st.integers(0, 6), st.integers(0, 5), st.integers(0, 5))
def test_shared_pages_are_those_that_lie_in_shared_blocks(
    block: int, page: int, shared: int, one: int, other: int
) -> None:
    ids = [list(range(shared)) + [100 * who + i for i in range(own)] for who, own in ((1, one), (2, other))]
    both = [Blocks(size=block, keys=chain(each), known=len(each) * block, own=who) for who, each in enumerate(ids)]
    pages = [blocks.pages(page, 0, 200).tolist() for blocks in both]
    equal = next(n for n in range(201) if n == 200 or pages[0][n] != pages[1][n])
    assert equal == shared * block // page
    assert len({*pages[0][equal:]} & {*pages[1][equal:]}) == 0


@given(SIZES, st.integers(1, 6), st.integers(1, 4))
def test_a_page_that_ends_with_a_block_has_its_key(block: int, blocks: int, times: int) -> None:
    keys = chain(list(range(blocks * times)))
    got = Blocks(size=block, keys=keys, known=10**6, own=7).pages(block * times, 0, blocks)
    assert got.view(np.uint64).tolist() == keys[times - 1 :: times].tolist()


@given(SIZES, st.integers(0, 40), st.integers(0, 30), st.integers(1, 30))
def test_pages_do_not_depend_on_how_many_are_asked_for(page: int, known: int, first: int, count: int) -> None:
    blocks = Blocks(size=4, keys=chain(list(range(10))), known=known, own=9)
    whole = blocks.pages(page, 0, first + count)
    assert blocks.pages(page, first, count).tolist() == whole[first:].tolist()


def test_a_block_known_in_part_gives_no_key_beyond_it() -> None:
    one, other = (Blocks(size=8, keys=chain([1, 2]), known=12, own=own) for own in (1, 2))
    assert one.pages(4, 0, 3).tolist() == other.pages(4, 0, 3).tolist()
    assert one.pages(4, 3, 1).tolist() != other.pages(4, 3, 1).tolist()


@given(SIZES, SIZES, st.integers(0, 60), st.integers(0, 2**64 - 1))
def test_one_page_has_the_key_that_many_at_once_have(block: int, page: int, known: int, own: int) -> None:
    blocks = Blocks(size=block, keys=chain(list(range(10))), known=known, own=own)
    keys = blocks.pages(page, 0, 60)
    assert [blocks.page(page, index) for index in range(60)] == keys.tolist()
    for count in (0, 1, 8, 9, 60):
        assert blocks.packed(page, count) == keys[:count].astype("<i8").tobytes()
