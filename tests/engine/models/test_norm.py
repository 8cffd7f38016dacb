"""RMS norm: what torch's own says, the same bits for a row in any company, and nothing written into the input."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from engine.models.norm import rms_norm

TYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


@TYPES
@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3])
def test_it_is_torchs_norm(dtype: torch.dtype, size: float) -> None:
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(9, 576, generator=generator) * size).to(dtype)
    weight = torch.randn(576, generator=generator).to(dtype)
    before = x.clone()
    got = rms_norm(x, weight, 1e-5)
    want = functional.rms_norm(x.double(), (576,), weight.double(), 1e-5)
    assert got.dtype is dtype
    assert torch.equal(x, before)
    torch.testing.assert_close(got.double(), want, rtol=1e-5 if dtype is torch.float32 else 8e-3, atol=1e-6)


@TYPES
def test_heads_have_weights_each(dtype: torch.dtype) -> None:
    x, weight = torch.randn(5, 4, 16).to(dtype), torch.randn(4, 16).to(dtype)
    want = functional.rms_norm(x.double(), (16,), None, 1e-6) * weight.double()
    torch.testing.assert_close(rms_norm(x, weight, 1e-6).double(), want, rtol=1e-2, atol=1e-2)


@TYPES
@pytest.mark.parametrize("hidden", [48, 576, 2048])
def test_a_row_is_the_same_bits_alone_and_in_company(dtype: torch.dtype, hidden: int) -> None:
    x, weight = torch.randn(300, hidden).to(dtype), torch.randn(hidden).to(dtype)
    whole = rms_norm(x, weight, 1e-5)
    for rows in (1, 2, 3, 48, 299):
        assert torch.equal(rms_norm(x[:rows], weight, 1e-5), whole[:rows])
        assert torch.equal(rms_norm(x[-rows:], weight, 1e-5), whole[-rows:])


def test_no_number_stays_none_and_zeros_stay_zeros() -> None:
    x = torch.zeros(3, 8)
    x[1, 2] = float("nan")
    got = rms_norm(x, torch.ones(8), 1e-5)
    assert got[1].isnan().all()
    assert not got[[0, 2]].any()
