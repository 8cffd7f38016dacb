"""The GPU itself. Owns: the facts of section 0, timing by events, and a device that is kept busy."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from bench.gpu_check.report import Finding

#: About the clock of the GPUs this is written for: how long a spin takes need not be exact.
_CYCLES_PER_S = 1.5e9
_PACKAGES = ("torch", "flashinfer-python", "apache-tvm-ffi", "nvidia-ml-py", "admitscope")


def has_gpu() -> bool:
    """Whether torch can use a GPU here."""
    return torch.cuda.is_available()


def machine() -> dict[str, Any]:
    """Versions, and the GPU if there is one."""
    facts: dict[str, Any] = {
        "python": platform.python_version(),
        "system": platform.platform(),
        "CUDA of torch": torch.version.cuda or "none",
    }
    for package in _PACKAGES:
        try:
            facts[package] = version(package)
        except PackageNotFoundError:
            facts[package] = "not installed"
    facts["nvidia-smi"] = _nvidia_smi()
    if has_gpu():
        found = torch.cuda.get_device_properties(0)
        facts |= {
            "GPU": found.name,
            "compute capability": f"{found.major}.{found.minor}",
            "SMs": found.multi_processor_count,
            "memory": f"{found.total_memory / 1024**3:.1f} GiB",
        }
    facts["FLASHINFER_DISABLE_JIT"] = os.environ.get("FLASHINFER_DISABLE_JIT", "not set")
    return facts


def _nvidia_smi() -> str:
    query = "driver_version,name,clocks.sm,clocks.mem,clocks.max.sm,power.limit,compute_mode"
    try:
        done = subprocess.run(
            ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"],
            capture_output=True, text=True, check=False, timeout=20,
        )  # fmt: skip
    except (FileNotFoundError, subprocess.TimeoutExpired) as error:
        return f"none ({type(error).__name__})"
    return f"{query}: {done.stdout.strip()}" if done.returncode == 0 else f"ended with status {done.returncode}"


def import_flashinfer() -> Any:
    """The module. Importing it writes a cache and a log below FLASHINFER_WORKSPACE_BASE, by default the home folder."""
    import flashinfer

    return flashinfer


def facts_of_the_gpu() -> Iterator[Finding]:
    """The checks of section 0 beside the facts."""
    major, minor = torch.cuda.get_device_capability(0)
    yield Finding("compute capability is 8.0 or higher", (major, minor) >= (8, 0), note=f"{major}.{minor}")
    if (major, minor) != (9, 0):
        yield Finding("limits and aims were written for 9.0", note="figures of another GPU are compared with no aim")


class CudaStopwatch:
    """Events around the work. Times of a device, in seconds."""

    def seconds(self, work: Callable[[], object]) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1000.0

    def spin(self, seconds: float) -> None:
        torch.cuda._sleep(int(seconds * _CYCLES_PER_S))


class CudaMarks:
    """Events that keep the time."""

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, first: torch.cuda.Event, last: torch.cuda.Event) -> float:
        return float(first.elapsed_time(last)) / 1000.0
