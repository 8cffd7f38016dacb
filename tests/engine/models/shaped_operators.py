"""FlashInfer's small operators on a CPU. Owns: their arithmetic by its contract, and functions of the module's shape.

The arithmetic is what the kernels do: sums, squares, angles and activations in float32, rounded once, when they are
written. What a kernel takes without a look is asked for here: weights of the input's type, rows that lie one behind the
other, a table in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.engine.attention.late_device import LateDevice, refuse_poison

#: Types that the kernels are compiled for.
KERNEL_TYPES = (torch.float16, torch.bfloat16)


def write_rms_norm(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    """out = x / rms(x) * weight, [R, H] with weight [H], or [R, heads, D] with weight [D]."""
    assert x.ndim in {2, 3}
    assert x.shape == out.shape
    check_norm(x, weight)
    rows = x.float()
    out.copy_(rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps) * weight.float())


def add_and_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    """residual += x and x = residual / rms(residual) * weight, of the sum before it is rounded."""
    assert x.ndim == 2
    assert x.shape == residual.shape
    assert residual.dtype is x.dtype
    assert residual.untyped_storage().data_ptr() != x.untyped_storage().data_ptr(), "each is written over the other"
    check_norm(x, weight)
    rows = x.float() + residual.float()
    residual.copy_(rows)
    x.copy_(rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps) * weight.float())


def turn(positions: torch.Tensor, heads: torch.Tensor, table: torch.Tensor) -> None:
    """heads [R, heads, D] turned in place, halves against each other, by rows of table [P, D]: cosines, then sines."""
    assert table.dtype is torch.float32
    assert table.is_contiguous()
    assert positions.is_contiguous()
    assert positions.dtype in {torch.int32, torch.int64}
    assert heads.stride(-1) == 1
    assert table.shape[1] == heads.shape[2], "only whole heads are turned here"
    cos, sin = table[positions.long()].chunk(2, dim=-1)
    first, second = heads.float().chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    heads.copy_(torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1))


def write_silu_and_mul(out: torch.Tensor, x: torch.Tensor) -> None:
    """out [R, F] = silu(gate) * up of x [R, 2 F], gate first."""
    assert x.is_contiguous(), "the kernel takes one row to lie behind the other"
    assert out.is_contiguous()
    gate, up = x.float().chunk(2, dim=-1)
    out.copy_(gate / (1 + torch.exp(-gate)) * up)


def check_norm(x: torch.Tensor, weight: torch.Tensor) -> None:
    assert weight.shape == x.shape[-1:]
    assert weight.dtype is x.dtype, "the kernel reads the weight as if it were of the input's type"
    assert x.stride(-1) == weight.stride(-1) == 1


class ShapedOperators:
    """The functions of the module, for a class that binds and counts calls and has a device.

    operator_types   types that are taken: those of the kernels, or more where bits are compared with a CPU's
    """

    device: LateDevice
    operator_types: tuple[torch.dtype, ...]
    bind: Callable[[str, Any, tuple[Any, ...], dict[str, Any]], dict[str, Any]]

    def rmsnorm(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        given = self._given("rmsnorm", "input", args, kwargs)
        x, weight, eps = given["input"], given["weight"], given.get("eps", 1e-6)
        out: torch.Tensor = given["out"] if given.get("out") is not None else torch.empty_like(x)
        self.device.launch(lambda: write_rms_norm(out, x, weight, eps))
        return out

    def fused_add_rmsnorm(self, *args: Any, **kwargs: Any) -> None:
        given = self._given("fused_add_rmsnorm", "input", args, kwargs)
        x, residual, weight, eps = given["input"], given["residual"], given["weight"], given.get("eps", 1e-6)
        self.device.launch(lambda: add_and_norm(x, residual, weight, eps))

    def apply_rope_with_cos_sin_cache_inplace(self, *args: Any, **kwargs: Any) -> None:
        given = self._given("apply_rope_with_cos_sin_cache_inplace", "query", args, kwargs)
        positions, table, size = given["positions"], given["cos_sin_cache"], given["head_size"]
        assert given.get("is_neox", True), "pairs of neighbours are another order of the weights"
        # Views of what was given, as there: a copy would be turned and forgotten.
        q, k = (given[name].view(len(positions), -1, size) for name in ("query", "key"))

        def kernel() -> None:
            refuse_poison(positions)
            turn(positions, q, table)
            turn(positions, k, table)

        self.device.launch(kernel)

    def silu_and_mul(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        given = self._given("silu_and_mul", "input", args, kwargs)
        x = given["input"]
        out: torch.Tensor = given["out"] if given.get("out") is not None else x.new_empty(len(x), x.shape[-1] // 2)
        self.device.launch(lambda: write_silu_and_mul(out, x))
        return out

    def _given(self, name: str, rows: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        given = self.bind(name, None, args, kwargs)
        assert given[rows].dtype in self.operator_types, f"no kernel of {name} takes {given[rows].dtype}"
        devices = {value.device for value in given.values() if isinstance(value, torch.Tensor)}
        assert len(devices) == 1, f"{name} is given tensors of {devices}"
        return given
