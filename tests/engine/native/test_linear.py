"""Products in C: what float64 says, the same bits alone and in company, the same int8 bits with and without tiles."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import silu

from engine.models.native_linear import Int8Linear, NativeLinear, Norm, Passage, PlainLinear, Scratch
from engine.models.quantized import QuantizedLinear
from engine.native.library import ADD_TO_NUMBERS, SILU_TO_NUMBERS, TO_FLOAT, TO_NUMBERS, Mode
from tests.engine.models.test_quantized import rounded
from tests.engine.native.libraries import ALL, DTYPE, EACH, Kernels, library

#: Where 16, 32, 128 and 256 rows begin something new.
ROWS = st.sampled_from([1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 48, 64, 100, 128, 129, 144, 250, 256, 257, 300])


#: What rounding a result once may change of it.
ROUNDING = {torch.bfloat16: 2**-7.99, torch.float32: 2**-22}


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@dataclass
class Case:
    """Inputs of one layer."""

    rows: int
    out: int
    inner: int
    seed: int = 0
    bias: bool = False
    gated: bool = False
    kernels: Kernels = "no tiles"

    def __post_init__(self) -> None:
        self.dtype = DTYPE[self.kernels]
        self.x = normal(self.rows, self.inner, seed=self.seed, dtype=self.dtype)
        self.weight = normal(self.out, self.inner, seed=self.seed + 1, dtype=self.dtype) * 0.125
        self.offset = normal(self.out, seed=self.seed + 2, dtype=self.dtype) if self.bias else None

    @property
    def width(self) -> int:
        return self.out // 2 if self.gated else self.out


def run(layer: NativeLinear, x: torch.Tensor, base: torch.Tensor, mode: Mode, norm: Norm | None = None) -> torch.Tensor:
    """What the layer leaves in a copy of `base`."""
    out = base.clone()
    layer(Passage(Scratch(), len(x), x.shape[1], x.dtype), x.data_ptr(), out.data_ptr(), mode, norm)
    return out


def near(got: torch.Tensor, want: torch.Tensor, *, share: float, room: float) -> bool:
    """Within `room` or a `share` of the value."""
    return bool(((got.double() - want).abs() <= room + share * want.abs()).all())


@EACH
@settings(max_examples=40)
@given(
    rows=ROWS,
    out=st.integers(1, 200),
    steps=st.integers(1, 6),
    bias=st.booleans(),
    mode=st.sampled_from([TO_NUMBERS, ADD_TO_NUMBERS, TO_FLOAT]),
    seed=st.integers(0, 99),
)
def test_products_are_rounded_once(
    kernels: Kernels, rows: int, out: int, steps: int, bias: bool, mode: Mode, seed: int
) -> None:
    case = Case(rows, out, 32 * steps, seed, bias, kernels=kernels)
    layer = PlainLinear(library(kernels), case.weight, case.offset)
    base = normal(rows, out, seed=seed + 3, dtype=case.dtype)
    got = run(layer, case.x, base.float() if mode == TO_FLOAT else base, mode)
    want = case.x.double() @ case.weight.double().t()
    if case.offset is not None:
        want += case.offset.double()
    if mode == ADD_TO_NUMBERS:
        want += base.double()
    assert near(got, want, share=0.0 if mode == TO_FLOAT else ROUNDING[case.dtype], room=2e-5)


@EACH
@pytest.mark.parametrize("kind", [PlainLinear, Int8Linear])
@pytest.mark.parametrize("width", [16, 40, 33, 100, 7])
@pytest.mark.parametrize("bias", [False, True])
def test_gate_and_up_come_out_as_one(
    kernels: Kernels, kind: type[PlainLinear | Int8Linear], width: int, bias: bool
) -> None:
    case = Case(37, 2 * width, 128, bias=bias, gated=True, kernels=kernels)
    layer = kind(library(kernels), case.weight, case.offset, gated=True)
    got = run(layer, case.x, torch.full((37, width), 9.0, dtype=case.dtype), SILU_TO_NUMBERS)
    weight = case.weight if kind is PlainLinear else rounded(case.weight.float())
    both = case.x.double() @ weight.double().t() + (0 if case.offset is None else case.offset.double())
    want = silu(both[:, :width]) * both[:, width:]
    share = 1e-5 if kind is PlainLinear and case.dtype is torch.float32 else 0.005
    assert near(got, want, share=share, room=1e-5 if kind is PlainLinear else 0.01)


@EACH
@pytest.mark.parametrize("kind", [PlainLinear, Int8Linear])
def test_a_row_has_the_same_bits_alone_in_company_and_with_other_threads(
    kernels: Kernels, kind: type[PlainLinear | Int8Linear]
) -> None:
    case = Case(300, 192, 576, kernels=kernels)
    layer, norm = kind(library(kernels), case.weight), Norm(normal(576, seed=8), 1e-5)
    base = torch.zeros(300, 192)
    together = run(layer, case.x, base, TO_FLOAT, norm)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert torch.equal(run(layer, case.x, base, TO_FLOAT, norm), together)
    finally:
        torch.set_num_threads(threads)
    for first, end in ((0, 1), (5, 6), (17, 34), (40, 48), (0, 33), (299, 300), (100, 260)):
        got = run(layer, case.x[first:end].contiguous(), base[first:end], TO_FLOAT, norm)
        assert torch.equal(got, together[first:end]), (first, end)


@EACH
@settings(max_examples=30)
@given(rows=ROWS, out=st.integers(1, 150), steps=st.integers(1, 5), bias=st.booleans(), seed=st.integers(0, 99))
def test_int8_products_are_near_torchs(
    kernels: Kernels, rows: int, out: int, steps: int, bias: bool, seed: int
) -> None:
    case = Case(rows, out, 64 * steps, seed, bias, kernels=kernels)
    got = run(Int8Linear(library(kernels), case.weight, case.offset), case.x, torch.zeros(rows, out), TO_FLOAT)
    offset = None if case.offset is None else case.offset.float()
    want = QuantizedLinear(case.weight.float(), offset, two_rows=True)(case.x.float()).double()
    # Half a step of the second row may be rounded the other way.
    step = case.x.float().abs().amax(1, keepdim=True).double() / 127 / 254
    room = step * case.weight.float().abs().double().sum(1) + 1e-5
    assert bool(((got.double() - want).abs() <= room + 1e-5 * want.abs()).all())


@settings(max_examples=30)
@given(rows=ROWS, out=st.integers(1, 150), steps=st.integers(1, 5), bias=st.booleans(), seed=st.integers(0, 99))
def test_int8_sums_are_the_same_bits_with_and_without_tiles(
    rows: int, out: int, steps: int, bias: bool, seed: int
) -> None:
    case, both = Case(rows, out, 64 * steps, seed, bias), ALL[:2]
    one, other = (
        run(Int8Linear(library(kernels), case.weight, case.offset), case.x, torch.zeros(rows, out), TO_FLOAT)
        for kernels in both
    )
    assert torch.equal(one, other)


@EACH
@pytest.mark.parametrize("kind", [PlainLinear, Int8Linear])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so_and_in_its_row(
    kernels: Kernels, kind: type[PlainLinear | Int8Linear], bad: float
) -> None:
    case = Case(20, 64, 128, kernels=kernels)
    case.x[3, 17] = bad
    got = run(kind(library(kernels), case.weight), case.x, torch.zeros(20, 64), TO_FLOAT)
    assert not got[3].isfinite().any()
    assert got[torch.arange(20) != 3].isfinite().all()


@EACH
def test_rows_of_zeros_and_of_the_smallest_numbers_stay_small(kernels: Kernels) -> None:
    case = Case(3, 64, 128, kernels=kernels)
    case.x[0], case.x[1] = 0, 1e-38
    got = run(Int8Linear(library(kernels), case.weight), case.x, torch.ones(3, 64), TO_FLOAT)
    assert not got[0].any()
    assert got[1].abs().max() < 1e-36


@EACH
@pytest.mark.parametrize("size", [1.2e-38, 3e-37, 4e-37, 1e-30])
def test_small_numbers_keep_their_sign_and_size(kernels: Kernels, size: float) -> None:
    case = Case(2, 64, 128, kernels=kernels)
    case.x = (case.x.sign() * size).to(case.dtype)
    got = run(Int8Linear(library(kernels), case.weight), case.x, torch.ones(2, 64), TO_FLOAT)
    want = case.x.double() @ rounded(case.weight.float()).double().t()
    assert near(got, want, share=0.01, room=128 * 1.2e-38 / 254)


@EACH
def test_nothing_is_written_beside_the_columns_of_a_result(kernels: Kernels) -> None:
    case = Case(5, 70, 64, kernels=kernels)
    memory = torch.full((7 * 70,), 5.0)
    out = memory[70 : 6 * 70]
    layer = PlainLinear(library(kernels), case.weight)
    layer(Passage(Scratch(), 5, 64, case.dtype), case.x.data_ptr(), out.data_ptr(), TO_FLOAT)
    assert bool((memory[:70] == 5.0).all())
    assert bool((memory[6 * 70 :] == 5.0).all())
