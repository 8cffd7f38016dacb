"""The second half of gpu_check's section 3 on the CPU double: small operators, and faults of theirs made on purpose."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch

from bench.gpu_check.compiling import small_kernels
from bench.gpu_check.operators import operators
from tests.bench.test_gpu_check import SMALL, failed, rig_of
from tests.engine.attention.late_device import LateDevice
from tests.engine.models import shaped_operators

#: The type of the real section: in float32 sums are as far off as one rounding.
IN_BFLOAT16 = dataclasses.replace(SMALL, dtype=torch.bfloat16)
AROUND = "v and the rows around keep their bits"


def failures() -> set[str]:
    """Names of what failed, without the shape."""
    names = failed(operators(rig_of(LateDevice(late=False), IN_BFLOAT16)))
    return {name.removeprefix("D 8, group 3").removeprefix("D 16, group 2").lstrip(",: ") for name in names}


def test_every_operator_is_rounded_once_and_torchs_form_is_told_beside_it() -> None:
    findings = list(operators(rig_of(LateDevice(late=False), IN_BFLOAT16)))
    assert failed(iter(findings)) == []
    # Two shapes; six operators and what lies around.
    assert len(findings) == 2 * 7
    assert all(finding.note.startswith("torch's operators: ") for finding in findings if finding.value is not None)


def test_all_three_modules_are_compiled_beforehand_and_one_that_cannot_be_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert [(finding.name, finding.ok) for finding in small_kernels(rig_of(LateDevice(late=False), IN_BFLOAT16))] == [
        ("norms", True),
        ("RoPE", True),
        ("activation", True),
    ]

    def broken(*args: object) -> None:
        raise RuntimeError("no nvcc")

    monkeypatch.setattr(shaped_operators, "turn", broken)
    told = {finding.name: finding for finding in small_kernels(rig_of(LateDevice(late=False), IN_BFLOAT16))}
    assert [finding.ok for finding in told.values()] == [True, False, True]
    assert told["RoPE"].note == "RuntimeError: no nvcc"


def sum_rounded_first(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    residual.add_(x)
    shaped_operators.write_rms_norm(x, residual, weight, eps)


def nothing_added(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    shaped_operators.write_rms_norm(x, residual, weight, eps)


def without_weight(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    rows = x.float()
    out.copy_(rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps))


def angles_in_bfloat16(positions: torch.Tensor, heads: torch.Tensor, table: torch.Tensor) -> None:
    TURN(positions, heads, table.bfloat16().float())


def one_position_on(positions: torch.Tensor, heads: torch.Tensor, table: torch.Tensor) -> None:
    TURN((positions + 1) % len(table), heads, table)


def over_its_end(positions: torch.Tensor, heads: torch.Tensor, table: torch.Tensor) -> None:
    """One head more than there are, within wider rows: behind q that is k's first one, behind k it is v's."""
    rows, count, dim = heads.shape
    more = int(heads.stride(0) > count * dim)
    TURN(positions, heads.as_strided((rows, count + more, dim), heads.stride()), table)


def up_first(out: torch.Tensor, x: torch.Tensor) -> None:
    ACTIVATE(out, torch.cat(x.chunk(2, dim=-1)[::-1], dim=-1))


def a_row_too_many(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    wider = residual.as_strided((len(residual) + 1, residual.shape[1]), residual.stride())
    ADD(x, residual, weight, eps)
    wider[-1] += 1


TURN, ACTIVATE, ADD = shaped_operators.turn, shaped_operators.write_silu_and_mul, shaped_operators.add_and_norm
FAULTS: list[tuple[str, Callable[..., None], set[str]]] = [
    ("add_and_norm", sum_rounded_first, {"norm of the sum"}),
    ("add_and_norm", nothing_added, {"sum", "norm of the sum"}),
    ("add_and_norm", a_row_too_many, {AROUND}),
    ("write_rms_norm", without_weight, {"norm", "norms of heads"}),
    ("turn", angles_in_bfloat16, {"RoPE"}),
    ("turn", one_position_on, {"RoPE", "norms of heads"}),
    ("turn", over_its_end, {"RoPE", AROUND}),
    ("write_silu_and_mul", up_first, {"activation"}),
]


@pytest.mark.parametrize(("name", "fault", "found"), FAULTS, ids=[fault.__name__ for _, fault, _ in FAULTS])
def test_a_fault_is_found_where_it_is(
    monkeypatch: pytest.MonkeyPatch, name: str, fault: Callable[..., None], found: set[str]
) -> None:
    monkeypatch.setattr(shaped_operators, name, fault)
    assert failures() == found
