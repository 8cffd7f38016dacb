"""The compiled kernels, for tests. Owns: one library with and one without matrix units, made once."""

from __future__ import annotations

from functools import cache

import pytest

from engine.native.compiler import Build, NativeUnavailableError, may_use_tiles
from engine.native.library import Library

#: Both sets of kernels, where this processor has them.
BOTH = pytest.mark.parametrize("tiles", [True, False], ids=["tiles", "no tiles"])


@cache
def _made(tiles: bool) -> Library | str:
    try:
        return Library(Build(tiles=tiles).wait())
    except NativeUnavailableError as error:
        return str(error)


def library(tiles: bool | None = None) -> Library:
    """The kernels; skips the test where there can be none, or none with matrix units. None: as the engine has them."""
    if tiles is None:
        tiles = may_use_tiles()
    made = _made(tiles)
    if isinstance(made, str):
        pytest.skip(made)  # it says what is missing: a compiler, or what the processor lacks
    if tiles and not made.has_tiles:
        pytest.skip("this processor has no matrix units")
    return made
