"""Huge pages. Owns: asking Linux to keep a process's large memory in pages of 2 MiB, and giving back what is free.

A step reads every weight once. In pages of 4 KiB that is tens of thousands of look-ups a step, each a walk through
tables that a busy or virtual machine has in no cache.
Most systems give huge pages to those who ask (`madvise`), and torch does not ask for packed weights.
"""

from __future__ import annotations

import ctypes
import re
import time
from pathlib import Path
from typing import Final

_MAPS: Final = Path("/proc/self/maps")
_HUGE: Final = 2 * 1024 * 1024
#: Between two looks at the clock.
_AT_ONCE: Final = 16 * _HUGE
#: <linux/mman.h>: may be huge from now on; become huge now (Linux 6.1, refused before).
_MADV_HUGEPAGE: Final = 14
_MADV_COLLAPSE: Final = 25
#: Private, readable and writable, of no file: the heap and what malloc maps.
_ANONYMOUS: Final = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) rw-p [0-9a-f]+ 00:00 0\s*(\[heap\])?$", re.MULTILINE)


def large_areas(maps: str) -> list[tuple[int, int]]:
    """(start, length) in bytes of the whole huge pages in anonymous memory, as /proc/self/maps says it."""
    areas = []
    for found in _ANONYMOUS.finditer(maps):
        start, end = -(-int(found[1], 16) // _HUGE) * _HUGE, int(found[2], 16) // _HUGE * _HUGE
        if end > start:
            areas.append((start, end - start))
    return areas


def ask_for_huge_pages(*, at_once_s: float = 2.0) -> int:
    """Ask for all memory that this process has now; untouched memory stays untouched. Returns bytes asked for.

    Pages are made within `at_once_s`, what is left then by Linux in its own time. Only advice: whether it is followed
    changes no result. 0 where there is nobody to ask.
    """
    try:
        maps = _MAPS.read_text(encoding="utf-8", errors="replace")
        madvise = ctypes.CDLL(None, use_errno=True).madvise
    except (OSError, AttributeError):  # not Linux
        return 0
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    asked, until_ns = 0, time.monotonic_ns() + int(at_once_s * 1e9)
    for start, length in large_areas(maps):
        if madvise(start, length, _MADV_HUGEPAGE) == 0:
            asked += length
            for part in range(start, start + length, _AT_ONCE):
                if time.monotonic_ns() > until_ns:
                    break
                madvise(part, min(_AT_ONCE, start + length - part), _MADV_COLLAPSE)
    return asked


def give_back_free_memory() -> None:
    """Give back what loading has left free: allocators keep it, and a model's first form is as large as its last."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError):  # another C library than GNU's
        return
