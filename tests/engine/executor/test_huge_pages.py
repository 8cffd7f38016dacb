"""Huge pages are asked for in anonymous memory only, by whole pages, and nothing breaks where nobody can be asked."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.executor import huge_pages
from engine.executor.huge_pages import ask_for_huge_pages, give_back_free_memory, large_areas

MIB = 1024 * 1024
MAPS = """\
00400000-00e00000 r-xp 00000000 08:01 131 /usr/bin/python3
01000000-01500000 rw-p 00000000 00:00 0                                  [heap]
7f0000100000-7f0000900000 rw-p 00000000 00:00 0
7f0001000000-7f0001100000 rw-p 00000000 00:00 0
7f0002000000-7f0003000000 rw-s 00000000 00:01 7 /dev/shm/shared
7f0004000000-7f0005000000 rw-p 00001000 08:01 132 /usr/lib/libtorch_cpu.so
7ffd00000000-7ffd00800000 rw-p 00000000 00:00 0                          [stack]
"""


def test_whole_huge_pages_of_heap_and_anonymous_memory() -> None:
    assert large_areas(MAPS) == [(0x1000000, 4 * MIB), (0x7F0000200000, 6 * MIB)]


def test_memory_keeps_what_it_holds() -> None:
    held = torch.arange(8 * MIB, dtype=torch.int32)
    asked = ask_for_huge_pages(at_once_s=0.1)
    assert asked >= 0
    assert torch.equal(held, torch.arange(8 * MIB, dtype=torch.int32))


def test_without_a_list_of_memory_nobody_is_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(huge_pages, "_MAPS", tmp_path / "missing")
    assert ask_for_huge_pages() == 0


def test_free_memory_is_given_back_and_what_is_held_stays() -> None:
    held = [torch.full((1000,), float(i)) for i in range(2000)]
    del held[::2]
    give_back_free_memory()
    assert all(bool((tensor == 2 * i + 1).all()) for i, tensor in enumerate(held))
