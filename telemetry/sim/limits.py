"""Limits. Owns: how much of a machine a simulation may take, when somebody said so."""

from __future__ import annotations

import os
import resource


def limit_memory(mib: int | None) -> None:
    """Let this process hold at most `mib` MiB of its own data; beyond it Python raises MemoryError. None: no limit."""
    if mib is not None:
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        wanted = mib * 1024 * 1024
        resource.setrlimit(resource.RLIMIT_DATA, (wanted if hard < 0 else min(wanted, hard), hard))


def give_way(niceness: int) -> None:
    """Run after others that want the processor; 0 changes nothing."""
    if niceness:
        os.nice(niceness)
