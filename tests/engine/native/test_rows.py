"""What C does to single rows, against torch in float64: norms, rotation, the way into the cache."""

from __future__ import annotations

import ctypes

import pytest
import torch

from engine.native.library import Heads
from tests.engine.native.libraries import DTYPE, Kernels, library

#: Matrix units have no part in what is done to rows.
KERNELS = pytest.mark.parametrize("kernels", ["no tiles", "float32"])
#: What rounding once may change.
ROUNDING = {torch.bfloat16: 2**-7.99, torch.float32: 2**-21}


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMS norm of the last axis in float64."""
    wide = x.double()
    return wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double()


@KERNELS
@pytest.mark.parametrize("rows", [1, 7, 8, 33])
@pytest.mark.parametrize("width", [16, 96, 576])
def test_norm(kernels: Kernels, rows: int, width: int) -> None:
    dtype = DTYPE[kernels]
    x, weight, out = normal(rows, width, dtype=dtype), normal(width, seed=1), normal(rows, width, seed=2, dtype=dtype)
    library(kernels).norm_rows(x.data_ptr(), weight.data_ptr(), 1e-5, out.data_ptr(), rows, width, 2)
    want = normed(x, weight, 1e-5)
    assert bool(((out.double() - want).abs() <= ROUNDING[dtype] * want.abs() + 1e-30).all())


@KERNELS
@pytest.mark.parametrize("dim", [32, 64, 96])
@pytest.mark.parametrize("with_norm", [False, True])
def test_heads_are_normed_and_turned_and_go_to_their_slots(kernels: Kernels, dim: int, with_norm: bool) -> None:
    rows, q_heads, kv_heads, slots = 11, 6, 2, 40
    dtype = DTYPE[kernels]
    qkv = normal(rows, (q_heads + 2 * kv_heads) * dim, dtype=dtype)
    before = qkv.view(rows, -1, dim).double()
    k_cache, v_cache = (
        torch.full((slots, kv_heads, dim), 3.0, dtype=dtype),
        torch.full((slots, kv_heads, dim), 4.0, dtype=dtype),
    )
    out_slots = torch.randperm(slots, generator=torch.Generator().manual_seed(5))[:rows]
    positions = torch.arange(rows) * 3
    angles = torch.rand(rows * 3, dim // 2, generator=torch.Generator().manual_seed(6)) * 6
    cos, sin = angles.cos(), angles.sin()
    weight = normal(q_heads + kv_heads, dim, seed=7)
    library(kernels).rotate_and_store(
        ctypes.byref(
            Heads(
                qkv=qkv.data_ptr(),
                k_slots=k_cache.data_ptr(),
                v_slots=v_cache.data_ptr(),
                slots=out_slots.data_ptr(),
                positions=positions.data_ptr(),
                cos=cos.data_ptr(),
                sin=sin.data_ptr(),
                head_norm=weight.data_ptr() if with_norm else None,
                rows=rows,
                q_heads=q_heads,
                kv_heads=kv_heads,
                dim=dim,
                eps=1e-6,
                threads=2,
            )
        )
    )
    turned = before[:, : q_heads + kv_heads]
    if with_norm:
        turned = normed(turned, weight, 1e-6)
    a, b = turned.chunk(2, dim=-1)
    c, s = cos[positions][:, None].double(), sin[positions][:, None].double()
    want = torch.cat((a * c - b * s, b * c + a * s), dim=-1)
    room = ROUNDING[dtype] * want.abs() + 1e-6
    got_q = qkv.view(rows, -1, dim)[:, :q_heads].double()
    assert bool(((got_q - want[:, :q_heads]).abs() <= room[:, :q_heads]).all())
    assert bool(((k_cache[out_slots].double() - want[:, q_heads:]).abs() <= room[:, q_heads:]).all())
    assert torch.equal(v_cache[out_slots].double(), before[:, q_heads + kv_heads :])
    others = torch.ones(slots, dtype=torch.bool)
    others[out_slots] = False
    assert bool((k_cache[others] == 3).all())
    assert bool((v_cache[others] == 4).all())
