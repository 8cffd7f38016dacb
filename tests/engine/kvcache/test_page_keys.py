"""Page keys: equal keys exactly for equal prefixes, grown page by page as made at once, and no token id in them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.kvcache.page_keys import PageKeyer, PageKeys

tokens = st.lists(st.integers(0, 3), max_size=40)
secrets = st.sampled_from([b"", b"a secret", b"another"])


@given(left=tokens, right=tokens, size=st.sampled_from([1, 2, 4]), secret=secrets)
def test_keys_are_equal_as_far_as_the_pages_are(left: list[int], right: list[int], size: int, secret: bytes) -> None:
    keyer = PageKeyer(size, secret)
    mine, yours = keyer.of(left)[0].tolist(), keyer.of(right)[0].tolist()
    assert (len(mine), len(yours)) == (len(left) // size, len(right) // size)
    for page in range(min(len(mine), len(yours))):
        end = (page + 1) * size
        assert (mine[page] == yours[page]) == (left[:end] == right[:end])


@given(prompt=tokens, more=tokens, size=st.sampled_from([1, 2, 4]), secret=st.sampled_from([b"", b"x", None]))
def test_growing_gives_the_keys_of_the_whole(
    prompt: list[int], more: list[int], size: int, secret: bytes | None
) -> None:
    keyer = PageKeyer(size, secret)
    keys, chain = keyer.of(prompt)
    grown, sequence = PageKeys(keys), list(prompt)
    for token in more:
        sequence.append(token)
        if len(sequence) % size == 0:
            key, chain = keyer.next(chain, sequence[-size:])
            grown.append(key)
    whole = keyer.of(sequence)[0]
    assert grown.first(len(sequence)).tolist() == whole.tolist()
    assert len(grown) == len(sequence) // size


@given(ids=st.lists(st.integers(0, 100_000), min_size=1, max_size=30))
def test_with_a_secret_no_key_is_a_token_id(ids: list[int]) -> None:
    keys = PageKeyer(1, b"secret").of(ids)[0].tolist()
    assert not set(keys) & set(range(100_001))
    assert PageKeyer(1, b"other").of(ids)[0].tolist() != keys
    # Page size 1 without a secret, for recorded vectors only: the ids themselves.
    assert PageKeyer(1, None).of(ids)[0].tolist() == ids


@pytest.mark.parametrize("secret", [None, b"", b"s"])
def test_head_of_32(secret: bytes | None) -> None:
    keyer = PageKeyer(16, secret)
    ids = list(range(50, 90))
    assert keyer.head32(ids[:31]) is None
    assert keyer.head32(ids[:32]) == keyer.head32(ids) is not None
    assert keyer.head32([*ids[:31], 0]) != keyer.head32(ids)


def test_views_stay_as_they_were() -> None:
    keys = PageKeys(np.array([1, 2, 3], dtype=np.int64))
    view = keys.first(2)
    for key in range(100):
        keys.append(key)
    assert view.tolist() == [1, 2]
    assert keys.first(1000).tolist() == [1, 2, 3, *range(100)]
