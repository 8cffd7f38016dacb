"""Linear layers on the kernels in C. Owns: packed weights, and the form that rows take on their way through them.

Same meaning as engine.models.linear and engine.models.quantized (`int8`), with what stands around a product done in
it: the norm before, the bias, the residual and the gate after. Sums are float32 and rounded once, to the type of the
library: bfloat16 or float32.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch

from engine.native import library
from engine.native.library import GROUP, INT8_STEP, NUMBERS_STEP, Library, Mode

_MOST = 127


class Scratch:
    """Memory that stays, for the layers of one model, which take turns: new memory may be faulted in every time."""

    def __init__(self) -> None:
        self._memory: dict[str, torch.Tensor] = {}

    def rows(self, name: str, rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        """[rows, width], with whatever was left there; valid until somebody asks for the same name."""
        size = rows * width
        memory = self._memory.get(name)
        if memory is None or len(memory) < size:
            with torch.inference_mode(False):  # memory made within that mode cannot be written outside
                memory = self._memory[name] = torch.empty(size, dtype=dtype)
        return memory[:size].view(rows, width)


class Passage:
    """What rows of one batch need on their way through layers: looked up once, used by every layer.

    form   for the kernels: `Passage` of kernels/forward.c
    """

    __slots__ = ("_memory", "argument", "form")

    def __init__(self, scratch: Scratch, count: int, widest: int, dtype: torch.dtype) -> None:
        """`count` rows; `widest`: inputs of the widest layer; `dtype`: the library's."""
        threads = torch.get_num_threads()
        narrow = scratch.rows("narrow", dtype.itemsize * count, widest, torch.int8)
        scales = scratch.rows("scales", count, 1, torch.float32)
        wide = scratch.rows("wide", threads, widest, torch.float32)
        self._memory = narrow, scales, wide  # pointers keep nothing alive
        self.form = library.Passage(
            narrow=narrow.data_ptr(), scales=scales.data_ptr(), wide=wide.data_ptr(), rows=count, threads=threads
        )
        self.argument = ctypes.byref(self.form)


class Norm:
    """The RMS norm before a layer. weight [in].

    form   for the kernels: `Norm` of kernels/forward.c
    """

    __slots__ = ("_weight", "argument", "form")

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self._weight = weight.float().contiguous()
        self.form = library.Norm(weight=self._weight.data_ptr(), eps=eps)
        self.argument = ctypes.byref(self.form)


class NativeLinear:
    """out = norm(x) Wᵀ + bias, in a mode of engine.native.library.

    form   for the kernels: `Matrix` of kernels/forward.c
    """

    __slots__ = ("_argument", "_memory", "_multiply", "form")

    def __init__(
        self,
        kernels: Library,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        gated: bool,
        pack: Callable[[torch.Tensor, int], tuple[torch.Tensor, ...]],
    ) -> None:
        """`pack`: a weight [packed columns, in], and groups -> packed, and where there are any scales and sums."""
        arranged, bias, width = _arranged(weight, bias, gated=gated)
        outputs, inputs = arranged.shape
        groups = -(-outputs // GROUP)
        packed, *rest = pack(arranged, groups)
        self._memory = packed, *rest, bias  # pointers keep nothing alive
        names = ("scales", "sums")[: len(rest)]
        self.form = library.Matrix(
            packed=packed.data_ptr(),
            bias=None if bias is None else bias.data_ptr(),
            inputs=inputs,
            groups=groups,
            width=width,
            **{name: tensor.data_ptr() for name, tensor in zip(names, rest, strict=True)},
        )
        self._argument = ctypes.byref(self.form)
        self._multiply = kernels.multiply

    def __call__(self, passage: Passage, x: int, out: int, mode: Mode, norm: Norm | None = None) -> None:
        """`x` points to [R, in], `out` to [R, out]; [R, out / 2] where gate and up come out as one."""
        self._multiply(passage.argument, self._argument, x, out, mode, None if norm is None else norm.argument)


class PlainLinear(NativeLinear):
    """Weights in the library's type. `gated`: [gate rows, up rows], which come out as silu(gate) * up."""

    __slots__ = ()

    def __init__(
        self, kernels: Library, weight: torch.Tensor, bias: torch.Tensor | None = None, *, gated: bool = False
    ) -> None:
        """`weight` [out, in] in the library's type, in a multiple of 32; it is copied."""

        def pack(arranged: torch.Tensor, groups: int) -> tuple[torch.Tensor]:
            outputs, inputs = arranged.shape
            packed = torch.empty(groups * GROUP * inputs, dtype=kernels.dtype)
            kernels.pack_numbers(arranged.data_ptr(), packed.data_ptr(), outputs, inputs, 0, groups)
            return (packed,)

        super().__init__(kernels, weight, bias, gated, pack)


class Int8Linear(NativeLinear):
    """Weights in int8, activations in two int8 rows: see engine.models.quantized."""

    __slots__ = ()

    def __init__(
        self, kernels: Library, weight: torch.Tensor, bias: torch.Tensor | None = None, *, gated: bool = False
    ) -> None:
        """`weight` [out, in], in a multiple of 64."""

        def pack(arranged: torch.Tensor, groups: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            outputs, inputs = arranged.shape
            wide = arranged.float()
            of_rows = (wide.abs().amax(1) / _MOST).clamp_min_(torch.finfo(torch.float32).tiny)
            quantized = (wide / of_rows[:, None]).round_().to(torch.int8)
            scales = torch.zeros(groups * GROUP)
            scales[:outputs] = of_rows
            packed = torch.empty(groups * GROUP * inputs, dtype=torch.int8)
            sums = torch.empty(groups * GROUP, dtype=torch.int32)
            kernels.pack_int8(quantized.data_ptr(), packed.data_ptr(), sums.data_ptr(), outputs, inputs, groups)
            return packed, scales, sums

        super().__init__(kernels, weight, bias, gated, pack)


def input_step(quantization: str) -> int:
    """What the inputs of a layer have to be a multiple of."""
    return INT8_STEP if quantization == "int8" else NUMBERS_STEP


def _arranged(
    weight: torch.Tensor, bias: torch.Tensor | None, *, gated: bool
) -> tuple[torch.Tensor, torch.Tensor | None, int]:
    """Weight [packed columns, in], bias of the packed columns in float32, and columns of a result.

    Gate and up are put side by side, 16 rows of each in turn, so that the two halves of one output end in one place.
    """
    if not gated:
        return weight.contiguous(), _padded(bias), len(weight)
    width = len(weight) // 2
    arranged = _interleaved(weight)
    return arranged, _padded(None if bias is None else _interleaved(bias)), width


def _interleaved(rows: torch.Tensor) -> torch.Tensor:
    """[gate rows, up rows, …] -> 16 gate rows, 16 up rows, and so on; the last 16 are filled up with zeros."""
    width = len(rows) // 2
    blocks = -(-width // 16)
    both = rows.new_zeros(2, blocks * 16, *rows.shape[1:])
    both[:, :width] = rows.view(2, width, *rows.shape[1:])
    return both.view(2, blocks, 16, *rows.shape[1:]).transpose(0, 1).reshape(blocks * 32, *rows.shape[1:]).contiguous()


def _padded(bias: torch.Tensor | None) -> torch.Tensor | None:
    if bias is None:
        return None
    padded = torch.zeros(-(-len(bias) // GROUP) * GROUP)
    padded[: len(bias)] = bias
    return padded
