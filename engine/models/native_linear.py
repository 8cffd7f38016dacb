"""Linear layers on the kernels in C. Owns: packed weights, and the form that rows take on their way through them.

Same meaning as engine.models.linear and engine.models.quantized (`int8`), with what stands around a product done in
it: the norm before, the bias, the residual and the gate after. Sums are float32 and rounded once, to the type of the
library: bfloat16 or float32.
"""

from __future__ import annotations

from typing import Protocol

import torch

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
    """What rows of one batch need on their way through layers, as pointers: looked up once, used by every layer.

    count     rows
    threads   that work on them
    narrow    [count, widest] in the library's type, or [2 count, widest] int8: high rows, then low rows
    scales    [count] float32
    wide      [threads, widest] float32
    """

    __slots__ = ("_memory", "count", "narrow", "scales", "threads", "wide")

    def __init__(self, scratch: Scratch, count: int, widest: int, dtype: torch.dtype) -> None:
        """`widest`: inputs of the widest layer; `dtype`: the library's."""
        self.count = count
        self.threads = torch.get_num_threads()
        narrow = scratch.rows("narrow", dtype.itemsize * count, widest, torch.int8)
        scales = scratch.rows("scales", count, 1, torch.float32)
        wide = scratch.rows("wide", self.threads, widest, torch.float32)
        self._memory = narrow, scales, wide  # pointers keep nothing alive
        self.narrow, self.scales, self.wide = narrow.data_ptr(), scales.data_ptr(), wide.data_ptr()


class Norm:
    """The RMS norm before a layer. weight [in]."""

    __slots__ = ("_weight", "eps", "weight")

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self._weight = weight.float().contiguous()
        self.weight = self._weight.data_ptr()
        self.eps = eps


class NativeLinear(Protocol):
    """out = norm(x) Wᵀ + bias, in a mode of engine.native.library."""

    def __call__(self, passage: Passage, x: int, out: int, mode: Mode, norm: Norm | None = None) -> None:
        """`x` points to [R, in], `out` to [R, out]; [R, out / 2] where gate and up come out as one."""
        ...


class PlainLinear:
    """Weights in the library's type. `gated`: [gate rows, up rows], which come out as silu(gate) * up."""

    def __init__(
        self, library: Library, weight: torch.Tensor, bias: torch.Tensor | None = None, *, gated: bool = False
    ) -> None:
        """`weight` [out, in] in the library's type, in a multiple of 32; it is copied."""
        self._multiply, self._norm = library.linear_numbers, library.norm_rows
        weight, self._bias, self._width = _arranged(weight, bias, gated=gated)
        outputs, self._inputs = weight.shape
        self._groups = -(-outputs // GROUP)
        self._packed = torch.empty(self._groups * GROUP * self._inputs, dtype=library.dtype)
        library.pack_numbers(weight.data_ptr(), self._packed.data_ptr(), outputs, self._inputs, 0, self._groups)
        self._weights = self._packed.data_ptr(), _pointer(self._bias)

    def __call__(self, passage: Passage, x: int, out: int, mode: Mode, norm: Norm | None = None) -> None:
        rows, threads, inputs, width = passage.count, passage.threads, self._inputs, self._width
        if norm is not None:
            self._norm(x, norm.weight, norm.eps, passage.narrow, rows, inputs, threads)
            x = passage.narrow
        self._multiply(x, *self._weights, out, rows, inputs, self._groups, width, width, mode, threads)


class Int8Linear:
    """Weights in int8, activations in two int8 rows: see engine.models.quantized."""

    def __init__(
        self, library: Library, weight: torch.Tensor, bias: torch.Tensor | None = None, *, gated: bool = False
    ) -> None:
        """`weight` [out, in], in a multiple of 64."""
        self._multiply, self._quantize = library.linear_int8, library.quantize_rows
        weight, self._bias, self._width = _arranged(weight, bias, gated=gated)
        outputs, self._inputs = weight.shape
        self._groups = -(-outputs // GROUP)
        wide = weight.float()
        scales = (wide.abs().amax(1) / _MOST).clamp_min_(torch.finfo(torch.float32).tiny)
        quantized = (wide / scales[:, None]).round_().to(torch.int8)
        self._scales = torch.zeros(self._groups * GROUP)
        self._scales[:outputs] = scales
        self._packed = torch.empty(self._groups * GROUP * self._inputs, dtype=torch.int8)
        self._sums = torch.empty(self._groups * GROUP, dtype=torch.int32)
        packed, sums = self._packed.data_ptr(), self._sums.data_ptr()
        library.pack_int8(quantized.data_ptr(), packed, sums, outputs, self._inputs, self._groups)
        self._weights = packed, self._scales.data_ptr(), sums, _pointer(self._bias)

    def __call__(self, passage: Passage, x: int, out: int, mode: Mode, norm: Norm | None = None) -> None:
        rows, threads, inputs, width = passage.count, passage.threads, self._inputs, self._width
        high, low, scales = passage.narrow, passage.narrow + rows * inputs, passage.scales
        weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
        self._quantize(x, weight, eps, high, low, scales, passage.wide, rows, inputs, threads)
        self._multiply(high, low, scales, *self._weights, out, rows, inputs, self._groups, width, width, mode, threads)


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


def _pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
