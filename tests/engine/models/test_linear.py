"""Linear: every layout multiplies the same, for any number of rows, with and without the residual."""

from __future__ import annotations

import pytest
import torch

from engine.models import linear
from engine.models.linear import Fill, Linear

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.25}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 2, 7, 33])
def test_product_equals_float64(dtype: torch.dtype, rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(40, 24, generator=generator).to(dtype)
    x = torch.randn(rows, 24, generator=generator).to(dtype)
    base = torch.randn(rows, 40, generator=generator).to(dtype)
    layer = Linear(weight)
    want = x.double() @ weight.double().T
    assert torch.allclose(layer(x).double(), want, atol=TOLERANCE[dtype])
    added = layer.add_to(base.clone(), x)
    assert torch.allclose(added.double(), want + base.double(), atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("packing", [True, False])
def test_a_bias_is_added_in_every_layout(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, packing: bool) -> None:
    if not packing:
        monkeypatch.setattr(linear, "_pack", lambda _: None)
    generator = torch.Generator().manual_seed(1)
    weight, bias, x, base = (
        torch.randn(*shape, generator=generator).to(dtype) for shape in ((40, 24), (40,), (3, 24), (3, 40))
    )
    layer = Linear(weight, bias)
    want = x.double() @ weight.double().T + bias.double()
    assert torch.allclose(layer(x).double(), want, atol=TOLERANCE[dtype])
    assert torch.allclose(layer.add_to(base.clone(), x).double(), want + base.double(), atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_matrices_are_packed_where_they_can_be(dtype: torch.dtype) -> None:
    is_packed = linear._pack(torch.ones(8, 4, dtype=dtype)) is not None
    assert (Linear(torch.ones(8, 4, dtype=dtype)).layout == "packed") == is_packed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_packing_the_answer_is_the_same(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """A torch build that offers no packing still multiplies."""
    weight, x = torch.randn(16, 8).to(dtype), torch.randn(3, 8).to(dtype)
    packed = Linear(weight)(x)
    monkeypatch.setattr(linear, "_pack", lambda _: None)
    plain = Linear(weight)
    assert plain.layout == ("transposed" if dtype is torch.float32 else "stored")
    assert torch.allclose(packed.float(), plain(x).float(), atol=TOLERANCE[dtype])
    assert torch.allclose(plain.add_to(torch.zeros_like(packed), x).float(), plain(x).float(), atol=1e-2)


@pytest.mark.parametrize(("out", "inner"), [(96, 64), (192, 576)])
def test_a_row_in_bfloat16_is_the_same_bits_alone_and_in_company(out: int, inner: int) -> None:
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(out, inner, generator=generator).bfloat16()
    x = torch.randn(600, inner, generator=generator).bfloat16()
    layer = Linear(weight, torch.randn(out, generator=generator).bfloat16())
    if layer.layout != "packed":
        pytest.skip("this build of torch packs no weights")
    whole = layer(x)
    for rows in (1, 2, 17, 33, 64, 100, 255, 256, 257, 513):
        assert torch.equal(layer(x[:rows]), whole[:rows]), rows
        assert torch.equal(layer(x[-rows:]), whole[-rows:]), rows


def test_row_counts_that_do_not_agree_are_not_mixed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product that rounds otherwise for few rows, as a kernel of its own does."""
    layer = Linear(torch.eye(8).bfloat16())
    if layer.layout != "packed":
        pytest.skip("this build of torch packs no weights")
    linear._agreeing.clear()
    asked: list[int] = []

    def product(_: Linear, x: torch.Tensor) -> torch.Tensor:
        asked.append(len(x))
        return x + (1 if len(x) < 60 or len(x) == 128 else 0)

    monkeypatch.setattr(Linear, "_packed_product", product)
    layer = Linear(torch.eye(8).bfloat16())
    assert layer._row_counts == (256, 192, 96, 64)
    asked.clear()
    x = torch.randn(300, 8).bfloat16()
    assert torch.equal(layer(x), x)
    assert torch.equal(layer(x[:3]), x[:3])
    assert asked == [256, 64, 64]
    linear._agreeing.clear()


def test_a_product_in_float32_is_asked_for_in_few_row_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """oneDNN keeps code and memory for each: a server whose batches have every length would grow by a gigabyte."""
    generator = torch.Generator().manual_seed(5)
    weight, x = torch.randn(24, 16, generator=generator), torch.randn(700, 16, generator=generator)
    layer = Linear(weight)
    if layer.layout != "packed":
        pytest.skip("this build of torch packs no weights")
    asked: set[int] = set()
    product = Linear._packed_product

    def noted(self: Linear, x: torch.Tensor) -> torch.Tensor:
        asked.add(len(x))
        return product(self, x)

    monkeypatch.setattr(Linear, "_packed_product", noted)
    want = x @ weight.T
    for rows in range(701):
        assert torch.allclose(layer(x[:rows]), want[:rows], atol=1e-4)
        assert torch.allclose(layer.add_to(torch.ones(rows, 24), x[:rows]), want[:rows] + 1, atol=1e-4)
    assert len(asked) < 30


@pytest.mark.parametrize("rows", [3, 256, 300, 513])
def test_a_long_product_is_added_part_by_part_to_the_same_bits(rows: int) -> None:
    generator = torch.Generator().manual_seed(3)
    layer = Linear(torch.randn(96, 64, generator=generator).bfloat16(), torch.randn(96, generator=generator).bfloat16())
    x, base = (torch.randn(rows, width, generator=generator).bfloat16() for width in (64, 96))
    want = base + layer(x)
    added = layer.add_to(base, x)
    assert torch.equal(added, want)
    assert added is base


def test_layers_that_share_their_fill_see_nothing_of_each_other() -> None:
    """The memory behind the rows holds what is left from other products, in the worst case no numbers."""
    generator = torch.Generator().manual_seed(4)
    fill = Fill()
    weights = [torch.randn(out, 64, generator=generator).bfloat16() for out in (96, 32)]
    alone, shared = [Linear(weight) for weight in weights], [Linear(weight, fill=fill) for weight in weights]
    x = torch.randn(7, 64, generator=generator).bfloat16()
    want = [layer(x[:2]) for layer in alone]
    for layer in shared:
        layer(torch.full((7, 64), float("nan"), dtype=torch.bfloat16))
        layer(x)
    assert all(torch.equal(layer(x[:2]), answer) for layer, answer in zip(shared, want, strict=True))
    shared[0](torch.full((40, 64), float("nan"), dtype=torch.bfloat16))
    assert all(torch.equal(layer(x[:2]), answer) for layer, answer in zip(shared, want, strict=True))


def test_memory_first_used_in_inference_mode_serves_outside_too() -> None:
    layer = Linear(torch.eye(16).bfloat16())
    x = torch.randn(3, 16).bfloat16()
    with torch.inference_mode():
        assert torch.equal(layer(x), x)
    assert torch.equal(layer(x[:2]), x[:2])


def test_few_usable_row_counts_are_weighed_against_many_products() -> None:
    assert linear._cost((256, 64)) < linear._cost((256,)) < linear._cost((16,))


def test_inputs_are_left_alone() -> None:
    weight, x = torch.randn(16, 8), torch.randn(3, 8)
    before = weight.clone(), x.clone()
    Linear(weight)(x)
    assert torch.equal(weight, before[0])
    assert torch.equal(x, before[1])
