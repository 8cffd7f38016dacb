"""DeviceRuntime. Owns: what code for a GPU asks of the device, behind one seam; the only file of the engine that uses
torch.cuda.

On a GPU work is started and done later, in the order of one stream. What the host may not touch meanwhile is pinned
memory that a copy reads from: an event recorded after the copy says when. A double in the tests keeps the same order on
a CPU, late on purpose.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from engine.errors import ConfigError


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes. `free` and `total` of the whole device, other programs included; `allocated` by this one's tensors now,
    `peak` at most since `reset_peak`."""

    total: int
    free: int
    allocated: int
    peak: int


class Event(Protocol):
    """A place in the stream."""

    def record(self) -> None:
        """Put the event after all that was started so far."""
        ...

    def wait(self) -> None:
        """Hold the host until the device is past the recorded place; at once if it never was recorded."""
        ...


class Graph(Protocol):
    """Device work that was captured once and can be started again as a whole."""

    def replay(self) -> None: ...


class DeviceRuntime(Protocol):
    """One device with one stream. capability: its compute capability, (9, 0) for Hopper."""

    device: torch.device
    capability: tuple[int, int]

    def pinned(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """[count] host memory that copies can read while the host goes on. Its content is not set."""
        ...

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Start a copy of pinned `source` to `target` on the device. `source` stays as it is until an event says so."""
        ...

    def fetch(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Start a copy of `source` on the device to pinned `target`, which holds it once an event says so."""
        ...

    def event(self) -> Event: ...

    def capture(self, work: Callable[[], None]) -> Graph:
        """Capture what `work` starts; it may not wait for the device, nor read from it. `work` is run before, too."""
        ...

    def synchronize(self) -> None:
        """Wait for everything started."""
        ...

    def memory(self) -> DeviceMemory:
        """Figures after everything that nobody uses was given back."""
        ...

    def reset_peak(self) -> None: ...


class CudaRuntime:
    """The current NVIDIA GPU and its current stream."""

    def __init__(self) -> None:
        """Raises ConfigError where torch has no GPU to offer."""
        if not torch.cuda.is_available():
            raise ConfigError(_no_cuda())
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.capability = torch.cuda.get_device_capability(self.device)
        self._pool = torch.cuda.graph_pool_handle()

    def pinned(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(count, dtype=dtype, pin_memory=True)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def fetch(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def event(self) -> Event:
        return _CudaEvent()

    def capture(self, work: Callable[[], None]) -> Graph:
        # Once outside: what is set up at a first use (handles, modules, workspaces) may not be set up in a capture.
        work()
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        # One pool for all graphs: captured from the largest to the smallest, the smaller ones fit into it.
        with torch.cuda.graph(graph, pool=self._pool):
            work()
        captured: Graph = graph
        return captured

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def memory(self) -> DeviceMemory:
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self.device)
        return DeviceMemory(
            total=total,
            free=free,
            allocated=torch.cuda.memory_allocated(self.device),
            peak=torch.cuda.max_memory_allocated(self.device),
        )

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)


class _CudaEvent:
    def __init__(self) -> None:
        self._event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch leaves it without annotations

    def record(self) -> None:
        self._event.record()

    def wait(self) -> None:
        # An event that was never recorded counts as passed.
        self._event.synchronize()


def _no_cuda() -> str:
    """Why there is no GPU, as far as torch tells, and what to do."""
    if torch.version.cuda is None:
        why = f"torch {torch.__version__} is built without CUDA: install one from an index with CUDA builds"
    else:
        why = f"torch {torch.__version__} (CUDA {torch.version.cuda}) finds no GPU: look at the driver with nvidia-smi"
    return f"executor.device=cuda: {why} (docs/gpu.md), or use executor.device=cpu"
