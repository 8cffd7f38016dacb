"""`make bench-serve`: start this engine's server, measure it with `bench/serve.py`, and stop it. Owns: that sequence.

Arguments go to `bench/serve.py`; those after `--` go to `admitscope serve`:
`python bench/local.py --workload W1 --repeat 3 -- --scheduler.chunked-prefill-size 512`.
"""

from __future__ import annotations

import os
import platform
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import httpx
import serve

from telemetry.demo.processes import Child
from telemetry.ports import free_port

_HOST: Final = "127.0.0.1"
_READY_TIMEOUT_S: Final = 300.0


def wait_until_ready(url: str, child: Child) -> None:
    """Until /ready says so. Raises RuntimeError with the log's end when the server ends, or takes too long."""
    deadline_s = time.monotonic() + _READY_TIMEOUT_S
    while time.monotonic() < deadline_s:
        if child.status() is not None:
            raise RuntimeError(f"the server ended with status {child.status()}:\n{child.tail()}")
        try:
            if httpx.get(f"{url}/ready", timeout=2.0, trust_env=False).status_code == httpx.codes.OK:
                return
        except httpx.TransportError:
            pass  # nobody listens yet
        time.sleep(0.2)
    raise RuntimeError(f"{url}/ready did not answer 200 within {_READY_TIMEOUT_S:.0f} s:\n{child.tail()}")


def machine() -> str:
    """The machine in one line, so that a figure is never without one."""
    info = Path("/proc/cpuinfo")
    names = [line for line in info.read_text().splitlines() if line.startswith("model name")] if info.exists() else []
    name = names[0].partition(":")[2].strip() if names else platform.processor() or platform.machine()
    return f"{name}, {os.cpu_count()} CPUs, {platform.system()}, Python {platform.python_version()}"


def main(argv: Sequence[str]) -> int:
    """Returns the benchmark's exit status."""
    words = list(argv)
    split = words.index("--") if "--" in words else len(words)
    port = free_port(_HOST, 0)
    url = f"http://{_HOST}:{port}"
    flags = ["serve", "--server.port", str(port), "--journal", "none", *words[split + 1 :]]
    print(f"machine: {machine()}", file=sys.stderr)
    with tempfile.TemporaryDirectory() as folder:
        child = Child("server", "telemetry.cli", flags, log=Path(folder) / "server.log")
        try:
            wait_until_ready(url, child)
            return serve.main(["--base-url", url, *words[:split]])
        except RuntimeError as error:
            print(error, file=sys.stderr)
            return 2
        finally:
            child.stop(30.0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
