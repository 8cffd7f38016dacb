"""The five workloads are what the documentation says, and the same everywhere."""

from __future__ import annotations

import hashlib

import pytest
from workloads import TOKEN_IDS, WORKLOADS

SHAPES = {"W1": (32, 256, 64), "W2": (32, 576, 32), "W3": (1, 512, 128), "W5": (8, 32, 128)}


@pytest.mark.parametrize("name", SHAPES)
def test_uniform_workloads_have_their_shape(name: str) -> None:
    count, prompt, output = SHAPES[name]
    requests = WORKLOADS[name].requests(seed=0, repetition=0)
    assert [(len(r.prompt), r.output_tokens) for r in requests] == [(prompt, output)] * count


def test_w4_is_the_first_forty_rows_divided_and_clipped() -> None:
    # Rows 1 to 5, 14, 24 and 34 of the trace by hand: 374/44, 396/109, 879/55, 91/16, 91/16, 2221/15, 4085/62, 27/183.
    shape = [(len(r.prompt), r.output_tokens) for r in WORKLOADS["W4"].requests(seed=0, repetition=0)]
    assert len(shape) == 40
    assert shape[:5] == [(93, 11), (99, 27), (219, 13), (22, 4), (22, 4)]
    assert shape[13] == (512, 4)
    assert shape[23] == (512, 15)
    assert shape[33] == (8, 45)


def test_w2_shares_exactly_its_first_512_tokens() -> None:
    prompts = [r.prompt for r in WORKLOADS["W2"].requests(seed=3, repetition=1)]
    assert len({p[:512] for p in prompts}) == 1
    assert len({p[512:] for p in prompts}) == len(prompts)


@pytest.mark.parametrize("name", WORKLOADS)
def test_ids_are_in_range_and_fresh_in_each_repetition_and_seed(name: str) -> None:
    workload = WORKLOADS[name]
    first = workload.requests(seed=0, repetition=0)
    ids = [token for request in first for token in request.prompt]
    assert min(ids) >= TOKEN_IDS[0]
    assert max(ids) <= TOKEN_IDS[1]
    heads = {r.prompt[:8] for r in first}
    for other in (workload.requests(seed=0, repetition=1), workload.requests(seed=1, repetition=0)):
        assert heads.isdisjoint({r.prompt[:8] for r in other})
        assert [(len(r.prompt), r.output_tokens) for r in other] == [(len(r.prompt), r.output_tokens) for r in first]


def test_prompts_are_the_same_on_every_machine() -> None:
    # Pinned: a change here makes every published figure incomparable, and must be said in the changelog.
    digest = hashlib.sha256()
    for workload in WORKLOADS.values():
        for request in workload.requests(seed=0, repetition=0):
            digest.update(repr((request.prompt, request.output_tokens)).encode())
    assert digest.hexdigest() == "65a04e96a64e00fe8f0e86c5e72b1dfeccf156a65d80137d06d8418956fee1e4"
