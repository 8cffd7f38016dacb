"""The compiled kernels, for tests. Owns: one library of each build, made once."""

from __future__ import annotations

from functools import cache
from typing import Final, Literal

import pytest
import torch

from engine.native.compiler import Build, NativeUnavailableError, may_use_tiles
from engine.native.library import Library

#: bfloat16 with matrix units, bfloat16 without, float32.
Kernels = Literal["tiles", "no tiles", "float32"]
ALL: Final[tuple[Kernels, ...]] = ("tiles", "no tiles", "float32")
#: All of them, where this processor has them.
EACH = pytest.mark.parametrize("kernels", ALL)
#: What they compute in.
DTYPE: Final[dict[Kernels, torch.dtype]] = {
    "tiles": torch.bfloat16,
    "no tiles": torch.bfloat16,
    "float32": torch.float32,
}


@cache
def _made(kernels: Kernels) -> Library | str:
    try:
        return Library(Build(tiles=kernels == "tiles", float32=kernels == "float32").wait())
    except NativeUnavailableError as error:
        return str(error)


def library(kernels: Kernels | None = None) -> Library:
    """The kernels; skips the test where there can be none, or none with matrix units. None: as the engine has them."""
    if kernels is None:
        kernels = "tiles" if may_use_tiles() else "no tiles"
    made = _made(kernels)
    if isinstance(made, str):
        pytest.skip(made)  # it says what is missing: a compiler, or what the processor lacks
    if kernels == "tiles" and not made.has_tiles:
        pytest.skip("this processor has no matrix units (AMX)")
    return made
