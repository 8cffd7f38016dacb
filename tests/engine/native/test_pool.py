"""The kernels' threads: each task is done once, whoever calls, with any number of threads; those asked for wake up."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch

from engine.native import compiler
from tests.engine.native.libraries import library


@pytest.fixture(scope="module")
def check(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """pool_check.c and the pool as a program."""
    library("no tiles")  # skips where there is no compiler
    named = compiler._compiler()
    assert named is not None
    program = tmp_path_factory.mktemp("pool") / "pool_check"
    sources = (Path(__file__).parent / "pool_check.c", compiler._SOURCES / "pool.c")
    flags = ("-std=gnu11", "-O2", "-march=native", "-pthread", f"-I{compiler._SOURCES}")
    subprocess.run([*named, *flags, "-o", str(program), *map(str, sources)], check=True)
    return program


def run(*words: str | Path) -> None:
    """Run the program; its complaint is the test's."""
    done = subprocess.run([*map(str, words)], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout


@pytest.mark.parametrize("helpers", [1, 2, 15, 40])
def test_a_job_of_two_threads_wakes_the_helper_it_counts_on(check: Path, helpers: int) -> None:
    run(check, "few", str(helpers))


def test_who_asks_for_cores_gets_them_and_all_work_again_afterwards(check: Path) -> None:
    run(check, "limited")


@pytest.mark.parametrize(("threads", "processors", "lends"), [(1, 1, False), (2, 2, True), (2, 3, False), (3, 2, True)])
def test_a_processor_is_lent_where_there_is_none_to_spare(
    threads: int, processors: int, lends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = library("no tiles")
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: set(range(processors)))
    lend_core = kernels.core_lender()
    assert (lend_core is not None) == lends
    if lend_core is not None:
        lend_core(1000)
        lend_core(0)


@pytest.mark.parametrize(("callers", "forks"), [(1, 0), (3, 0), (2, 10)])
def test_each_task_is_done_once_whoever_calls_and_in_children_too(check: Path, callers: int, forks: int) -> None:
    run(check, "hammer", str(callers), "1500", str(forks))
