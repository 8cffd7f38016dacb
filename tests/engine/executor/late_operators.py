"""Operators that are late. Owns: a device on which nothing is computed before the host waits for it.

`LateDevice` holds back copies and kernels; here torch's own operators are held back too. What they return is there at
once, as on a GPU, and holds poison until the device came to it. So a value that the host reads too early is wrong in
every run alike, and what asks the device for a value in order to go on is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map

from tests.engine.attention.late_device import LateDevice, poison


class HostData(AssertionError):
    """A tensor made of Python numbers: on a GPU a copy from ordinary memory, which the host waits for."""


class LateStream(LateDevice):
    """A LateDevice whose own doings are the host's, also while operators are late."""

    def pinned(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        with _disable_current_modes():
            return super().pinned(count, dtype)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        with _disable_current_modes():
            super().copy(target, source)

    def run_until(self, place: int) -> None:
        # What was begun in inference mode can be written to there alone.
        with _disable_current_modes(), torch.inference_mode():
            super().run_until(place)


class LateOperators(TorchDispatchMode):
    """What is called inside is put into the stream of `device`. Views are views at once; the shapes of everything else
    come from fake tensors, which know no values: an operator whose result has a shape that depends on them raises, and
    so does reading one."""

    def __init__(self, device: LateDevice) -> None:
        super().__init__()
        self._device = device
        self._shapes = FakeTensorMode(allow_non_fake_inputs=True)
        #: What operators on arguments of these shapes give: asking for it anew takes most of the time.
        self._known: dict[Any, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}

        def compute() -> Any:
            return func(*args, **kwargs)

        if func is torch.ops.aten.lift_fresh.default:
            raise HostData("a tensor was made of Python numbers")
        if func._schema.is_mutable:
            assert func._schema.name.endswith("_"), f"{func} writes to something else than its first argument"
            self._device.launch(compute)
            return args[0]
        if any(argument.alias_info is not None for argument in func._schema.arguments):
            first = compute()
            if _storages(first) & _storages((args, kwargs)):
                return first  # it shows what its base holds, whenever that comes
            return self._late(first, compute)
        asked = (func, *map(_described, tree_flatten((args, kwargs))[0]))
        if asked not in self._known:
            with self._shapes:
                self._known[asked] = compute()
        return self._late(tree_map(_poisoned, self._known[asked]), compute)

    def _late(self, result: Any, compute: Callable[[], Any]) -> Any:
        """`result` holds what `compute` gives once the device came to it."""

        def write() -> None:
            for there, new in zip(tree_flatten(result)[0], tree_flatten(compute())[0], strict=True):
                there.copy_(new)

        self._device.launch(write)
        return result


def _described(argument: Any) -> Any:
    """All of an argument that the shape of a result can hang on."""
    if isinstance(argument, torch.Tensor):
        return tuple(argument.shape), argument.stride(), argument.dtype
    return type(argument), argument


def _poisoned(shaped: Any) -> Any:
    if not isinstance(shaped, torch.Tensor):
        return shaped
    made = torch.empty_strided(shaped.size(), shaped.stride(), dtype=shaped.dtype)
    if made.dtype.is_floating_point:
        return made.fill_(float("nan"))
    return made.fill_(made.dtype is not torch.bool and poison(made.dtype))


def _storages(tree: Any) -> set[int]:
    """Where the tensors of `tree` keep their values."""
    tensors = [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, torch.Tensor)]
    return {tensor.untyped_storage()._cdata for tensor in tensors}
