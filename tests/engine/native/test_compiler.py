"""The compiler: a library is made once, kept, made anew when it must be; what is missing is said in words."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from engine.native import compiler
from engine.native.compiler import Build, NativeUnavailableError
from engine.native.library import Library
from tests.engine.native.libraries import library


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of its own, on a processor that has what it takes."""
    library("no tiles")  # skips where it does not
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    return tmp_path / "admitscope"


#: A compiler that is quick and makes nothing of use.
FAKE = 'while [ "$1" != -o ]; do shift; done; echo made > "$2"'


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_a_library_is_made_once_and_kept_for_its_owner(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = Build().wait()
    assert path.parent == folder
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    made = path.stat().st_mtime_ns
    monkeypatch.setattr(compiler.subprocess, "Popen", None)  # whoever calls it fails
    assert Build().wait() == path
    assert path.stat().st_mtime_ns == made
    assert [entry.name for entry in folder.iterdir()] == [path.name]
    assert Library(path).has_tiles == compiler.may_use_tiles()


#: Loads its first argument for everybody, then the kernels of the second: an empty batch is enough to be led astray.
BESIDE_ANOTHER = """
import ctypes, sys
from pathlib import Path
from engine.native.library import Forward, Heads, Layer, Library
ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)
kernels, heads, layers = Library(Path(sys.argv[2])), Heads(), (Layer * 1)()
forward = Forward(layers=ctypes.addressof(layers), heads=ctypes.addressof(heads))
kernels.begin_layer(ctypes.byref(forward), 0)
kernels.finish_layer(ctypes.byref(forward), 0)
"""


def test_kernels_call_each_other_whatever_else_has_their_names(tmp_path: Path) -> None:
    named, other = compiler._compiler(), tmp_path / "other.so"
    assert named is not None
    names = ("multiply", "norm_rows", "rotate_and_store", "decode_attention", "prefill_attention")
    source = "#include <stdlib.h>\n" + "".join(f"void {name}(void) {{ abort(); }}\n" for name in names)
    compiling = [*named, "-shared", "-fPIC", "-xc", "-", "-o", str(other)]
    subprocess.run(compiling, input=source, text=True, check=True)
    for path in (Build(tiles=False).wait(), Build(float32=True).wait()):
        subprocess.run([sys.executable, "-c", BESIDE_ANOTHER, str(other), str(path)], check=True)


def test_with_and_without_matrix_units_are_two_libraries() -> None:
    if not compiler.may_use_tiles():
        pytest.skip("this processor has no matrix units (AMX)")
    with_tiles, without = Build(), Build(tiles=False)
    assert (with_tiles.has_tiles, without.has_tiles) == (True, False)
    assert with_tiles.wait() != without.wait()


def test_float32_is_a_library_of_its_own_without_matrix_units() -> None:
    float32, bfloat16 = Build(float32=True), Build()
    assert (float32.is_float32, float32.has_tiles) == (True, False)
    made = Library(float32.wait())
    assert (made.dtype, made.has_tiles) == (torch.float32, False)
    assert Library(bfloat16.wait()).dtype is torch.bfloat16


def test_other_sources_are_another_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    first = Build().wait()
    sources = tmp_path / "kernels"
    sources.mkdir()
    for path in compiler._SOURCES.iterdir():
        (sources / path.name).write_bytes(path.read_bytes() + b"\n/* changed */\n")
    monkeypatch.setattr(compiler, "_SOURCES", sources)
    assert Build().wait() != first


def test_two_that_start_at_once_both_get_it(folder: Path) -> None:
    builds = [Build() for _ in range(3)]
    paths: list[Path] = []
    threads = [threading.Thread(target=lambda build=build: paths.append(build.wait())) for build in builds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(paths)) == 1
    assert len(paths) == 3
    assert len(list(folder.iterdir())) == 1


def test_a_compiler_that_fails_is_quoted_and_leaves_nothing(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", script(tmp_path / "cc", "echo 'no space left' >&2; exit 1"))
    with pytest.raises(NativeUnavailableError, match="the C compiler failed: no space left"):
        Build().wait()
    assert not list(folder.iterdir())


def test_a_compiler_that_hangs_is_given_up(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", script(tmp_path / "cc", "exec sleep 60"))
    monkeypatch.setattr(compiler, "_TIMEOUT_S", 0.2)
    with pytest.raises(NativeUnavailableError, match="longer than 0 s"):
        Build().wait()
    assert not list(folder.iterdir())


@pytest.mark.parametrize("named", ["/nowhere/cc", "no-such-compiler -O2"])
def test_a_compiler_that_is_not_there(named: str, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setenv("CC", named)
    with pytest.raises(NativeUnavailableError, match="cannot be compiled"):
        Build()
    assert not list(folder.iterdir())


def test_no_compiler_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler.shutil, "which", lambda _: None)
    with pytest.raises(NativeUnavailableError, match="there is no C compiler"):
        Build()


def test_a_cache_that_cannot_be_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.write_text("a file where the folder should be")
    with pytest.raises(NativeUnavailableError, match="cannot be compiled into"):
        Build()


def test_a_cache_that_others_can_write_is_not_trusted(folder: Path) -> None:
    path = Build().wait()
    folder.chmod(0o777)
    with pytest.raises(NativeUnavailableError, match="can be written by, others"):
        Build()
    folder.chmod(0o700)
    assert Build().wait() == path


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", home)
    with pytest.raises(NativeUnavailableError, match="no place to keep kernels: Could not determine"):
        Build()


def test_a_processor_without_what_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "processor_flags", lambda: frozenset({"avx512f", "avx512bw", "avx2"}))
    with pytest.raises(NativeUnavailableError, match="has no avx512dq, avx512vl, avx512_bf16, avx512_vnni"):
        Build()


def test_flags_of_the_processor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    facts = tmp_path / "cpuinfo"
    facts.write_text("model name\t: x\nflags\t\t: fpu avx2\nbugs\t\t:\nflags\t\t: other\n")
    monkeypatch.setattr(compiler, "_CPU_FACTS", facts)
    read = compiler.processor_flags.__wrapped__
    assert read() == {"fpu", "avx2"}
    facts.unlink()
    assert read() == frozenset()
    monkeypatch.setattr(compiler.platform, "machine", lambda: "aarch64")
    assert read() == frozenset()


def test_a_library_that_is_none_is_told(tmp_path: Path) -> None:
    (tmp_path / "broken.so").write_bytes(os.urandom(100))
    with pytest.raises(NativeUnavailableError, match=r"broken\.so cannot be used"):
        Library(tmp_path / "broken.so")


def test_a_compiler_that_knows_no_matrix_units_makes_kernels_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """As gcc 10 does: it knows the rest."""
    named = compiler._compiler()
    assert named is not None
    monkeypatch.setenv("CC", " ".join((*named, *compiler._NO_TILES)))
    assert not Library(Build().wait()).has_tiles


def test_words_for_no_matrix_units_are_only_said_where_there_are_some(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CC", script(tmp_path / "cc", f'echo "$@" > {tmp_path}/said; exit 1'))
    monkeypatch.setattr(compiler, "may_use_tiles", lambda: False)
    for facts, are_said in ((compiler._NEEDED, False), ((*compiler._NEEDED, "amx_tile"), True)):
        monkeypatch.setattr(compiler, "processor_flags", lambda facts=facts: frozenset(facts))
        with pytest.raises(NativeUnavailableError):
            Build().wait()
        assert ("-mno-amx-tile" in (tmp_path / "said").read_text()) is are_said


def test_another_compiler_behind_the_same_name_makes_another_library(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = tmp_path / "cc"
    monkeypatch.setenv("CC", str(name))
    for program in ("cc-10", "cc-12"):
        name.unlink(missing_ok=True)
        name.symlink_to(script(tmp_path / program, FAKE))
        Build().wait()
    assert len(list(folder.iterdir())) == 2


def test_an_empty_cc_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "  ")
    assert compiler._compiler() not in (None, [])


def test_a_cache_that_this_user_may_not_look_into(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container's other user with the home of root."""

    def refuse(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "exists", refuse)
    with pytest.raises(NativeUnavailableError, match=r"cannot be compiled into .*Permission denied"):
        Build()


def test_words_of_the_compiler_in_any_encoding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", script(tmp_path / "cc", r"printf 'no \377\376 words' >&2; exit 1"))
    with pytest.raises(NativeUnavailableError, match=r"the C compiler failed: no .* words"):
        Build().wait()


def test_a_compiler_that_reads_gets_nothing_to_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", script(tmp_path / "cc", "cat; echo 'read all' >&2; exit 1"))
    with pytest.raises(NativeUnavailableError, match="read all"):
        Build().wait()


def test_what_a_killed_process_left_is_removed_in_time(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", script(tmp_path / "cc", FAKE))
    folder.mkdir(mode=0o700)
    old, new = folder / "making-old.so", folder / "making-new.so"
    for path in (old, new):
        path.write_text("half a library")
    os.utime(old, (0, 0))
    path = Build().wait()
    assert sorted(folder.iterdir()) == sorted((path, new))


def test_libraries_that_nobody_has_used_for_long_are_removed_when_another_is_made(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = tmp_path / "cc"
    monkeypatch.setenv("CC", str(name))

    def made_by(program: str) -> Path:
        name.unlink(missing_ok=True)
        name.symlink_to(script(tmp_path / program, FAKE))
        return Build().wait()

    used, unused = made_by("cc-10"), made_by("cc-11")
    for path in (used, unused):
        os.utime(path, (0, 0))
    assert made_by("cc-10") == used
    assert used.stat().st_mtime == 0
    other = made_by("cc-12")
    assert sorted(folder.iterdir()) == sorted((used, other))


def test_what_cannot_be_removed_keeps_nobody_from_making_a_library(folder: Path, tmp_path: Path) -> None:
    folder.mkdir(mode=0o700)
    target, link, loop, kept = (
        tmp_path / "target",
        folder / "kernels-1.so",
        folder / "kernels-2.so",
        folder / "kernels-3.so",
    )
    target.touch()
    link.symlink_to(target)
    loop.symlink_to(loop)
    kept.mkdir()
    for path in (target, kept):
        os.utime(path, (0, 0))
    made = Build().wait()
    assert sorted(folder.iterdir()) == sorted([made, loop, kept])
    assert target.exists()


def test_a_library_in_a_cache_that_cannot_be_written_is_used(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = Build().wait()

    def refuse(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(os, "utime", refuse)
    assert Build().wait() == path


def test_a_library_that_another_process_removes_after_it_was_found_is_made_anew(folder: Path) -> None:
    path = Build().wait()
    found = Build()
    path.unlink()
    assert found.is_kept
    with pytest.raises(NativeUnavailableError, match="cannot be used"):
        Library(found.wait())
    found.discard()
    assert Library(Build().wait())


@pytest.mark.parametrize(
    ("processor", "wanted"),
    [("sapphirerapids", ()), ("cooperlake", ()), ("sapphirerapids", (*compiler._NO_TILES, *compiler._FLOAT32))],
    ids=["matrix units", "none", "float32"],
)
def test_the_sources_are_free_of_warnings_for_processors_that_are_not_here(
    processor: str, wanted: tuple[str, ...], tmp_path: Path
) -> None:
    """Whoever changes them on one kind of processor cannot run the other half."""
    named = compiler._compiler()
    assert named is not None
    flags = [flag for flag in compiler._FLAGS if flag != "-march=native"]
    strict = ["-Wall", "-Wextra", "-Werror", *wanted]
    to_compile = [*named, *flags, f"-march={processor}", *strict, "-o", str(tmp_path / "made.so")]

    def compile_(*sources: Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*to_compile, *map(str, sources)], capture_output=True, text=True, check=False)

    (tmp_path / "empty.c").write_text("extern int nothing;\n")
    if compile_(tmp_path / "empty.c").returncode:
        pytest.skip(f"this compiler knows no {processor}")
    done = compile_(*sorted(compiler._SOURCES.glob("*.c")))
    assert (done.returncode, done.stderr) == (0, "")
