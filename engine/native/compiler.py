"""Compiler. Owns: turning the C files beside it into a library for this processor, once, and keeping it.

The library is made for exactly this processor (-march=native), so none is shipped. Making it takes a second or two; it
is kept in the user's cache under a name that its sources, the flags, the compiler and the processor decide.
Needs no torch: the compiler can run while torch is imported.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Final

_SOURCES: Final = Path(__file__).parent / "kernels"
#: Without products and sums joined where the compiler likes: kernels that agree bit for bit must round alike. They call
#: each other, never what another library of this process has under the same name (a plain word, as `multiply`).
_FLAGS: Final = (
    "-std=gnu11", "-O3", "-march=native", "-ffp-contract=off",
    "-pthread", "-shared", "-fPIC", "-fvisibility=hidden", "-Wl,-Bsymbolic",
)  # fmt: skip
#: What every kernel uses, in the words of /proc/cpuinfo.
_NEEDED: Final = ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16", "avx512_vnni")
_CPU_FACTS: Final = Path("/proc/cpuinfo")
#: For processors with matrix units that this process may not use.
_NO_TILES: Final = ("-mno-amx-tile", "-mno-amx-bf16", "-mno-amx-int8")
#: See kernels/common.h.
_FLOAT32: Final = ("-DFLOAT32",)
#: <asm/unistd_64.h>, <asm/prctl.h>: Linux hands the units' state out on request.
_ARCH_PRCTL: Final = 158
_ARCH_REQ_XCOMP_PERM: Final = 0x1023
_XFEATURE_XTILEDATA: Final = 18
#: Longer than any machine takes; a compiler that hangs must not keep a server from starting.
_TIMEOUT_S: Final = 120.0
#: Names of files in the cache, and seconds after which nobody needs them: whoever was making one was killed; a library
#: that no process has looked for is of other sources, or of another compiler.
_LIFETIMES_S: Final = (("making-*.so", 3600.0), ("kernels-*.so", 30 * 86400.0))


class NativeUnavailableError(RuntimeError):
    """There are no kernels in C here; the message says what is missing."""


class Build:
    """A library that is being made, or is there. `wait` gives its path.

    is_float32  they compute in float32, not in bfloat16
    has_tiles   the kernels may use the processor's matrix units (AMX); Library.has_tiles says whether they do
    is_kept     it was made by an earlier process
    """

    def __init__(self, *, tiles: bool = True, float32: bool = False) -> None:
        """Look for the library, and start a compiler where there is none. Raises NativeUnavailableError.

        tiles     False: without the matrix units even where they are
        float32   rows, weights and K/V in float32, of which matrix units know nothing
        """
        facts = processor_flags()
        if lacking := [name for name in _NEEDED if name not in facts]:
            raise NativeUnavailableError(f"this processor has no {', '.join(lacking)}")
        self.is_float32 = float32
        self.has_tiles = tiles and not float32 and may_use_tiles()
        # A compiler that is older than these units does not know the words for leaving them out either.
        has_to_avoid = not self.has_tiles and "amx_tile" in facts
        flags = (*_FLAGS, *(_NO_TILES if has_to_avoid else ()), *(_FLOAT32 if float32 else ()))
        sources = sorted(_SOURCES.glob("*.c"))
        try:
            folder = _cache_folder()
        except RuntimeError as error:  # nobody knows this user's home
            raise NativeUnavailableError(f"there is no place to keep kernels: {error}") from error
        self._process: subprocess.Popen[str] | None = None
        compiler = _compiler()
        self._library = folder / f"kernels-{_fingerprint(sources, compiler, flags, facts)}.so"
        try:
            self.is_kept = folder.exists() and self._library.exists()
            if self.is_kept:
                _check_owner(folder)
                _note_use(self._library)
                return
            if compiler is None:
                raise NativeUnavailableError("there is no C compiler (cc, gcc or clang, or what CC names)")
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _check_owner(folder)
            _clear(folder)
            # Its own name first: another process may be making the same library.
            handle, name = tempfile.mkstemp(prefix="making-", suffix=".so", dir=folder)
            os.close(handle)
        except OSError as error:  # a home that belongs to another user cannot even be asked
            raise NativeUnavailableError(f"the kernels cannot be compiled into {folder}: {error}") from error
        self._making = Path(name)
        try:
            self._process = subprocess.Popen(  # noqa: S603 - our own files, by the compiler that the user chose
                [*compiler, *flags, "-o", name, *map(str, sources), "-lm"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
            )
        except OSError as error:
            self._making.unlink(missing_ok=True)
            raise NativeUnavailableError(f"the kernels cannot be compiled: {error}") from error

    def wait(self) -> Path:
        """The library. Raises NativeUnavailableError where the compiler failed."""
        if self._process is None:
            return self._library
        try:
            _, complaint = self._process.communicate(timeout=_TIMEOUT_S)
            if self._process.returncode:
                first = (complaint.strip() or "without a word").splitlines()[0]
                raise NativeUnavailableError(f"the C compiler failed: {first}")
            self._making.replace(self._library)
        except subprocess.TimeoutExpired as error:
            self._process.kill()
            self._process.communicate()
            raise NativeUnavailableError(f"the compiler took longer than {_TIMEOUT_S:.0f} s") from error
        except OSError as error:
            raise NativeUnavailableError(f"the compiled kernels cannot be kept: {error}") from error
        finally:
            self._making.unlink(missing_ok=True)
        self._process = None
        return self._library

    def discard(self) -> None:
        """Take the library out of the cache, so that the next Build makes it anew."""
        try:
            self._library.unlink(missing_ok=True)
        except OSError as error:
            raise NativeUnavailableError(f"damaged kernels cannot be replaced: {error}") from error


@cache
def processor_flags() -> frozenset[str]:
    """What the first processor can do, as Linux says it; nothing elsewhere."""
    if platform.machine() != "x86_64":
        return frozenset()
    try:
        lines = _CPU_FACTS.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:  # not Linux
        return frozenset()
    return next((frozenset(line.split(":", 1)[1].split()) for line in lines if line.startswith("flags")), frozenset())


@cache
def may_use_tiles() -> bool:
    """Whether this processor has matrix units for bfloat16 and int8, and Linux lets this process use them."""
    if not {"amx_tile", "amx_bf16", "amx_int8"} <= processor_flags():
        return False
    try:
        return bool(ctypes.CDLL(None).syscall(_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA) == 0)
    except (OSError, AttributeError):  # no C library that has it
        return False


def _compiler() -> list[str] | None:
    if named := os.environ.get("CC", "").split():
        return named
    return next(([found] for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None)


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    root = Path(base) if base and Path(base).is_absolute() else Path.home() / ".cache"
    return root / "admitscope"


def _check_owner(folder: Path) -> None:
    """Raise where somebody else could have put a library there: it would run as part of this process."""
    facts = folder.stat()
    if facts.st_uid != os.getuid() or facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise NativeUnavailableError(f"{folder} belongs to, or can be written by, others")


def _note_use(library: Path) -> None:
    """Set the time of its last reading, which file systems need not keep."""
    # A cache that cannot be written, as in an image, is not cleared either.
    with suppress(OSError):
        os.utime(library, ns=(time.time_ns(), library.stat().st_mtime_ns))


def _clear(folder: Path) -> None:
    """Remove what nobody needs any more.

    Whoever has loaded a library keeps it; whoever looks for one at this very moment makes it anew, see cpu_form.
    What cannot be looked at or removed stays: kernels can be made beside it.
    """
    for pattern, lifetime_s in _LIFETIMES_S:
        for path in folder.glob(pattern):
            # Finished, or removed by another process, meanwhile; a folder, or a link that leads to itself.
            with suppress(OSError):
                facts = path.stat()
                if time.time() - max(facts.st_mtime, facts.st_atime) > lifetime_s:
                    path.unlink()


def _fingerprint(sources: list[Path], compiler: list[str] | None, flags: tuple[str, ...], facts: frozenset[str]) -> str:
    """What the library depends on, in 16 letters."""
    state = hashlib.sha256()
    for path in sorted([*sources, *_SOURCES.glob("*.h")]):
        state.update(path.read_bytes())
    # Where its name leads, as cc to gcc-12: another compiler may know more of this processor.
    program = os.path.realpath(shutil.which(compiler[0]) or compiler[0]) if compiler else None
    state.update(repr((flags, sorted(facts), compiler, program)).encode())
    return state.hexdigest()[:16]
