"""Library. Owns: the compiled kernels as Python calls; what their arguments are is said beside each kernel in C.

Pointers are integers (`Tensor.data_ptr`), lengths are elements. Nothing is checked here: the callers own the shapes.
Calls give the interpreter's lock away while they run.
"""

from __future__ import annotations

import ctypes
import os
from ctypes import c_float, c_int, c_long, c_void_p
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import torch

from engine.native.compiler import NativeUnavailableError

if TYPE_CHECKING:
    from engine.executor.base import LendCore

Mode = Literal[0, 1, 2, 3]
TO_NUMBERS: Final[Mode] = 0
ADD_TO_NUMBERS: Final[Mode] = 1
TO_FLOAT: Final[Mode] = 2
#: Gate and up side by side come out as silu(gate) * up.
SILU_TO_NUMBERS: Final[Mode] = 3
#: Columns of a group of packed weights, and inputs per step through it.
GROUP: Final = 64
NUMBERS_STEP: Final = 32
INT8_STEP: Final = 64
#: Tokens of one step of the softmax, and of the parts that a context is cut into.
STEP: Final = 64
PART: Final = 256
#: Of prompt pieces: columns (query rows times heads of a group) of one task.
COLUMNS: Final = 32
#: Largest head with matrix units.
MOST_DIM: Final = 256


class Heads(ctypes.Structure):
    """`Heads` of kernels/rows.c."""

    _fields_ = (
        *((name, c_void_p) for name in ("qkv", "k_slots", "v_slots", "slots", "positions", "cos", "sin", "head_norm")),
        *((name, c_long) for name in ("rows", "q_heads", "kv_heads", "dim")),
        ("eps", c_float),
        ("threads", c_int),
    )


class Matrix(ctypes.Structure):
    """`Matrix` of kernels/forward.c."""

    _fields_ = (
        *((name, c_void_p) for name in ("packed", "scales", "sums", "bias")),
        *((name, c_long) for name in ("inputs", "groups", "width")),
    )


class Norm(ctypes.Structure):
    """`Norm` of kernels/forward.c."""

    _fields_ = (("weight", c_void_p), ("eps", c_float))


class Attention(ctypes.Structure):
    """`Attention` of kernels/forward.c."""

    _fields_ = (("rows", c_void_p), ("pieces", c_void_p))


class Layer(ctypes.Structure):
    """`Layer` of kernels/forward.c."""

    _fields_ = (
        *((name, Norm) for name in ("attention_norm", "mlp_norm")),
        *((name, Matrix) for name in ("qkv", "attention_out", "gate_up", "down")),
        *((name, c_void_p) for name in ("head_norm", "k", "v")),
        ("window", c_long),
    )


class Passage(ctypes.Structure):
    """`Passage` of kernels/forward.c."""

    _fields_ = (
        *((name, c_void_p) for name in ("narrow", "scales", "wide")),
        ("rows", c_long),
        ("threads", c_int),
    )


class Forward(ctypes.Structure):
    """`Forward` of kernels/forward.c."""

    _fields_ = (
        ("passage", Passage),
        *((name, c_void_p) for name in ("layers", "attention", "heads", "hidden", "mixed", "between")),
    )


class Decode(ctypes.Structure):
    """`Decode` of kernels/decode.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("q", "out", "k", "v", "page_ids", "parts", "partial")),
        *((name, c_long) for name in ("num_parts", "q_stride", "out_stride")),
        *((name, c_long) for name in ("page_size", "q_heads", "kv_heads", "dim")),
        ("scale", c_float),
        ("threads", c_int),
    )


class Prefill(ctypes.Structure):
    """`Prefill` of kernels/prefill.c."""

    _fields_ = (
        *((name, c_void_p) for name in ("q", "out", "k", "v", "page_ids", "pieces", "layouts", "items")),
        *((name, c_void_p) for name in ("laid_k", "laid_v")),
        *((name, c_long) for name in ("num_layouts", "num_items", "q_stride", "out_stride")),
        *((name, c_long) for name in ("page_size", "q_heads", "kv_heads", "dim", "window")),
        ("scale", c_float),
        ("threads", c_int),
    )


_SIGNATURES: Final[dict[str, tuple[Any, ...]]] = {
    "pack_numbers": (c_void_p, c_void_p, c_long, c_long, c_long, c_long),
    "pack_int8": (c_void_p, c_void_p, c_void_p, c_long, c_long, c_long),
    "norm_rows": (c_void_p, c_void_p, c_float, c_void_p, c_long, c_long, c_int),
    "multiply": (ctypes.POINTER(Passage), ctypes.POINTER(Matrix), c_void_p, c_void_p, c_int, ctypes.POINTER(Norm)),
    "rotate_and_store": (ctypes.POINTER(Heads),),
    "decode_attention": (ctypes.POINTER(Decode),),
    "prefill_attention": (ctypes.POINTER(Prefill),),
    **{
        name: (ctypes.POINTER(Forward), c_long)
        for name in ("begin_layer", "attend_layer", "finish_layer", "run_layers")
    },
}


class Library:
    """The kernels of `path`.

    dtype       what their rows, weights and K/V are made of: bfloat16 or float32
    has_tiles   they use the processor's matrix units, as far as their compiler knew them
    """

    def __init__(self, path: Path) -> None:
        """Raises NativeUnavailableError where the library cannot be loaded."""
        try:
            library = ctypes.CDLL(str(path))
            for name, arguments in _SIGNATURES.items():
                function = getattr(library, name)
                function.argtypes, function.restype = arguments, None
            # Not worth to give the interpreter's lock away for: it stores two numbers.
            self._limit_threads = ctypes.PyDLL(str(path)).limit_threads
            self._limit_threads.argtypes, self._limit_threads.restype = (c_int, c_long), None
            self.has_tiles = bool(library.use_tiles())
            self.dtype = torch.float32 if library.number_bytes() == 4 else torch.bfloat16
        except (OSError, AttributeError) as error:
            raise NativeUnavailableError(f"{path} cannot be used: {error}") from error
        self.pack_numbers = library.pack_numbers
        self.pack_int8 = library.pack_int8
        self.norm_rows = library.norm_rows
        self.multiply = library.multiply
        self.rotate_and_store = library.rotate_and_store
        self.decode_attention = library.decode_attention
        self.prefill_attention = library.prefill_attention
        self.begin_layer = library.begin_layer
        self.attend_layer = library.attend_layer
        self.finish_layer = library.finish_layer
        self.run_layers = library.run_layers

    def core_lender(self) -> LendCore | None:
        """What leaves one of this process's processors to others; None where torch's threads leave one free anyway."""
        threads = torch.get_num_threads()
        if threads < 2 or threads < len(os.sched_getaffinity(0)):
            return None
        return partial(self._limit_threads, threads - 1)
