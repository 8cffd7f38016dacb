"""Library. Owns: the compiled kernels as Python calls; what their arguments are is said beside each kernel in C.

Pointers are integers (`Tensor.data_ptr`), lengths are elements. Nothing is checked here: the callers own the shapes.
Calls give the interpreter's lock away while they run.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_long, c_void_p
from pathlib import Path
from typing import Any, Final, Literal

import torch

from engine.native.compiler import NativeUnavailableError

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
    "linear_numbers": (*(c_void_p,) * 4, *(c_long,) * 5, c_int, c_int),
    "linear_int8": (*(c_void_p,) * 8, *(c_long,) * 5, c_int, c_int),
    "norm_rows": (c_void_p, c_void_p, c_float, c_void_p, c_long, c_long, c_int),
    "quantize_rows": (c_void_p, c_void_p, c_float, *(c_void_p,) * 4, c_long, c_long, c_int),
    "rotate_and_store": (ctypes.POINTER(Heads),),
    "decode_attention": (ctypes.POINTER(Decode),),
    "prefill_attention": (ctypes.POINTER(Prefill),),
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
            self.has_tiles = bool(library.use_tiles())
            self.dtype = torch.float32 if library.number_bytes() == 4 else torch.bfloat16
        except (OSError, AttributeError) as error:
            raise NativeUnavailableError(f"{path} cannot be used: {error}") from error
        self.pack_numbers = library.pack_numbers
        self.pack_int8 = library.pack_int8
        self.linear_numbers = library.linear_numbers
        self.linear_int8 = library.linear_int8
        self.norm_rows = library.norm_rows
        self.quantize_rows = library.quantize_rows
        self.rotate_and_store = library.rotate_and_store
        self.decode_attention = library.decode_attention
        self.prefill_attention = library.prefill_attention
