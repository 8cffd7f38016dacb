"""A device that does everything as late as it may. Owns: the DeviceRuntime of the tests, on CPU tensors.

Work is put into a list and done only when somebody waits for it. So the host runs ahead as far as a GPU could ever let
it, in every run alike. What a copy brings along if its pinned source was written before it was done is not what was
there: it is poison, and a kernel that reads poison raises `PoisonRead`. `log` tells the order.

Capturing keeps the operators with their tensors and replays them on the same tensors, as a CUDA graph does: no Python
of the captured code runs again, and asking a captured tensor for its value raises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine.attention.device import DeviceMemory

MIB = 1024**2
GIB = 1024 * MIB


class PoisonRead(AssertionError):
    """A kernel read what a copy brought from pinned memory that the host had written meanwhile."""


class NotPinned(AssertionError):
    """A copy that was meant to be asynchronous reads from ordinary memory."""


class LateDevice:
    """late    work waits in a list until somebody waits for it; False: done at once
    deaf       waiting for an event does nothing: what code without events would do
    late_fetches  copies to the host wait until somebody waits for them, or for anything behind them
    poisons    what was written over arrives as poison; False: as what was written
    memory_plan   what `memory` answers, call by call; the last one for ever
    capability   see DeviceRuntime
    """

    def __init__(
        self,
        *,
        late: bool = True,
        deaf: bool = False,
        late_fetches: bool = False,
        poisons: bool = True,
        memory_plan: list[DeviceMemory] | None = None,
        capability: tuple[int, int] = (9, 0),
    ) -> None:
        self.device = torch.device("cpu")
        self.capability = capability
        self.log: list[str] = []
        self.waiting: list[Callable[[], None]] = []
        self.done = 0
        self._late = late
        self._deaf = deaf
        self._late_fetches = late_fetches
        self._poisons = poisons
        self._pinned: list[torch.Tensor] = []
        self._graph: LateGraph | None = None
        self._memory_plan = memory_plan or [DeviceMemory(total=80 * MIB, free=60 * MIB, allocated=0, peak=0)]
        self.peaks_reset = 0

    def pinned(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        memory = torch.zeros(count, dtype=dtype)
        self._pinned.append(memory)
        return memory

    def is_pinned(self, array: torch.Tensor) -> bool:
        """Whether `array` lies in memory that `pinned` gave."""
        pointer = array.untyped_storage().data_ptr()
        return any(pointer == memory.untyped_storage().data_ptr() for memory in self._pinned)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if not self.is_pinned(source):
            raise NotPinned(f"a copy of {tuple(source.shape)} {source.dtype} reads from memory that is not pinned")
        assert self._graph is None, "a copy from the host in a capture would bring the same values in each replay"
        before = source.clone()

        def arrive() -> None:
            if self._poisons and not torch.equal(source, before):
                target.fill_(poison(before.dtype))
            else:
                target.copy_(source)

        self.log.append(f"copy {len(source)}")
        self._start(arrive)

    def fetch(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if not self.is_pinned(target):
            raise NotPinned(f"a copy of {tuple(source.shape)} {source.dtype} goes to memory that is not pinned")
        self.log.append(f"fetch {len(source)}")

        def arrive() -> None:
            target.copy_(source)

        if self._late_fetches:
            self.waiting.append(arrive)
        else:
            self._start(arrive)

    def launch(self, kernel: Callable[[], None]) -> None:
        """A kernel: it runs in its place in the stream, and again in each replay of a graph that holds it."""
        if self._graph is not None:
            with self._graph.unrecorded():
                kernel()
            self._graph.steps.append(kernel)
            return
        self._start(kernel)

    def event(self) -> LateEvent:
        return LateEvent(self)

    def capture(self, work: Callable[[], None]) -> LateGraph:
        work()
        self.synchronize()
        self.log.append("capture")
        self._graph = LateGraph(self)
        try:
            with self._graph:
                work()
            return self._graph
        finally:
            self._graph = None

    def synchronize(self) -> None:
        self.run_until(self.done + len(self.waiting))

    def memory(self) -> DeviceMemory:
        return self._memory_plan.pop(0) if len(self._memory_plan) > 1 else self._memory_plan[0]

    def reset_peak(self) -> None:
        self.peaks_reset += 1

    def run_until(self, place: int) -> None:
        """Do what was started before `place`."""
        while self.waiting and self.done < place:
            self.done += 1
            self.waiting.pop(0)()

    def wait_for(self, place: int) -> None:
        if not self._deaf:
            self.run_until(place)

    def _start(self, work: Callable[[], None]) -> None:
        self.waiting.append(work)
        if not self._late:
            self.synchronize()


class LateEvent:
    def __init__(self, device: LateDevice) -> None:
        self._device = device
        self._place = 0

    def record(self) -> None:
        self._place = self._device.done + len(self._device.waiting)
        self._device.log.append("record")

    def wait(self) -> None:
        self._device.log.append("wait")
        self._device.wait_for(self._place)


class LateGraph(TorchDispatchMode):
    """Operators and kernels with their tensors, and `replay`, which runs them on the same tensors."""

    def __init__(self, device: LateDevice) -> None:
        super().__init__()
        self.steps: list[Callable[[], None]] = []
        self._device = device
        self._paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._paused:
            return func(*args, **kwargs)
        if func is torch.ops.aten._local_scalar_dense.default:
            raise AssertionError("a value was read in a capture: the device has not computed it yet")
        first = func(*args, **kwargs)
        schema = func._schema
        if any(argument.alias_info is not None for argument in schema.arguments):
            if schema.is_mutable:
                self.steps.append(lambda: func(*args, **kwargs))
            return first  # a view: it shows what its base holds, in each replay too
        self.steps.append(lambda: _write(first, func(*args, **kwargs)))
        return first

    @contextmanager
    def unrecorded(self) -> Iterator[None]:
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def replay(self) -> None:
        self._device.log.append("replay")
        for step in self.steps:
            self._device.launch(step)


def poison(dtype: torch.dtype) -> int:
    """No index, length or offset has this value."""
    return torch.iinfo(dtype).min + 7


def refuse_poison(*arrays: torch.Tensor) -> None:
    """What every kernel of the tests does first."""
    for array in arrays:
        if bool((array == poison(array.dtype)).any()):
            raise PoisonRead("a kernel read an array that the host wrote over before it was copied")


def _write(static: Any, fresh: Any) -> None:
    """Put new results where the captured ones lie."""

    def put(there: Any, new: Any) -> None:
        if isinstance(there, torch.Tensor):
            there.copy_(new)

    if isinstance(static, tuple | list):
        for there, new in zip(static, fresh, strict=True):
            put(there, new)
    else:
        put(static, fresh)
