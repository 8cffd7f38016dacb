"""Stand-ins for packages that SGLang imports on its way and that have no build for a machine without a GPU.

None of them has a part in scheduling: they compute images, kernels and grammars. Each import of one of `NAMES`, or of
anything below it, gives an empty module whose attributes are placeholders that cannot be called for a result.
Nothing of SGLang itself is replaced.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any, Final

NAMES: Final = (
    "torchvision",
    "sgl_kernel",
    "flashinfer",
    "deep_gemm",
    "deep_ep",
    "flash_mla",
    "xgrammar",
    "llguidance",
    "outlines",
    "interegular",
    "torchaudio",
    "torchcodec",
    "tilelang",
    "cutlass",
    "tvm_ffi",
    "decord",
    "av",
    "soundfile",
    "datasets",
    "modelscope",
    "timm",
    "compressed_tensors",
    "torch_memory_saver",
    "mistral_common",
    "openai_harmony",
    "gguf",
    "numba",
    "scipy",
    "quack",
    "humming",
    "kernels",
    "cuda",
    "einops",
)


class _Placeholder(type):
    """A class that may be named, subclassed and used as a decorator, and does nothing."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _placeholder(name)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and callable(args[0]):
            return args[0]  # a decorator without arguments
        return _placeholder(cls.__name__)

    def __or__(cls, other: Any) -> Any:
        return cls

    def __ror__(cls, other: Any) -> Any:
        return cls

    def __getitem__(cls, item: Any) -> Any:
        return cls


def _any_schema(cls: type, source: Any, handler: Any) -> Any:
    """What pydantic needs of a class that it finds in an annotation."""
    from pydantic_core import core_schema

    return core_schema.any_schema()


def _placeholder(name: str) -> Any:
    return _Placeholder(name, (), {"__get_pydantic_core_schema__": classmethod(_any_schema)})


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _placeholder(name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> Any:
        if name.split(".", maxsplit=1)[0] not in NAMES:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> types.ModuleType:
        module = _Module(spec.name)
        module.__version__ = "0"
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to run."""


def install() -> None:
    """Answer imports of `NAMES` that are not installed. Call it before `sglang` is imported."""
    sys.meta_path.append(_Finder())
